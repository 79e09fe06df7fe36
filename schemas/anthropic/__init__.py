"""Anthropic's Messages API, strictly typed, and the chat requests that mean the same."""
