"""Weights in fewer bits: rounding, calibration, and what they cost in quality."""
