"""The HTTP bridge's application: one module for each group of paths."""
