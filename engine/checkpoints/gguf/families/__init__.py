"""The architectures that GGUF files hold: for each family what config.json would say, and where its tensors belong."""
