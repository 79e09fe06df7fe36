"""Blocks of the key-value cache: who holds them, what is found again, what is evicted first."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.paged.kv.block_pool import BlockPool, chain, root
from penstock.engine.paged.kv.blocks import NO_BLOCK, GroupSpec, KVBlocks, Tables

EXAMPLES = settings(max_examples=150, deadline=None)
TOKENS = st.lists(st.integers(0, 3), max_size=40)
WINDOWS = st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3)


def keys_of(tokens: Sequence[int], size: int, salt: str = "") -> list[bytes]:
    keys = [root(salt)]
    for end in range(size, len(tokens) + 1, size):
        keys.append(chain(keys[-1], tokens[end - size : end]))
    return keys[1:]


def fill(pool: BlockPool, keys: Iterable[bytes]) -> list[int]:
    """Cache a block for each key, without a holder."""
    blocks = [pool.allocate() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
        pool.release(block)
    return blocks


def names(count: int) -> list[bytes]:
    return [bytes([index]) for index in range(count)]


def compute(blocks: KVBlocks, tokens: Sequence[int], salt: str = "") -> Tables:
    """Tables of a sequence whose tokens have all been computed in one step."""
    tables = Tables(len(blocks.pools))
    tables.keys = keys_of(tokens, blocks.block_size, salt)
    assert blocks.grow(tables, len(tokens))
    blocks.publish(tables, len(tables.keys))
    return tables


def test_a_key_tells_everything_before_its_block() -> None:
    assert len(root("a")) == len(chain(root("a"), [1, 2])) == 16
    assert root("a") != root("b")
    assert chain(root(""), [1, 2]) != chain(root(""), [2, 1])
    assert chain(root(""), [1, 256]) != chain(root(""), [257, 0])
    assert keys_of([1, 2, 3, 4], 2)[1] != keys_of([0, 2, 3, 4], 2)[1]


def test_free_blocks_come_first_then_unused_ones_in_ascending_order_then_cached_ones() -> None:
    """The memory of an unused block is not taken yet."""
    pool = BlockPool(4)
    cached = fill(pool, names(2))
    loose = pool.allocate()
    pool.release(loose)
    assert (cached, loose) == ([0, 1], 2)
    assert [pool.allocate() for _ in range(4)] == [2, 3, 0, 1]
    assert (pool.num_free, pool.num_cached, pool.evictions) == (0, 0, 2)


def test_memory_grows_with_use_not_with_the_pool() -> None:
    tracemalloc.start()
    try:
        pool = BlockPool(50_000_000)
        pool.release(pool.allocate())
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert pool.num_free == 50_000_000


def test_content_is_found_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    assert pool.lookup(b"k") == first
    pool.release(second)
    assert (pool.num_free, pool.num_cached, pool.allocate()) == (1, 1, second)


@EXAMPLES
@given(
    size=st.integers(1, 5),
    windows=st.lists(st.none() | st.integers(2, 12), min_size=1, max_size=3),  # of 1, nothing would be needed
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    rest=TOKENS,
    running=st.booleans(),
)
def test_a_common_prefix_is_shared(
    size: int, windows: list[int | None], prompt: list[int], rest: list[int], running: bool
) -> None:
    """P9: a request whose tokens begin with a cached request's tokens reuses its KV blocks."""
    blocks = KVBlocks(size, [GroupSpec(100, window) for window in windows], max_step_tokens=100)
    first = compute(blocks, prompt)
    held = [list(table) for table in first.blocks]
    if not running:
        blocks.release(first)
    second = Tables(len(windows))
    second.keys = keys_of(prompt + rest, size)
    count = blocks.match(second.keys)
    assert count >= len(prompt) // size
    blocks.attach(second, count)
    for table, other, window in zip(second.blocks, held, windows, strict=True):
        shared = [block for block in table if block != NO_BLOCK]
        assert shared == other[count - len(shared) : count]
        assert len(shared) == (count if window is None else count - max(count * size - window + 1, 0) // size)
    assert blocks.stats().hits == count * size
    blocks.check_integrity([first, second])
    stranger = keys_of(prompt + rest, size, salt="another tenant")
    assert blocks.match(stranger) == 0


@EXAMPLES
@given(limit=st.integers(1, 6), script=st.lists(st.tuples(st.sampled_from("nhrc"), st.integers(0, 20)), max_size=60))
def test_the_least_recently_used_goes_first(limit: int, script: list[tuple[str, int]]) -> None:
    """P10: eviction removes the least recently used and ends within the limit."""
    pool = BlockPool(limit)
    held: Counter[int] = Counter()
    unheld: list[bytes] = []  # the reference: keys without a holder, least recently used first
    key_of: dict[int, bytes] = {}
    for step, (verb, choice) in enumerate(script):
        expected: list[bytes] = []
        if verb == "n" and pool.num_free:  # a new block
            expected = unheld[:1] if len(unheld) + held.total() - sum(n - 1 for n in held.values()) == limit else []
            block = pool.allocate()
            held[block] += 1
            key_of[block] = str(step).encode()
            pool.publish(block, key_of[block])
        elif verb == "h" and pool.num_cached:  # a hit
            key, block = pool.cached()[choice % pool.num_cached]
            pool.acquire(block)
            held[block] += 1
            unheld = [other for other in unheld if other != key]
        elif verb == "r" and held:
            block = sorted(held)[choice % len(held)]
            pool.release(block)
            held[block] -= 1
            if not held[block]:
                del held[block]
                unheld.append(key_of[block])
        elif verb == "c":
            expected = unheld[: choice % 3]
            pool.clear_cached(choice % 3)
        unheld = unheld[len(expected) :]
        assert [key for key in expected if pool.lookup(key) is not None] == []
        assert [key for key, block in pool.cached() if not pool.is_held(block)] == unheld
        assert len(held) + len(unheld) <= limit
        assert pool.num_free == limit - len(held)
        pool.check_integrity(held)


@EXAMPLES
@given(count=st.integers(1, 8), hits=st.lists(st.integers(0, 7), max_size=12))
def test_a_hit_renews_the_last_access(count: int, hits: list[int]) -> None:
    """P11: a hit renews the entry's last-access time, and so the entry outlives those that were not hit."""
    pool = BlockPool(count)
    order = fill(pool, names(count))
    for hit in hits:
        block = hit % count
        before = max(map(pool.last_access, range(count)))
        pool.acquire(block)
        assert pool.last_access(block) > before
        pool.release(block)
        order.remove(block)
        order.append(block)
    assert [pool.allocate() for _ in range(count)] == order


@EXAMPLES
@given(count=st.integers(0, 8), hits=st.lists(st.integers(0, 7), max_size=8), limit=st.integers(1, 10))
def test_cached_keys_survive_a_restart(count: int, hits: list[int], limit: int) -> None:
    """P12, who holds what: the keys of `cached` restored to a fresh pool are cached in the same order."""
    pool = BlockPool(8)
    fill(pool, names(count))
    for hit in hits:
        if hit < count:
            pool.acquire(hit)
            pool.release(hit)
    keys = [key for key, _ in pool.cached()]
    fresh = BlockPool(limit)
    restored = fresh.restore(keys)
    assert restored == fresh.cached()
    assert [key for key, _ in restored] == keys[max(count - limit, 0) :]
    assert fresh.evictions == 0 and fresh.restore(keys[max(count - limit, 0) :]) == []
    fresh.check_integrity(Counter())


def test_restoring_leaves_held_and_cached_blocks_alone() -> None:
    pool = BlockPool(4)
    fill(pool, names(2))
    pool.allocate()
    assert pool.restore([b"x", b"\0", b"y"]) == [(b"y", 3)]
    assert [key for key, _ in pool.cached()] == [b"\0", b"\1", b"y"]


@EXAMPLES
@given(
    size=st.integers(1, 4),
    windows=WINDOWS,
    missing=st.lists(st.sets(st.integers(0, 9), max_size=4), min_size=3, max_size=3),
    length=st.integers(0, 10),
)
def test_the_longest_reusable_prefix_is_matched(
    size: int, windows: list[int | None], missing: list[set[int]], length: int
) -> None:
    blocks = KVBlocks(size, [GroupSpec(10, window) for window in windows], max_step_tokens=1)
    cached = [set(range(10)) - indices for indices in missing]
    keys = names(10)
    for pool, present in zip(blocks.pools, cached, strict=False):
        fill(pool, [keys[index] for index in sorted(present)])

    def reusable(count: int) -> bool:
        """By definition: everything that the token after the match sees is there."""
        end = count * size
        return all(
            position // size in present
            for present, window in zip(cached, windows, strict=False)
            for position in range(0 if window is None else max(end - window + 1, 0), end)
        )

    assert blocks.match(keys[:length]) == max(count for count in range(length + 1) if reusable(count))


@EXAMPLES
@given(
    size=st.integers(1, 4),
    groups=st.lists(st.tuples(st.integers(1, 12), st.none() | st.integers(1, 9)), min_size=1, max_size=2),
    chunks=st.lists(st.integers(1, 6), min_size=60, max_size=60),
)
def test_a_sequence_can_grow_to_the_capacity_and_holds_what_it_sees(
    size: int, groups: list[tuple[int, int | None]], chunks: list[int]
) -> None:
    specs = [GroupSpec(*group) for group in groups]
    blocks = KVBlocks(size, specs, max_step_tokens=6)
    tables = Tables(len(specs))
    computed = 0
    for chunk in chunks:
        target = min(computed + chunk, blocks.capacity)
        assert blocks.grow(tables, target)
        computed = target
        blocks.slide(tables, computed)
        for table, spec in zip(tables.blocks, specs, strict=True):
            first = 0 if spec.window is None else max(computed - spec.window + 1, 0) // size
            assert [block != NO_BLOCK for block in table] == [index >= first for index in range(len(table))]
        blocks.check_integrity([tables])
    full = [spec.num_blocks * size for spec in specs if spec.window is None]
    if full:
        assert blocks.capacity <= min(full)
    if blocks.capacity == computed == min(full, default=0):
        assert not blocks.grow(tables, computed + 1)
    blocks.release(tables)
    assert blocks.usage == 0 and blocks.stats().num_held == 0


@EXAMPLES
@given(size=st.integers(1, 5), window=st.integers(1, 12), chunk=st.integers(1, 12))
def test_a_sliding_pool_limits_nothing_where_the_worst_step_fits(size: int, window: int, chunk: int) -> None:
    def capacity(num_blocks: int) -> int:
        return KVBlocks(size, [GroupSpec(num_blocks, window)], chunk).capacity

    worst = max(
        (position + chunk - 1) // size - max(position - window + 1, 0) // size + 1 for position in range(window + size)
    )
    assert capacity(worst) > 10**9
    assert capacity(worst - 1) == (worst - 1) * size


def test_growing_is_all_or_nothing() -> None:
    blocks = KVBlocks(4, [GroupSpec(9, None), GroupSpec(2, 100)], max_step_tokens=4)
    tables = Tables(2)
    assert not blocks.grow(tables, 9) and tables.blocks == [[], []]
    assert blocks.grow(tables, 8) and (blocks.num_free_blocks, blocks.usage) == (0, 1.0)
    assert (blocks.stats().num_blocks, blocks.stats().num_held) == (11, 4)


def test_the_beginning_of_a_prefix_is_evicted_last() -> None:
    blocks = KVBlocks(2, [GroupSpec(4, None)], max_step_tokens=8)
    tables = compute(blocks, range(8))
    blocks.release(tables)
    for left in (3, 2, 1, 0):
        blocks.pools[0].clear_cached(1)
        assert blocks.match(tables.keys) == left


def test_what_fits_can_be_attached_and_grown() -> None:
    blocks = KVBlocks(2, [GroupSpec(6, None)], max_step_tokens=100)
    keys = compute(blocks, range(4)).keys  # still held: sharing costs nothing
    shared, alone = Tables(1), Tables(1)
    shared.keys = keys
    assert blocks.fits(shared, 2, 12, 0) and not blocks.fits(shared, 2, 13, 0) and not blocks.fits(shared, 2, 12, 1)
    assert blocks.fits(alone, 0, 8, 0) and not blocks.fits(alone, 0, 9, 0)


def test_a_short_pool_counts_cached_blocks_once() -> None:
    blocks = KVBlocks(2, [GroupSpec(4, None)], max_step_tokens=100)
    tables = compute(blocks, range(6))
    blocks.release(tables)
    assert blocks.fits(tables, 3, 8, 0) and not blocks.fits(tables, 3, 9, 0)


def test_a_fault_is_found() -> None:
    blocks = KVBlocks(2, [GroupSpec(4, None), GroupSpec(4, 3)], max_step_tokens=4)
    tables = compute(blocks, range(5))
    with pytest.raises(AssertionError, match="holders"):
        blocks.check_integrity([])
    tables.blocks[1].pop()
    with pytest.raises(AssertionError, match="unequal length"):
        blocks.check_integrity([tables])
