"""What other people write for the pipeline: filters, and what the `process` of a stage may change."""
