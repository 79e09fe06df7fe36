"""Swaps: how an agent replaces a model by another revision while it serves, and how revisions end.

The catalogue names the new revision as a candidate. The planner has it loaded beside the old one; then it must answer a
probe. If it does, it becomes the current one: requests that are validated from then on are bound to it, and the old one
finishes its own. If it does not, it leaves the catalogue with the reason. All that is in the broker, so that the next
agent continues where one has died.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial

import structlog

from ...config.settings import Settings
from ...schemas.errors import ModelNotFound
from ...schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey
from ...schemas.models.model_state import RESIDENT, IllegalTransition, ModelState, enqueue, touch
from ...schemas.models.placement import displacing
from ...schemas.registry import ModelLanes
from ...streams.lanes import remove_lanes, waiting_in_lanes
from ...streams.port import Broker
from ...streams.stores.catalogue import CatalogueStore
from ...streams.stores.registry import Registry
from ...streams.topology import PRIORITIES, lane_stream, lanes_of, stage_stream
from .hosting import Host
from .probing import probe

log = structlog.get_logger(__name__)

LEFT = 30.0  # seconds for which nothing has come for a former revision, before it goes with its lanes


class Swaps:
    """`name` is the agent's; `end` ends the worker of a revision, if it has one. `may_go_elsewhere`: another host could
    load what this one cannot."""

    def __init__(
        self,
        broker: Broker,
        store: CatalogueStore,
        registry: Registry,
        host: Host,
        settings: Settings,
        name: str,
        end: Callable[[RevisionKey], None],
        may_go_elsewhere: Callable[[RevisionKey], bool],
    ) -> None:
        self._broker = broker
        self._store = store
        self._registry = registry
        self._host = host
        self._settings = settings
        self._name = name
        self._end = end
        self._may_go_elsewhere = may_go_elsewhere
        self._probes: dict[RevisionKey, asyncio.Task[str | None]] = {}
        self._left: dict[RevisionKey, float] = {}  # loop time since when nothing comes for those that may go

    async def step(
        self, catalogue: Catalogue, states: Mapping[RevisionKey, ModelState], demand: Collection[RevisionKey]
    ) -> bool:
        """Do what is due; returns whether that changed anything. `demand` are the revisions that requests wait for."""
        tried = {
            RevisionKey(entry.name, entry.candidate): entry
            for entry in catalogue.entries
            if entry.candidate is not None
        }
        for key in self._probes.keys() - tried.keys():
            self._probes.pop(key).cancel()
        changed = False
        for key, entry in tried.items():
            state = states.get(key) or ModelState(name=key.name, revision=key.revision)
            if reason := self._fault(key, state):
                changed |= await self.fail(key, reason)
            elif state.status == "ready" and state.agent == self._name:
                changed |= await self._try(key, entry)
        return await self._clear(catalogue, states, demand) or changed

    async def fail(self, key: RevisionKey, reason: str) -> bool:
        """End a swap; the former revision serves on, and is loaded again if it had to make room.

        Returns False if `key` is not a candidate any more.
        """
        if (running := self._probes.pop(key, None)) is not None:
            running.cancel()

        def failed(catalogue: Catalogue) -> Catalogue:
            if catalogue.find(key.name).candidate != key.revision:
                raise ValueError(f"revision {key.revision} of {key.name} is not being tried")
            return catalogue.retire(key, reason)

        if not await self._change(failed):
            return False
        self._end(key)  # it has nothing but the probe
        log.error("swap failed", model=key.name, revision=key.revision, reason=reason)
        with contextlib.suppress(ModelNotFound):
            entry = (await self._store.read()).find(key.name)
            await self._store.change_state(RevisionKey(entry.name, entry.revision), self._restored)
        return True

    def close(self) -> None:
        for running in self._probes.values():
            running.cancel()

    def _fault(self, key: RevisionKey, state: ModelState) -> str | None:
        """Why a candidate will never be ready, as far as this host knows."""
        if state.status == "failed":
            return f"it could not be loaded: {state.reason}"
        if state.status in RESIDENT or self._may_go_elsewhere(key):
            return None
        return self._host.faults.get(key)

    async def _try(self, key: RevisionKey, entry: CatalogueEntry) -> bool:
        """Have a candidate that is loaded answer a probe, and then make it the current revision."""
        if key not in self._probes:
            log.info("model is probed", model=key.name, revision=key.revision)
            card = self._host.card(key)
            served = self._registry.models.get(key.name, card)  # with the adapters that were added to it
            self._probes[key] = asyncio.create_task(probe(self._broker, self._settings, card, served.adapters))
        running = self._probes[key]
        if not running.done():
            return False
        if (error := running.exception()) is not None:
            return await self.fail(key, f"it could not be probed: {error}")
        if (reason := running.result()) is not None:
            return await self.fail(key, reason)
        with contextlib.suppress(IllegalTransition):  # it is not loaded
            former = RevisionKey(entry.name, entry.revision)
            await self._store.change_state(former, partial(touch, now=self._store.now()))  # it stays a little longer
        if not await self._change(lambda catalogue: catalogue.promote(key)):
            return False
        log.info("model swapped", model=key.name, revision=key.revision, source=entry.sources[key.revision])
        return True

    async def _clear(
        self, catalogue: Catalogue, states: Mapping[RevisionKey, ModelState], demand: Collection[RevisionKey]
    ) -> bool:
        """Drop former and removed revisions, and failed candidates, for which nothing has come for a while."""
        former = {
            RevisionKey(entry.name, number)
            for entry in catalogue.entries
            for number in entry.sources
            if number < entry.revision
        }
        live = {RevisionKey(entry.name, number) for entry in catalogue.entries for number in entry.sources}
        lanes = {RevisionKey(each.model, each.revision) for each in self._registry.lanes.values()}
        never_loaded = {key for key in lanes - live if self._registry.was_offered(catalogue, key)}
        gone = ({key.first for key in states} - live) | never_loaded
        loaded = {key.first for key, state in states.items() if state.status in ("queued", *RESIDENT)}
        may_go = (former | gone) - loaded - {*demand}
        for key in self._left.keys() - may_go:
            del self._left[key]
        clock = asyncio.get_running_loop().time()
        due = [key for key in may_go if clock - self._left.setdefault(key, clock) >= LEFT]
        if not due or await self._are_on_the_way():
            return False
        for key in due:
            if any((await waiting_in_lanes(self._broker, lanes_of(key.name, key.revision))).values()):
                continue
            if key in former and not await self._change(partial(Catalogue.retire, key=key)):
                continue
            await remove_lanes(self._broker, ModelLanes(model=key.name, revision=key.revision))
            await self._registry.refuse_model(key.name, key.revision, None)
            for replica in {key, *(each for each in states if each.first == key)}:
                await self._store.forget(replica)
            log.info("revision dropped", model=key.name, revision=key.revision)
        return True

    async def _are_on_the_way(self) -> bool:
        """Whether requests that are bound to a revision have yet to reach their lanes."""
        streams = [lane_stream(stage_stream(stage), lane) for stage in self._settings.job_stages for lane in PRIORITIES]
        return any([(await self._broker.held(stream)).messages for stream in streams])

    async def _change(self, update: Callable[[Catalogue], Catalogue]) -> bool:
        """Change the catalogue; returns False if that is not possible any more."""
        try:
            await self._store.change(update)
        except (ModelNotFound, ValueError):
            return False
        return True

    def _restored(self, state: ModelState) -> ModelState:
        """The state of a revision after the failed swap for which it had to make room."""
        if state.status == "unloaded" and state.reason == displacing(state.name):
            return enqueue(state, self._store.now(), requested=True)
        return state
