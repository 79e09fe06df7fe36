"""Parts of chat requests that other APIs ask for in words of their own."""

from __future__ import annotations

from typing import Any

_THINKS = {"enable_thinking": True, "thinking": True}  # the names of the switch in chat templates


def thought_options(effort: str | None, *, thinks: bool) -> dict[str, Any]:
    """The parameters for thoughts, where they are not switched off. Clients ask every model to think; the templates of
    those that cannot ignore these."""
    options: dict[str, Any] = dict(_THINKS) if thinks else {}
    if effort is not None:
        options["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return {"chat_template_kwargs": options} if options else {}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The parameter for an answer of this schema; it is not strict, so properties may be optional."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}
