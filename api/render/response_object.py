"""The object of OpenAI's Responses API that is a whole response, running or ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...schemas.events import ErrorBody, FinishReason
from ...schemas.integers import as_integer
from ...schemas.loops import Begun, Ended, Items, Turned
from .openai import answered_by

_Object = dict[str, Any]

CUT: dict[FinishReason, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_SECRETS = ("authorization", "headers", "sealed")
_FUNCTION: _Object = {"type": "function", "name": "", "description": None, "parameters": None, "strict": None}
_INTEGERS = frozenset({"max_output_tokens", "max_tool_calls", "top_logprobs"})
_DEFAULTS: _Object = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}


def response_object(begun: Begun, turns: Sequence[Turned], ended: Ended | None) -> _Object:
    """The response that was stored; while it runs, up to its last whole turn."""
    job = begun.job
    head = response_head(job.id, job.body, int(job.created), job.body["model"])
    output = [*begun.items, *(item for turn in turns for item in turn.items)]
    usages, fallbacks = [turn.usage for turn in turns], [turn.fallback for turn in turns]
    if ended is None:
        return response_at(head, output, usages, fallbacks, "in_progress")
    error = ErrorBody(**ended.error) if ended.error else None
    reason = CUT.get(turns[-1].reason) if turns else None
    return response_at(head, output, usages, fallbacks, ended.status, error, ended.at, reason)


def response_head(id: str, body: Mapping[str, Any], created: int, model: str) -> _Object:
    """The fields that repeat the request, without its secrets."""
    given = {name: value for name, value in body.items() if value is not None}
    given |= {name: as_integer(given[name]) for name in _INTEGERS & given.keys()}
    conversation = given.get("conversation")
    tier = given.get("service_tier", "auto")
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "model": model,
        **{name: given.get(name, default) for name, default in _DEFAULTS.items()},
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
        "service_tier": "default" if tier == "auto" else tier,
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tools": [_shown_tool(tool) for tool in given.get("tools", ())],
        "truncation": "disabled",  # though "auto" was asked for
    }


def _shown_tool(tool: Mapping[str, Any]) -> _Object:
    """A tool without its secrets; a function with every field that clients look for."""
    shown = {name: value for name, value in tool.items() if name not in _SECRETS}
    return _FUNCTION | shown if tool.get("type") == "function" else shown


def response_at(
    head: _Object,
    output: Items,
    usages: Iterable[Mapping[str, int]],
    fallbacks: Iterable[str | None],
    status: str,
    error: ErrorBody | None = None,
    at: float | None = None,
    reason: str | None = None,
) -> _Object:
    """The response in one `status`: `error` is why it failed, `at` when it ended, `reason` why it was cut off."""
    return {
        **head,
        "status": status,
        "completed_at": int(at) if at is not None and status == "completed" else None,
        "error": _error(error) if error else None,
        "incomplete_details": {"reason": reason or "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": None if status in ("queued", "in_progress") else _usage(usages),
        **answered_by(next(filter(None, fallbacks), None)),
    }


def _usage(usages: Iterable[Mapping[str, int]]) -> _Object:
    total = Counter[str]()
    for usage in usages:
        total.update(usage)
    return {
        "input_tokens": total["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": total["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": total["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": total["reasoning_tokens"]},
        "total_tokens": total["total_tokens"],
    }


def _error(error: ErrorBody) -> _Object:
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    return {"code": code, "message": error.message, "type": error.type, "param": error.param}
