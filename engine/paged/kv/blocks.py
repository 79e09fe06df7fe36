"""The block tables of sequences in the key-value cache. Holds no tensor, and knows nothing of requests.

A block stores the keys and values of `block_size` consecutive tokens of one sequence, in all layers of one group.
Layers with full attention form groups without a window; a sliding group has a window of W tokens: a token at position p
sees positions p - W + 1 to p. Every group has its own pool.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .block_pool import BlockPool

NO_BLOCK = -1
"""The entry of a sliding group's table where the window has passed."""


class GroupSpec(NamedTuple):
    num_blocks: int
    window: int | None  # tokens; None: all


class Tables:
    """The blocks that one sequence holds. `KVBlocks` sets everything but `keys`, which the scheduler extends."""

    __slots__ = ("blocks", "keys", "num_published", "slide_at")

    def __init__(self, num_groups: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]  # equally long, in the order of the tokens
        self.keys: list[bytes] = []  # the chain of keys of the full blocks whose tokens are known
        self.num_published = 0  # leading blocks that are published in the prefix cache
        self.slide_at = 0  # below this many computed tokens `slide` has nothing to release


@dataclass(frozen=True, slots=True)
class KVStats:
    """Blocks of all groups together; `queries` and `hits` are the tokens looked up and found at admissions."""

    num_blocks: int
    num_held: int
    num_cached: int
    queries: int
    hits: int
    evictions: int


@dataclass(slots=True)
class Journal:
    """What happened to the prefix cache since its reader last took it: `KVBlocks` adds, the reader removes."""

    published: list[bytes] = field(default_factory=list)  # keys of blocks that became findable
    released: list[list[bytes]] = field(default_factory=list)  # of published blocks that a sequence held, in its order


