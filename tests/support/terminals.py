"""Commands in terminals of their own."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import subprocess
import termios

import psutil
from serving import START_TIMEOUT


class Terminal:
    """A command in a terminal of 30 lines of 100 columns, and what a person does there."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self._child = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        """Wait until `text` is shown, and return what was until then; what comes next is looked for behind it."""
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], START_TIMEOUT)
            assert ready, f"no {text!r} in:\n{self._seen}"
            news = self._read()
            assert news, f"ended without {text!r} in:\n{self._seen}"
            self._seen += news
        before, _, self._seen = self._seen.partition(text)
        return before

    def interrupt(self) -> None:
        """Press Ctrl-C at a prompt that waits. Python's readline loses one that comes while it shows a key."""
        child = psutil.Process(self._child.pid)
        while child.status() != psutil.STATUS_SLEEPING:
            os.sched_yield()
        self.type("\x03")

    def wait(self) -> int:
        while self._read():
            pass
        return self._child.wait(START_TIMEOUT)

    def end(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        os.close(self._master)

    def _read(self) -> str:
        try:
            return os.read(self._master, 65536).decode(errors="replace")
        except OSError as error:  # the child's end is closed
            assert error.errno == errno.EIO
            return ""
