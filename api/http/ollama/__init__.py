"""Ollama's API: chats, completions, embeddings, and the models that can be asked for."""
