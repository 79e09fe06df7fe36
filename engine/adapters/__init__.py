"""LoRA adapters: their files, which of them are loaded, and their products."""
