"""Where the files of a user are, as the XDG Base Directory Specification has it."""

from __future__ import annotations

import os
from pathlib import Path


def user_state() -> Path:
    """Where Penstock keeps what must survive a restart."""
    return _given("XDG_STATE_HOME", ".local/state") / "penstock"


def user_cache() -> Path:
    """Where Penstock keeps what it can make again."""
    return _given("XDG_CACHE_HOME", ".cache") / "penstock"


def _given(variable: str, below_home: str) -> Path:
    """The directory that the variable names: by the specification, a relative one is ignored."""
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else _home() / below_home


def _home() -> Path:
    """For a user without one, as under a number that no container's image knows, what container runtimes take: /."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")
