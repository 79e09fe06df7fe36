"""What befalls the network and the disks of a NATS cluster in `penstock bench chaos`, while all its servers run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ....schemas.errors import StartupError
from ..brokers import Brokers
from ..load import clock
from ..server import START_LIMIT
from .faults import POLL, Strike

KINDS = {
    "partition": "the leader and the others do not hear each other",
    "mute": "the leader is not heard, but hears",
    "deaf": "the leader hears nobody, but is heard",
    "no-quorum": "no server hears another",
    "full-disk": "the last server has no space left (with --small-disk)",
}
_PIECE = 1 << 30  # bytes taken at once; half as many each time that they do not fit
_FILLER = "penstock-chaos-filler"


class Trouble(NamedTuple):
    """One of `KINDS`, for so many seconds."""

    kind: str
    seconds: float


def troubles(text: str) -> list[Trouble]:
    """What `KIND=SECONDS,…` says. Raises `ValueError` with what is wrong."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind, _, seconds = word.partition("=")
        if kind not in KINDS:
            raise ValueError(f"{kind}: no such fault; known: {', '.join(KINDS)}")
        try:
            found.append(Trouble(kind, float(seconds)))
        except ValueError:
            raise ValueError(f"{word}: no number of seconds; write {kind}=SECONDS, such as {kind}=60") from None
        if not 0 < found[-1].seconds < 3600:
            raise ValueError(f"{word}: from 0 to 3,600 seconds")
    return found


class ClusterFaults:
    """Strikes the servers between each other; `leads` is the stream (the server's name) whose leader is struck."""

    def __init__(self, brokers: Brokers, leads: str, disk: str | None, add: Callable[[Strike], None]) -> None:
        self._brokers, self._leads, self._disk, self._add = brokers, leads, disk, add

    def planned(self, found: list[Trouble]) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [partial(self._fill if kind == "full-disk" else self._cut, kind, seconds) for kind, seconds in found]

    async def _cut(self, kind: str, seconds: float) -> None:
        """Hold back what servers say to each other for a while; clients reach all of them."""
        brokers, everybody = self._brokers, range(len(self._brokers.nodes))
        leader = None if kind == "no-quorum" else await self._leader()
        strike = Strike(kind, "brokers" if leader is None else f"broker {leader}", clock())
        self._add(strike)
        for node in everybody if leader is None else [leader]:
            brokers.hold(node, sent=kind != "deaf", received=kind != "mute")
        try:
            await asyncio.sleep(seconds)
        finally:
            brokers.release()
        await self._recover(strike)

    async def _fill(self, kind: str, seconds: float) -> None:
        """Leave a server no byte of disk for a while; then start it again, as an operator would."""
        assert self._disk is not None  # as the command has checked
        node = len(self._brokers.nodes) - 1
        filler = Path(self._disk) / _FILLER
        strike = Strike(kind, f"broker {node}", clock())
        self._add(strike)
        try:
            until = clock() + seconds
            with filler.open("wb") as file:
                while clock() < until:
                    await asyncio.to_thread(_take_all, file.fileno())  # again, as the server also gives space up
                    await asyncio.sleep(POLL)
        finally:
            filler.unlink(missing_ok=True)
        await self._brokers.replace(node)
        await self._recover(strike)

    async def _leader(self) -> int:
        while (leader := await self._brokers.leader_of(self._leads)) is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL)
        return leader

    async def _recover(self, strike: Strike) -> None:
        with contextlib.suppress(StartupError, TimeoutError):  # it stays without an end, which the table shows
            async with asyncio.timeout(START_LIMIT):
                await self._brokers.whole()
            strike.away = clock() - strike.at


def _take_all(file: int) -> None:
    """Allocate what the file system has left."""
    piece = _PIECE
    while piece:
        try:
            os.posix_fallocate(file, os.fstat(file).st_size, piece)
        except OSError:
            piece //= 2
