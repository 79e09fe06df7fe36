"""The blocks of one pool: which are held, and which full ones a lookup by content finds. Holds no tensor.

The key of a full block is the chained hash of all tokens up to its end: any sequence with the same prefix can hold it.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def root(salt: str, adapter: str = "") -> bytes:
    """The start of a chain of keys; chains with different salts, or different adapters by their digests, share none."""
    return blake2b(salt.encode(), digest_size=16, person=b"root", key=adapter.encode()).digest()


def chain(parent: bytes, tokens: Sequence[int], marks: bytes = b"") -> bytes:
    """The key of the block of `tokens` behind the block with the key `parent`; `marks` say which images they show."""
    content = parent + struct.pack(f"<{len(tokens)}I", *tokens)
    return blake2b(content + marks, digest_size=16, person=b"images" if marks else b"").digest()


class BlockPool:
    """The blocks of one group, 0 to `num_blocks` - 1. Its memory grows with the blocks ever used, not with all."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._num_used = 0  # the blocks from this one on were never used
        self._free: list[int] = []  # used before, now neither held nor cached
        self._holders: dict[int, int] = {}  # held block -> its number of holders
        self._unheld: OrderedDict[int, None] = OrderedDict()  # cached blocks without a holder, by last access
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._last_access: dict[int, int] = {}
        self._tick = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return, including those that it would evict."""
        return self.num_blocks - len(self._holders)

    @property
    def num_cached(self) -> int:
        """The number of blocks that `lookup` finds, held or not."""
        return len(self._block_of)

    def allocate(self) -> int:
        """Return a block with one holder. `num_free` must not be 0."""
        if self._free:
            block = self._free.pop()
        elif self._num_used < self.num_blocks:
            block = self._num_used
            self._num_used += 1
        else:
            block = self._evict()
        self._holders[block] = 1
        self._touch(block)
        return block

    def acquire(self, block: int) -> None:
        """Add a holder to a cached block."""
        self._holders[block] = self._holders.get(block, 0) + 1
        self._unheld.pop(block, None)
        self._touch(block)

    def release(self, block: int) -> None:
        """Remove a holder. A cached block without holders can be found until it is evicted."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        del self._holders[block]
        if block in self._key_of:
            self._unheld[block] = None
            self._touch(block)
        else:
            self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Make a held, full block findable, unless one with the same content already is."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def lookup(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def is_held(self, block: int) -> bool:
        return block in self._holders

    def last_access(self, block: int) -> int:
        """When a used block was last allocated, acquired or released by its last holder, on the pool's own clock."""
        return self._last_access[block]

    def forget(self, block: int) -> None:
        """Make a held block's content no longer findable."""
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]

    def cached(self) -> list[tuple[bytes, int]]:
        """The keys and blocks that `lookup` finds, least recently used first."""
        return sorted(self._block_of.items(), key=lambda item: self._last_access[item[1]])

    def restore(self, keys: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """Cache blocks for the missing ones of `keys`, least recently used first; the caller must fill the blocks.

        Evicts nothing: where room is short, the last keys take it.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._block_of]
        room = self.num_free - len(self._unheld)
        restored = [(key, self.allocate()) for key in missing[max(len(missing) - room, 0) :]]
        for key, block in restored:
            self.publish(block, key)
            self.release(block)
        return restored

    def clear_cached(self, count: int) -> None:
        """Evict `count` cached blocks, or as many as have no holder."""
        for _ in range(min(count, len(self._unheld))):
            self._free.append(self._evict())

    def check_integrity(self, held: Counter[int]) -> None:
        """Raise `AssertionError` unless every block is in one state and has the number of holders in `held`."""
        known = sorted([*self._free, *self._unheld, *self._holders])
        assert known == list(range(self._num_used)), f"blocks lost or in two states: {known} of {self._num_used}"
        assert self._num_used <= self.num_blocks, f"{self._num_used} blocks used of {self.num_blocks}"
        assert self._holders == dict(held), f"holders: {self._holders}, should be {dict(held)}"
        assert self._key_of == {block: key for key, block in self._block_of.items()}, "keys and blocks disagree"
        assert self._key_of.keys() >= self._unheld.keys(), "a block without a key is kept as cached"
        assert self._key_of.keys().isdisjoint(self._free), "a free block can be found"
        ticks = [self._last_access[block] for block in self._unheld]
        assert ticks == sorted(ticks), "the order of eviction is not that of last access"

    def _evict(self) -> int:
        block, _ = self._unheld.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self.evictions += 1
        return block

    def _touch(self, block: int) -> None:
        self._tick += 1
        self._last_access[block] = self._tick
