"""What a host's agent knows when it plans, and what a plan may say: the words of the planner."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..jobs import Priority
from .catalogue import Catalogue, RevisionKey
from .model_state import ModelState


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How long a revision stays loaded at least, how long another waits before busy ones drain for it, and how long a
    host leaves further replicas of a model that it has to others; seconds."""

    least_residency: float = 5.0
    longest_wait: float = 15.0
    spread: float = 2.0


class Demand(NamedTuple):
    """How many requests wait for a revision, and the highest priority among them; those dispatched do not count."""

    waiting: int
    priority: Priority = "normal"


class Device(NamedTuple):
    """`capacity` is what models may take there together, `free` what is free by measurement, both in bytes."""

    capacity: int
    free: int


class Need(NamedTuple):
    """The devices on which a revision may run, and the bytes that each of its replicas takes there."""

    devices: tuple[str, ...]
    memory: int


@dataclass(frozen=True, slots=True)
class View:
    """What an agent knows as it plans for its host.

    `states` are those of all hosts, by replica. `demand` and `needs` are by revision; the latter has those that this
    host could load, and those that it holds. `busy` are the replicas with requests that were dispatched, those on their
    way included, and have not ended. `has_peers`: other hosts have agents, too.
    """

    agent: str
    catalogue: Catalogue
    states: Mapping[RevisionKey, ModelState]
    demand: Mapping[RevisionKey, Demand]
    needs: Mapping[RevisionKey, Need]
    devices: Mapping[str, Device]
    busy: Collection[RevisionKey] = ()
    has_peers: bool = False


class Enqueue(NamedTuple):
    key: RevisionKey


class Load(NamedTuple):
    key: RevisionKey
    device: str


class Drain(NamedTuple):
    """`wanted` is the revision that needs the memory, if one does."""

    key: RevisionKey
    reason: str
    wanted: RevisionKey | None = None


class Unload(NamedTuple):
    """End the workers, which are idle; a queued revision has none."""

    key: RevisionKey


class Refuse(NamedTuple):
    """This host cannot serve those who wait for it: fail them, unless another host may; `retry_after` is in seconds.

    If the revision is queued, unload it with this reason. `elsewhere`: another host may have the memory for it.
    """

    key: RevisionKey
    reason: str
    retry_after: float | None = None
    elsewhere: bool = False


Action = Enqueue | Load | Drain | Unload | Refuse


def displacing(model: str) -> str:
    """Why a revision is drained that makes room for this model."""
    return f"{model} needs its memory"
