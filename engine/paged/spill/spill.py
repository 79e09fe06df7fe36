"""Moves cached blocks between the pools and the disk, so that prefixes outlive the memory and the process.

Each block that becomes findable is also written to the disk, by a thread: the engine's own copies it, and drops it
where too many wait. A choice whose prefix is on the disk is held until another thread has read it, piece by piece; then
the scheduler finds it in the pools like any other. So the disk delays no step, and a slow one no more than the choices
that it could have helped.

A block with numbers that are none is never written: after a restart it would spoil every request that begins like it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...background import Background
from ...choice import Choice
from ...output import SpillStats
from ..kv.blocks import Journal, KVBlocks, Tables
from ..kv.kv_cache import Pool
from ..runner import Runner
from ..scheduling.rows import Row
from .block_files import BlockFiles, DamagedBlock

_log = logging.getLogger(__name__)

_PIECE = 16 << 20  # bytes that are read, and copied between two steps, at a time
_QUEUE = 64 << 20  # bytes that may wait to be written
_INTERVAL = 0.25  # seconds in which what is published is collected: waking the writer takes a core from the engine
_PATIENCE = 5.0  # seconds for a piece; the prompt is then computed
_POLL = 0.001  # seconds between two looks for a piece while nothing else runs
_TOUCH = 30.0  # seconds in which a prefix is noted as used once
_FLUSH = 3.0  # seconds to write what waits at the end

_Rows = NDArray[np.uint8]  # [blocks, bytes]


class _Part(NamedTuple):
    """One layer's share of a block's numbers."""

    group: int
    pool: Pool
    start: int
    end: int


class _Held:
    """A choice that waits for blocks from the disk; `Spill` sets all attributes."""

    __slots__ = ("began", "choice", "keys", "piece", "start")

    def __init__(self, choice: Choice, keys: list[bytes]) -> None:
        self.choice = choice
        self.keys = keys  # of the blocks that can be reused
        self.start = 0  # the index of the first block of the piece that is being read
        self.piece: Future[_Rows] | None = None
        self.began = 0.0  # when its reading began, on the clock


class Spill:
    """The engine's thread calls all methods; `stats` is safe from any."""

    def __init__(
        self,
        files: BlockFiles,
        blocks: KVBlocks,
        runner: Runner,
        *,
        queue: int = _QUEUE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queue` is how many bytes may wait to be written; `clock` is in seconds."""
        self._files, self._blocks, self._runner, self._clock = files, blocks, runner, clock
        self._room = queue  # bytes that may still be queued; the writer returns them through `_done`
        self._done: deque[int] = deque()
        self._off = ""
        self._num_found = self._num_dropped = self._num_written = self._num_damaged = 0
        self._held: deque[_Held] = deque()
        self._touched: OrderedDict[bytes, float] = OrderedDict()  # by last key, when a prefix was noted as used
        self._journal = blocks.journal = Journal()
        self._since: float | None = None  # when the oldest entry of the journal was seen; set by `_collect`
        self._parts = layout(runner)
        self._piece = max(_PIECE // files.size, 1)
        self._reader, self._writer = Background("penstock-prefix-reader"), Background("penstock-prefix-writer")
        self._writer.submit(self._guarded(files.trim))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def stats(self) -> SpillStats:
        return SpillStats(
            num_bytes=self._files.total,
            num_written=self._num_written,
            num_found=self._num_found,
            num_dropped=self._num_dropped,
            num_damaged=self._num_damaged,
            off=self._off,
        )

    def hold(self, choice: Choice) -> bool:
        """Take a new choice if the disk has more of its prefix than the pools; `advance` returns it."""
        if self._off or not choice.is_scored:
            return False
        row = Row(choice, 0, Tables(0))
        row.extend_keys(self._blocks.block_size)
        keys = row.tables.keys[: (row.num_tokens - 1) // self._blocks.block_size]  # the last token is always computed
        matched = self._blocks.match(keys)
        if matched == len(keys) or not self._files.has(keys[matched]):
            return False
        self._held.append(_Held(choice, keys))
        return True

    def remove(self, choice: Choice) -> None:
        """Forget a choice. An unknown one is no error."""
        self._held = deque(held for held in self._held if held.choice is not choice)

    def delay(self) -> float:
        """Seconds until `advance` should be called: infinite if there is nothing to do."""
        due = inf
        if self._journal.published or self._journal.released:
            due = 0.0 if self._since is None else max(self._since + _INTERVAL - self._clock(), 0.0)
        if self._held:
            held = self._held[0]
            is_open = held.piece is not None and not held.piece.done() and not self._is_late(held)
            due = min(due, _POLL if is_open else 0.0)
        return due

    def advance(self) -> list[Choice]:
        """Copy what was published for the writer, and a piece that was read into the pools. Call it before each step.

        Returns the choices whose prefixes are in the pools as far as possible.
        """
        self._collect()
        choices = []
        while self._held:
            held = self._held[0]
            if held.piece is None and not self._off and self._request(held):
                break
            if held.piece is not None:
                if not held.piece.done() and not self._is_late(held):
                    break
                if self._store(held) and self._request(held):
                    break
            choices.append(self._held.popleft().choice)
        return choices

    def _collect(self, waited: float = 0.0) -> None:
        """Copy what was published, a piece at most, and note what was used, once it has waited long enough."""
        journal, now = self._journal, self._clock()
        if self._off:
            journal.published, journal.released = [], []
        if not journal.published and not journal.released:
            return
        if self._since is None:
            self._since = now
        if now - self._since + waited < _INTERVAL:
            return
        while self._done:
            self._room += self._done.popleft()
        published = list(dict.fromkeys(journal.published))
        journal.published = published[self._piece :]
        if published:
            self._copy(published[: self._piece])
        if journal.published:
            return
        self._since = None
        released, journal.released = journal.released, []
        for keys in released:
            self._touch(keys)

    def close(self) -> None:
        """Write what is left, as far as that takes little time."""
        while self._journal.published or self._journal.released:
            self._collect(_INTERVAL)
        self._blocks.journal = None
        self._reader.close(0)
        self._writer.close(_FLUSH)

    def _request(self, held: _Held) -> bool:
        """Begin to read the next piece, unless the disk has none."""
        held.start = self._blocks.match(held.keys)
        keys = held.keys[held.start : held.start + self._piece]
        if not keys or not self._files.has(keys[0]):
            return False
        held.began = self._clock()
        held.piece = self._reader.submit(partial(self._read, keys))
        return True

    def _read(self, keys: Sequence[bytes]) -> _Rows:
        """Runs in the reader: the leading blocks of `keys` that are on the disk."""
        self._files.expect(keys)
        rows = np.empty((len(keys), self._files.size), np.uint8)
        count, damaged = len(keys), []
        for index, key in enumerate(keys):
            try:
                if self._files.read(key, rows[index].data):
                    continue
            except DamagedBlock as error:
                damaged.append(str(error))
            count = min(count, index)
            if not damaged:
                break  # else the blocks that follow are looked at, too: they will not be written again
        if damaged:
            self._num_damaged += len(damaged)
            _log.warning("%d damaged blocks of a cached prefix removed, such as %s", len(damaged), damaged[0])
        return rows[:count]

    def _store(self, held: _Held) -> bool:
        """Copy the piece that was read into the pools; returns whether more may be on the disk."""
        piece, held.piece = held.piece, None
        assert piece is not None
        if not piece.done():
            self._stop(f"reading {self._files.file_size * self._piece} bytes took more than {_PATIENCE:g} s")
            return False
        if (error := piece.exception()) is not None:
            self._stop(str(error) or repr(error))
            return False
        rows = piece.result()
        numbers = torch.from_numpy(rows).view(self._runner.dtype)

        def write(group: int, indices: list[int], blocks: list[int]) -> None:
            chosen = numbers[[index - held.start for index in indices]]
            for part in self._parts:
                if part.group == group:
                    part.pool.restore_rows(blocks, chosen[:, part.start : part.end])

        keys = held.keys[: held.start + len(rows)]
        if not len(rows) or not self._blocks.fill(keys, held.start, write):
            return False
        self._num_found += len(rows)
        return len(rows) == self._piece

    def _is_late(self, held: _Held) -> bool:
        return self._clock() - held.began > _PATIENCE

    def _copy(self, keys: list[bytes]) -> None:
        size = self._files.file_size
        count = min(len(keys), self._room // size)
        self._num_dropped += len(keys) - count
        tables = [[pool.lookup(key) for key in keys[:count]] for pool in self._blocks.pools]
        kept = [index for index in range(count) if all(table[index] is not None for table in tables)]
        if not kept:
            return
        blocks = [[block for index in kept if (block := table[index]) is not None] for table in tables]
        numbers = torch.cat([part.pool.rows(blocks[part.group]) for part in self._parts], dim=1)
        sums = numbers.sum(1, dtype=torch.float32)  # none if any number is none
        event = torch.cuda.Event() if numbers.is_cuda else None  # type: ignore[no-untyped-call]
        numbers, sums = (one.to("cpu", non_blocking=event is not None) for one in (numbers, sums))
        if event is not None:
            event.record()
        self._room -= size * len(kept)
        rows = numbers.view(torch.uint8).numpy()
        chosen = [keys[index] for index in kept]
        self._writer.submit(self._guarded(partial(self._write, chosen, rows, sums.numpy(), event), size * len(kept)))

    def _write(self, keys: list[bytes], rows: _Rows, sums: NDArray[np.float32], event: torch.cuda.Event | None) -> None:
        """Runs in the writer."""
        if event is not None:
            event.synchronize()
        for key, row, is_finite in zip(keys, rows, np.isfinite(sums), strict=True):
            if is_finite:
                self._num_written += self._files.write(key, row.data)

    def _touch(self, keys: list[bytes]) -> None:
        now = self._clock()
        if now - self._touched.get(keys[-1], -inf) < _TOUCH:
            return
        self._touched[keys[-1]] = now
        self._touched.move_to_end(keys[-1])
        while now - next(iter(self._touched.values())) >= _TOUCH:
            self._touched.popitem(last=False)
        self._writer.submit(self._guarded(partial(self._files.touch, keys)))

    def _guarded(self, work: Callable[[], None], size: int = 0) -> Callable[[], None]:
        """Work for the writer that ends the spilling if it fails; it gives back `size` bytes of the queue."""

        def guarded() -> None:
            try:
                if not self._off:
                    work()
            except Exception as error:  # whatever it is, the requests go on
                self._stop(str(error) or repr(error))
            finally:
                self._done.append(size)

        return guarded

    def _stop(self, reason: str) -> None:
        """Neither write nor read from now on."""
        if not self._off:
            self._off = reason
            _log.warning("the prefix cache on disk is off until the next start: %s", reason)


def layout(runner: Runner) -> list[_Part]:
    """Where each layer's numbers lie in a block: group by group, layer by layer."""
    parts: list[_Part] = []
    for group in range(len(runner.groups)):
        for pool in runner.pools(group):
            start = parts[-1].end if parts else 0
            parts.append(_Part(group, pool, start, start + pool.block_numbers))
    return parts
