"""A thread that does what it is given, in order. It ends with its process: work that hangs holds up nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Background:
    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # a panic of a library in Rust is no Exception
                result.set_exception(error)

        self._work.put(run)
        return result

    def close(self, timeout: float) -> None:
        """End after the work that is queued, but wait at most `timeout` seconds for it."""
        self._work.put(None)
        self._thread.join(timeout)

    def _main(self) -> None:
        while (work := self._work.get()) is not None:
            work()
