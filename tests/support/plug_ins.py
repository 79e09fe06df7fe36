"""Tiny packages with entry points, as pip would install them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(directory: Path, name: str, group: str, entries: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Lay a package into a directory that is on `sys.path`: `entries` by name, `files` by path."""
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{own} = {value}\n" for own, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    for path, text in files.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
