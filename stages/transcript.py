"""What has been said of one request so far, told from its stored outputs: the same for every reader.

A worker that takes a request over reads it to know where to go on; the stream stage reads it to know what to pass on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from ..schemas.events import Delta, FinishReason, Output, Started, Usage
from ..schemas.wire import codec
from ..streams.port import TRACE_PARENT, Message


class Transcript:
    """Fed with a request's outputs in stored order, it keeps those that count and forgets the rest.

    An output counts if it belongs to the newest epoch and begins at the next index of its choice; whatever a worker
    says after a successor has started is fenced off.
    """

    def __init__(self) -> None:
        self.last = 0  # sequence of the newest output read; set by of
        self.trace: str | None = None  # the traceparent of the worker that announced last; set by of
        self.started: Started | None = None  # of the newest epoch; set by apply
        self.token_ids: list[list[int]] = []  # by choice; set by apply
        self.finish_reasons: list[FinishReason | None] = []  # by choice; set by apply
        self.cached_tokens = 0  # set by apply
        self.gap = False  # something between is gone; set by apply
        self.silent = True  # nothing has been said in the newest epoch; set by apply
        self.kills = 0  # epochs in a row, up to the newest, in which nothing was said; set by apply

    @classmethod
    def of(cls, stored: Iterable[Message]) -> Self:
        said = cls()
        for message in stored:
            for output in codec.decode_outputs(message.data):
                said.apply(output)
            said.last = message.sequence
            said.trace = message.headers.get(TRACE_PARENT, said.trace)
        return said

    def apply(self, output: Output) -> bool:
        """Take the next stored output; True if it counts."""
        match output:
            case Started():
                return self._start(output)
            case Delta():
                return self._extend(output)

    @property
    def epoch(self) -> int:
        """The newest one, from 1; 0 before any."""
        return self.started.epoch if self.started else 0

    @property
    def finished(self) -> bool:
        return bool(self.finish_reasons) and None not in self.finish_reasons

    @property
    def usage(self) -> Usage:
        prompt = self.started.prompt_tokens if self.started else 0
        completion = sum(map(len, self.token_ids))
        return Usage(prompt, completion, prompt + completion, self.cached_tokens)

    def _start(self, started: Started) -> bool:
        if self.started is not None and started.epoch <= self.started.epoch:
            return False
        if self.started is None:
            self.token_ids = [[] for _ in range(started.choices)]
            self.finish_reasons = [None] * started.choices
        self.started = started
        self.silent = True
        self.kills += 1
        return True

    def _extend(self, delta: Delta) -> bool:
        if self.started is None:
            self.gap = True
            return False
        if delta.epoch != self.started.epoch or self.finish_reasons[delta.choice] is not None:
            return False
        said = self.token_ids[delta.choice]
        if delta.index != len(said):
            # An answer that was begun anew is cut into other deltas: one may reach further than what was said before.
            is_repeated = delta.index + len(delta.token_ids) <= len(said) and delta.finish_reason is None
            self.gap = self.gap or not is_repeated
            return False
        self.silent, self.kills = False, 0
        said.extend(delta.token_ids)
        self.finish_reasons[delta.choice] = delta.finish_reason
        self.cached_tokens += delta.cached_tokens
        return True
