"""Renders events as OpenAI's responses and stream chunks. Pure; one renderer a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import orjson

from ...schemas.events import Accepted, Done, ErrorBody, FinishReason, Token, TokenLogprob, Usage
from ...schemas.integers import as_integer
from ...schemas.jobs import Endpoint
from ...schemas.openai.custom_tools import custom_names
from ...schemas.openai.responses.turns import logprob_json
from .calls import CallDeltas, call_json, join_calls

PREFIX: dict[Endpoint, str] = {  # of the ids of requests
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/embeddings": "embd-",
    "/v1/rerank": "rerank-",
}
_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
    "cancelled": "stop",
    "deadline": "length",  # OpenAI has no reason of its own; clients with a closed list fail at another one
    "error": "stop",
}


class Extras(NamedTuple):
    """What a client asks for beside its answer: the usage behind a stream or in each of its chunks, token ids, and the
    prompt's log-probabilities. `echo`: these are part of the answer's; with `prompt_alone` they are all of it. `n` is
    the number of choices of each prompt, `custom` has the names of custom tools."""

    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    prompt_alone: bool = False
    n: int = 1
    custom: frozenset[str] = frozenset()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Extras:
        """The extras of a body, which need not be valid."""
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        n = as_integer(body.get("n"))
        return cls(
            usage=options.get("include_usage") is True,
            continuous_usage=options.get("continuous_usage_stats") is True,
            token_ids=body.get("return_token_ids") is True,
            prompt_logprobs=body.get("prompt_logprobs") is not None,
            echo=body.get("echo") is True,
            prompt_alone=body.get("echo") is True and body.get("max_tokens") == 0,
            n=n if isinstance(n, int) and n > 0 else 1,
            custom=custom_names(body.get("tools")),
        )


class Renderer:
    """Renders one request, as chunks if `streaming`, else as one object."""

    def __init__(
        self,
        endpoint: Endpoint,
        request: str,
        model: str,
        created: int,
        *,
        streaming: bool,
        extras: Extras | None = None,
        service_tier: str | None = None,
    ) -> None:
        self.request = request
        self._kind: Literal["chat", "text"] = "chat" if endpoint == "/v1/chat/completions" else "text"
        self._extras = extras or Extras()
        self._accepted: Accepted | None = None  # set by begin
        self._told = 0  # tokens of all choices; set by chunks
        self._begun: set[int] = set()  # choices of which a token was sent; set by chunks
        self.opened: set[int] = set()  # choices whose role was sent; set by openings, chunks and who resumes a stream
        self._offsets: dict[int, int] = {}  # choice → characters rendered, for completion logprobs
        self._call_deltas = CallDeltas(self._extras.custom)
        kind = "text_completion" if self._kind == "text" else "chat.completion" + (".chunk" if streaming else "")
        self._head = {"id": request, "object": kind, "created": created, "model": model}
        if service_tier is not None:
            self._head["service_tier"] = "default" if service_tier == "auto" else service_tier

    def begin(self, accepted: Accepted) -> None:
        """Take the time and prompts of the request, so that every renderer of it writes the same bytes."""
        self._head["created"] = accepted.created
        self._accepted = accepted

    def hear(self, token: Token) -> None:
        """Hear of a token event as it comes, if `whole` will get all of them."""

    def chunks(self, token: Token) -> Iterator[bytes]:
        """The SSE messages of a token event; none for one without content, as of an incomplete character."""
        for part in self.apart(token):
            yield from self._chunk(part)

    def apart(self, token: Token) -> Sequence[Token]:
        """A token event as one for its thought, one for its text, one for each piece of a call and, in a chat, one for
        the end behind them, in the order in which a client that resumes counts them.

        OpenAI sends them in chunks of their own, and clients rely on it: AutoGen reads no calls beside text, Haystack
        fails there, LlamaIndex reads the first of several calls in a chunk alone, OpenAI's own clients miss that a call
        is done which begins in the chunk that ends the choice, and gpt-cli drops the text of that chunk.
        """
        ends = token.finish_reason is not None and self._kind == "chat"
        if bool(token.reasoning) + bool(token.text) + len(token.tool_calls) + ends < 2:
            return (token,)
        following = token.index + len(token.token_ids)
        after = replace(token, index=following, token_ids=(), logprobs=None, prompt_logprobs=None)
        blank = {"text": "", "reasoning": "", "tool_calls": ()}
        said: list[dict[str, Any]] = [{"tool_calls": (call,)} for call in token.tool_calls]
        said = [{name: text} for name in ("reasoning", "text") if (text := getattr(token, name))] + said
        said += [{}] if ends else []
        parts = [replace(after if place else token, **blank | one) for place, one in enumerate(said)]
        return [*(replace(part, finish_reason=None, stop_reason=None) for part in parts[:-1]), parts[-1]]

    def openings(self, token: Token) -> Iterator[bytes]:
        """The SSE messages that must precede a choice's first one, which `chunks` sends too where this was not called:
        choices open in the order of their numbers, as OpenAI's client keeps them in the order in which they came."""
        if self._kind != "chat" or token.choice in self.opened or not self._is_news(token):
            return
        for earlier in sorted(set(range(token.choice)) - self.opened):
            self.opened.add(earlier)
            opening = {"index": earlier, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}
            yield self._message([opening], self._usage_so_far(), {})

    def _is_news(self, token: Token) -> bool:
        said = token.text or token.reasoning or token.tool_calls or token.finish_reason
        return bool(said or token.logprobs or token.prompt_logprobs or self._extras.token_ids)

    def _chunk(self, token: Token) -> Iterator[bytes]:
        yield from self.openings(token)
        reason = token.finish_reason and _REASONS[token.finish_reason]
        self._told += 0 if self._extras.prompt_alone else len(token.token_ids)
        if not self._is_news(token):
            return
        first = token.choice not in self._begun
        choice: dict[str, Any] = {"index": token.choice}
        if self._kind == "chat":
            choice["delta"] = self._delta(token)
        else:
            choice["text"] = token.text
        self._begun.add(token.choice)
        choice["logprobs"] = self._logprobs(token)
        choice["finish_reason"] = reason
        head = self._add_extras(choice, [token], token.finish_reason, first=first)
        yield self._message([choice], self._usage_so_far(), head)

    def end(self, done: Done) -> Iterator[bytes]:
        if self._extras.usage or done.fallback:
            yield self._message([], _usage(done.usage), answered_by(done.fallback))
        yield b"data: [DONE]\n\n"

    def whole(self, tokens: list[Token], done: Done) -> bytes:
        """The response to a request that does not stream."""
        choices, head = [], {}
        for index, reason in enumerate(done.finish_reasons):
            said = [token for token in tokens if token.choice == index]
            text = "".join(token.text for token in said)
            choice: dict[str, Any] = {"index": index}
            if self._kind == "chat":
                choice["message"] = _message(said, text, self._extras.custom)
            else:
                choice["text"] = text
            choice["logprobs"] = self._logprobs(*said)
            choice["finish_reason"] = _REASONS[reason]
            head = self._add_extras(choice, said, reason, first=True)
            choices.append(choice)
        return orjson.dumps(
            {**self._head, **answered_by(done.fallback), **head, "choices": choices, "usage": _usage(done.usage)}
        )

    def _add_extras(
        self, choice: dict[str, Any], said: list[Token], ended: FinishReason | None, *, first: bool
    ) -> dict[str, Any]:
        """Add vLLM's fields to a choice that renders `said`; returns those that belong beside the choices."""
        if ended == "deadline":
            choice["stop_reason"] = ended
        elif (reason := said[-1].stop_reason if said else None) is not None:
            choice["stop_reason"] = reason
        if self._extras.token_ids:
            choice["token_ids"] = [id for token in said for id in token.token_ids if not self._extras.prompt_alone]
        more: dict[str, Any] = {}
        prompts = self._accepted.prompts if self._accepted else ()
        if first and self._extras.token_ids and prompts:
            more["prompt_token_ids"] = prompts[choice["index"] // self._extras.n]
        if first and self._extras.prompt_logprobs and said:
            more["prompt_logprobs"] = [_prompt_logprob(entry) for entry in said[0].prompt_logprobs or ()]
        if self._kind == "chat":
            return more  # beside the choices, which share the prompt
        choice |= more
        return {}

    def _usage_so_far(self) -> dict[str, Any] | None:
        if not self._extras.continuous_usage:
            return None
        prompt = self._accepted.prompt_tokens if self._accepted else 0
        return _usage(Usage(prompt, self._told, prompt + self._told))

    def _delta(self, token: Token) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if token.choice not in self.opened:
            self.opened.add(token.choice)
            delta["role"] = "assistant"
        if token.choice not in self._begun:
            delta["content"] = None if token.reasoning or token.tool_calls else ""
        if token.text:
            delta["content"] = token.text
        if token.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = token.reasoning
        if calls := self._call_deltas.deltas(token):
            delta["tool_calls"] = calls
        return delta

    def _message(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, head: dict[str, Any]) -> bytes:
        body = {**self._head, **head, "choices": choices}
        if self._extras.usage or self._extras.continuous_usage:
            body["usage"] = usage
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _logprobs(self, *tokens: Token) -> dict[str, Any] | None:
        if all(token.logprobs is None for token in tokens):
            return None
        entries = [entry for token in tokens for entry in token.logprobs or ()]
        if self._extras.echo:
            entries = [*(tokens[0].prompt_logprobs or ()), *entries]
        if self._kind == "chat":
            return {"content": [logprob_json(entry) for entry in entries], "refusal": None}
        return self._completion_logprobs(tokens[0].choice, entries)

    def _completion_logprobs(self, choice: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offsets.get(choice, 0))
            self._offsets[choice] = offsets[-1] + len(entry.token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry.logprob is None else {rival.token: rival.logprob for rival in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def error_payload(error: ErrorBody) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_message(error: ErrorBody) -> bytes:
    """The SSE message of an error, without which a client takes a broken stream for a complete one."""
    return b"data: " + orjson.dumps(error_payload(error)) + b"\n\n"


def answered_by(fallback: str | None) -> dict[str, Any]:
    """What an answer says where another backend than the configured one has made it."""
    return {"fallback_backend": fallback} if fallback else {}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _message(said: list[Token], text: str, custom: frozenset[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thought := "".join(token.reasoning for token in said):
        message["reasoning"] = message["reasoning_content"] = thought
    if calls := join_calls(said):
        message["content"] = text or None
        message["tool_calls"] = [call_json(call, is_custom=call.name in custom) for call in calls]
    return message


def _prompt_logprob(entry: TokenLogprob) -> dict[str, Any] | None:
    """vLLM's form: the token of the prompt and its best alternatives, by id; null for the first one."""
    if entry.logprob is None:
        return None
    best = {
        str(rival.token_id): {"logprob": rival.logprob, "rank": rank, "decoded_token": rival.token}
        for rank, rival in enumerate(entry.top, 1)
        if rival.token_id != entry.token_id
    }
    own = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.token}
    return {str(entry.token_id): own} | best
