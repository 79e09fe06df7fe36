"""The engine behind OpenAI's objects, and conversations with tools, without a server."""
