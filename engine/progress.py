"""A loading bar on standard error, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .backend import ProgressCallback


@contextmanager
def loading_bar(title: str, also: ProgressCallback | None = None) -> Iterator[ProgressCallback | None]:
    """Yield a callback that draws a bar titled `title` and calls `also`; without a terminal as standard error it is
    `also` itself."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield also
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if also is not None:
                also(done, total)

        yield report
