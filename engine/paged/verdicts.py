"""What the checks of a model found when it was loaded before: they read every weight several times in float32.

Each is a file in the user's cache, named after all that the checks depend on: the model's files, the settings, the code
and the machine. What failed is not kept, so that it is told again.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

import torch

from ...config.directories import user_cache
from ..config import EngineConfig
from ..cpu.library import Kernels
from ..models import keep, state_of
from ..planning.device import surroundings

_log = logging.getLogger(__name__)
_MOST = 256  # files that are kept; those that were not used for longest go first
_CODE = Path(__file__).parents[1]


class Verdict(NamedTuple):
    """Packed requests do not affect each other; and whether the plain decoder, and the compiled one, computes what the
    model computes. `pauses`: its vision tower makes the same features block by block."""

    is_plain: bool
    is_compiled: bool
    pauses: bool = False


class Verdicts:
    """That of one model with one configuration on this machine."""

    def __init__(self, file: Path | None) -> None:
        """Without a file none is known, and none is kept."""
        self._file = file

    @classmethod
    def of(
        cls, config: EngineConfig, path: Path, context_length: int, device: torch.device, kernels: Kernels | None
    ) -> Self:
        """`path` is the model's."""
        parts = surroundings(device) | {
            "code": _state_of_code(),
            "model": state_of(path),
            "settings": [context_length, config.dtype, config.quantization],
            "kernels": kernels.name if kernels is not None else "",
        }
        name = sha256(json.dumps(parts).encode()).hexdigest()[:32]
        return cls(user_cache() / "verdicts" / f"{name}.json")

    def read(self) -> Verdict | None:
        """None if there is none."""
        if self._file is None:
            return None
        try:
            found = json.loads(self._file.read_bytes())
            with suppress(OSError):  # a cache that may only be read
                os.utime(self._file)
            return Verdict(*(found[name] is True for name in Verdict._fields))
        except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one: the checks are made again
            return None

    def keep(self, verdict: Verdict) -> None:
        """Keep it, if it is a new one and the cache can be written."""
        if self._file is None or self.read() == verdict:
            return
        try:
            keep(self._file, json.dumps(verdict._asdict()).encode(), _MOST)
        except OSError as error:
            _log.info("checks not noted: %s; set XDG_CACHE_HOME to a writable directory", error)


NO_VERDICTS = Verdicts(None)


@cache  # what has been imported stays as it is
def _state_of_code() -> list[list[object]]:
    files = [(file, file.stat()) for file in sorted(_CODE.rglob("*.py"))]
    return [[file.relative_to(_CODE).as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in files]
