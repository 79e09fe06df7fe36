"""LoRA adapters in an engine: what they add to a model's layers, and which of them are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from ...schemas.errors import ModelNotFound

if TYPE_CHECKING:
    from torch import Tensor


class Target(NamedTuple):
    """The size of a linear layer that adapters may change."""

    inputs: int
    outputs: int


class Targets(NamedTuple):
    """The `linear` layers of a model that adapters may change, and its `others`, which they may not, by module name."""

    linear: Mapping[str, Target]
    others: frozenset[str]


class LowRank(NamedTuple):
    """What an adapter adds to one layer: scale · (x A') B'. Each file states how `a` and `b` lie in memory."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter: `rank` is the highest of its layers, `memory` in bytes. `digest` identifies its content."""

    name: str
    source: str
    digest: str
    rank: int
    num_modules: int
    memory: int


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Adapter:
    """An adapter that a backend has loaded; its memory lasts as long as a request refers to it.

    `pairs` and `compiled` are the backend's own form of the matrices.
    """

    info: AdapterInfo
    pairs: Mapping[str, LowRank]
    compiled: Any = None


class LoadedAdapters:
    """An engine's adapters by name. Any thread may call it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Adapter] = {}  # replaced, never changed
        self._kept: WeakSet[Adapter] = WeakSet()  # these, and removed ones that requests still use
        self._lock = Lock()  # guards the two above

    @property
    def memory(self) -> int:
        """Bytes of all adapters, removed ones included as long as requests use them."""
        with self._lock:
            return sum(adapter.info.memory for adapter in self._kept)

    def add(self, adapter: Adapter) -> None:
        """Add an adapter, or replace the one of that name."""
        with self._lock:
            self._by_name = self._by_name | {adapter.info.name: adapter}
            self._kept.add(adapter)

    def find(self, name: str | None) -> Adapter | None:
        """The adapter of that name; None for None. Raises `ModelNotFound`."""
        if name is None:
            return None
        if (adapter := self._by_name.get(name)) is None:
            loaded = ", ".join(sorted(self._by_name)) or "none"
            raise ModelNotFound(f"no adapter {name!r} is loaded (loaded: {loaded}); load it first", param="adapter")
        return adapter

    def remove(self, name: str) -> None:
        """Forget the adapter of that name. Raises `ModelNotFound`."""
        with self._lock:
            self.find(name)
            self._by_name = {own: adapter for own, adapter in self._by_name.items() if own != name}

    def infos(self) -> list[AdapterInfo]:
        return [adapter.info for _, adapter in sorted(self._by_name.items())]
