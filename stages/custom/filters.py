"""Filters stand between `infer` and `stream`: they read what a model says before its client does.

A filter is a fold over one answer: an object that gets its tokens in order, remembers what it likes, and returns them
as the client shall see them. It runs inside the stage stream. Whoever takes a request over feeds new objects with the
whole answer from the start; what was published before is not published again. So a filter that makes the same of the
same answer, which is all that is asked of it, is never seen to die.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, get_args

import structlog

from ...schemas.errors import GenerationFailed, Refusal, StageFailed
from ...schemas.events import (
    Cancelled,
    Done,
    ErrorBody,
    Event,
    Failed,
    FinishReason,
    Started,
    Token,
    ToolCallDelta,
    Usage,
)
from .. import endings
from ..failures import is_cancelled

log = structlog.get_logger(__name__)

_REASONS = frozenset(get_args(FinishReason))


class Filter(ABC):
    """Base of your own filters: one object for each choice of each answer.

    `answer` tells whose it is: `tenant`, `request`, `model`, `endpoint`. Override `process`.
    """

    name: ClassVar[str]

    def __init__(self, answer: Started, choice: int) -> None:
        self.answer = answer
        self.choice = choice

    @abstractmethod
    async def process(self, token: Token) -> Token:
        """Return the next piece of the answer as the client shall see it: `text`, `reasoning` and `tool_calls` may be
        anything.

        To withhold text, return less and keep the rest for later; the last piece has a `finish_reason`. To end the
        answer here, return one with a `finish_reason`, "stop" or "content_filter"; nothing follows, and once that
        holds for every choice, the model stops too. Raise `InvalidRequest` (or another `Refusal`) to end the request
        with an error. From the first piece on that is changed, token ids are -1 and log-probabilities are left out,
        since they would tell what it was.
        """


class FilteredAnswer:
    """One request's way through filters, `kinds`, in order. Fed with all its events, in order, from the first.

    A filter that returns nothing for `limit` seconds has failed.
    """

    def __init__(self, kinds: Sequence[type[Filter]], answer: Started, limit: float) -> None:
        self._answer = answer
        chains = [[kind(answer, choice) for kind in kinds] for choice in range(answer.choices)]
        self._choices = [_Choice(chain, limit) for chain in chains]

    async def read(self, event: Event) -> list[Event]:
        """What the client is told instead; nothing counts behind a final event."""
        match event:
            case Token():
                return await self._pass(event)
            case Done():
                return [replace(event, finish_reasons=self._reasons)]
            case _:
                return [event]

    async def _pass(self, token: Token) -> list[Event]:
        choice = self._choices[token.choice]
        if choice.reason is not None:
            return []
        try:
            told = await choice.pass_on(token)
        except Refusal as refusal:
            return [Failed(token.request, ErrorBody.of(refusal))]
        if any(one.is_cut for one in self._choices) and len(self._reasons) == len(self._choices):
            return [told, self._end(token.request)]
        return [told]

    @property
    def _reasons(self) -> tuple[FinishReason, ...]:
        return tuple(choice.reason for choice in self._choices if choice.reason is not None)

    def _end(self, request: str) -> Event:
        """Where a filter has ended a choice, what the model made behind that counts for nothing."""
        prompt, completion = self._answer.prompt_tokens, sum(choice.tokens for choice in self._choices)
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        usage = Usage(prompt, completion, prompt + completion, reasoning_tokens=reasoning)
        return Cancelled(request, usage) if "cancelled" in self._reasons else Done(request, self._reasons, usage)


class _Choice:
    """One choice of an answer, on its way through a chain of filters. All is set by `pass_on`."""

    def __init__(self, chain: Sequence[Filter], limit: float) -> None:
        self.reason: FinishReason | None = None  # why it ended
        self.is_cut = False  # a filter has ended it
        self.tokens = 0
        self.reasoning_tokens = 0
        self._chain = chain
        self._limit = limit
        self._is_changed = False

    async def pass_on(self, token: Token) -> Token:
        """What the client sees of the next piece. Raises what a filter refuses with; its bugs are refusals too."""
        said = replace(token)  # which a filter may change in its place
        for link in self._chain:
            try:
                async with asyncio.timeout(self._limit) as timer:
                    found = _checked(await link.process(said))
                said = replace(
                    said,
                    text=found.text,
                    reasoning=found.reasoning,
                    tool_calls=found.tool_calls,
                    finish_reason=found.finish_reason or said.finish_reason,
                )
            except Refusal:
                raise
            except BaseException as error:
                if is_cancelled(error):
                    raise
                if timer.expired():
                    log.error("a filter does not return", filter=link.name, request=token.request)
                    raise GenerationFailed(f"The filter {link.name} did not return for {self._limit:g} s.") from error
                reason = str(error) if isinstance(error, StageFailed) else type(error).__name__
                log.error("a filter failed", filter=link.name, reason=reason, where=endings.location(error))
                raise GenerationFailed(f"The filter {link.name} failed.") from error
        said_as_is = (said.text, said.reasoning, said.tool_calls) == (token.text, token.reasoning, token.tool_calls)
        self._is_changed = self._is_changed or not said_as_is
        if self._is_changed:
            said = replace(said, token_ids=(-1,) * len(token.token_ids), logprobs=None)
        self.reason = said.finish_reason
        self.is_cut = token.finish_reason is None and said.finish_reason is not None
        self.tokens += len(token.token_ids)
        self.reasoning_tokens += token.num_thought_tokens
        return said


def _checked(found: object) -> Token:
    """What a filter has returned. Raises `StageFailed` for what no client could be told."""
    if not isinstance(found, Token):
        raise StageFailed(f"process returned a {type(found).__name__}, not a Token")
    calls = found.tool_calls
    if not isinstance(calls, tuple) or not all(isinstance(call, ToolCallDelta) for call in calls):
        raise StageFailed("process returned a token whose tool_calls are no tuple of ToolCallDelta")
    texts = [("text", found.text), ("reasoning", found.reasoning)]
    texts += [("tool_calls", each) for call in calls for each in (call.arguments, call.id or "", call.name or "")]
    for name, text in texts:
        if not isinstance(text, str):
            raise StageFailed(f"process returned a token whose {name} is a {type(text).__name__}, not a str")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise StageFailed(f"process returned a token whose {name} has half of a surrogate pair") from None
    if found.finish_reason is not None and found.finish_reason not in _REASONS:
        raise StageFailed('process returned a token whose finish_reason is unknown: use "stop" or "content_filter"')
    return found
