"""What the engine asks of a backend, and the register of backends. Chosen explicitly, never switched silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..schemas.errors import InvalidRequest
from ..schemas.events import Delta
from ..schemas.params import GenerationParams
from .models import ModelInfo
from .output import CacheStats
from .sequence import Sequence
from .text.tokenizer_port import TokenizerLike

ProgressCallback = Callable[[int, int], None]
"""Told how far loading is: (weights done, weights in all)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; a request that needs more is refused before it runs.

    `parameters` are the fields of `GenerationParams` that it honours. `hooks` says whether callers may supply logits
    processors and the like.
    """

    formats: tuple[str, ...]
    devices: tuple[str, ...]
    text: bool = True
    vision: bool = False
    embeddings: bool = False
    hooks: bool = False
    parameters: frozenset[str] = frozenset(GenerationParams.model_fields)


class NoPrefixes:
    """What a backend without a cache of prefixes says."""

    def cache_stats(self) -> None:
        return None

    def save_prefixes(self, path: Path) -> int:
        raise InvalidRequest("this backend has no cache of prefixes", code="unsupported_capability")

    load_prefixes = save_prefixes


class Backend(Protocol):
    """Runs sequences. All methods but the properties are called from one thread, the engine's.

    `step` is one verb: schedule, run, commit. It hands tokens to `Sequence.append` and returns the deltas; a failure
    that can be pinned on sequences ends those alone (`Sequence.fail`). A sequence that has finished is forgotten.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has not finished."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its mates do not notice. An unknown one is no error."""
        ...

    def step(self) -> list[Delta]:
        """Advance every running sequence by one token, admitting waiting ones first."""
        ...

    def delay(self) -> float:
        """Seconds until `step` has something to do: 0 for at once, infinite with nothing to run."""
        ...

    def cache_stats(self) -> CacheStats | None:
        """What the key-value cache holds; None for a backend without one of its own. May be called from any thread."""
        ...

    def save_prefixes(self, path: Path) -> int:
        """Write the cached prefixes to a file; how many blocks. Raises `InvalidRequest` where none are cached ever."""
        ...

    def load_prefixes(self, path: Path) -> int:
        """Cache what `save_prefixes` wrote; how many blocks. Raises `ConfigurationError` for a file that is unfit."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...
