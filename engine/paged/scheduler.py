"""Which tokens the next step computes, and who holds blocks for them. Never sees a tensor, and runs nothing.

All stand in one line, by priority and then by arrival. Rows that decode come first, one token each; what they leave of
the step's budget goes to prompts in line order, begun or not, all of one priority, and half a step at most where a more
urgent row decodes. In the step that ends those prompts rows that decode in a lower priority wait, never twice in a row.

Where blocks run out, the running row that is last in line gives back all of its own and waits at its old place to be
computed again; what it had finished stays cached. The first in line always runs.

A row that waits takes no blocks from those that run, nor is it passed by one of a lower priority while it waits for
them. No stream of urgent ones keeps a row back for ever: a priority is worth so many places in line, and no more.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from heapq import merge
from itertools import pairwise
from math import inf
from operator import attrgetter

from ...schemas.jobs import most_together
from ..choice import Choice
from .blocks import KVBlocks, Tables
from .rows import Row, Scheduled

_MAX_OVERTAKES = 32  # of a row that waits for blocks; then those behind it wait as well
_MAX_BLOCKED = 8  # rows that wait for blocks are looked at in one step; each costs a match of its whole prompt
_place = attrgetter("place")


class Scheduler:
    """Call `schedule`, compute, `commit`; choices may be removed in between, but no row scheduled twice.

    Of a choice, no more than `blocks.capacity` tokens can be computed: its owner sees to that. Without `chunked` a
    prompt is computed in one step, be it larger than `max_step_tokens` (`blocks` must be told), if it is the first.
    """

    def __init__(
        self, blocks: KVBlocks, max_batch_size: int, max_step_tokens: int, chunked: bool = True, reserved: int = 0
    ) -> None:
        """`reserved` rows of a batch are for priority 0 alone; one request takes no more than `most_together` of them.

        Raises `ValueError` where a full batch would leave no token for a prompt.
        """
        if max_step_tokens < max_batch_size:
            raise ValueError(f"{max_step_tokens} tokens a step are too few for {max_batch_size} rows")
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_batch_size = max_batch_size
        self._reserved = min(reserved, max_batch_size - 1)
        self._most_of_one = most_together(max_batch_size)  # rows of one request
        self._rows_of: Counter[int] = Counter()  # that run, by the identity of their request
        self._max_step_tokens = max_step_tokens
        self._share = max(max_step_tokens // 2, 1) if chunked else None  # of a prompt while others wait
        self._rows: dict[Choice, Row] = {}
        self._arrivals = 0
        self._waiting: list[Row] = []  # both in line order
        self._running: list[Row] = []
        self._has_waited = False  # whether the last step left out a row that could decode; set by _decoding
        self._claims: dict[bytes, Row] = {}  # keys of prompts' blocks -> the running row that will publish them

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, choice: Choice) -> bool:
        return choice in self._rows

    def add(self, choice: Choice) -> None:
        """Put a choice in line. Raises `ValueError` for one that the pools can never hold."""
        row = Row(choice, self._arrivals, Tables(len(self._blocks.pools)))
        if row.num_tokens > self._blocks.capacity:
            raise ValueError(f"{row.num_tokens} tokens; the key-value cache holds {self._blocks.capacity}")
        self._arrivals += 1
        self._rows[choice] = row
        insort(self._waiting, row, key=_place)

    def remove(self, choice: Choice) -> None:
        """Forget a choice; its finished blocks stay cached. An unknown one is no error."""
        row = self._rows.pop(choice, None)
        if row is None:
            return
        if row.running:
            self._running.remove(row)
            self._leave(row)
        else:
            self._waiting.remove(row)

    def discard(self, choice: Choice) -> list[list[int]]:
        """As `remove`, for one whose keys and values are worthless; its blocks, by group, that nobody has any more."""
        row = self._rows[choice]
        blocks = [list(table) for table in row.tables.blocks]
        self._blocks.forget(row.tables)
        self.remove(choice)
        pools = self._blocks.pools
        return [[b for b in table if not pool.is_held(b)] for table, pool in zip(blocks, pools, strict=True)]

    def schedule(self) -> list[Scheduled]:
        """The rows of the next step, those that decode first; without those whose last token is chosen already.

        Raises `RuntimeError` where one choice alone has outgrown the pools.
        """
        preemptions = self.num_preemptions
        scheduled: list[Scheduled] = []
        prefills: list[Row] = []
        for row in self._running:  # preemption takes rows off its end, this one at most
            lacking = row.num_tokens - row.num_computed
            if lacking > 1:
                prefills.append(row)
            elif lacking and not row.choice.is_complete and self._grow(row, row.num_computed + 1):
                scheduled.append(Scheduled(row, 1, True))
        if not (prefills or self._waiting):  # nothing of the rest: 20 µs of a step
            self._has_waited = False
            return scheduled
        left = self._max_step_tokens - len(scheduled)
        urgent = min((one.row.priority for one in scheduled), default=inf)
        shares: dict[Row, int] = {}
        blocked: list[Row] = []
        for row in merge(prefills, self._entrants(blocked), key=_place):
            if left <= 0 or (shares and row.priority != next(iter(shares)).priority):
                break
            if row.priority > urgent and self._share is not None:
                left = min(left, self._share)
            if row.running:
                count = self._count(row.num_lacking, left, not shares)
                is_in = count > 0 and self._grow(row, row.num_computed + count)
            elif self.num_preemptions > preemptions or (matched := self._match(row)) is None:
                continue
            else:
                count = self._count(row.num_lacking - matched * self._blocks.block_size, left, not shares)
                is_in = count > 0 and self._admit(row, matched, count, shares, blocked)
            if not count:
                break
            if is_in:
                shares[row] = count
                left -= count
        if self.num_preemptions != preemptions:
            left += len(scheduled)
            scheduled = [one for one in scheduled if one.row.running]
            left -= len(scheduled)
        self._spread(shares, left)
        for row in prefills:
            row.choice.is_waiting = row not in shares
        scheduled = self._decoding(scheduled, shares)
        for row, count in shares.items():
            scheduled.append(Scheduled(row, count, row.num_computed + count == row.num_tokens))
        return scheduled

    def commit(self, scheduled: list[Scheduled]) -> None:
        """The keys and values of these tokens are written, or will be before any later step reads them.

        Best called before their rows' tokens are appended: a row that finishes is removed, and caches no more.
        """
        block_size = self._blocks.block_size
        for row, count, _ in scheduled:
            if not row.running:  # removed since
                continue
            row.num_computed += count
            row.choice.num_computed += count
            tables = row.tables
            if row.num_computed >= (tables.num_published + 1) * block_size:
                row.extend_keys(block_size)
                published = tables.num_published
                self._blocks.publish(tables, min(row.num_computed, row.num_known) // block_size)
                self._unclaim(row, tables.keys[published : tables.num_published])
            self._blocks.slide(tables, row.num_computed)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless rows, tables and pools account for each other."""
        for line in (self._waiting, self._running):
            assert all(one.place <= other.place for one, other in pairwise(line)), "out of line order"
        assert set(self._rows.values()) == {*self._waiting, *self._running}, "a row is lost"
        assert len(self._rows) == len(self._waiting) + len(self._running), "a row waits and runs"
        assert len(self._running) <= self._max_batch_size, f"{len(self._running)} rows run"
        assert self._rows_of == Counter(id(row.choice.request) for row in self._running), "rows are miscounted"
        assert all(count <= self._most_of_one for count in self._rows_of.values()), "one request has too many rows"
        for row in self._waiting:
            assert not (row.running or row.num_computed or any(row.tables.blocks)), "a waiting row holds something"
        for row in self._running:
            tables, size = row.tables, self._blocks.block_size
            assert row.running, "a running row does not know that it runs"
            assert row.num_computed <= row.num_tokens, f"{row.num_computed} computed of {row.num_tokens} tokens"
            assert row.num_computed <= len(tables.blocks[0]) * size, "computed tokens lie in no block"
            assert tables.num_published <= row.num_computed // size, "published before it is computed"
            assert tables.num_published <= len(tables.keys) <= row.num_known // size, "keys of unknown tokens"
        for key, row in self._claims.items():
            assert row.running and key in row.tables.keys[row.tables.num_published :], "a claim nobody works on"
        self._blocks.check_integrity(row.tables for row in self._running)

    def _count(self, lacking: int, left: int, first: bool) -> int:
        """How many of the tokens that a prompt lacks it gets at first; `left` is left of the step's budget."""
        if self._share is not None:
            return min(lacking, left, self._share)
        return lacking if first or lacking <= left else 0

    def _entrants(self, blocked: list[Row]) -> Iterator[Row]:
        """Rows that wait, in line order, for as long as one may enter; `blocked` gets those that do not fit."""
        for row in self._waiting.copy():
            if len(self._running) == self._max_batch_size or len(blocked) == _MAX_BLOCKED:
                return
            if any(other.passed == _MAX_OVERTAKES or other.priority < row.priority for other in blocked):
                return
            is_full = row.priority > 0 and len(self._running) >= self._max_batch_size - self._reserved
            is_full = is_full or self._rows_of[id(row.choice.request)] >= self._most_of_one
            if not (is_full or row.choice.pending or row.awaits in self._claims):
                yield row

    def _match(self, row: Row) -> int | None:
        """How many leading blocks of a waiting row are cached; None where a running one computes the next."""
        row.extend_keys(self._blocks.block_size)
        if not row.choice.is_scored:
            return 0
        keys = row.tables.keys[: (row.num_tokens - 1) // self._blocks.block_size]  # the last token is always computed
        matched = self._blocks.match(keys)
        if matched < len(keys) and keys[matched] in self._claims:
            row.awaits = keys[matched]
            return None
        return matched

    def _admit(self, row: Row, matched: int, count: int, shares: dict[Row, int], blocked: list[Row]) -> bool:
        """Let a waiting row in, with blocks for `count` tokens, if all of it fits beside the prompts in `shares`."""
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
        """Give what is left of the budget to prompts, the first in line first."""
        if self._share is None:
            return
        for row in sorted(shares, key=_place):
            more = min(row.num_lacking - shares[row], left)
            if self._blocks.grow(row.tables, row.num_computed + shares[row] + more):
                shares[row] += more
                left -= more

    def _decoding(self, scheduled: list[Scheduled], shares: dict[Row, int]) -> list[Scheduled]:
        """Which of the rows that could decode do so beside these prompts.

        Beside 16 others the first token of an urgent prompt of 120 would come a fifth later.
        """
        ends = all(row.num_computed + count == row.num_tokens for row, count in shares.items())
        if not shares or not ends or self._has_waited:
            self._has_waited = False
            return scheduled
        priority = next(iter(shares)).priority
        decoding = [one for one in scheduled if one.row.priority <= priority]
        self._has_waited = len(decoding) < len(scheduled)
        return decoding

    def _lacking_blocks(self, row: Row) -> int:
        return -(-row.num_tokens // self._blocks.block_size) - len(row.tables.blocks[0])

    def _grow(self, row: Row, num_tokens: int) -> bool:
        """Find blocks for a running row, at the cost of those behind it; False where it is preempted itself."""
        while not self._blocks.grow(row.tables, num_tokens):
            if len(self._running) == 1:
                raise RuntimeError(f"{num_tokens} tokens of one choice outgrow the key-value cache")
            last = self._running.pop()
            self._leave(last)
            insort(self._waiting, last, key=_place)
            self.num_preemptions += 1
            if last is row:
                return False
        return True

    def _enter(self, row: Row, matched: int) -> None:
        """A row starts running, with its `matched` leading blocks and a claim to the others of its prompt."""
        self._waiting.remove(row)
        insort(self._running, row, key=_place)
        self._rows_of[id(row.choice.request)] += 1
        self._blocks.attach(row.tables, matched)
        row.running = True
        row.choice.is_waiting = False
        row.awaits = b""
        row.passed = 0
        row.num_computed = matched * self._blocks.block_size
        if not row.choice.num_computed:  # for the first time
            row.choice.cached_tokens = min(row.num_computed, len(row.choice.prompt))
        for key in row.tables.keys[matched:]:
            self._claims.setdefault(key, row)

    def _leave(self, row: Row) -> None:
        """A row stops running: what it holds and claims is free."""
        self._unclaim(row, row.tables.keys[row.tables.num_published :])
        self._blocks.release(row.tables)
        request = id(row.choice.request)
        self._rows_of[request] -= 1
        if not self._rows_of[request]:
            del self._rows_of[request]
        row.running = False
        row.choice.is_waiting = True
        row.num_computed = 0

    def _unclaim(self, row: Row, keys: list[bytes]) -> None:
        for key in keys:
            if self._claims.get(key) is row:
                del self._claims[key]
