"""What `penstock serve` runs, as parts of their own at a guarded NATS server, each with the user of its role."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from guarded import DENIED, GuardedServer
from serving import Process, Served

from penstock.streams.nats.broker import JetStreamBroker

STAGES = ("validate", "queue", "batch", "stream", "tools")
OF_MODELS = ("--models", "--model-dir")


class _Background:
    """An event loop in a thread of its own, for a server that outlives single tests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, directory: Path) -> GuardedServer:
        return asyncio.run_coroutine_threadsafe(GuardedServer.start(directory), self._loop).result()

    def stop(self, server: GuardedServer) -> None:
        asyncio.run_coroutine_threadsafe(server.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class GuardedParts(Served):
    """`process` is the agent, where models are offered, or the worker."""

    supervised = False

    def __init__(self, process: Process, state_dir: Path, url: str, server: GuardedServer) -> None:
        self.process, self.state_dir, self.url = process, state_dir, url
        self._server = server

    async def broker(self) -> JetStreamBroker:
        return await self._server.broker()


@contextlib.contextmanager
def guarded_parts(state_dir: Path, *arguments: str) -> Iterator[Served]:
    """All parts with the arguments of a `penstock serve`. Fails at the end if one of them was denied anything."""
    background = _Background()
    server = background.start(state_dir / "guarded")
    parts: list[Process] = []

    def start(*words: str) -> Process:
        environment = server.of_command(*words) | {"PENSTOCK_STATE_DIR": str(state_dir)}
        parts.append(Process(*words, environment=environment))
        return parts[-1]

    model, settings = (arguments[:1], arguments[1:]) if not arguments[0].startswith("-") else ((), arguments)
    is_offered = any(word in OF_MODELS for word in settings)
    shared = _without(settings, OF_MODELS)
    try:
        # An agent creates the lanes of its models itself.
        setup = start("nats", "setup", *model, *shared, "--apply")
        assert setup.wait() == 0, setup.output
        running = [start("stage", stage, *shared) for stage in STAGES]
        worker = start("agent", *settings) if is_offered else start("worker", *model, *settings)
        bridge = start("bridge", "--port", "0", *shared)
        for part in running:
            part.wait_for(r"running.*stages=")
        worker.wait_for("agent runs" if is_offered else "worker ready")
        yield GuardedParts(worker, state_dir, bridge.wait_for(r"penstock ready (http://\S+)")[1], server)
    finally:
        for part in reversed(parts):
            part.end()
        background.stop(server)
    denied = [line for part in parts for line in part.lines if DENIED.search(line)]
    assert not denied, "\n".join(denied)


def _without(settings: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The settings but for these flags, each with its value."""
    left = list(settings)
    for flag in flags:
        while flag in left:
            at = left.index(flag)
            del left[at : at + 2]
    return left
