"""The running states of choices, as slots that the scheduler hands out. Holds no tensor.

A slot has the state of all layers after some number of tokens, and is never changed: a step reads one slot and writes
another. So a step that fails can run again, and a state that stands at the border of a block can stay as a checkpoint,
under the key of the chain up to there, without a copy. A sequence that starts with the same tokens reads the checkpoint
and goes on from it. Checkpoints that no row holds are evicted, the least recently used first.

Where a row leaves a checkpoint: at the last border of the tokens that it enters with, at the border up to which it
shares blocks with earlier rows although no checkpoint was there, and, of those that its steps happen to reach, at the
newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..kv.block_pool import BlockPool

NO_STATE = -1
"""In place of a slot: the state before the first token, which is zero."""

MatchBlocks = Callable[[Sequence[bytes]], int]
"""The most leading blocks with these keys that can be reused."""


class StateUse(NamedTuple):
    """The slots of one segment: it reads `source` and writes `target`.

    Each of `captures` is a number of its tokens, ascending, and the slot for the state after them.
    """

    source: int
    target: int
    captures: tuple[tuple[int, int], ...] = ()


class RowState:
    """What one row holds; `Slots` sets everything."""

    __slots__ = ("borders", "captures", "current", "newest", "num_tokens", "target")

    def __init__(self) -> None:
        self.current = NO_STATE  # the state after `num_tokens` tokens
        self.num_tokens = 0
        self.target = NO_STATE  # what the step that is being computed writes
        self.captures: dict[int, int] = {}  # tokens -> slot, for that step
        self.borders: frozenset[int] = frozenset()  # counts of tokens at which to leave a checkpoint
        self.newest = b""  # the key of the checkpoint that the next one replaces

    @property
    def held(self) -> list[int]:
        return [slot for slot in (self.current, self.target, *self.captures.values()) if slot != NO_STATE]

    def use(self, start: int) -> StateUse | None:
        """The slots for a segment from `start` on; None if the model keeps no states."""
        if self.target == NO_STATE:
            return None
        return StateUse(
            self.current, self.target, tuple((tokens - start, slot) for tokens, slot in sorted(self.captures.items()))
        )


class Slots(Protocol):
    """What the scheduler asks for. `keys` are those of a row's full blocks, from the first on."""

    def match(self, state: RowState, keys: Sequence[bytes], match_blocks: MatchBlocks) -> int:
        """How many leading blocks a row that has not entered can reuse."""
        ...

    def awaitable(self, keys: Sequence[bytes], matched: int) -> Iterable[bytes]:
        """Which of the `keys` are worth waiting for, while another row computes them."""
        ...

    def enter(self, state: RowState, keys: Sequence[bytes], matched: int) -> Sequence[bytes]:
        """Start a row after its `matched` leading blocks; returns the keys that others may wait for."""
        ...

    def begin(self, steps: Iterable[tuple[RowState, int, int]]) -> None:
        """Take slots for a step that computes these rows' tokens from one position to another."""
        ...

    def finish(self, state: RowState, num_tokens: int, keys: Sequence[bytes]) -> None:
        """Commit a row's step, after which `num_tokens` are computed."""
        ...

    def leave(self, state: RowState) -> None:
        """Release what the row holds."""
        ...

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the checkpoints under these keys: the states of a chain that turned out invalid."""
        ...

    def check_integrity(self, running: Iterable[tuple[RowState, int]], waiting: Iterable[RowState]) -> None:
        """Raise `AssertionError` unless the rows account for each slot; running ones with their computed tokens."""
        ...


class NoSlots:
    """Of a model that keeps no states: blocks alone decide."""

    def match(self, state: RowState, keys: Sequence[bytes], match_blocks: MatchBlocks) -> int:
        return match_blocks(keys)

    def awaitable(self, keys: Sequence[bytes], matched: int) -> Iterable[bytes]:
        return keys[matched : matched + 1]

    def enter(self, state: RowState, keys: Sequence[bytes], matched: int) -> Sequence[bytes]:
        return keys[matched:]

    def begin(self, steps: Iterable[tuple[RowState, int, int]]) -> None: ...

    def finish(self, state: RowState, num_tokens: int, keys: Sequence[bytes]) -> None: ...

    def leave(self, state: RowState) -> None: ...

    def forget(self, keys: Iterable[bytes]) -> None: ...

    def check_integrity(self, running: Iterable[tuple[RowState, int]], waiting: Iterable[RowState]) -> None: ...


class StateSlots:
    """`num_slots` slots, at least two for each row that may run: what is left over keeps checkpoints."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self.pool = BlockPool(num_slots)  # checkpoints are its cached blocks

    @property
    def num_slots(self) -> int:
        return self.pool.num_blocks

    @property
    def num_held(self) -> int:
        return self.pool.num_blocks - self.pool.num_free

    @property
    def num_checkpoints(self) -> int:
        return self.pool.num_cached

    def match(self, state: RowState, keys: Sequence[bytes], match_blocks: MatchBlocks) -> int:
        count = shared = match_blocks(keys)
        while count:
            count = next((n for n in range(count, 0, -1) if self.pool.lookup(keys[n - 1]) is not None), 0)
            found = match_blocks(keys[:count])
            if found == count:
                break
            count = found  # of a window, those before a checkpoint may be gone
        borders = {shared, len(keys)}
        state.borders = frozenset(border * self._block_size for border in borders if border > count)
        return count

    def awaitable(self, keys: Sequence[bytes], matched: int) -> Iterable[bytes]:
        return reversed(keys[matched:])

    def enter(self, state: RowState, keys: Sequence[bytes], matched: int) -> Sequence[bytes]:
        assert not state.held, "a row that enters holds a state"
        state.num_tokens = matched * self._block_size
        if matched:
            slot = self.pool.lookup(keys[matched - 1])
            assert slot is not None, "a matched checkpoint is gone"
            self.pool.acquire(slot)
            state.current = slot
        return [keys[border // self._block_size - 1] for border in sorted(state.borders)]

    def begin(self, steps: Iterable[tuple[RowState, int, int]]) -> None:
        steps = list(steps)
        for state, *_ in steps:
            if state.target == NO_STATE:
                state.target = self.pool.allocate()
        for state, start, end in steps:
            for border in sorted(state.borders):
                if start < border < end and border not in state.captures and self.pool.num_free:
                    state.captures[border] = self.pool.allocate()

    def finish(self, state: RowState, num_tokens: int, keys: Sequence[bytes]) -> None:
        self._keep(state, keys)  # if its last token was not known yet when it was computed
        for border, slot in state.captures.items():
            self.pool.publish(slot, keys[border // self._block_size - 1])
            self.pool.release(slot)
        state.captures.clear()
        if state.current != NO_STATE:
            self.pool.release(state.current)
        state.current, state.target = state.target, NO_STATE
        state.num_tokens = num_tokens
        self._keep(state, keys)

    def leave(self, state: RowState) -> None:
        for slot in state.held:
            self.pool.release(slot)
        state.current = state.target = NO_STATE
        state.captures.clear()
        state.num_tokens = 0
        state.newest = b""

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            slot = self.pool.lookup(key)
            if slot is not None:
                self.pool.acquire(slot)
                self.pool.forget(slot)
                self.pool.release(slot)

    def check_integrity(self, running: Iterable[tuple[RowState, int]], waiting: Iterable[RowState]) -> None:
        assert not any(state.held for state in waiting), "a waiting row holds a state"
        held = Counter[int]()
        for state, num_computed in running:
            assert state.num_tokens == num_computed, f"a state of {state.num_tokens} tokens, {num_computed} computed"
            assert (state.current == NO_STATE) == (not num_computed), "a state is missing, or of no tokens"
            held.update(state.held)
        self.pool.check_integrity(held)

    def _keep(self, state: RowState, keys: Sequence[bytes]) -> None:
        """Make the current state a checkpoint, if it stands at a border whose key is known."""
        count, inside = divmod(state.num_tokens, self._block_size)
        if state.current == NO_STATE or inside or not 0 < count <= len(keys):
            return
        key = keys[count - 1]
        if self.pool.lookup(key) is not None:
            return
        self.pool.publish(state.current, key)
        if state.num_tokens in state.borders:
            return
        if state.newest:
            self.forget([state.newest])
        state.newest = key
