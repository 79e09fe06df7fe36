"""The consumers of a stream in memory, by name."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator

from ..port import ConsumerSpec
from .consumer import ConsumerGroup, MemoryConsumer
from .stream import MemoryStream, head_of, may_match, overlap

_HEAD = 3  # tokens of a subject: outputs have their partition there, which only one consumer takes


class ConsumerGroups:
    """The consumers of one stream by name: a message visits only those whose subject it is on."""

    def __init__(self, stream: MemoryStream, loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop
        self._groups: dict[str, ConsumerGroup] = {}
        self._exact: defaultdict[str, list[ConsumerGroup]] = defaultdict(list)  # by subject
        self._wild: list[ConsumerGroup] = []  # whose subjects have wildcards
        self._by_head: dict[str, list[ConsumerGroup]] = {}  # those of them that may match a subject, by its head

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(self._groups.values())

    def get(self, name: str) -> ConsumerGroup | None:
        return self._groups.get(name)

    def join(self, spec: ConsumerSpec, member: MemoryConsumer) -> None:
        """Open a copy of a consumer, which is made if it is the first."""
        group = self._groups.get(spec.name)
        if group is None:
            group = self._groups[spec.name] = ConsumerGroup(self._stream, spec, self._loop)
        else:
            self._line(group.spec.subject).remove(group)
        self._line(spec.subject).append(group)
        self._by_head.clear()
        group.join(spec, member)

    def retire(self) -> list[tuple[ConsumerSpec, MemoryConsumer]]:
        """The stream is no more: deliver nothing. Returns the open copies, for a stream of the same name."""
        return [(group.spec, member) for group in self for member in group.retire()]

    def remove(self, name: str) -> None:
        group = self._groups.pop(name)
        self._line(group.spec.subject).remove(group)
        self._by_head.clear()

    def offer(self, subject: str, sequence: int) -> None:
        """A message has been stored."""
        for group in self._exact.get(subject, ()):
            group.offer(sequence)
        if self._wild:
            for group in self._beginning(head_of(subject, _HEAD)):
                if group.matches(subject):
                    group.offer(sequence)

    def overlapping(self, spec: ConsumerSpec) -> str | None:
        """The name of another consumer that takes some of the same messages."""
        if _is_wild(spec.subject):
            others = list(self._groups.values())
        else:
            others = [*self._exact.get(spec.subject, ()), *self._wild]
        names = (other.spec.name for other in others if overlap(other.spec.subject, spec.subject))
        return next((name for name in names if name != spec.name), None)

    def _beginning(self, head: str) -> list[ConsumerGroup]:
        """Those with wildcards that may match a subject with this head."""
        found = self._by_head.get(head)
        if found is None:
            found = self._by_head[head] = [group for group in self._wild if may_match(group.spec.subject, head)]
        return found

    def _line(self, subject: str) -> list[ConsumerGroup]:
        return self._wild if _is_wild(subject) else self._exact[subject]


def _is_wild(subject: str) -> bool:
    return "*" in subject or ">" in subject
