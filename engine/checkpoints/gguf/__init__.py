"""GGUF files: what is in them, and what transformers' models, tokenizers and projectors would have of it."""
