"""The bodies of Ollama's API, and the requests that mean the same."""
