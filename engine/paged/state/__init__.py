"""Layers that keep a running state instead of keys and values: their slots, their memory and their mathematics."""
