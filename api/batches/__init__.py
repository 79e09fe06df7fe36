"""Runs batches: reads their input files, sends a job for each line, and writes their result files."""
