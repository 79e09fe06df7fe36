"""The state of the whole deployment as one JSON document, made anew twice a second while somebody watches.

Every source is one that exists for others, too: the registry, the streams' own counts, the workers' reports of their
room, the metrics, the states of the models, the events of the requests, and the dead letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence

from pydantic import ValidationError

from ....schemas.registry import Room
from ....schemas.wire.merge_patch import Document
from ....streams.outages import outage_logged
from ....streams.port import DEAD_SUBJECT, Message, Usage
from ....streams.stores.dead_letters import DeadLetters, summary
from ....streams.topology import DEAD, EVENTS, INFER, PRIORITIES, lane_stream, stage_stream
from ..metrics import MetricsRoutes, Snapshot
from ..requests import Gateway
from .figures import Figures
from .requests import RequestBoard

TICK = 0.5  # seconds between two documents
LOOK = 1.0  # seconds between two questions to the broker
WINDOW = 5.0  # seconds over which the rates of the stages are measured
MOST_LETTERS = 100  # the newest ones


class Overview:
    """Watches the deployment while there is an iterator of `watch`; all of them share one `Watch`."""

    def __init__(self, gateway: Gateway, metrics: MetricsRoutes, version: str) -> None:
        self._gateway, self._metrics, self._version = gateway, metrics, version
        self._watch: Watch | None = None
        self._watchers = 0

    async def watch(self) -> AsyncGenerator[Document]:
        """The document, and each new one; a slow reader misses some."""
        self._watchers += 1
        if self._watch is None:
            self._watch = Watch(self._gateway, self._metrics, self._version)
        watch = self._watch
        try:
            seen: Document = {}
            while True:
                seen = await watch.next(seen)
                yield seen
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watch = None
                watch.stop()


class Watch:
    """Makes the documents from its first moment on until `stop`."""

    def __init__(self, gateway: Gateway, metrics: MetricsRoutes, version: str) -> None:
        self._gateway, self._metrics, self._version = gateway, metrics, version
        self._board = RequestBoard(gateway.broker, gateway.bridge.subjects)
        self._figures = Figures()
        self._rooms: dict[str, Room] = {}  # by worker
        self._used: deque[tuple[float, dict[str, Usage]]] = deque()  # by stream, with when that was
        self._letters: dict[str, Document] = {}
        self._letters_seen: tuple[int, int] | None = None  # how many there were, and the newest number
        self._document: Document = {}
        self._changed = asyncio.Event()
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(lambda _: self._changed.set())

    def stop(self) -> None:
        self._running.cancel()

    async def next(self, seen: Document) -> Document:
        """The newest document, once that is another one than `seen`."""
        while self._document is seen or not self._document:
            if self._running.done():
                self._running.result()
            await self._changed.wait()
        return self._document

    async def _run(self) -> None:
        while True:
            with outage_logged("the broker is away, the page waits"):
                await self._follow()
            self._tell({"server": self._server()})
            await asyncio.sleep(TICK)

    async def _follow(self) -> None:
        """Watch until the broker is away, or has been: some events were missed. Raises `BrokerUnavailable`."""
        broker, subjects = self._gateway.broker, self._gateway.bridge.subjects
        async with self._board.following(), contextlib.AsyncExitStack() as ending:
            ending.push_async_callback((await broker.listen(subjects.room_all(), self._hear_room)).close)
            letters = await DeadLetters.of(broker, subjects)
            looked, outages = float("-inf"), broker.outages
            while broker.outages == outages:
                if (now := time.monotonic()) - looked >= LOOK:
                    looked = now
                    await self._metrics.deployment.look()
                    await self._look_at_letters(letters)
                    self._used.append((now, {used.name: used for used in self._metrics.deployment.used}))
                    while len(self._used) > 2 and now - self._used[1][0] >= WINDOW:
                        self._used.popleft()
                    families = await asyncio.to_thread(lambda: list(self._metrics.whole.collect()))
                    self._figures.add(now, Snapshot(families))
                self._tell(self._whole())
                await asyncio.sleep(TICK)

    def _tell(self, document: Document) -> None:
        self._document = document
        self._changed.set()
        self._changed = asyncio.Event()

    def _hear_room(self, message: Message) -> None:
        with contextlib.suppress(ValidationError):  # of another release
            room = Room.model_validate_json(message.data)
            self._rooms[room.worker] = room

    async def _look_at_letters(self, letters: DeadLetters) -> None:
        used = next((used for used in self._metrics.deployment.used if used.name == DEAD), None)
        if used is None or self._letters_seen == (used.messages, used.last):
            return
        found = await letters.all(max(0, used.last - MOST_LETTERS))
        self._letters = {str(letter.sequence): _letter(letter) for letter in found}
        self._letters_seen = used.messages, used.last

    def _whole(self) -> Document:
        return {
            "server": self._server(),
            "pipeline": self._pipeline(),
            "requests": self._board.shown(),
            "counts": dict(self._board.counts()),
            "models": {model["id"]: _known(model) for model in self._metrics.deployment.models},
            "workers": self._workers(),
            "letters": self._letters,
            "figures": self._figures.shown,
        }

    def _server(self) -> Document:
        settings = self._gateway.settings
        return {
            "version": self._version,
            "now": round(time.time(), 2),
            "connected": self._gateway.broker.connected,
            "draining": self._gateway.bridge.draining,
            "show_prompts": settings.show_prompts,
            "loads_models": bool(self._gateway.registry.agents),
        }

    def _pipeline(self) -> dict[str, Document]:
        """By stage: its live copies, the messages that wait for it, and how many come a second."""
        registry, settings = self._gateway.registry, self._gateway.settings
        copies = Counter(card.stage for card in registry.stages)
        copies["infer"] = len(registry.workers)
        found: dict[str, Document] = {}
        for index, stage in enumerate((*settings.pipeline, "tools")):
            streams = self._streams_of(stage)
            waiting = sum(used.messages for used in self._latest(streams))
            found[stage] = {"index": index, "copies": copies[stage], "rate": self._rate(streams)}
            if stage == "infer":
                found[stage] |= {"waiting": 0, "active": waiting}  # a message stays until its request has ended
            elif stage in settings.filters:
                found[stage] |= {"copies": copies["stream"], "rate": self._rate([EVENTS])}
            elif stage == "stream":
                found[stage] |= {"rate": self._rate([EVENTS])}
            else:
                found[stage]["waiting"] = waiting
        return found

    def _streams_of(self, stage: str) -> list[str]:
        """The streams from which a stage takes its work."""
        registry, job_stages = self._gateway.registry, self._gateway.settings.job_stages
        match stage:
            case "infer":
                return [INFER]
            case "batch":
                names = [f"BATCH_{lanes.upper()}" for lanes in registry.lanes]
            case "validate":
                names = ["JOBS"]
            case "tools":
                names = ["TOOLS"]
            case _:
                names = [stage_stream(stage)] if stage in job_stages else []
        return [lane_stream(name, priority) for name in names for priority in PRIORITIES]

    def _latest(self, streams: Sequence[str]) -> list[Usage]:
        latest = self._used[-1][1] if self._used else {}
        return [latest[name] for name in streams if name in latest]

    def _rate(self, streams: Sequence[str]) -> float:
        """Messages a second that these streams got over the newest `WINDOW` seconds."""
        if not self._used:
            return 0.0
        (since, before), (now, _) = self._used[0], self._used[-1]
        came = sum(used.last - before[used.name].last for used in self._latest(streams) if used.name in before)
        return round(came / (now - since), 1) if now > since else 0.0

    def _workers(self) -> dict[str, Document]:
        registry = self._gateway.registry
        found: dict[str, Document] = {}
        for card in registry.workers:
            state = "leaving" if card.id in registry.leaving else "live"
            found[card.id] = {
                "state": state,
                "model": card.model.name,
                "revision": card.model.revision,
                "capacity": card.capacity,
                "host": card.host.partition("/")[0],
                "pid": card.pid,
                "slow_paths": list(card.slow_paths),
            }
            if (room := self._rooms.get(card.id)) is not None and room.incarnation == card.incarnation:
                found[card.id] |= {"active": room.active}  # as of its last report, which is not after every change
            found[card.id] |= self._figures.of_worker(card.id)
        for id, card in registry.ended.items():
            found[id] = {"state": "dead", "model": card.model.name, "host": card.host.partition("/")[0]}
            found[id] |= {"pid": card.pid, "capacity": card.capacity, "revision": card.model.revision}
        return found


def _letter(letter: Message) -> Document:
    return summary(letter) | {"subject": letter.headers.get(DEAD_SUBJECT, "")}


def _known(values: Document) -> Document:
    return {name: value for name, value in values.items() if value is not None}
