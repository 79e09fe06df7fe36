"""The worker processes of an agent: one for each replica that this host holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import structlog
from pydantic import ValidationError

from ...schemas.errors import Fatal
from ...schemas.models.catalogue import RevisionKey
from ...schemas.models.model_state import (
    RESIDENT,
    IllegalTransition,
    ModelState,
    RetryRules,
    abandon,
    fail,
    start_draining,
    unload,
)
from ...schemas.registry import LoadProgress, WorkerCard
from ...streams.outages import outage_logged
from ...streams.port import Message
from ...streams.stores.catalogue import CatalogueStore
from ...streams.stores.registry import Registry
from ...streams.topology import lanes_of
from .processes import FATAL_EXIT, Ending, Part, ProcessKeeper

log = structlog.get_logger(__name__)

PAUSE = 0.25  # seconds until the end of a worker is noted again, where the broker is away
MOST_DEATHS = 3  # of a replica's workers in a row, while they load or soon after, before its requests are refused


@dataclass(slots=True)
class HostedWorker:
    """A worker process of ours; setting `ending` ends it, once it has finished what it runs."""

    key: RevisionKey
    worker: str
    device: str
    percent: int = 0  # of its weights that are loaded
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class HostedWorkers:
    """`agent` is the name of ours. `ended` is called with a replica after each end: without a reason if it was asked
    for."""

    def __init__(
        self,
        store: CatalogueStore,
        registry: Registry,
        keeper: ProcessKeeper,
        agent: str,
        ended: Callable[[RevisionKey, str | None], None],
    ) -> None:
        self._store = store
        self._registry = registry
        self._keeper = keeper
        self._agent = agent
        self._noted = ended
        self._hosted: dict[RevisionKey, HostedWorker] = {}
        self._retry = RetryRules()
        self._closing = False  # set by close

    def __getitem__(self, key: RevisionKey) -> HostedWorker | None:
        return self._hosted.get(key)

    def __iter__(self) -> Iterator[HostedWorker]:
        return iter(list(self._hosted.values()))

    def name(self, key: RevisionKey) -> str:
        """The name of the worker of a replica on this host: the same for the next agent of the same name."""
        replica = f"-{key.replica}" if key.replica else ""
        return f"{self._agent}-{lanes_of(key.name, key.revision)}{replica}"

    def card(self, hosted: HostedWorker) -> WorkerCard | None:
        cards = self._registry.workers_for(hosted.key.name, hosted.key.revision)
        return next((card for card in cards if card.id == hosted.worker), None)

    def keep_alive(self) -> dict[RevisionKey, float]:
        """How long models are to stay, as their last requests have asked: negative for ever. Of several replicas, that
        counts which was asked to stay longest."""
        asked: dict[RevisionKey, float] = {}
        for hosted in self:
            if (card := self.card(hosted)) is not None and (own := card.keep_alive) is not None:
                other = asked.get(hosted.key.first, own)
                asked[hosted.key.first] = min(own, other) if min(own, other) < 0 else max(own, other)
        return asked

    def hear(self, message: Message) -> None:
        """Note how far a worker of ours has loaded its model."""
        with contextlib.suppress(ValidationError):  # of another release
            load = LoadProgress.model_validate_json(message.data)
            for hosted in self:
                if hosted.worker == load.worker:
                    hosted.percent = load.percent

    def start(self, key: RevisionKey, device: str, environment: dict[str, str]) -> None:
        hosted = self._hosted[key] = HostedWorker(key, self.name(key), device)
        hosted.task = asyncio.create_task(self._run(hosted, environment))

    def end(self, key: RevisionKey) -> None:
        """End a worker, if there is one."""
        if hosted := self._hosted.get(key):
            hosted.ending.set()

    async def close(self) -> None:
        self._closing = True
        for hosted in self:
            hosted.ending.set()
        await asyncio.gather(*(hosted.task for hosted in self if hosted.task))

    async def _run(self, hosted: HostedWorker, environment: dict[str, str]) -> None:
        """Run a worker process to its end, and note that."""
        key = hosted.key
        log.info("model loads", model=key.name, revision=key.revision, worker=hosted.worker, device=hosted.device)
        part = Part(f"worker {hosted.worker}", ("worker", "--id", hosted.worker, "--revision", str(key.revision)))
        ending = await self._keeper.run(part, environment, hosted.ending)
        reason = None if hosted.ending.is_set() else await self._reason(hosted, ending)
        while True:
            with outage_logged("the end of a worker cannot be noted", worker=hosted.worker):
                with contextlib.suppress(IllegalTransition):
                    change = partial(self._ended, reason=reason, is_final=ending.status == FATAL_EXIT)
                    await self._store.change_state(key, change)
                break
            if self._closing:  # the broker may never return, and the next agent finds that this one is gone
                break
            await asyncio.sleep(PAUSE)
        del self._hosted[key]
        self._noted(key, reason)

    def _ended(self, state: ModelState, *, reason: str | None, is_final: bool) -> ModelState:
        """The state after a worker has ended: asked to (no `reason`), by its own decision (`is_final`), or killed."""
        now = self._store.now()
        if state.agent != self._agent or state.status not in RESIDENT:
            return state
        if reason is None and self._closing and state.status != "draining":
            return abandon(state, now)
        if reason is None or state.status == "draining":
            return unload(state if state.status != "ready" else start_draining(state, now, "its worker ended"), now)
        log.error("model has no worker", model=state.name, revision=state.revision, reason=reason)
        failed = fail(state, now, reason, self._retry)
        if is_final or failed.attempts > MOST_DEATHS:
            return failed
        return failed.model_copy(update={"retry_at": None})  # at once: who waits for it goes on waiting

    async def _reason(self, hosted: HostedWorker, ending: Ending) -> str:
        """Why a worker ended without being asked to: its own word, if it left one."""
        with contextlib.suppress(Fatal), outage_logged("a worker's last word cannot be read", worker=hosted.worker):
            if word := await self._registry.last_word(hosted.worker):
                return word
        return f"its worker {ending.text}"
