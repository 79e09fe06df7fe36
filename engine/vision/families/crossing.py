"""Images that some layers attend to: each has one token. Knows no torch and no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .writing import Config, Grid


def num_tiles(_: Config, made: Mapping[str, Any]) -> Grid:
    """How many tiles an image has; others, which are black, fill up those that the tower takes."""
    return (int(made["aspect_ratio_mask"][0][0].sum()),)


def write_crossed(_: Config, __: Grid, mark: str) -> str:
    return mark
