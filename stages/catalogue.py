"""Finds a stage by name: a built-in one, one installed under the entry point `penstock.stages`, or `module:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

from ..config.settings import BUILT_IN_STAGES
from ..schemas.errors import StartupError
from .batch import Batch
from .contract import Stage
from .queue import Queue
from .stream import Stream
from .tools import Tools
from .validate import Validate

GROUP = "penstock.stages"
LIGHT: dict[str, type[Stage]] = {"validate": Validate, "queue": Queue, "batch": Batch, "stream": Stream, "tools": Tools}


def find_stage(name: str) -> type[Stage]:
    """The class of a stage. `name` may be `path/to/file.py:Class`. Raises `StartupError`."""
    if name in LIGHT:
        return LIGHT[name]
    if name in BUILT_IN_STAGES:
        raise StartupError(f"the stage {name} holds a model: run it with `penstock worker MODEL`")
    try:
        found = _import(name) if ":" in name else _installed(name)
    except (ImportError, AttributeError, OSError) as error:
        raise StartupError(f"the stage {name} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Stage)):
        raise StartupError(f"{name} is not a stage: it must be a subclass of penstock.stages.JobStage")
    return found


def installed(name: str) -> bool:
    """Whether a custom stage is there to be run in this process; otherwise it runs elsewhere, in whatever language."""
    return name not in LIGHT and bool(entry_points(group=GROUP, name=name))


def _installed(name: str) -> object:
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise StartupError(
        f"no stage is called {name}; there are {', '.join(LIGHT)}, what is installed under the entry point {GROUP}, "
        "and your own as module:Class or file.py:Class"
    )


def _import(name: str) -> object:
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), attribute)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)
