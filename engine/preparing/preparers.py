"""A cache of preparers: each model's tokenizer and formats are loaded once in a process, in a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextvars import Context
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

from ...schemas.registry import ModelCard
from ..vision.reading import ANY, ImageLimits
from .prepare import Preparer, load_preparer


class PreparerKey(NamedTuple):
    """What decides how a model's requests are prepared; models with equal keys share a preparer.

    A swap may be to the same directory, in which other files lie now: `revision` tells them apart.
    """

    source: str
    backend: str
    tool_format: str
    reasoning_format: str
    revision: int = 1

    @classmethod
    def of(cls, card: ModelCard) -> Self:
        return cls(card.source, card.backend, card.tool_format, card.reasoning_format, card.revision)


class PreparerCache:
    """Loads each preparer when it is first needed and keeps it; requests at the same time share one load."""

    def __init__(self, on_load: Callable[[], None] = lambda: None, limits: ImageLimits = ANY) -> None:
        """`on_load` is called after each load; `limits` are those of images."""
        self._on_load, self._limits = on_load, limits
        self._loads: dict[PreparerKey, asyncio.Task[Preparer]] = {}
        self._turns: WeakKeyDictionary[asyncio.Task[Preparer], asyncio.Lock] = WeakKeyDictionary()

    @property
    def idle(self) -> bool:
        """Whether every load has ended."""
        return all(load.done() for load in self._loads.values())

    async def get(self, card: ModelCard) -> Preparer:
        """The preparer of a model, for callers in the order of their calls: none passes those that waited for the load.

        Raises `ModelLoadError` and `ConfigurationError`; the next call then tries again.
        """
        key = PreparerKey.of(card)
        load = self.start(key)
        try:
            async with self._turns.setdefault(load, asyncio.Lock()):
                return await asyncio.shield(load)
        except BaseException:  # a panic of a library in Rust is no Exception
            is_failed = load.done() and (load.cancelled() or load.exception() is not None)
            if is_failed and self._loads.get(key) is load:
                del self._loads[key]
            raise

    def start(self, key: PreparerKey) -> asyncio.Task[Preparer]:
        """Begin to load, unless that has begun before."""
        if key not in self._loads:
            # In a context of its own: a task keeps the context, and what the caller has in it.
            self._loads[key] = asyncio.create_task(self._load(key), context=Context())
        return self._loads[key]

    def keep(self, cards: Collection[ModelCard], *more: PreparerKey) -> None:
        """Forget the preparers of models other than these, such as those of former revisions."""
        if len(self._loads) > len(cards):
            kept = {*map(PreparerKey.of, cards), *more}
            self._loads = {key: load for key, load in self._loads.items() if key in kept or not load.done()}

    async def _load(self, key: PreparerKey) -> Preparer:
        preparer = await asyncio.to_thread(load_preparer, *key[:4], self._limits)
        self._on_load()
        return preparer
