"""Models that a deployment knows though nobody announces them: their requests wait in their lanes until a worker comes.

`penstock nats setup MODEL` declares them, so workers may be started on demand and ended when nothing waits. Their cards
lie in the bucket `catalogue`, which forgets nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from ...config.settings import Settings
from ...schemas.registry import ModelCard
from ..lanes import open_lanes
from ..port import Broker
from ..topology import CATALOGUE, DECLARED
from .catalogue import CatalogueStore


class DeclaredChange(NamedTuple):
    """What `declare` would do: names of models."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


async def declared_models(broker: Broker) -> list[ModelCard]:
    """The declared models in the order of their names."""
    entries = await (await broker.bucket(CATALOGUE)).entries(DECLARED)
    return sorted((ModelCard.model_validate_json(entry.value) for entry in entries), key=lambda card: card.name)


async def declaration(broker: Broker, cards: Sequence[ModelCard]) -> DeclaredChange:
    """What would change if `cards` were all models that are declared."""
    known = {card.name: card for card in await declared_models(broker)}
    wanted = {card.name: card for card in cards}
    return DeclaredChange(
        tuple(name for name in wanted if name not in known),
        tuple(name for name, card in wanted.items() if name in known and not _is_same(known[name], card)),
        tuple(name for name in known if name not in wanted),
    )


async def declare(broker: Broker, settings: Settings, cards: Sequence[ModelCard]) -> None:
    """Let `cards` be all models that are declared, and create their lanes.

    A model that is in the catalogue, too, keeps its revision there. Raises `StartupError` as `open_lanes` does.
    """
    for card in await declared_models(broker):
        if card.name not in {wanted.name for wanted in cards}:
            await forget(broker, card.name)
    catalogue = await (await CatalogueStore.of(broker)).read()
    revisions = {entry.name: entry.revision for entry in catalogue.entries}
    for card in cards:
        if card.name in revisions:
            card = card.model_copy(update={"revision": revisions[card.name], "catalogued": True})
        await open_lanes(broker, settings, card.name, card.revision)
        await _keep(broker, card)


async def follow(broker: Broker, declared: ModelCard, announced: ModelCard) -> None:
    """Let what waits while no agent lives wait for what the agent serves now, as long as the declared model says."""
    own = {name: getattr(declared, name) for name in ("created", "queue_limit", "wait_limit")}
    if (now := announced.model_copy(update=own)) != declared:
        await _keep(broker, now)


async def forget(broker: Broker, name: str) -> None:
    """Declare a model no longer; its lanes go when others need them and nothing waits there."""
    await (await broker.bucket(CATALOGUE)).delete(_key(name))


async def _keep(broker: Broker, card: ModelCard) -> None:
    await (await broker.bucket(CATALOGUE)).put(_key(card.name), card.model_dump_json().encode())


def _is_same(one: ModelCard, other: ModelCard) -> bool:
    """Whether two cards tell the same of a model, but for when they were made and who serves it."""
    ignored = {"created": 0, "revision": 1, "catalogued": False}
    return one.model_copy(update=ignored) == other.model_copy(update=ignored)


def _key(name: str) -> str:
    return DECLARED + hashlib.sha256(name.encode()).hexdigest()[:32]  # keys do not allow every character of a name
