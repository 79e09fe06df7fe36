"""The tools stage: turns between a model and its tools, each call made once."""
