"""OpenTelemetry's attributes of a request to a model. What a client may have got wrong is left out.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .integers import as_integer

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
_NUMBERS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "top_k")
_WHOLE = {"max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "seed": "seed", "n": "choice.count"}


def span_name(endpoint: str, model: object) -> str:
    """The conventions' name of a span."""
    operation = OPERATIONS.get(endpoint, endpoint)
    return f"{operation} {model}" if isinstance(model, str) else operation


def request_attributes(endpoint: str, body: Mapping[str, Any]) -> dict[str, str | int | float]:
    """What the request asks for, without its text."""
    found: dict[str, str | int | float] = {
        "gen_ai.operation.name": OPERATIONS.get(endpoint, endpoint),
        "gen_ai.provider.name": "penstock",
    }
    if isinstance(model := body.get("model"), str):
        found["gen_ai.request.model"] = model[:256]
    for name in _NUMBERS:
        if type(value := body.get(name)) in (int, float):
            found[f"gen_ai.request.{name}"] = float(value)  # type: ignore[arg-type]
    for name, attribute in _WHOLE.items():
        if type(value := as_integer(body.get(name))) is int and abs(value) < 1 << 63:
            found[f"gen_ai.request.{attribute}"] = value
    return found
