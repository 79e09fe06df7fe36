"""Files with the vision part of a model in GGUF: what config.json would say, and where tensors belong."""