class KVBlocks:
    """The pools of all groups, kept in step: a table grows, or matches, in every group or in none.

    No step may compute more than `max_step_tokens` tokens of a sequence, and `slide` must follow each step.
    """

    def __init__(self, block_size: int, groups: Sequence[GroupSpec], max_step_tokens: int) -> None:
        self.block_size = block_size
        self.journal: Journal | None = None  # set by who reads it
        self.pools = tuple(BlockPool(group.num_blocks) for group in groups)
        self._windows = tuple(group.window for group in groups)
        self._full_first = sorted(range(len(groups)), key=lambda group: groups[group].window is not None)
        self._queries = self._hits = 0
        # The most blocks that a step's tokens and the tokens that they see can span, wherever in a block they start.
        self._spans = tuple(
            sys.maxsize if window is None else (window + max_step_tokens + block_size - 3) // block_size + 1
            for window in self._windows
        )
        # The most tokens that one sequence can have.
        self.capacity = min(
            pool.num_blocks * block_size if pool.num_blocks < span else sys.maxsize
            for pool, span in zip(self.pools, self._spans, strict=True)
        )

    @property
    def num_free_blocks(self) -> int:
        """The free blocks of the group with the fewest."""
        return min(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        """The share, 0 to 1, of blocks held in the fullest group."""
        return max(1 - pool.num_free / pool.num_blocks for pool in self.pools)

    def match(self, keys: Sequence[bytes]) -> int:
        """The most leading blocks that all groups can reuse; a sliding group needs those that the next token sees."""
        count, before = len(keys), -1
        while count != before:  # a shorter match in one group may move another's window over a gap
            before = count
            for group in self._full_first:
                count = self._match_group(group, keys, count)
        return count

    def fits(self, tables: Tables, count: int, num_tokens: int, reserved: int) -> bool:
        """Whether there is room to `attach` `count` blocks and then grow to `num_tokens`.

        `reserved` blocks of each group without a window are not available.
        """
        lacking = -(-num_tokens // self.block_size) - count
        for group, pool in enumerate(self.pools):
            needed = lacking
            for key in tables.keys[self._first_seen(group, count * self.block_size) : count]:
                block = pool.lookup(key)
                needed += block is not None and not pool.is_held(block)
            needed = needed + reserved if self._windows[group] is None else min(needed, self._spans[group])
            if needed > pool.num_free:
                return False
        return True

    def attach(self, tables: Tables, count: int) -> None:
        """Hold the `count` leading blocks that `match` found; the tables must be empty."""
        for group, pool in enumerate(self.pools):
            first = self._first_seen(group, count * self.block_size)
            found = [pool.lookup(key) for key in tables.keys[first:count]]
            blocks = [block for block in found if block is not None]
            assert len(blocks) == count - first, "a matched block is gone"
            for block in blocks:
                pool.acquire(block)
            tables.blocks[group] = [NO_BLOCK] * first + blocks
        tables.num_published = count
        self._queries += len(tables.keys) * self.block_size
        self._hits += count * self.block_size

    def grow(self, tables: Tables, num_tokens: int) -> bool:
        """Extend every group's table to `num_tokens`; if any pool is short of blocks, extend none and return False."""
        lacking = -(-num_tokens // self.block_size) - len(tables.blocks[0])
        if lacking <= 0:
            return True
        if self.num_free_blocks < lacking:
            return False
        for blocks, pool in zip(tables.blocks, self.pools, strict=True):
            blocks += [pool.allocate() for _ in range(lacking)]
        return True

    def slide(self, tables: Tables, num_computed: int) -> None:
        """Release the blocks that no token from position `num_computed` on can see."""
        if num_computed < tables.slide_at:
            return
        tables.slide_at = sys.maxsize
        for group, window in enumerate(self._windows):
            if window is not None:
                passed = self._first_seen(group, num_computed)
                self._give_back(group, tables.blocks[group], passed)
                tables.slide_at = min(tables.slide_at, (passed + 1) * self.block_size + window - 1)

    def publish(self, tables: Tables, num_full: int) -> None:
        """Publish the first `num_full` blocks, whose tokens are computed, under `tables.keys`."""
        for index in range(tables.num_published, num_full):
            for blocks, pool in zip(tables.blocks, self.pools, strict=True):
                if blocks[index] != NO_BLOCK:
                    pool.publish(blocks[index], tables.keys[index])
        if self.journal is not None:
            self.journal.published += tables.keys[tables.num_published : num_full]
        tables.num_published = num_full

    def release(self, tables: Tables) -> None:
        """Release all blocks; `keys` stay."""
        if self.journal is not None and tables.num_published:
            self.journal.released.append(tables.keys[: tables.num_published])
        for group, blocks in enumerate(tables.blocks):
            self._give_back(group, blocks, len(blocks))
            blocks.clear()
        tables.num_published = tables.slide_at = 0

    def fill(self, keys: Sequence[bytes], known: int, write: Callable[[int, list[int], list[int]], None]) -> int:
        """Cache the missing ones of a sequence's leading blocks, as far as the token after them sees them.

        `write(group, indices, blocks)` stores the contents of these of `keys`; it knows those from index `known` on.
        Evicts other blocks for them, the least recently used first. Returns the number of blocks written: 0 if there is
        no room, or if one is missing that is not known.
        """
        plans: list[tuple[range, list[int]]] = []
        for group, pool in enumerate(self.pools):
            seen = range(self._first_seen(group, len(keys) * self.block_size), len(keys))
            missing = [index for index in seen if pool.lookup(keys[index]) is None]
            found = [block for index in seen if (block := pool.lookup(keys[index])) is not None]
            room = pool.num_free - sum(not pool.is_held(block) for block in found)
            if len(missing) > room or (missing and missing[0] < known):
                return 0
            plans.append((seen, missing))
        for group, (pool, (seen, missing)) in enumerate(zip(self.pools, plans, strict=True)):
            held: dict[int, int] = {}
            for index in seen:
                if (block := pool.lookup(keys[index])) is not None:
                    pool.acquire(block)
                    held[index] = block
            held |= {index: pool.allocate() for index in missing}
            try:
                if missing:
                    write(group, missing, [held[index] for index in missing])
                for index in missing:
                    pool.publish(held[index], keys[index])
            finally:
                for index in reversed(seen):
                    pool.release(held[index])
        return sum(len(missing) for _, missing in plans)

    def evict(self) -> None:
        """Evict all cached blocks that no sequence holds."""
        for pool in self.pools:
            pool.clear_cached(pool.num_cached)

    def forget(self, tables: Tables) -> None:
        """Remove these blocks from the prefix cache."""
        for blocks, pool in zip(tables.blocks, self.pools, strict=True):
            for block in blocks:
                if block != NO_BLOCK:
                    pool.forget(block)

    def stats(self) -> KVStats:
        return KVStats(
            num_blocks=sum(pool.num_blocks for pool in self.pools),
            num_held=sum(pool.num_blocks - pool.num_free for pool in self.pools),
            num_cached=sum(pool.num_cached for pool in self.pools),
            queries=self._queries,
            hits=self._hits,
            evictions=sum(pool.evictions for pool in self.pools),
        )

    def check_integrity(self, tables: Iterable[Tables]) -> None:
        """Raise `AssertionError` unless `tables` are of one length each and account for every held block."""
        held: list[Counter[int]] = [Counter() for _ in self.pools]
        for one in tables:
            assert len({len(blocks) for blocks in one.blocks}) == 1, f"tables of unequal length: {one.blocks}"
            for counter, blocks in zip(held, one.blocks, strict=True):
                counter.update(block for block in blocks if block != NO_BLOCK)
        for pool, counter in zip(self.pools, held, strict=True):
            pool.check_integrity(counter)

    def _first_seen(self, group: int, position: int) -> int:
        """The index of the first block that a token at `position` sees."""
        window = self._windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def _match_group(self, group: int, keys: Sequence[bytes], count: int) -> int:
        """`match` for one group, at most `count` blocks."""
        lookup = self.pools[group].lookup
        if self._windows[group] is None:
            return next((index for index in range(count) if lookup(keys[index]) is None), count)
        first = self._first_seen(group, count * self.block_size)
        for index in reversed(range(count)):
            if index < first:
                break
            if lookup(keys[index]) is None:
                count = index
                first = self._first_seen(group, count * self.block_size)
        return count

    def _give_back(self, group: int, blocks: list[int], end: int) -> None:
        """Release the held ones among the first `end` blocks, last first: the start of a prefix is evicted last."""
        for index in reversed(range(end)):
            if blocks[index] == NO_BLOCK:
                break  # and so are all before it
            self.pools[group].release(blocks[index])
            blocks[index] = NO_BLOCK
