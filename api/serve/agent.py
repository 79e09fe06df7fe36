"""The agent of a host: starts and ends the worker processes of the catalogue's models, one for each replica.

`schemas.models.planner` decides what should be, from what the broker knows: the catalogue, the states of the models,
what waits in their lanes, and what their workers hold. Nothing about a model is kept in this process alone: an agent
that dies takes its workers with it, and the next one finds the requests where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil

import structlog
from pydantic import ValidationError

from ...config.settings import Settings
from ...schemas.errors import StartupError
from ...schemas.models.catalogue import Catalogue, RevisionKey
from ...schemas.models.model_state import (
    RESIDENT,
    IllegalTransition,
    ModelState,
    abandon,
    become_ready,
    enqueue,
    report_progress,
    start_draining,
    start_loading,
    touch,
    unload,
)
from ...schemas.models.placement import Action, Demand, Drain, Enqueue, Load, PlacementRules, Refuse, Unload, View
from ...schemas.models.planner import plan
from ...schemas.registry import Admission, AgentCard, ModelRefusal
from ...streams.lanes import open_lanes, waiting_in_lanes
from ...streams.outages import outage_logged
from ...streams.port import Broker, Message
from ...streams.stores.catalogue import CatalogueStore
from ...streams.stores.registry import Registry
from ...streams.topology import INFER, PRIORITIES, Subjects, lanes_of
from .hosting import Host
from .processes import ProcessKeeper
from .swapping import Swaps
from .workers import HostedWorkers

log = structlog.get_logger(__name__)

PAUSE, IDLE_PAUSE = 0.25, 1.0  # seconds between two plans, at most a heartbeat; while nothing loads, runs or waits
ANNOUNCED = 60.0  # seconds between two announcements of a model; one that nobody announces is forgotten in ten minutes
EVERYWHERE = 8  # plans for each that looks at all lanes; the others look where something waits
USED = 1.0  # seconds; a busy model's last use is noted no more often


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
        self._settings = settings
        self._name = name
        self._environment = environment
        self._registry = Registry(broker, interval=settings.heartbeat_interval)
        self._host = Host(settings)
        self._workers = HostedWorkers(store, self._registry, keeper, name, self._ended)
        self._swaps = Swaps(
            broker, store, self._registry, self._host, settings, name, self._workers.end, self._may_go_elsewhere
        )
        self._catalogue = Catalogue()  # set by _step
        self._announced: dict[RevisionKey, float] = {}  # loop time
        self._rules = PlacementRules(settings.least_residency, settings.longest_wait)
        self._due = asyncio.Event()  # a plan: something has changed here
        self._crowded: set[str] = set()  # lanes in which something may wait
        self._plans = 0
        self._unfit: frozenset[str] = frozenset()  # the lanes of revisions that this host cannot hold
        self._told = AgentCard()  # what others heard of us last, and the loop time when they did
        self._told_at = 0.0

    async def run(self, until: asyncio.Event) -> None:
        """Place models until `until` is set, then end the workers."""
        subjects = Subjects(self._settings.namespace)
        await self._broker.listen(subjects.admission(), self._hear)
        await self._broker.listen(subjects.loading(), self._workers.hear)
        try:
            while not until.is_set():
                self._due.clear()
                pause = PAUSE
                with outage_logged("models cannot be placed"):
                    pause = PAUSE if await self._step() else IDLE_PAUSE
                pause = min(pause, self._settings.heartbeat_interval)
                waits = [asyncio.create_task(each.wait()) for each in (until, self._due)]
                await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
        finally:
            self._swaps.close()
            await self._workers.close()
            with outage_logged("an agent that ends cannot be withdrawn"):
                await self._registry.withdraw_agent(self._name)

    def _hear(self, message: Message) -> None:
        """Note that something waits for a model."""
        with contextlib.suppress(ValidationError):  # of another release
            admission = Admission.model_validate_json(message.data)
            if any(admission.depth.values()):
                self._crowded.add(lanes_of(admission.model, admission.revision))
                self._due.set()

    async def _step(self) -> bool:
        """Plan, and do it; returns whether the next plan is due soon."""
        now = self._broker.now()
        await self._tell()
        catalogue = self._catalogue = await self._store.read()
        await self._host.examine(catalogue, {hosted.key.first for hosted in self._workers})
        await self._announce(catalogue)
        await self._registry.refresh()
        held = (await self._broker.held(INFER)).by_subject
        at_workers = {subject.rpartition(".")[2]: count for subject, count in held.items()}
        states = await self._watch(await self._store.states(), at_workers, now)
        demand = await self._demand(catalogue, states, at_workers)
        if await self._swaps.step(catalogue, states, demand):
            self._due.set()
            return True
        view = View(
            agent=self._name,
            catalogue=catalogue.as_asked(self._workers.keep_alive()),
            states=states,
            demand=demand,
            needs=self._host.needs,
            devices=self._host.devices((hosted.key, hosted.device) for hosted in self._workers),
            busy=[hosted.key for hosted in self._workers if at_workers.get(hosted.worker)],
            has_peers=bool(self._peers),
        )
        actions = plan(view, self._rules, now)
        refused = [action.key for action in actions if isinstance(action, Refuse) and action.elsewhere]
        self._unfit = frozenset(lanes_of(key.name, key.revision) for key in (*self._host.faults, *refused))
        await self._tell()
        await self._refuse_unusable(demand, now)
        for action in actions:
            await self._do(action, now)
        return bool(actions or demand or view.busy or any(state.status == "loading" for state in states.values()))

    async def _tell(self) -> None:
        """Let others know that this agent lives, and at once what it cannot hold."""
        clock, card = asyncio.get_running_loop().time(), AgentCard(unfit=tuple(sorted(self._unfit)))
        if clock - self._told_at >= self._settings.heartbeat_interval or card != self._told:
            self._told_at, self._told = clock, card
            await self._registry.announce_agent(self._name, card)

    @property
    def _peers(self) -> dict[str, AgentCard]:
        """The agents of other hosts."""
        return {name: card for name, card in self._registry.agents.items() if name != self._name}

    def _may_go_elsewhere(self, key: RevisionKey) -> bool:
        """Whether another host could hold a revision that this one cannot."""
        token = lanes_of(key.name, key.revision)
        return any(card.unfit is not None and token not in card.unfit for card in self._peers.values())

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
            hosted = self._workers[key]
            is_ours = state.agent == self._name
            if hosted is not None and (not is_ours or state.status not in RESIDENT):  # it is not wanted any more
                hosted.ending.set()
            elif state.status in RESIDENT and (hosted is None if is_ours else state.agent not in agents):
                found[key] = await self._change(key, partial(abandon, now=now)) or state
            elif hosted is None:
                continue
            elif state.status == "draining":
                hosted.ending.set()
            elif state.status == "loading" and (card := self._workers.card(hosted)):
                ready = await self._change(key, partial(become_ready, now=now, incarnations=(card.incarnation,)))
                await self._registry.refuse_model(key.name, key.revision, None)
                found[key] = ready or state
            elif state.status == "loading" and hosted.percent > state.progress:
                found[key] = await self._change(key, partial(report_progress, percent=hosted.percent)) or state
            elif state.status == "ready" and at_workers.get(hosted.worker) and now - (state.last_used or 0.0) >= USED:
                found[key] = await self._change(key, partial(touch, now=now)) or state
        return found

    async def _demand(
        self, catalogue: Catalogue, states: Mapping[RevisionKey, ModelState], at_workers: Mapping[str, int]
    ) -> dict[RevisionKey, Demand]:
        """What waits for each revision: in its lanes, and with a worker of it that is gone."""
        demand: dict[RevisionKey, Demand] = {}
        left: dict[RevisionKey, int] = {}  # with workers that this host had, by revision
        for key in states:
            if self._workers[key] is None and (count := at_workers.get(self._workers.name(key))):
                left[key.first] = left.get(key.first, 0) + count
        offered = {RevisionKey(entry.name, number) for entry in catalogue.entries for number in entry.sources}
        is_everywhere, self._plans = self._plans % EVERYWHERE == 0, self._plans + 1
        for token, lanes in self._registry.lanes.items():
            key = RevisionKey(lanes.model, lanes.revision)
            if not (token in self._crowded or key in left or is_everywhere):
                continue
            if key not in offered and not self._registry.was_offered(catalogue, key):
                continue
            depth = await waiting_in_lanes(self._broker, token)
            depth["normal"] += left.get(key, 0)
            self._crowded.discard(token)
            if waiting := sum(depth.values()):
                self._crowded.add(token)
                demand[key] = Demand(waiting, next(priority for priority in PRIORITIES if depth[priority]))
        return demand

    async def _refuse_unusable(self, demand: Mapping[RevisionKey, Demand], now: float) -> None:
        """Refuse what waits for models whose files are not as they should be, and let it be known."""
        for key, reason in self._host.faults.items():
            if self._may_go_elsewhere(key):
                continue
            if key in demand or lanes_of(key.name, key.revision) not in self._registry.refusals:
                await self._registry.refuse_model(key.name, key.revision, ModelRefusal(reason=reason, at=now))

    async def _do(self, action: Action, now: float) -> None:
        key = action.key
        match action:
            case Enqueue():
                await self._change(key, lambda state: enqueue(state, now))
            case Load(device=device):
                if self._workers[key] is not None:  # a former process of it has yet to end
                    return
                if await self._change(key, lambda state: start_loading(state, now, agent=self._name, device=device)):
                    self._start(key, device)
            case Drain(reason=reason):
                if await self._change(key, lambda state: start_draining(state, now, reason)):
                    log.info("model drains", model=key.name, revision=key.revision, reason=reason)
                    self._workers.end(key)
            case Unload():
                self._workers.end(key)
                if self._workers[key] is None:
                    await self._change(key, lambda state: unload(state, now))
            case Refuse(reason=reason, retry_after=retry_after, elsewhere=elsewhere):
                if elsewhere and self._may_go_elsewhere(key):
                    return
                await self._swaps.fail(key, reason)  # if it is being tried
                refusal = ModelRefusal(reason=reason, at=now, retry_after=retry_after)
                await self._registry.refuse_model(key.name, key.revision, refusal)
                await self._change(key, lambda state: unload(state, now, reason) if state.status == "queued" else state)
        self._due.set()

    def _start(self, key: RevisionKey, device: str) -> None:
        """Start a worker; replicas on the same CPU share its cores."""
        replicas = self._catalogue.find(key.name).num_replicas
        sharing = ceil(replicas / (1 + len(self._peers))) if device == "cpu" else 1
        self._workers.start(key, device, self._environment(self._host.settings_of(key.first, device, sharing)))

    def _ended(self, key: RevisionKey, reason: str | None) -> None:
        if reason is not None:
            self._host.forget(key.first)  # its files may have changed
        self._due.set()

    async def _change(self, key: RevisionKey, change: Callable[[ModelState], ModelState]) -> ModelState | None:
        """The changed state; None where another process has made the change impossible."""
        try:
            return await self._store.change_state(key, change)
        except IllegalTransition:
            return None
