"""The backends by name, and those that do not page: echo, transformers' own models, sentence-transformers."""
