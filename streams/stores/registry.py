"""The live processes and the available models: cards in key-value buckets, written as heartbeats, read as a cache.

A card expires after a few heartbeats, so a process that dies or hangs drops out by itself. A model's card outlives its
last worker for a while, so that clients wait for a worker that restarts instead of getting "model not found".
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
from collections.abc import Sequence
from math import inf
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ...config.process import has_ended
from ...schemas.errors import ModelNotFound, StartupError
from ...schemas.models.catalogue import Catalogue, RevisionKey
from ...schemas.registry import AddedAdapter, AgentCard, ModelCard, ModelLanes, ModelRefusal, StageCard, WorkerCard
from ..beats import until_beat
from ..lanes import present_lanes
from ..outages import outage_logged
from ..port import Broker, Entry
from ..records import readable
from ..topology import CATALOGUE, lanes_of
from .declared import declared_models, follow, forget

Card = TypeVar("Card", bound=BaseModel)
LATEST = ":latest"  # the tag that Ollama gives to models without one
LOOK_PAUSE = 0.05  # seconds; the least between two looks for names that are not known
AGAIN = 60.0  # seconds until a model's card is written again, which expires after ten minutes
AGENT, LAST_WORD, LEAVING = "agent.", "last-word.", "leaving."  # begin keys in the bucket `workers`
ADAPTER = "adapter."  # begins the keys of adapters that were added at run time, in the bucket `catalogue`
REFUSED = "refused."  # begins the keys of refusals in the bucket `state`


class Registry:
    """Reads the cards every `interval` seconds in `run`; its attributes never wait for the broker.

    A card lives for `lifetime` seconds unless it is written again, by default three times the interval.
    """

    def __init__(self, broker: Broker, *, interval: float, lifetime: float | None = None) -> None:
        self._broker = broker
        self._interval = interval
        self._lifetime = 3 * interval if lifetime is None else lifetime
        self._outages = broker.outages  # set by refresh
        self._trusted = -inf  # loop time from which a missing card means that a stage has ended; set by refresh
        self.models: dict[str, ModelCard] = {}  # by name; set by refresh
        self.declared: dict[str, ModelCard] = {}  # those that stay known without a worker, by name; set by refresh
        self.workers: tuple[WorkerCard, ...] = ()  # in order of their ids; set by refresh
        self.ended: dict[str, WorkerCard] = {}  # workers whose process has ended, by id; set by drop_ended
        self.leaving: frozenset[str] = frozenset()  # ids of workers that have withdrawn their cards; set by refresh
        self.stages: tuple[StageCard, ...] = ()  # set by refresh
        self.lanes: dict[str, ModelLanes] = {}  # of all models for which requests may wait, by token; set by refresh
        self.agents: dict[str, AgentCard] = {}  # those of hosts that live, by name; set by refresh
        self.refusals: dict[str, ModelRefusal] = {}  # of models that cannot be loaded, by the token of their lanes
        self._lanes_changed = asyncio.Event()
        self._written: dict[str, float] = {}  # loop time when the card of a model of ours was; set by announce_worker
        self._looks = 0  # that have begun
        self._looked = -inf  # loop time when the newest began; set by look
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Refresh the cards until cancelled, more often while there is no worker."""
        while True:
            with outage_logged("registry is stale"):
                await self.refresh()
            # The batch stage looks for workers that report themselves.
            is_served = self.workers or self.agents or self.declared
            await asyncio.sleep(until_beat(self._interval if is_served else min(0.1, self._interval)))

    async def find(self, model: str) -> ModelCard | None:
        """The model of this name; one that is not known is looked for, as it may just have been announced."""
        if (found := self.named(model)) is None:
            await self.look(LOOK_PAUSE)
            found = self.named(model)
        return found

    async def untagged(self, name: str) -> str:
        """The name of a model, to which Ollama's clients add a tag where it has none."""
        bare = name.removesuffix(LATEST)
        if bare == name or self.named(name) is not None:
            return name
        return bare if self.named(bare) is not None or await self.find(name) is None else name

    async def only(self) -> str | None:
        """The name of the model where there is one alone; it may just have been announced."""
        if not self.models:
            await self.look(LOOK_PAUSE)
        return next(iter(self.models)) if len(self.models) == 1 else None

    def unknown(self, name: str) -> ModelNotFound:
        """The refusal of a name that is no model's, which suggests similar ones."""
        known = [each for card in self.models.values() for each in card.names]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Served: {', '.join(known) or 'none yet'}."
        return ModelNotFound(f"The model {name!r} is not served here. {hint}", param="model")

    def named(self, name: str) -> ModelCard | None:
        """The model of this name, alias or adapter, as known now."""
        return self.models.get(name) or next((card for card in self.models.values() if name in card.names), None)

    async def look(self, pause: float = 0.0) -> None:
        """Refresh the cards now, or `pause` seconds after the newest look; all that ask before it begins share it."""
        looks, loop = self._looks, asyncio.get_running_loop()
        async with self._looking:
            if self._looks == looks:
                await asyncio.sleep(self._looked + pause - loop.time())
                self._looks += 1
                self._looked = loop.time()
                await self.refresh()

    async def refresh(self) -> None:
        live = await (await self._broker.bucket("workers")).entries()
        models, state = await self._broker.bucket("models"), await self._broker.bucket("state")
        # After the workers, each of which is announced after its model and its lanes.
        known, declared, added, refused, lanes = await asyncio.gather(
            models.entries(),
            declared_models(self._broker),
            self.added_adapters(),
            state.entries(REFUSED),
            present_lanes(self._broker),
        )
        self.workers = tuple(_cards(WorkerCard, live, "worker."))
        self.agents = {entry.key.removeprefix(AGENT): _agent(entry) for entry in live if entry.key.startswith(AGENT)}
        self.leaving = frozenset(entry.key.removeprefix(LEAVING) for entry in live if entry.key.startswith(LEAVING))
        self.ended = {}
        self.drop_ended()
        self.stages = self._known_stages(_cards(StageCard, live, "stage."))
        self.declared = {card.name: card for card in declared}
        announced = {card.name: card for card in _cards(ModelCard, known)}
        cards = sorted((self.declared | announced).values(), key=lambda card: (card.created, card.name))
        self.models = {card.name: card for card in _with_added(cards, added)}
        self.refusals = {
            entry.key.removeprefix(REFUSED): ModelRefusal.model_validate_json(entry.value) for entry in refused
        }
        if lanes.keys() != self.lanes.keys():
            self.lanes = lanes
            self._lanes_changed.set()
            self._lanes_changed = asyncio.Event()

    def _known_stages(self, found: list[StageCard]) -> tuple[StageCard, ...]:
        """After an outage, in which no card can be renewed, and from which a broker may come back without any, each
        stage gets a card's life to write its own again."""
        now, outages = asyncio.get_running_loop().time(), self._broker.outages
        if outages != self._outages:
            self._outages, self._trusted = outages, now + self._lifetime
        if now >= self._trusted:
            return tuple(found)
        written = {(card.stage, card.id) for card in found}
        return (*found, *(card for card in self.stages if (card.stage, card.id) not in written))

    def drop_ended(self) -> None:
        """Move workers that have died on this host to `ended`, as their cards have yet to expire.

        This is cheaper than `refresh`, so it can run more often.
        """
        ended = {card.id: card for card in self.workers if has_ended(card.host, card.pid)}
        if ended:
            self.ended |= ended
            self.workers = tuple(card for card in self.workers if card.id not in ended)

    def was_offered(self, catalogue: Catalogue, key: RevisionKey) -> bool:
        """Whether a revision has left the catalogue, rather than being served by workers of their own."""
        card = self.models.get(key.name)
        return catalogue.has_had(key) and (card is None or card.catalogued)

    async def lanes_changed(self) -> None:
        """Return when a refresh has found other lanes than the one before."""
        await self._lanes_changed.wait()

    def workers_for(self, model: str, revision: int) -> list[WorkerCard]:
        return [worker for worker in self.workers if (worker.model.name, worker.model.revision) == (model, revision)]

    def missing(self, stages: Sequence[str]) -> list[str]:
        """The stages without a live copy; a worker is a copy of infer, and an agent starts one when it is asked for.

        Requests for declared models may come before a worker.
        """
        is_served = self.workers or self.agents or self.declared
        live = {card.stage for card in self.stages} | ({"infer"} if is_served else set())
        return [stage for stage in stages if stage not in live]

    async def claim(self, card: WorkerCard) -> None:
        """Wait until no other worker has this worker's name, for example until a dead one's card has expired.

        Raises `StartupError` if another live worker has it.
        """
        bucket = await self._broker.bucket("workers")
        first = None
        while (entry := await bucket.get(f"worker.{card.id}")) is not None:
            (found,) = _cards(WorkerCard, [entry]) or (card,)
            if found.incarnation == card.incarnation or has_ended(found.host, found.pid):
                return
            first = first or entry.revision
            if entry.revision != first:
                holder = f"process {found.pid} on {found.host.partition('/')[0]}"
                raise StartupError(
                    f"a worker called {card.id} is already running as {holder}; stop it, or choose another --id"
                )
            await asyncio.sleep(self._interval / 2)

    async def refuse_model(self, model: str, revision: int, refusal: ModelRefusal | None) -> None:
        """Refuse the requests of a model, or no longer."""
        state, key = await self._broker.bucket("state"), REFUSED + lanes_of(model, revision)
        await (state.delete(key) if refusal is None else state.put(key, _encoded(refusal)))

    async def added_adapters(self) -> list[AddedAdapter]:
        """The adapters that operators have added at run time, the first one first."""
        bucket = await self._broker.bucket(CATALOGUE)
        return sorted(_cards(AddedAdapter, await bucket.entries(ADAPTER)), key=lambda each: (each.created, each.name))

    async def add_adapter(self, adapter: AddedAdapter, *, replace: bool = False) -> bool:
        """Offer an adapter from now on, also after a restart; False if there is one of its name, without `replace`."""
        bucket = await self._broker.bucket(CATALOGUE)
        write = bucket.put if replace else bucket.create
        return await write(ADAPTER + _key(adapter), _encoded(adapter)) is not None

    async def remove_adapter(self, adapter: AddedAdapter) -> None:
        await (await self._broker.bucket(CATALOGUE)).delete(ADAPTER + _key(adapter))

    async def announce_model(self, card: ModelCard) -> None:
        await (await self._broker.bucket("models")).put(_key(card), _encoded(card))
        if card.catalogued and (declared := self.declared.get(card.name)) is not None:
            await follow(self._broker, declared, card)

    async def withdraw_model(self, card: ModelCard) -> None:
        await (await self._broker.bucket("models")).delete(_key(card))
        if card.catalogued and card.name in self.declared:
            await forget(self._broker, card.name)

    async def announce_worker(self, card: WorkerCard) -> None:
        model, now = card.model, asyncio.get_running_loop().time()
        # Models are kept on disk, so a heartbeat reads, and writes only where that says something new.
        if not model.catalogued and (
            now - self._written.get(model.name, -AGAIN) >= AGAIN or not await self._is_announced(model)
        ):
            await self.announce_model(model)
            self._written[model.name] = now
        await (await self._broker.bucket("workers")).put(f"worker.{card.id}", _encoded(card))

    async def _is_announced(self, card: ModelCard) -> bool:
        """Whether a model is there as `card` has it, whichever of its workers was the first."""
        entry = await (await self._broker.bucket("models")).get(_key(card))
        found = _cards(ModelCard, [entry] if entry else [])
        return [each.model_copy(update={"created": card.created}) for each in found] == [card]

    async def announce_agent(self, name: str, card: AgentCard) -> None:
        await (await self._broker.bucket("workers")).put(AGENT + name, _encoded(card))

    async def withdraw_agent(self, name: str) -> None:
        await (await self._broker.bucket("workers")).delete(AGENT + name)

    async def leave_word(self, worker: str, reason: str) -> None:
        """Say why this worker cannot run; its agent reads it."""
        await (await self._broker.bucket("workers")).put(LAST_WORD + worker, reason.encode())

    async def last_word(self, worker: str) -> str | None:
        """What a worker said last, if it has ended just now; it is forgotten."""
        bucket = await self._broker.bucket("workers")
        entry = await bucket.get(LAST_WORD + worker)
        if entry is None:
            return None
        await bucket.delete(entry.key)
        return entry.value.decode()

    async def announce_stage(self, card: StageCard) -> None:
        await (await self._broker.bucket("workers")).put(f"stage.{card.stage}.{card.id}", _encoded(card))

    async def withdraw(self, card: WorkerCard | StageCard) -> None:
        """Take back a card before its process ends; of a worker it is known for a while that it has done so."""
        bucket = await self._broker.bucket("workers")
        if isinstance(card, WorkerCard):
            await bucket.put(LEAVING + card.id, b"")
            await bucket.delete(f"worker.{card.id}")
        else:
            await bucket.delete(f"stage.{card.stage}.{card.id}")


def _cards(kind: type[Card], entries: list[Entry], prefix: str = "") -> list[Card]:
    """The cards among `entries`, ordered by key; skips those it cannot parse, such as another version's."""
    found = sorted(entry for entry in entries if entry.key.startswith(prefix))
    return [card for _, card in readable(kind, found)]


def _agent(entry: Entry) -> AgentCard:
    try:
        return AgentCard.model_validate_json(entry.value)
    except ValidationError:
        return AgentCard()  # of another release


def _with_added(cards: Sequence[ModelCard], added: Sequence[AddedAdapter]) -> list[ModelCard]:
    """The models with the adapters that were added to them, but those whose names are taken."""
    taken = {name for card in cards for name in card.names}
    return [
        card.model_copy(update={"adapters": (*card.adapters, *(each.source for each in mine))}) if mine else card
        for card in cards
        for mine in [[each for each in added if each.model == card.name and each.name not in taken]]
    ]


def _key(named: ModelCard | AddedAdapter) -> str:
    return hashlib.sha256(named.name.encode()).hexdigest()[:32]  # keys do not allow every character of a name


def _encoded(card: BaseModel) -> bytes:
    return card.model_dump_json().encode()
