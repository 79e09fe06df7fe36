"""Finds a stage or filter by name: a built-in one, one installed under the entry point `penstock.stages`, or
`module:Class`."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from ..config.loading import load_named
from ..config.settings import BUILT_IN_STAGES, RESERVED
from ..schemas.errors import PenstockError, StartupError
from ..schemas.jobs import TOKEN_PATTERN
from .contract import Stage
from .custom.filters import Filter

GROUP = "penstock.stages"
LIGHT = {
    "validate": "validate.stage:Validate",
    "queue": "queue:Queue",
    "batch": "batch.stage:Batch",
    "stream": "stream:Stream",
    "tools": "tools.stage:Tools",
}
"""Where the built-in stages that hold no model are: a process imports those that it runs."""


def built_in(name: str) -> type[Stage]:
    """The class of a stage in `LIGHT`."""
    module, _, kind = LIGHT[name].partition(":")
    found: type[Stage] = getattr(import_module(f".{module}", __package__), kind)
    return found


def find_stage(name: str) -> type[Stage] | type[Filter]:
    """The class of a stage or filter. `name` may be `path/to/file.py:Class`. Raises `StartupError`."""
    if name in LIGHT:
        return built_in(name)
    if name in BUILT_IN_STAGES:
        raise StartupError(f"the stage {name} holds a model: run it with `penstock worker MODEL`")
    try:
        found = load_named(name) if ":" in name else _installed(name)
    except PenstockError:  # it says itself what to do
        raise
    except (Exception, SystemExit) as error:  # importing runs a user's code
        raise StartupError(f"the stage {name} cannot be loaded: {_reason(error)}") from error
    if not (isinstance(found, type) and issubclass(found, Stage | Filter)):
        raise StartupError(f"{name} is not a stage: it must be a subclass of penstock.stages.JobStage or Filter")
    own = getattr(found, "name", None)
    if not (isinstance(own, str) and re.fullmatch(TOKEN_PATTERN, own)) or own in BUILT_IN_STAGES + RESERVED:
        raise StartupError(
            f"{name} has {f'the name {own!r}' if own else 'no name'}: give it a class attribute `name`, the stage's "
            "name in the pipeline, of letters, digits, '_' and '-', and not one that Penstock uses"
        )
    if ":" not in name and own != name:
        raise StartupError(f"the entry point {name} leads to a stage called {own!r}: give both the same name")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise StartupError(f"{name} does not define {', '.join(missing)}")
    return found


def find_filters(names: Sequence[str], given: Sequence[type[Filter]]) -> tuple[type[Filter], ...]:
    """The pipeline's filters, `names`, in order: those `given`, else those installed. Raises `StartupError`."""
    known = {kind.name: kind for kind in given}
    if strange := sorted(known.keys() - set(names)):
        raise StartupError(f"{strange[0]} is no filter of the pipeline: name it there, between infer and stream")
    found = []
    for name in names:
        kind = known.get(name) or (find_stage(name) if installed(name) else None)
        if kind is None:
            raise StartupError(
                f"the stage stream runs all filters of the pipeline, and {name} is not here: name its file too, as in "
                "`penstock stage FILE.py:Class`"
            )
        if not issubclass(kind, Filter):
            raise StartupError(f"{name} is a stage, and no filter: it must stand between validate and batch")
        found.append(kind)
    return tuple(found)


def installed(name: str) -> bool:
    """Whether a custom stage is there to be run in this process; otherwise it runs elsewhere, in whatever language."""
    return name not in LIGHT and bool(entry_points(group=GROUP, name=name))


def _installed(name: str) -> object:
    entries = entry_points(group=GROUP, name=name)
    if len(packages := sorted({entry.dist.name if entry.dist else entry.value for entry in entries})) > 1:
        raise StartupError(f"{' and '.join(packages)} both have a stage called {name}; uninstall one of them")
    for entry in entries:
        return entry.load()
    raise StartupError(
        f"no stage is called {name}; there are {', '.join(LIGHT)}, what is installed under the entry point {GROUP}, "
        "and your own as module:Class or file.py:Class"
    )


def _reason(error: BaseException) -> str:
    """Why a module or a name in it could not be had; of the module's own errors also where."""
    if isinstance(error, ImportError | AttributeError | OSError | SyntaxError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
