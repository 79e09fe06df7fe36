"""The scheduler's view of a choice, and what a step computes of it. Never sees a tensor."""

from __future__ import annotations

from typing import NamedTuple

from ...choice import Choice
from ...vision.images import marks
from ..kv.block_pool import chain, root
from ..kv.blocks import Tables
from ..state.slots import RowState

_PRIORITY = 1_000  # arrivals that one level of priority outranks
_MAX_SCORED = 256  # the most tokens of a step whose logits are all kept


class Row:
    """One choice in the scheduler, which sets all attributes."""

    __slots__ = (
        *("__weakref__", "awaits", "choice", "num_computed", "order", "passed"),
        *("running", "state", "tables", "tenant"),
    )

    def __init__(self, choice: Choice, arrival: int, tables: Tables) -> None:
        self.choice = choice
        self.order = arrival + _PRIORITY * choice.request.priority  # of the line, ascending
        self.tables = tables
        self.tenant = choice.request.cache_salt
        self.state = RowState()
        self.num_computed = 0  # tokens whose keys and values are in the pools
        self.running = False
        self.awaits = b""  # the key of a block that another row is computing and this one will reuse
        self.passed = 0  # rows that were admitted while this one waited for blocks

    @property
    def priority(self) -> int:
        return self.choice.request.priority

    @property
    def num_lacking(self) -> int:
        """The tokens that a step may compute; fewer for a scored prompt, since the step keeps all their logits."""
        lacking = self.num_tokens - self.num_computed
        return lacking if self.choice.is_scored else min(lacking, _MAX_SCORED)

    @property
    def num_known(self) -> int:
        return len(self.choice.prompt) + len(self.choice.tokens)

    @property
    def num_tokens(self) -> int:
        choice = self.choice
        return len(choice.prompt) + len(choice.tokens) + choice.pending

    def whole(self, count: int, matched: int = 0, is_first: bool = False) -> int:
        """The most of the `count` tokens behind those that are computed and `matched` ones, between which and the next
        a step may end; if that are none and the row `is_first`, as many as it may end after."""
        layout, start = self.choice.layout, self.num_computed + matched
        if layout is None:
            return count
        return layout.pause(start, start + count) - start or (layout.least(start) - start if is_first else 0)

    def extend_keys(self, block_size: int) -> None:
        """Extend the chain of keys to the last full block of known tokens."""
        keys, prompt, tokens = self.tables.keys, self.choice.prompt, self.choice.tokens
        identity = b"" if self.choice.layout is None else self.choice.layout.identity
        adapter = self.choice.adapter.info.digest if self.choice.adapter is not None else ""
        for end in range((len(keys) + 1) * block_size, self.num_known + 1, block_size):
            begin = end - block_size
            parent = keys[-1] if keys else root(self.choice.request.cache_salt, adapter)
            generated = tokens[max(begin - len(prompt), 0) : max(end - len(prompt), 0)]
            shown = marks(self.choice.request.images, begin, end) + identity
            keys.append(chain(parent, [*prompt[begin:end], *generated], shown))

    def check_integrity(self, block_size: int) -> None:
        """Raise `AssertionError` unless a running row has blocks for what is computed, and keys of what is known."""
        tables = self.tables
        assert self.running, "a running row does not know that it runs"
        assert self.num_computed <= self.num_tokens, f"{self.num_computed} computed of {self.num_tokens} tokens"
        assert self.num_computed <= len(tables.blocks[0]) * block_size, "a computed token has no block"
        assert tables.num_published <= self.num_computed // block_size, "published before it is computed"
        assert tables.num_published <= len(tables.keys) <= self.num_known // block_size, "keys of unknown tokens"


class Scheduled(NamedTuple):
    """The next `num_tokens` of a row, from `num_computed` on; `samples` if a token is chosen after them."""

    row: Row
    num_tokens: int
    samples: bool
