"""The interface between the engine and a backend. A backend is chosen explicitly and never replaced silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..schemas.errors import InvalidRequest
from ..schemas.events import Delta
from .adapters.files import AdapterFiles
from .adapters.loaded import Adapter, Targets
from .choice import Choice
from .models import ModelInfo
from .output import CacheStats
from .planning.manifest import Manifest
from .text.tokenizer_port import TokenizerLike

ProgressCallback = Callable[[int, int], None]
"""Called as a model loads, with the weights loaded so far and the weights in all."""


class NoPrefixes:
    """The cache methods of a backend without a prefix cache."""

    def cache_stats(self) -> CacheStats | None:
        return None

    def save_prefixes(self, path: Path) -> int:
        raise InvalidRequest("this backend has no prefix cache; use the backend 'paged'", code="unsupported_capability")

    load_prefixes = save_prefixes


class NoAdapters:
    """The adapter methods of a backend that cannot change its model."""

    def adapter_targets(self) -> Targets:
        raise InvalidRequest("this backend runs no adapters; use the backend 'paged'", code="unsupported_capability")

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        raise NotImplementedError("a backend without targets has no adapters")


class Backend(Protocol):
    """Runs choices. The engine calls all methods, but not the properties, from its one thread.

    `step` schedules, runs and commits. It passes tokens to `Choice.append` and returns the deltas; a failure that it
    can attribute to some choices ends only those (`Choice.fail`). The backend drops a choice that has finished.
    """

    @property
    def manifest(self) -> Manifest:
        """What it can do: the engine refuses a request that needs more."""
        ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def add(self, choice: Choice) -> None:
        """Queue an unfinished choice."""
        ...

    def remove(self, choice: Choice) -> None:
        """Drop a choice, running or waiting, without affecting others. An unknown one is no error."""
        ...

    def step(self) -> list[Delta]:
        """Admit waiting choices, then advance every running one by a token."""
        ...

    def delay(self) -> float:
        """Seconds until `step` has work: 0 for now, infinite with nothing to run."""
        ...

    def cache_stats(self) -> CacheStats | None:
        """Counts of the key-value cache; None for a backend without one of its own. Safe from any thread."""
        ...

    def save_prefixes(self, path: Path) -> int:
        """Write the cached prefixes to a file; returns the number of blocks.

        Raises `InvalidRequest` for a backend without a prefix cache.
        """
        ...

    def load_prefixes(self, path: Path) -> int:
        """Restore the prefixes that `save_prefixes` wrote; returns the number of blocks.

        Raises `ConfigurationError` for an unsuitable file.
        """
        ...

    def adapter_targets(self) -> Targets:
        """What adapters may change. Raises `InvalidRequest` for a backend that runs none."""
        ...

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        """Put a checked adapter into memory, for choices that have it. Raises `InvalidRequest` if it does not fit."""
        ...

    def close(self) -> None:
        """Free the model and its memory."""
        ...
