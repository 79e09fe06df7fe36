"""Guessed tokens: where they come from, and how many of them a step checks."""
