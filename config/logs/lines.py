"""Log lines on their way to a reader who may be slow, or stand still: a terminal that was halted, a collector that is
stuck. No process waits for one, since it would answer nobody meanwhile."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import stat
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

MOST = 2_000  # lines that may wait for the reader; more are dropped, and counted
AT_THE_END = 1.0  # seconds that the end of the process waits for the reader


class LogLines:
    """Writes each line at once while the reader keeps up, and leaves it to a thread when not.

    A reader that has gone, or a disk that is full, costs lines and no request. `dropped` logs how many lines were
    dropped, once the reader goes on.
    """

    def __init__(self, stream: TextIO, dropped: Callable[[int], object] | None = None) -> None:
        self._stream = stream
        self._dropped = dropped
        self._waiting: deque[str] = deque()
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None  # while lines wait
        try:
            self._number: int | None = stream.fileno()
            self._may_block = not stat.S_ISREG(os.fstat(self._number).st_mode)
        except (OSError, ValueError, AttributeError):  # no file
            self._number, self._may_block = None, False
        if self._may_block:
            atexit.register(self._end)

    def msg(self, line: str) -> None:
        with self._lock:
            if self._writer is None and (not self._may_block or self._has_room(len(line))):
                self._write(line)
            elif len(self._waiting) >= MOST:
                self._num_dropped += 1
            else:
                self._waiting.append(line)
                if self._writer is None:
                    self._writer = threading.Thread(target=self._wait_and_write, name="log", daemon=True)
                    self._writer.start()

    debug = info = warning = error = critical = msg

    def write(self, text: str) -> None:
        """As a stream of the standard library's logging, which writes one record at a time."""
        self.msg(text.removesuffix("\n"))

    def flush(self) -> None:
        """For the same."""

    def _has_room(self, length: int) -> bool:
        """Whether a line can be written at once, also if other processes write some to the same pipe meanwhile."""
        assert self._number is not None
        try:
            if not select.select([], [self._number], [], 0)[1]:
                return False
            if stat.S_ISFIFO(os.fstat(self._number).st_mode):
                unread: int
                (unread,) = struct.unpack("i", fcntl.ioctl(self._number, termios.FIONREAD, bytes(4)))
                return max(unread, length) <= _size_of_pipe(self._number) // 4
        except (OSError, ValueError):
            pass
        return True

    def _wait_and_write(self) -> None:
        while True:
            with self._lock:
                num_dropped, self._num_dropped = (0, self._num_dropped) if self._waiting else (self._num_dropped, 0)
                line = self._waiting.popleft() if self._waiting else None
                if line is None and not num_dropped:
                    self._writer = None
                    return
            if line is not None:
                self._write(line)
            elif self._dropped is not None:
                self._dropped(num_dropped)  # which adds a line

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._number is None:
                self._stream.write(line + "\n")
                self._stream.flush()
                return
            # Past the buffers of Python, whose locks the end of the process could not take from a thread that waits.
            encoding, errors = self._stream.encoding or "utf-8", self._stream.errors or "backslashreplace"
            left = memoryview(f"{line}\n".encode(encoding, errors))
            while left:
                left = left[os.write(self._number, left) :]

    def _end(self) -> None:
        if (writer := self._writer) is not None:
            writer.join(AT_THE_END)


def _size_of_pipe(number: int) -> int:
    command = getattr(fcntl, "F_GETPIPE_SZ", None)  # Linux alone tells
    return 64 << 10 if command is None else int(fcntl.fcntl(number, command))
