"""Opens the prefix cache on disk that a configuration names; one that cannot be used costs a line in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from pathlib import Path

from ...choice import Choice
from ...cpu.library import Kernels
from ...models import ModelInfo
from ...output import SpillStats
from ...planning.sizing import SizedConfig
from ..kv.blocks import KVBlocks
from ..runner import Runner
from .block_files import BlockFiles
from .identity import identity
from .spill import Spill, layout

_log = logging.getLogger(__name__)


class NoSpill:
    """Of an engine without a directory, or with one that cannot be used: `off` says why."""

    def __init__(self, off: str = "") -> None:
        self.num_held = 0
        self._off = off

    def stats(self) -> SpillStats:
        return SpillStats(off=self._off)

    def hold(self, choice: Choice) -> bool:
        return False

    def remove(self, choice: Choice) -> None: ...

    def advance(self) -> list[Choice]:
        return []

    def delay(self) -> float:
        return inf

    def close(self) -> None: ...


def open_spill(
    config: SizedConfig,
    path: Path,
    info: ModelInfo,
    runner: Runner,
    blocks: KVBlocks,
    kernels: Kernels | None,
    slow_paths: Sequence[str],
) -> Spill | NoSpill:
    """`path` is the model's; for the others see `identity`."""
    directory = config.prefix_cache_dir
    if directory is None:
        return NoSpill()
    try:
        own = identity(config, path, info, runner, kernels, slow_paths)
        size = layout(runner)[-1].end * runner.dtype.itemsize
        files = BlockFiles(directory.expanduser(), own, size, config.prefix_cache_limit)
    except OSError as error:
        _log.warning("the prefix cache on disk is off until the next start: %s", error)
        return NoSpill(str(error))
    return Spill(files, blocks, runner)
