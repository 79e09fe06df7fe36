"""What is stored of one request's events: enough to tell a repetition from news, and a fence to publish behind.

Each event is published where the last one known is still the newest on its subject; where somebody else was faster,
what is stored is read again and decides. So two holders of one request, however long one of them stood still, publish
one stream: every event once, and nothing behind the final one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from ..schemas.events import FINAL, Accepted, Event, ItemEvent, Queued, Token, Turn
from ..schemas.wire import codec
from ..streams.port import Message


@dataclass(slots=True)
class Trail:
    """`last` is the sequence of the newest event, 0 where there is none. All is set by `add` and `merge`."""

    last: int = 0
    accepted: bool = False
    over: bool = False  # the final event is stored
    shown: int = 0  # of a response's own events
    next_index: dict[int, int] = field(default_factory=dict)  # of the next token, by choice
    finished: set[int] = field(default_factory=set)  # choices

    @classmethod
    def of(cls, stored: Iterable[Message]) -> Self:
        trail = cls()
        for message in stored:
            trail.add(codec.decode_event(message.data), message.sequence)
        return trail

    def lacks(self, event: Event) -> bool:
        """Whether the event is not stored yet; nothing is missing once the final one is stored."""
        if self.over:
            return False
        match event:
            case Token():
                return event.choice not in self.finished and event.index >= self.next_index.get(event.choice, 0)
            case Accepted():
                return not self.accepted
            case Queued():
                return not self.next_index  # who has the first token does not wait any more
            case ItemEvent() | Turn():
                return event.index >= self.shown
            case _:
                return True

    def overlaps(self, event: Event) -> bool:
        """Whether only some of the event's tokens are stored, which happens when an answer was begun anew."""
        if not isinstance(event, Token) or self.over or event.choice in self.finished:
            return False
        return event.index < self.next_index.get(event.choice, 0) < event.index + len(event.token_ids)

    def add(self, event: Event, sequence: int) -> None:
        """Note that the event is stored."""
        self.last = max(self.last, sequence)
        match event:
            case Token():
                self.next_index[event.choice] = event.index + len(event.token_ids)
                if event.finish_reason is not None:
                    self.finished.add(event.choice)
            case Accepted():
                self.accepted = True
            case ItemEvent() | Turn():
                self.shown = max(self.shown, event.index + 1)
            case _ if isinstance(event, FINAL):
                self.over = True

    def merge(self, earlier: Trail) -> None:
        """Keep what was known before and may have been pushed out of the stream since."""
        self.accepted = self.accepted or earlier.accepted
        self.over = self.over or earlier.over
        self.shown = max(self.shown, earlier.shown)
        self.finished |= earlier.finished
        for choice, index in earlier.next_index.items():
            self.next_index[choice] = max(index, self.next_index.get(choice, 0))
