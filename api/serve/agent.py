"""The agent of a host: starts and ends the worker processes of the catalogue's models, one for each revision.

What should be is decided by `schemas.placement`, from what the broker knows: the catalogue, the states of the models,
what waits in their lanes, and what their workers hold. Nothing about a model is kept in this process alone: an agent
that dies takes its workers with it, and the next one finds the requests where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import structlog
from pydantic import ValidationError

from ...config.settings import Settings
from ...schemas.catalogue import Catalogue, RevisionKey
from ...schemas.errors import Fatal, StartupError
from ...schemas.model_state import (
    RESIDENT,
    IllegalTransition,
    ModelState,
    RetryRules,
    abandon,
    become_ready,
    enqueue,
    fail,
    report_progress,
    start_draining,
    start_loading,
    touch,
    unload,
)
from ...schemas.placement import (
    Action,
    Demand,
    Drain,
    Enqueue,
    Load,
    PlacementRules,
    Refuse,
    Unload,
    View,
    plan,
)
from ...schemas.registry import LoadProgress, ModelRefusal, WorkerCard
from ...streams.lanes import open_lanes
from ...streams.outages import outage_logged
from ...streams.port import Broker, Message
from ...streams.stores.catalogue import CatalogueStore
from ...streams.stores.registry import Registry
from ...streams.topology import INFER, PRIORITIES, Subjects, batch_stream, lanes_of
from .hosting import Host
from .processes import FATAL_EXIT, Part, ProcessKeeper
from .swapping import Swaps

log = structlog.get_logger(__name__)

PAUSE, IDLE_PAUSE = 0.25, 1.0  # seconds between two plans; while nothing loads, runs or waits
ANNOUNCED = 60.0  # seconds between two announcements of a model; one that nobody announces is forgotten in ten minutes
MOST_DEATHS = 3  # of a model's workers in a row, while they load or soon after, before its requests are refused
USED = 1.0  # seconds; a busy model's last use is noted no more often


@dataclass(slots=True)
class _Hosted:
    """A worker process of ours; setting `ending` ends it, once it has finished what it runs."""

    key: RevisionKey
    worker: str
    percent: int = 0  # of its weights that are loaded
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class ModelAgent:
    """`name` is this agent's alone; `environment` gives a worker process with some settings its variables."""

    def __init__(
        self,
        broker: Broker,
        store: CatalogueStore,
        settings: Settings,
        name: str,
        keeper: ProcessKeeper,
        environment: Callable[[Settings], dict[str, str]],
    ) -> None:
        self._broker = broker
        self._store = store
        self._keeper = keeper
        self._settings = settings
        self._name = name
        self._environment = environment
        self._registry = Registry(broker, interval=settings.heartbeat_interval)
        self._host = Host(settings)
        self._swaps = Swaps(broker, store, self._registry, self._host, settings, name, self._end)
        self._hosted: dict[RevisionKey, _Hosted] = {}
        self._announced: dict[RevisionKey, float] = {}  # loop time
        self._retry = RetryRules()
        self._rules = PlacementRules(settings.least_residency, settings.longest_wait)
        self._due = asyncio.Event()  # a plan: something has changed here
        self._told = 0.0  # loop time at which others last heard of us

    async def run(self, until: asyncio.Event) -> None:
        """Place models until `until` is set, then end the workers."""
        subjects = Subjects(self._settings.namespace)
        await self._broker.listen(subjects.admission(), lambda _: self._due.set())  # something waits, for some model
        await self._broker.listen(subjects.loading(), self._hear)
        try:
            while not until.is_set():
                self._due.clear()
                pause = PAUSE
                with outage_logged("models cannot be placed"):
                    pause = PAUSE if await self._step() else IDLE_PAUSE
                waits = [asyncio.create_task(each.wait()) for each in (until, self._due)]
                await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
        finally:
            self._swaps.close()
            for hosted in self._hosted.values():
                hosted.ending.set()
            await asyncio.gather(*(hosted.task for hosted in self._hosted.values() if hosted.task))

    def _hear(self, message: Message) -> None:
        """Note how far a worker of ours has loaded its model."""
        with contextlib.suppress(ValidationError):  # of another release
            load = LoadProgress.model_validate_json(message.data)
            hosted = self._hosted.get(RevisionKey(load.model, load.revision))
            if hosted is not None and hosted.worker == load.worker:
                hosted.percent = load.percent

    async def _step(self) -> bool:
        """Plan, and do it; returns whether the next plan is due soon."""
        now = time.time()
        await self._tell()
        catalogue = await self._store.read()
        await self._host.examine(catalogue)
        await self._announce(catalogue)
        await self._registry.refresh()
        held = (await self._broker.held(INFER)).by_subject
        at_workers = {subject.rpartition(".")[2]: count for subject, count in held.items()}
        states = await self._watch(await self._store.states(), at_workers, now)
        demand = await self._demand(catalogue, states, at_workers)
        if await self._swaps.step(catalogue, states, demand):
            self._due.set()
            return True
        needs = self._host.needs
        asked = {key: card.keep_alive for key, hosted in self._hosted.items() if (card := self._card_of(hosted))}
        view = View(
            agent=self._name,
            catalogue=catalogue.as_asked(asked),
            states=states,
            demand=demand,
            needs=needs,
            devices=self._host.devices({key: needs[key] for key in self._hosted if key in needs}),
            busy=[key for key, hosted in self._hosted.items() if at_workers.get(hosted.worker)],
        )
        await self._refuse_unusable(demand, now)
        actions = plan(view, self._rules, now)
        for action in actions:
            await self._do(action, now)
        return bool(actions or demand or view.busy or any(state.status == "loading" for state in states.values()))

    async def _tell(self) -> None:
        """Let others know that this agent lives."""
        clock = asyncio.get_running_loop().time()
        if clock - self._told >= self._settings.heartbeat_interval:
            self._told = clock
            await self._registry.announce_agent(self._name)

    async def _announce(self, catalogue: Catalogue) -> None:
        """Let requests come for every model that this host could load, loaded or not."""
        clock = asyncio.get_running_loop().time()
        for entry in catalogue.entries:
            for number in entry.sources:
                key = RevisionKey(entry.name, number)
                if key not in self._host.needs:
                    continue
                known = self._registry.models.get(key.name)
                is_swapped = number == entry.revision and known is not None and known.revision != number
                if clock - self._announced.get(key, -ANNOUNCED) < ANNOUNCED and not is_swapped:
                    continue
                try:
                    await open_lanes(self._broker, self._settings, key.name, key.revision)
                except StartupError as error:
                    if number == entry.candidate:
                        await self._swaps.fail(key, str(error))
                        continue
                    log.error("model cannot be offered", model=key.name, reason=str(error))
                    self._announced[key] = clock
                    continue
                if key not in self._announced:  # what a former agent said of it is out of date
                    await self._registry.refuse_model(key.name, key.revision, None)
                if number == entry.revision:
                    await self._registry.announce_model(self._host.card(key))
                self._announced[key] = clock
        offered = {entry.name for entry in catalogue.entries}
        for card in list(self._registry.models.values()):
            if card.catalogued and card.name not in offered:
                await self._registry.withdraw_model(card)

    async def _watch(
        self, states: Mapping[RevisionKey, ModelState], at_workers: Mapping[str, int], now: float
    ) -> dict[RevisionKey, ModelState]:
        """Bring the states up to date with the workers that live; returns them."""
        found = dict(states)
        agents = self._registry.agents
        for key, state in states.items():
            hosted = self._hosted.get(key)
            is_ours = state.agent == self._name
            if hosted is not None and (not is_ours or state.status not in RESIDENT):  # it is not wanted any more
                hosted.ending.set()
            elif state.status in RESIDENT and (hosted is None if is_ours else state.agent not in agents):
                found[key] = await self._change(key, partial(abandon, now=now)) or state
            elif hosted is None:
                continue
            elif state.status == "draining":
                hosted.ending.set()
            elif state.status == "loading" and (card := self._card_of(hosted)):
                ready = await self._change(key, partial(become_ready, now=now, incarnations=(card.incarnation,)))
                await self._registry.refuse_model(key.name, key.revision, None)
                found[key] = ready or state
            elif state.status == "loading" and hosted.percent > state.progress:
                found[key] = await self._change(key, partial(report_progress, percent=hosted.percent)) or state
            elif state.status == "ready" and at_workers.get(hosted.worker) and now - (state.last_used or 0.0) >= USED:
                found[key] = await self._change(key, partial(touch, now=now)) or state
        return found

    def _card_of(self, hosted: _Hosted) -> WorkerCard | None:
        cards = self._registry.workers_for(*hosted.key)
        return next((card for card in cards if card.id == hosted.worker), None)

    async def _demand(
        self, catalogue: Catalogue, states: Mapping[RevisionKey, ModelState], at_workers: Mapping[str, int]
    ) -> dict[RevisionKey, Demand]:
        """What waits for each revision: in its lanes, and with a worker of it that is gone."""
        demand: dict[RevisionKey, Demand] = {}
        offered = {RevisionKey(entry.name, number) for entry in catalogue.entries for number in entry.sources}
        for token, lanes in self._registry.lanes.items():
            key = RevisionKey(lanes.model, lanes.revision)
            card = self._registry.models.get(lanes.model)
            if key not in offered and (key not in states or (card is not None and not card.catalogued)):
                continue  # workers of their own serve it
            depth = {
                priority: (await self._broker.held(batch_stream(token, priority))).messages for priority in PRIORITIES
            }
            if key not in self._hosted:
                depth["normal"] += at_workers.get(self._worker(key), 0)
            if waiting := sum(depth.values()):
                demand[key] = Demand(waiting, next(priority for priority in PRIORITIES if depth[priority]))
        return demand

    async def _refuse_unusable(self, demand: Mapping[RevisionKey, Demand], now: float) -> None:
        """Refuse what waits for models whose files are not as they should be, and let it be known."""
        for key, reason in self._host.faults.items():
            if key in demand or lanes_of(*key) not in self._registry.refusals:
                await self._registry.refuse_model(key.name, key.revision, ModelRefusal(reason=reason, at=now))

    async def _do(self, action: Action, now: float) -> None:
        key = action.key
        match action:
            case Enqueue():
                await self._change(key, lambda state: enqueue(state, now))
            case Load(device=device):
                if key in self._hosted:  # a former process of it has yet to end
                    return
                if await self._change(key, lambda state: start_loading(state, now, agent=self._name, device=device)):
                    self._start(key)
            case Drain(reason=reason):
                if await self._change(key, lambda state: start_draining(state, now, reason)):
                    log.info("model drains", model=key.name, revision=key.revision, reason=reason)
                    self._hosted[key].ending.set()
            case Unload():
                self._end(key)
                if key not in self._hosted:
                    await self._change(key, lambda state: unload(state, now))
            case Refuse(reason=reason, retry_after=retry_after):
                await self._swaps.fail(key, reason)  # if it is being tried
                refusal = ModelRefusal(reason=reason, at=now, retry_after=retry_after)
                await self._registry.refuse_model(key.name, key.revision, refusal)
                await self._change(key, lambda state: unload(state, now, reason) if state.status == "queued" else state)
        self._due.set()

    def _end(self, key: RevisionKey) -> None:
        if hosted := self._hosted.get(key):
            hosted.ending.set()

    def _worker(self, key: RevisionKey) -> str:
        """The name of the worker of a revision on this host: the same for the next agent of the same name."""
        return f"{self._name}-{lanes_of(*key)}"

    def _start(self, key: RevisionKey) -> None:
        hosted = self._hosted[key] = _Hosted(key, self._worker(key))
        hosted.task = asyncio.create_task(self._run(hosted, self._environment(self._host.settings_of(key))))

    async def _run(self, hosted: _Hosted, environment: dict[str, str]) -> None:
        """Run a worker process to its end, and note that."""
        key = hosted.key
        log.info("model loads", model=key.name, revision=key.revision, worker=hosted.worker)
        part = Part(f"worker {hosted.worker}", ("worker", "--id", hosted.worker, "--revision", str(key.revision)))
        status = await self._keeper.run(part, environment, hosted.ending)
        reason = None if hosted.ending.is_set() else await self._reason(hosted, status)
        if reason is not None:
            self._host.forget(key)  # its files may have changed
        while True:
            with outage_logged("the end of a worker cannot be noted", worker=hosted.worker):
                await self._change(key, partial(self._ended, reason=reason, is_final=status == FATAL_EXIT))
                break
            await asyncio.sleep(PAUSE)
        del self._hosted[key]
        self._due.set()

    def _ended(self, state: ModelState, *, reason: str | None, is_final: bool) -> ModelState:
        """The state after a worker has ended: asked to (no `reason`), by its own decision (`is_final`), or killed."""
        now = time.time()
        if state.agent != self._name or state.status not in RESIDENT:
            return state
        if reason is None or state.status == "draining":
            return unload(state if state.status != "ready" else start_draining(state, now, "its worker ended"), now)
        log.error("model has no worker", model=state.name, revision=state.revision, reason=reason)
        failed = fail(state, now, reason, self._retry)
        if is_final or failed.attempts > MOST_DEATHS:
            return failed
        return failed.model_copy(update={"retry_at": None})  # at once: who waits for it goes on waiting

    async def _reason(self, hosted: _Hosted, status: int) -> str:
        """Why a worker ended without being asked to: its own word, if it left one."""
        with contextlib.suppress(Fatal), outage_logged("a worker's last word cannot be read", worker=hosted.worker):
            if word := await self._registry.last_word(hosted.worker):
                return word
        return f"its worker ended with status {status}"

    async def _change(self, key: RevisionKey, change: Callable[[ModelState], ModelState]) -> ModelState | None:
        """The changed state; None where another process has made the change impossible."""
        try:
            return await self._store.change_state(key, change)
        except IllegalTransition:
            return None
