"""Loads users' code by name: `module:name`, `path/to/file.py:name`, or a whole module or file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ..schemas.sources import check_access


def load_named(name: str) -> object:
    """The object called `name`; a file runs once. Raises `ImportError`, `AttributeError`, and the code's errors."""
    location, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    module = _file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    return getattr(module, attribute) if attribute else module


def _file(path: Path) -> ModuleType:
    name, whole = path.stem, str(path.resolve())
    if (known := sys.modules.get(name)) is not None and getattr(known, "__file__", None) == whole:
        return known
    if known is not None or name in sys.stdlib_module_names:  # queue.py, for example: others mean theirs by it
        name = f"{name} at {whole}"
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, whole)
    check_access(path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no such file: {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
