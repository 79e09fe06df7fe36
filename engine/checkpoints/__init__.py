"""Checkpoint formats besides plain safetensors: what their files say, and how their numbers are expanded."""
