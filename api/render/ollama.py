"""Renders events as Ollama's responses: JSON objects, one on each line of a stream. One renderer a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson

from ...schemas.errors import GenerationFailed
from ...schemas.events import Accepted, Done, FinishReason, Token, TokenLogprob, ToolCallDelta, TopLogprob
from ...schemas.jobs import Endpoint
from .calls import arguments_object, join_calls
from .openai import Renderer
from .pooled import vector

Piece = dict[str, Any]

_REASONS: dict[FinishReason, str] = {"length": "length", "deadline": "length"}  # of all others it is "stop"


class Timer:
    """The durations of a request, in nanoseconds, as the bridge sees them: the time until the first token, with what it
    waited in queues, counts as that of the prompt."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._began = clock()
        self._first: int | None = None  # when the first token came; set by token

    def token(self) -> None:
        if self._first is None:
            self._first = self._clock()

    def figures(self, done: Done) -> Piece:
        """Of an answer that has just ended."""
        now = self._clock()
        first = now if self._first is None else self._first
        return {
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": done.usage.prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": done.usage.completion_tokens,
            "eval_duration": now - first,
        }


class LineRenderer(Renderer):
    """Renders a chat, or with `is_chat` false a completion. A call stands whole in one line."""

    def __init__(self, endpoint: Endpoint, request: str, model: str, *, is_chat: bool, timer: Timer) -> None:
        super().__init__(endpoint, request, model, 0, streaming=True)
        self._model = model
        self._is_chat = is_chat
        self._timer = timer
        self._call: ToolCallDelta | None = None  # the one whose arguments are coming; set by chunks
        self._broken = False  # set by chunks and end, once an error was the last line

    def begin(self, accepted: Accepted) -> None:
        pass  # the head of OpenAI's chunks

    def hear(self, token: Token) -> None:
        self._timer.token()

    def chunks(self, token: Token) -> Iterator[bytes]:
        if self._broken:
            return
        self._timer.token()
        if token.reasoning:
            yield line(self._piece({"thinking": token.reasoning}, ()))
        if token.text or token.logprobs:
            yield line(self._piece({"content": token.text}, token.logprobs or ()))
        for piece in token.tool_calls:
            if self._call is not None and piece.index == self._call.index:
                self._call = replace(self._call, arguments=self._call.arguments + piece.arguments)
            else:
                yield from self._called()
                self._call = piece

    def end(self, done: Done) -> Iterator[bytes]:
        yield from self._called()
        yield b"" if self._broken else line(self._whole({}, (), done))

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        """Raises `GenerationFailed` for a call whose arguments are no JSON object."""
        said = {
            "thinking": "".join(token.reasoning for token in tokens),
            "content": "".join(token.text for token in tokens),
            "tool_calls": list(map(_call, join_calls(tokens))),
        }
        logprobs = [each for token in tokens for each in token.logprobs or ()]
        return orjson.dumps(self._whole({name: each for name, each in said.items() if each}, logprobs, done))

    def empty(self, reason: str | None = None) -> Piece:
        """An object without content; with a reason it is the last one."""
        ending = {"done": False} if reason is None else {"done": True, "done_reason": reason}
        return self._object({}, ()) | ending

    def _whole(self, said: Piece, logprobs: Sequence[TokenLogprob], done: Done) -> Piece:
        reason = {"done_reason": _REASONS.get(done.finish_reasons[0], "stop")}
        return self._object(said, logprobs) | {"done": True} | reason | self._timer.figures(done)

    def _called(self) -> Iterator[bytes]:
        """The line of the call that is complete now, if there is one."""
        if (call := self._call) is not None and not self._broken:
            self._call = None
            try:
                yield line(self._piece({"tool_calls": [_call(call)]}, ()))
            except GenerationFailed as error:
                self._broken = True
                yield error_line(str(error))

    def _piece(self, said: Piece, logprobs: Sequence[TokenLogprob]) -> Piece:
        return self._object(said, logprobs) | {"done": False}

    def _object(self, said: Piece, logprobs: Sequence[TokenLogprob]) -> Piece:
        content = {"content": ""} | said
        said = {"message": {"role": "assistant"} | content} if self._is_chat else _completed(content)
        head = {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        return head | said | ({"logprobs": list(map(_logprob, logprobs))} if logprobs else {})


class Vectors(Renderer):
    """The vectors of `/api/embed`; if `alone`, the one of `/api/embeddings`."""

    def __init__(self, request: str, model: str, *, alone: bool, timer: Timer) -> None:
        super().__init__("/v1/embeddings", request, model, 0, streaming=False)
        self._model = model
        self._alone = alone
        self._timer = timer

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        vectors = [vector(token.text) for token in sorted(tokens, key=lambda token: token.choice)]
        if self._alone:
            answer: Piece = {"embedding": vectors[0]}
        else:
            figures = self._timer.figures(done)
            kept = {name: figures[name] for name in ("total_duration", "load_duration", "prompt_eval_count")}
            answer = {"model": self._model, "embeddings": vectors, **kept}
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def error_line(message: str) -> bytes:
    return line({"error": message})


def line(piece: Piece) -> bytes:
    return orjson.dumps(piece) + b"\n"


def _completed(content: Piece) -> Piece:
    return {"response" if name == "content" else name: said for name, said in content.items()}


def _call(call: ToolCallDelta) -> Piece:
    function = {"index": call.index, "name": call.name, "arguments": arguments_object(call)}
    return {"id": call.id, "function": function}


def _logprob(found: TokenLogprob) -> Piece:
    return {**_likely(found), "top_logprobs": list(map(_likely, found.top))}


def _likely(found: TokenLogprob | TopLogprob) -> Piece:
    return {"token": found.token, "logprob": found.logprob, "bytes": found.bytes}
