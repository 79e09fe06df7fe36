"""Renders events as Anthropic's message and its stream. Pure; one renderer a request.

A stream consists of blocks, one after the other: thinking, text and tool calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from ...schemas.events import Accepted, Done, FinishReason, Token, ToolCallDelta, Usage
from .calls import arguments_object, join_calls
from .openai import Renderer, answered_by

Piece = dict[str, Any]

THREAD = "thread_unsupported_request"  # Anthropic's code for a conversation that its server would keep

_UNCITED: Piece = {"citations": []}  # Anthropic's schema requires it; Vercel's AI SDK takes no null
_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "deadline": "pause_turn",
    "cancelled": "end_turn",
    "error": "end_turn",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageRenderer(Renderer):
    """Renders one request. Text between the pieces of a call follows behind the call."""

    def __init__(self, request: str, model: str) -> None:
        super().__init__("/v1/chat/completions", request, model, 0, streaming=True)
        self._base = {"id": request, "type": "message", "role": "assistant", "model": model}
        self._stop: str | None = None  # the stop sequence that ended the answer; set by chunks
        self._blocks = 0
        self._open: str | None = None  # type of the open block
        self._calls: set[int] = set()  # indices of the calls begun; the open one is the last
        self._waiting: dict[str, str] = {}  # type → what was thought or said while a call was open

    def start(self, accepted: Accepted) -> Iterator[bytes]:
        """The message's head."""
        usage = _whole_usage(Usage(accepted.prompt_tokens, 0, accepted.prompt_tokens))
        empty: Piece = {"content": [], **_ended(None, None), "usage": usage}
        yield sse({"type": "message_start", "message": self._base | empty})

    def chunks(self, token: Token) -> Iterator[bytes]:
        if isinstance(token.stop_reason, str):
            self._stop = token.stop_reason
        yield from self._say("thinking", token.reasoning)
        yield from self._say("text", token.text)
        for call in token.tool_calls:
            if call.index not in self._calls:
                yield from self._close()
                self._calls.add(call.index)
                yield self._begin(_called(call, {}))
            if call.arguments:
                yield self._add({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self, done: Done) -> Iterator[bytes]:
        yield from self._close()
        delta = self._ending(done, self._stop, called=bool(self._calls))
        yield sse({"type": "message_delta", "delta": delta, "usage": _usage(done.usage), **answered_by(done.fallback)})
        yield sse({"type": "message_stop"})

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        """Raises `GenerationFailed` for a call whose input is no JSON object."""
        content: list[Piece] = []
        if thought := "".join(token.reasoning for token in tokens):
            content.append({"type": "thinking", "thinking": thought, "signature": self.request})
        if text := "".join(token.text for token in tokens):
            content.append({"type": "text", "text": text, **_UNCITED})
        calls = join_calls(tokens)
        content += (_called(call, arguments_object(call)) for call in calls)
        stop = next((token.stop_reason for token in tokens if isinstance(token.stop_reason, str)), None)
        ending = self._ending(done, stop, called=bool(calls))
        ending |= {"usage": _whole_usage(done.usage), **answered_by(done.fallback)}
        return orjson.dumps({**self._base, "content": content, **ending})

    def _ending(self, done: Done, stop: str | None, *, called: bool) -> Piece:
        reason = _REASONS[done.finish_reasons[0]]
        if reason == "end_turn" and called:  # as OpenAI has it where the call was dictated
            reason = "tool_use"
        return _ended(reason, stop)

    def _say(self, kind: str, text: str) -> Iterator[bytes]:
        if not text:
            return
        if self._open == "tool_use":
            self._waiting[kind] = self._waiting.get(kind, "") + text
            return
        if self._open != kind:
            yield from self._close()
            yield self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else _UNCITED)})
        yield self._add({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Piece) -> bytes:
        self._open = block["type"]
        self._blocks += 1
        return sse({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _add(self, delta: Piece) -> bytes:
        return sse({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        while self._open is not None:
            if self._open == "thinking":  # some clients drop a thought without a signature
                yield self._add({"type": "signature_delta", "signature": self.request})
            yield sse({"type": "content_block_stop", "index": self._blocks - 1})
            self._open = None
            waiting, self._waiting = self._waiting, {}
            for kind, text in waiting.items():
                yield from self._say(kind, text)


def sse(piece: Piece) -> bytes:
    return f"event: {piece['type']}\ndata: ".encode() + orjson.dumps(piece) + b"\n\n"


def error_payload(status: int, message: str, request: str, code: str | None = None) -> Piece:
    """Anthropic's error object, also as an event of a stream."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": code, "unsupported": ["thread"]}} if code == THREAD else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request}


def _called(call: ToolCallDelta, given: Piece | orjson.Fragment) -> Piece:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given, "caller": {"type": "direct"}}


def _ended(reason: str | None, stop: str | None) -> Piece:
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}


def _whole_usage(usage: Usage) -> Piece:
    """The usage of a message; the end of its stream has less."""
    written = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    return {**_usage(usage), "cache_creation": written, "inference_geo": None, "service_tier": None}


def _usage(usage: Usage) -> Piece:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
    }
