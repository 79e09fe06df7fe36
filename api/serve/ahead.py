"""Starts the worker of `penstock serve` before anything else is known, since importing torch takes longest.

The child imports what a worker needs and then waits for its environment, which `serve` sends once the settings are read
and the broker runs. If another kind of worker is needed, this one is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from ...config.process import die_with_parent, directory_of_children, python, started_by, uncollected

WORKER = ("worker", "--id", "w0")
"""Its arguments: of the first worker of a `serve` with a broker of its own."""

_started: AheadWorker | None = None  # set by start_ahead
_FILE = "PENSTOCK_ENVIRONMENT_FD"  # the variable that names the file descriptor from which the child reads
_SAYS_OTHERWISE = ("nats_url", "backend", "models", "workers", "device")  # settings of which the worker may depend


class AheadWorker:
    """The process, with what the supervisor uses of asyncio's own."""

    def __init__(self) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                python("penstock", *WORKER),
                env=os.environ | {_FILE: str(reading)},
                stdin=subprocess.DEVNULL,
                pass_fds=(reading,),
                cwd=directory_of_children(),
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def go(self, environment: Mapping[str, str]) -> None:
        """Let the worker begin. If it is dead by now, `wait` tells."""
        await asyncio.to_thread(self._send, json.dumps(dict(environment)).encode())

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    def end(self) -> None:
        """End a worker that is not needed."""
        os.close(self._pipe)
        self.kill()
        self._process.wait()

    def _send(self, text: bytes) -> None:
        with contextlib.suppress(BrokenPipeError), open(self._pipe, "wb") as pipe:
            pipe.write(text)


def start_ahead(arguments: Sequence[str]) -> None:
    """Start the worker of `penstock` with these arguments, unless it is plain that another one is needed."""
    global _started
    started_by()
    flags = tuple("--" + name.replace("_", "-") for name in _SAYS_OTHERWISE)
    if (
        list(arguments[:1]) == ["serve"]
        and "--help" not in arguments
        and not any(argument.partition("=")[0] in flags for argument in arguments)
        and not any("PENSTOCK_" + name.upper() in os.environ for name in _SAYS_OTHERWISE)
    ):
        with contextlib.suppress(OSError):  # no process can be started here: the supervisor tries too, and says so
            _started = AheadWorker()


def _load_xgrammar() -> None:
    """Import it now, while nothing else runs, so that the first grammar does not import transformers for it, which an
    engine of a plain decoder needs for nothing."""
    from ...engine.grammar.importing import import_alone

    try:
        import_alone()
    except Exception:  # another release of xgrammar needs more of transformers than names: the first grammar imports it
        for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]


def take_ahead() -> AheadWorker | None:
    """The worker that was started ahead; whoever takes it ends it."""
    global _started
    taken, _started = _started, None
    return taken


def await_environment(load: Callable[[], object]) -> None:
    """In a process that was started ahead: `load` the command, torch and xgrammar, and wait for the environment."""
    if (descriptor := os.environ.pop(_FILE, None)) is None:
        return
    from ...engine.cpu.process import prepare_memory

    prepare_memory()
    with uncollected():
        import torch  # noqa: F401

        load()
        _load_xgrammar()
    with open(int(descriptor), "rb") as pipe:
        text = pipe.read()
    if not text:
        os._exit(0)  # whoever started this process needs it no more
    os.environ.clear()
    os.environ.update(json.loads(text))
