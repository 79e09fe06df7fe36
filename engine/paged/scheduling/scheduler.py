"""Schedules steps: which tokens the next one computes, and which row holds which blocks. Never sees a tensor.

All rows form one line, ordered by priority and arrival. Decoding rows come first, with one token each. The rest of a
step's token budget goes to prompts in line order, started or not, all of one priority; they get at most half of the
step while a more urgent row decodes. In the step that completes those prompts, decoding rows of a lower priority wait,
but never in two steps in a row. So do, within a priority, rows of a tenant that lately had more than its share; its
prompts come after those of others, and share no step that can complete one of them.

When blocks run out, the scheduler preempts the last running row in line: it releases its blocks and waits, in its old
order, to be computed again; its published blocks stay cached. The first row in line always runs.

A waiting row takes no blocks from running ones, and no row of a lower priority is admitted while it waits for blocks.
Urgent rows cannot starve others: a level of priority outranks a limited number of arrivals.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import pairwise
from math import inf
from operator import attrgetter

from ...choice import Choice
from ...request import Preemption
from ..kv.blocks import KVBlocks, Tables
from ..state.slots import NoSlots, Slots
from .picture_gate import PictureGate
from .precedence import Precedence
from .rows import Row, Scheduled

_MAX_OVERTAKES = 32  # rows admitted past one that waits for blocks; then the rows behind it wait as well
_MAX_BLOCKED = 8  # rows waiting for blocks that one step considers; each costs a match of its whole prompt
_order = attrgetter("order")


class Scheduler:
    """Call `schedule`, compute, then `commit`; choices may be removed in between, but not scheduled again.

    The caller ensures that no choice grows beyond `blocks.capacity` tokens. Without `chunked` a prompt is computed in
    one step, even if the first in line is larger than `max_step_tokens` (`blocks` must allow for that).
    """

    def __init__(
        self,
        blocks: KVBlocks,
        max_batch_size: int,
        max_step_tokens: int,
        chunked: bool = True,
        reserved: int = 0,
        now: Callable[[], float] = time.time,
        slots: Slots | None = None,
        gate: PictureGate | None = None,
    ) -> None:
        """`reserved` rows of a batch are only for priority 0; one request gets at most `most_together` rows.
        `now` tells when a choice is preempted, in Unix seconds; `slots` keeps running states, `gate` awaits pictures.

        Raises `ValueError` if a step has fewer tokens than a full batch needs.
        """
        if max_step_tokens < max_batch_size:
            raise ValueError(f"{max_step_tokens} tokens a step are too few for {max_batch_size} rows")
        self.num_preemptions = 0
        self._now = now
        self._blocks = blocks
        self._slots = slots or NoSlots()
        self._gate = gate or PictureGate()
        self._max_batch_size = max_batch_size
        self._reserved = min(reserved, max_batch_size - 1)
        self._precedence = Precedence(max_batch_size)
        self._max_step_tokens = max_step_tokens
        self._share = max(max_step_tokens // 2, 1) if chunked else None  # the tokens of a prompt while others wait
        self._rows: dict[Choice, Row] = {}
        self._arrivals = 0
        self._waiting: list[Row] = []  # both in line order
        self._running: list[Row] = []
        self._line: Callable[[Row], int] = _order  # of this step
        self._has_waited = False  # whether the last step left out a row that could decode; set by `_decoding`
        self._claims: dict[bytes, Row] = {}  # keys of prompt blocks -> the running row that will publish them

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, choice: Choice) -> bool:
        return choice in self._rows

    def add(self, choice: Choice) -> None:
        """Queue a choice. Raises `ValueError` for one that the pools can never hold."""
        row = Row(choice, self._arrivals, Tables(len(self._blocks.pools)))
        if row.num_tokens > self._blocks.capacity:
            raise ValueError(f"{row.num_tokens} tokens; the key-value cache holds {self._blocks.capacity}")
        self._arrivals += 1
        self._gate.is_idle = False
        self._rows[choice] = row
        self._precedence.add(row)
        insort(self._waiting, row, key=_order)

    def remove(self, choice: Choice) -> None:
        """Drop a choice; its published blocks stay cached. An unknown one is no error."""
        row = self._rows.pop(choice, None)
        if row is None:
            return
        self._gate.forget(choice)
        self._precedence.remove(row)
        if row.running:
            self._running.remove(row)
            self._leave(row)
        else:
            self._waiting.remove(row)

    def discard(self, choice: Choice) -> list[list[int]]:
        """`remove` a choice whose keys and values are invalid; returns, by group, its blocks without another holder."""
        row = self._rows[choice]
        blocks = [list(table) for table in row.tables.blocks]
        self._blocks.forget(row.tables)
        self._slots.forget(row.tables.keys)
        self.remove(choice)
        pools = self._blocks.pools
        return [[b for b in table if not pool.is_held(b)] for table, pool in zip(blocks, pools, strict=True)]

    def schedule(self) -> list[Scheduled]:
        """The rows of the next step, decoding ones first, without those whose last token is already chosen.

        Raises `RuntimeError` if one choice alone has outgrown the pools.
        """
        scheduled = self._schedule()
        self._gate.is_idle = not scheduled
        self._slots.begin((row.state, row.num_computed, row.num_computed + count) for row, count, _ in scheduled)
        return scheduled

    def _schedule(self) -> list[Scheduled]:
        preemptions = self.num_preemptions
        scheduled: list[Scheduled] = []
        prefills: list[Row] = []
        line = self._line = self._precedence.place if self._precedence.begin() else _order
        for row in self._running:  # preemption removes rows from the end, up to this one
            lacking = row.num_tokens - row.num_computed
            if lacking > 1:
                prefills.append(row)
            elif lacking and not row.choice.is_complete and self._grow(row, row.num_computed + 1):
                scheduled.append(Scheduled(row, 1, True))
        if not (prefills or self._waiting):  # skip the rest: it takes 20 µs
            self._has_waited = False
            return scheduled
        self._gate.begin()
        left = self._max_step_tokens - len(scheduled)
        level = self._precedence.level
        lacked = 0.0  # tokens that the prompts in `shares` lack still; infinite if this step cannot compute them all
        urgent = min((level(one.row) for one in scheduled), default=inf)
        shares: dict[Row, int] = {}
        blocked: list[Row] = []
        for row in merge(sorted(prefills, key=line), self._entrants(blocked), key=line):
            if left <= 0 or (shares and self._precedence.parts(next(iter(shares)), row, lacked <= left)):
                break
            if level(row) > urgent and self._share is not None:
                left = min(left, self._share)
            matched = 0 if row.running else self._match(row) if self.num_preemptions == preemptions else None
            if matched is None or not (lacking := self._gate.lacking(row, matched * self._blocks.block_size)):
                continue
            if not (count := self._count(row, matched * self._blocks.block_size, lacking, left, not shares)):
                break
            if self._admit(row, matched, count, shares, blocked):
                shares[row] = count
                left -= count
                lacked += lacking - count if lacking == row.num_tokens - row.num_computed else inf
        if self.num_preemptions != preemptions:
            left += len(scheduled) + sum(shares.values())
            scheduled = [one for one in scheduled if one.row.running]
            shares = {row: count for row, count in shares.items() if row.running}
            left -= len(scheduled) + sum(shares.values())
        self._spread(shares, left)
        for row in prefills:
            row.choice.is_waiting = row not in shares
        scheduled = self._decoding(scheduled, shares)
        for row, count in shares.items():
            scheduled.append(Scheduled(row, count, row.num_computed + count == row.num_tokens))
        return scheduled

    def reserve(self, row: Row, count: int) -> int:
        """Take blocks for `count` tokens after a scheduled row's next one, but none from others.

        Returns for how many of them there are blocks.
        """
        if self._blocks.grow(row.tables, row.num_computed + 1 + count):
            return count
        return min(count, len(row.tables.blocks[0]) * self._blocks.block_size - row.num_computed - 1)

    def commit(self, scheduled: list[Scheduled]) -> None:
        """Record that these tokens' keys and values are written, or will be before any later step reads them.

        Call it before appending the rows' tokens: a row that finishes is removed and publishes no more blocks.
        """
        block_size = self._blocks.block_size
        self._precedence.spend(scheduled)
        for row, count, _ in scheduled:
            if not row.running:  # removed meanwhile
                continue
            row.num_computed += count
            row.choice.num_computed += count
            tables = row.tables
            if row.num_computed >= (tables.num_published + 1) * block_size:
                row.extend_keys(block_size)
                published = tables.num_published
                self._blocks.publish(tables, min(row.num_computed, row.num_known) // block_size)
                self._unclaim(row, tables.keys[published : tables.num_published])
            self._slots.finish(row.state, row.num_computed, tables.keys)
            self._blocks.slide(tables, row.num_computed)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless rows, tables and pools account for each other."""
        for line in (self._waiting, self._running):
            assert all(one.order <= other.order for one, other in pairwise(line)), "out of line order"
        assert set(self._rows.values()) == {*self._waiting, *self._running}, "a row is lost"
        assert len(self._rows) == len(self._waiting) + len(self._running), "a row waits and runs"
        assert len(self._running) <= self._max_batch_size, f"{len(self._running)} rows run"
        self._precedence.check_integrity(self._running, self._waiting)
        for row in self._waiting:
            assert not (row.running or row.num_computed or any(row.tables.blocks)), "a waiting row holds something"
        for row in self._running:
            row.check_integrity(self._blocks.block_size)
        for key, row in self._claims.items():
            assert row.running and key in row.tables.keys[row.tables.num_published :], "a claim without a running row"
        self._blocks.check_integrity(row.tables for row in self._running)
        running = ((row.state, row.num_computed) for row in self._running)
        self._slots.check_integrity(running, (row.state for row in self._waiting))

    def _count(self, row: Row, matched: int, lacking: int, left: int, first: bool) -> int:
        """How many of its `lacking` tokens a prompt gets at first, with `left` tokens of the step's budget; the first
        one exceeds that for an image of which no part can be computed."""
        count = lacking if self._share is None else min(lacking, left, self._share)
        return row.whole(count if first or count <= left else 0, matched, first)

    def _entrants(self, blocked: list[Row]) -> Iterator[Row]:
        """Yield waiting rows to admit, in line order; the caller adds those that do not fit to `blocked`."""
        for row in self._waiting.copy() if self._line is _order else sorted(self._waiting, key=self._line):
            if len(self._running) == self._max_batch_size or len(blocked) == _MAX_BLOCKED:
                return
            if any(other.passed == _MAX_OVERTAKES or other.priority < row.priority for other in blocked):
                return
            is_full = row.priority > 0 and len(self._running) >= self._max_batch_size - self._reserved
            if not (is_full or self._precedence.is_full(row) or row.choice.pending or row.awaits in self._claims):
                yield row

    def _match(self, row: Row) -> int | None:
        """How many leading blocks of a waiting row are cached; None if a running row is computing the next one."""
        row.extend_keys(self._blocks.block_size)
        if not row.choice.is_scored:
            return 0
        keys = row.tables.keys[: (row.num_tokens - 1) // self._blocks.block_size]  # the last token is always computed
        matched = self._slots.match(row.state, keys, self._blocks.match)
        row.awaits = next((key for key in self._slots.awaitable(keys, matched) if key in self._claims), b"")
        return None if row.awaits else matched

    def _admit(self, row: Row, matched: int, count: int, shares: dict[Row, int], blocked: list[Row]) -> bool:
        """Get a row blocks for `count` tokens; a waiting one only if all of it fits beside the prompts in `shares`."""
        if row.running:
            return self._grow(row, row.num_computed + count)
        reserved = sum(map(self._lacking_blocks, shares))
        if not self._blocks.fits(row.tables, matched, row.num_tokens, reserved):
            blocked.append(row)
            return False
        for other in blocked:
            other.passed += 1
        self._enter(row, matched)
        if not self._blocks.grow(row.tables, row.num_computed + count):
            raise RuntimeError(f"{count} tokens in a step, more than the pools were laid out for")
        return True

    def _spread(self, shares: dict[Row, int], left: int) -> None:
        """Distribute the rest of the budget to prompts, in line order."""
        if self._share is None:
            return
        for row in shares:
            more = row.whole(min(self._gate.lacking(row), shares[row] + max(left, 0))) - shares[row]
            if more > 0 and self._blocks.grow(row.tables, row.num_computed + shares[row] + more):
                shares[row] += more
                left -= more

    def _decoding(self, scheduled: list[Scheduled], shares: dict[Row, int]) -> list[Scheduled]:
        """Which of the decoding rows run in the same step as these prompts.

        16 decoding rows would delay the first token of an urgent prompt of 120 tokens by a fifth.
        """
        ends = all(row.num_computed + count == row.num_tokens for row, count in shares.items())
        if not shares or not ends or self._has_waited:
            self._has_waited = False
            return scheduled
        level = self._precedence.level(next(iter(shares)))
        decoding = [one for one in scheduled if self._precedence.level(one.row) <= level]
        self._has_waited = len(decoding) < len(scheduled)
        return decoding

    def _lacking_blocks(self, row: Row) -> int:
        return -(-row.num_tokens // self._blocks.block_size) - len(row.tables.blocks[0])

    def _grow(self, row: Row, num_tokens: int) -> bool:
        """Extend a running row's tables, preempting rows behind it if need be; False if it is preempted itself."""
        while not self._blocks.grow(row.tables, num_tokens):
            if len(self._running) == 1:
                raise RuntimeError(f"{num_tokens} tokens of one choice outgrow the key-value cache")
            last = self._running.pop()
            self._leave(last)
            insort(self._waiting, last, key=_order)
            self.num_preemptions += 1
            last.choice.preemptions.append(Preemption(last.choice.number, self._now()))
            if last is row:
                return False
        return True

    def _enter(self, row: Row, matched: int) -> None:
        """Start a row, which holds its `matched` leading blocks and claims the other blocks of its prompt."""
        self._waiting.remove(row)
        insort(self._running, row, key=_order)
        self._precedence.enter(row)
        self._blocks.attach(row.tables, matched)
        row.running = True
        row.choice.is_waiting = False
        for preemption in row.choice.preemptions:
            if preemption.choice == row.choice.number and preemption.resumed is None:
                preemption.resumed = self._now()
        row.awaits = b""
        row.passed = 0
        row.num_computed = matched * self._blocks.block_size
        if not row.choice.num_computed:  # for the first time
            row.choice.cached_tokens = min(row.num_computed, len(row.choice.prompt))
        for key in self._slots.enter(row.state, row.tables.keys, matched):
            self._claims.setdefault(key, row)

    def _leave(self, row: Row) -> None:
        """Stop a row and release its blocks and claims."""
        self._unclaim(row, row.tables.keys[row.tables.num_published :])
        self._blocks.release(row.tables)
        self._slots.leave(row.state)
        self._precedence.leave(row)
        row.running = False
        row.choice.is_waiting = True
        row.num_computed = 0

    def _unclaim(self, row: Row, keys: list[bytes]) -> None:
        for key in keys:
            if self._claims.get(key) is row:
                del self._claims[key]
