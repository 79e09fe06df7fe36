"""OpenAI's request bodies and items, strictly typed."""

from .completions import ChatRequest, CompletionRequest, parse_request

__all__ = ["ChatRequest", "CompletionRequest", "parse_request"]
