"""A stream in memory: messages by sequence within the limits of its spec, and the message ids that reveal duplicates.

Old messages expire when a method is called, which no caller can tell from expiry on time. Knows nothing of consumers.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

from ...schemas.errors import StartupError, StreamFull, Superseded
from ..port import MESSAGE_ID, Headers, Held, Message, Published, StreamSpec, Usage


class _Stored(NamedTuple):
    message: Message
    at: float
    size: int


class MemoryStream:
    """`clock` returns seconds, `now` Unix seconds. No method awaits, so no caller sees a stream half changed."""

    def __init__(self, spec: StreamSpec, clock: Callable[[], float], now: Callable[[], float] = time.time) -> None:
        self.last = 0  # the newest sequence ever assigned; `store` increments it
        self._clock = clock
        self._now = now
        # OrderedDict, because a plain dict takes ever longer to find its first key as earlier ones are deleted.
        self._messages: OrderedDict[int, _Stored] = OrderedDict()  # by sequence, oldest first
        self._ids: dict[str, int] = {}  # sequences by message id
        self._seen: deque[str] = deque()  # these ids, oldest first
        self._seen_at: deque[float] = deque()  # and when each was stored
        self._of_subject: defaultdict[str, dict[int, None]] = defaultdict(dict)  # sequences, oldest first
        self._bytes = 0
        self._due = 0.0  # by the clock: nothing expires before; set by _adopt, store and _expire
        self.watcher: Callable[[Message], None] | None = None  # hears of each message that is stored
        self._adopt(spec)

    def check(self, spec: StreamSpec) -> None:
        """Raises `StartupError` if the spec differs in what no reconfiguration can change."""
        for fixed in ("retention", "storage"):
            present, wanted = getattr(self.spec, fixed), getattr(spec, fixed)
            if present != wanted:
                raise StartupError(f"stream {spec.name} exists with {fixed} {present!r} where {wanted!r} is needed")

    def configure(self, spec: StreamSpec) -> None:
        """Adopt a changed spec that has passed `check`."""
        self._adopt(spec)

    @property
    def first(self) -> int:
        """The oldest sequence stored; if the stream is empty, the one that comes next."""
        self._expire()
        return next(iter(self._messages), self.last + 1)

    def accepts(self, subject: str) -> bool:
        return self._pattern.fullmatch(subject) is not None

    def may_accept(self, head: str) -> bool:
        """Whether it accepts a subject that begins with these tokens, as far as they tell."""
        return any(may_match(subject, head) for subject in self.spec.subjects)

    def store(self, subject: str, data: bytes, headers: Headers, size: int, expect: int | None = None) -> Published:
        """Store a message of so many bytes, whose headers include its id. Raises `StreamFull` and `Superseded`."""
        self._expire()
        message_id = headers[MESSAGE_ID]
        if (seen := self._ids.get(message_id)) is not None:
            return Published(seen, True)
        if expect is not None and expect != (newest := next(reversed(self._of_subject.get(subject, {})), 0)):
            raise Superseded(f"{subject}: the last sequence is {newest}, not {expect}")
        size += len(subject)
        if self.spec.discard == "new":
            self._check_limits(subject, size)
        self.last += 1
        now = self._clock()
        data = bytes(memoryview(data))  # a copy, since what orjson writes may hold ten times the memory of its text
        message = Message(subject, data, headers, self.last, self._now())
        self._messages[self.last] = _Stored(message, now, size)
        self._of_subject[subject][self.last] = None
        self._ids[message_id] = self.last
        self._seen.append(message_id)
        self._seen_at.append(now)
        self._due = min(self._due, now + self._shortest)
        self._bytes += size
        if self.spec.discard == "old":
            self._drop_oldest(subject)
        if self.watcher is not None:
            self.watcher(message)
        return Published(self.last, False)

    def get(self, sequence: int) -> Message | None:
        self._expire()
        stored = self._messages.get(sequence)
        return stored.message if stored else None

    def sequences(self, pattern: re.Pattern[str], first: int = 0) -> Iterator[int]:
        """Those of the messages from `first` on whose subjects match, oldest first."""
        self._expire()
        messages = self._messages.items()
        return (s for s, stored in messages if s >= first and pattern.fullmatch(stored.message.subject))

    def on_subject(self, subject: str, after: int) -> list[Message]:
        self._expire()
        if "*" in subject or ">" in subject:
            pattern = matcher(subject)
            sequences = [s for s, stored in self._messages.items() if pattern.fullmatch(stored.message.subject)]
        else:
            sequences = list(self._of_subject.get(subject, ()))
        return [self._messages[sequence].message for sequence in sequences if sequence > after]

    def last_on(self, subject: str) -> Message | None:
        self._expire()
        sequence = next(reversed(self._of_subject.get(subject, {})), None)
        return None if sequence is None else self._messages[sequence].message

    def held(self, subject: str = ">") -> Held:
        self._expire()
        matches = matcher(subject).fullmatch
        counts = {each: len(sequences) for each, sequences in self._of_subject.items() if sequences and matches(each)}
        return Held(counts, self.last, len(self._messages))

    def usage(self) -> Usage:
        self._expire()
        limits = self.spec.max_messages, self.spec.max_bytes
        return Usage(self.spec.name, len(self._messages), self._bytes, *limits, last=self.last)

    def remove(self, sequence: int) -> None:
        """Delete a message if it is still there."""
        stored = self._messages.pop(sequence, None)
        if stored is None:
            return
        self._bytes -= stored.size
        subject = stored.message.subject
        del self._of_subject[subject][sequence]
        if not self._of_subject[subject]:
            del self._of_subject[subject]

    def _adopt(self, spec: StreamSpec) -> None:
        self.spec = spec
        self._shortest = min(spec.dedup_window, spec.max_age or inf)  # seconds in which something may expire
        self._due = 0.0
        self._pattern = re.compile("|".join(matcher(subject).pattern for subject in spec.subjects))

    def _check_limits(self, subject: str, size: int) -> None:
        spec = self.spec
        if spec.max_messages and len(self._messages) >= spec.max_messages:
            raise StreamFull(f"{spec.name}: maximum messages exceeded")
        if spec.max_bytes and self._bytes + size > spec.max_bytes:
            raise StreamFull(f"{spec.name}: maximum bytes exceeded")
        if spec.max_messages_per_subject and len(self._of_subject.get(subject, ())) >= spec.max_messages_per_subject:
            raise StreamFull(f"{spec.name}: maximum messages per subject exceeded", per_subject=True)

    def _drop_oldest(self, subject: str) -> None:
        spec, sequences = self.spec, self._of_subject[subject]
        while spec.max_messages_per_subject and len(sequences) > spec.max_messages_per_subject:
            self.remove(next(iter(sequences)))
        while (spec.max_messages and len(self._messages) > spec.max_messages) or (
            spec.max_bytes and self._bytes > spec.max_bytes
        ):
            self.remove(next(iter(self._messages)))

    def _expire(self) -> None:
        now = self._clock()
        if now < self._due:
            return
        window, age = self.spec.dedup_window, self.spec.max_age or inf
        while self._seen_at and now - self._seen_at[0] >= window:
            self._seen_at.popleft()
            del self._ids[self._seen.popleft()]
        while self._messages and now - (oldest := next(iter(self._messages.values()))).at >= age:
            self.remove(oldest.message.sequence)
        begins = next(iter(self._messages.values())).at if self._messages else inf
        self._due = min(self._seen_at[0] + window if self._seen_at else inf, begins + age)


def matcher(pattern: str) -> re.Pattern[str]:
    """A regular expression for a NATS subject pattern: `*` stands for one token, a final `>` for one or more.

    Use its `fullmatch`.
    """
    tokens = (r"[^.]+" if token == "*" else r".+" if token == ">" else re.escape(token) for token in pattern.split("."))
    return re.compile(r"\.".join(tokens))


def head_of(subject: str, num_tokens: int = 2) -> str:
    """Its first tokens, of which two tell most subjects apart."""
    return ".".join(subject.split(".", num_tokens)[:num_tokens])


def may_match(pattern: str, head: str) -> bool:
    """Whether a subject that begins with the tokens of `head` may match a pattern."""
    return overlap(".".join(pattern.split(".")[: head.count(".") + 1]), head)


def overlap(one: str, other: str) -> bool:
    """Whether a subject exists that matches both patterns."""
    first, second = one.split("."), other.split(".")
    for a, b in zip(first, second, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(first) == len(second)
