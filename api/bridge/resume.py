"""How far a client has read a stream, as the ids of its SSE messages say. Pure.

An id is `<request>/<choices>`, and ends in `/u` once the usage was sent. The choices are in order, separated by commas:
`tokens:characters` counts what was sent of each, and `f` follows with its finish reason. A choice that has not begun is
empty. `o` follows on a choice whose role was sent before anything else. The request alone, which the header
`x-request-id` names, is the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ...schemas.errors import InvalidRequest
from ...schemas.events import Token, ToolCallDelta

_CHOICE = r"(?:[0-9]{1,9}:[0-9]{1,9}f?)?o?"
_is_id = re.compile(rf"([A-Za-z0-9_-]{{1,64}})(?:/({_CHOICE}(?:,{_CHOICE})*)(/u)?)?").fullmatch


class ChoiceProgress(NamedTuple):
    """How many tokens and characters of one choice were sent, and whether its finish reason was."""

    tokens: int = 0
    characters: int = 0
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}:{self.characters}{'f' * self.finished}"

    def furthest(self, other: ChoiceProgress) -> ChoiceProgress:
        tokens, characters = max(self.tokens, other.tokens), max(self.characters, other.characters)
        return ChoiceProgress(tokens, characters, self.finished or other.finished)


class Progress:
    """Separates what the client has received from what is new to it; `split` must be given all tokens in order.

    `had` is what the client has received by choice; None where it does not resume. `opened` are choices of which it has
    the role alone.
    """

    def __init__(
        self,
        request: str,
        had: dict[int, ChoiceProgress] | None = None,
        *,
        opened: Iterable[int] = (),
        usage_sent: bool = False,
    ) -> None:
        self.request = request
        self.resumed = had is not None
        self.usage_sent = usage_sent  # set by the caller that sends it
        self._had = had or {}
        self.opened = set(opened)  # choices whose role was sent; the caller that sends it adds to them
        self._seen: dict[int, ChoiceProgress] = {}

    @classmethod
    def parse(cls, given: str) -> Progress:
        """The progress that a `Last-Event-ID` names. Raises `InvalidRequest` for one of another form."""
        found = _is_id(given)
        if found is None:
            raise invalid_event_id("Last-Event-ID must be an id of an event that this server sent.")
        if found[2] is None:
            return cls(given)
        had, opened = {}, []
        for choice, text in enumerate(found[2].split(",")):
            if text.endswith("o"):
                opened.append(choice)
            if text := text.rstrip("o"):
                tokens, _, characters = text.rstrip("f").partition(":")
                had[choice] = ChoiceProgress(int(tokens), int(characters), text.endswith("f"))
        return cls(found[1], had, opened=opened, usage_sent=found[3] is not None)

    def before(self) -> Progress:
        """As it stands now, whatever `split` is given later; it knows of roles that are sent later."""
        found = Progress(self.request, self._had, usage_sent=self.usage_sent)
        found.opened, found._seen = self.opened, dict(self._seen)
        return found

    @property
    def reached(self) -> bool:
        """Whether `split` has been given all that the client has received."""
        return all(self._progress(choice) == self._seen.get(choice) for choice in self._had)

    @property
    def id(self) -> str:
        known = {choice: self._progress(choice) for choice in self._had.keys() | self._seen}
        texts = {choice: str(progress) for choice, progress in known.items()}
        for choice in self.opened:
            if choice not in known or not (known[choice].characters or known[choice].finished):
                texts[choice] = texts.get(choice, "") + "o"
        choices = ",".join(texts.get(choice, "") for choice in range(max(texts, default=-1) + 1))
        return f"{self.request}/{choices}{'/u' * self.usage_sent}"

    def identified(self, message: bytes) -> bytes:
        """An SSE message with the id that says how far a client is which has received it."""
        return f"id: {self.id}\n".encode() + message

    def split(self, token: Token) -> tuple[Token | None, Token | None]:
        """The part of `token` that the client has received, and the part that it has not, cut between characters."""
        seen = self._seen.get(token.choice, ChoiceProgress())
        had = self._had.get(token.choice, ChoiceProgress())
        ends = token.finish_reason is not None
        length = _length(token)
        now = ChoiceProgress(seen.tokens + len(token.token_ids), seen.characters + length, seen.finished or ends)
        self._seen[token.choice] = now
        if token.choice in self._had and had.furthest(now) == had:
            return token, None
        tokens = min(max(had.tokens - seen.tokens, 0), len(token.token_ids))
        characters = min(max(had.characters - seen.characters, 0), length)
        if not tokens and not characters:
            return None, token
        ids, logprobs = token.token_ids, token.logprobs
        old, new = _cut(token, characters)
        return (
            replace(old, token_ids=ids[:tokens], logprobs=logprobs and logprobs[:tokens], finish_reason=None),
            replace(
                new,
                index=token.index + tokens,
                token_ids=ids[tokens:],
                logprobs=logprobs and logprobs[tokens:],
                prompt_logprobs=None,
            ),
        )

    def _progress(self, choice: int) -> ChoiceProgress:
        return self._had.get(choice, ChoiceProgress()).furthest(self._seen.get(choice, ChoiceProgress()))


def _length(token: Token) -> int:
    """Characters of reasoning, text and tool calls; the head of a tool call counts as one."""
    calls = sum(len(call.arguments) + (call.id is not None) for call in token.tool_calls)
    return len(token.reasoning) + len(token.text) + calls


def _cut(token: Token, count: int) -> tuple[Token, Token]:
    """The first `count` characters, reasoning first, then text, then calls; and the rest."""
    thought, count = min(count, len(token.reasoning)), max(count - len(token.reasoning), 0)
    text, count = min(count, len(token.text)), max(count - len(token.text), 0)
    had: list[ToolCallDelta] = []
    news: list[ToolCallDelta] = []
    for call in token.tool_calls:
        head = int(call.id is not None)
        cut = min(max(count - head, 0), len(call.arguments))
        if count and (head or cut):
            had.append(replace(call, arguments=call.arguments[:cut]))
            if rest := call.arguments[cut:]:
                news.append(ToolCallDelta(call.index, rest))
        else:
            news.append(call)
        count = max(count - head - len(call.arguments), 0)
    old = replace(token, reasoning=token.reasoning[:thought], text=token.text[:text], tool_calls=tuple(had))
    new = replace(token, reasoning=token.reasoning[thought:], text=token.text[text:], tool_calls=tuple(news))
    return old, new


def invalid_event_id(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_event_id", param="Last-Event-ID")
