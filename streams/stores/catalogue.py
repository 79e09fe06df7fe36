"""The catalogue of models and the states of their revisions: in one bucket, and changed by compare-and-set alone.

The catalogue is one entry, because a name that is taken, or a swap that is going on, concerns all its writers; each
state is one of its own. An update gets the newest value, and runs again if another process has written meanwhile: of
two agents that would load the same revision, the second finds it loading, and its transition is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from pydantic import ValidationError

from ...schemas.errors import StartupError
from ...schemas.models.catalogue import Catalogue, RevisionKey
from ...schemas.models.model_state import ModelState
from ..port import Broker, Bucket, Entry
from ..topology import CATALOGUE, OFFERED

_STATES = "state."

Value = TypeVar("Value", Catalogue, ModelState)


@dataclass(frozen=True, slots=True)
class CatalogueStore:
    """Reads include every write that was acknowledged before. All methods raise `StartupError` if another release has
    written a format that this one does not know, and the errors of the bucket."""

    _bucket: Bucket
    now: Callable[[], float]
    """Unix seconds, by the clock that all agents share."""

    @classmethod
    async def of(cls, broker: Broker) -> Self:
        return cls(await broker.bucket(CATALOGUE), broker.now)

    async def read(self) -> Catalogue:
        entry = await self._bucket.get(OFFERED)
        return Catalogue() if entry is None else _parse(Catalogue, entry)

    async def change(self, update: Callable[[Catalogue], Catalogue]) -> Catalogue:
        """Replace the catalogue by `update` of it and return the result. Raises what `update` raises."""
        return await self._change(OFFERED, Catalogue(), update)

    async def states(self) -> dict[RevisionKey, ModelState]:
        """Of all replicas that were ever queued, and not forgotten."""
        found = [_parse(ModelState, entry) for entry in await self._bucket.entries(_STATES)]
        return {state.key: state for state in found}

    async def change_state(self, key: RevisionKey, update: Callable[[ModelState], ModelState]) -> ModelState:
        """Replace the state of a replica by `update` of it and return the result; at first it is unloaded.

        Raises what `update` raises: `IllegalTransition` if another process was faster.
        """
        return await self._change(_state_key(key), ModelState(**key._asdict()), update)

    async def forget(self, key: RevisionKey) -> None:
        """Delete the state of a revision that has left the catalogue, and is unloaded: no one may want it again."""
        await self._bucket.delete(_state_key(key))

    async def _change(self, key: str, initial: Value, update: Callable[[Value], Value]) -> Value:
        while True:
            entry = await self._bucket.get(key)
            before = initial if entry is None else _parse(type(initial), entry)
            after = update(before)
            if after == before:
                return after
            data = after.model_dump_json().encode()
            if entry is None:
                written = await self._bucket.create(key, data)
            else:
                written = await self._bucket.update(key, data, entry.revision)
            if written is not None:
                return after


def _state_key(key: RevisionKey) -> str:
    name = hashlib.sha256(key.name.encode()).hexdigest()[:32]  # keys do not allow every character of a name
    return f"{_STATES}{name}.{key.revision}" + (f".{key.replica}" if key.replica else "")


def _parse(kind: type[Value], entry: Entry) -> Value:
    try:
        return kind.model_validate_json(entry.value)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]
        raise StartupError(
            f"the catalogue's entry {entry.key} was written by another release of Penstock "
            f"({'.'.join(map(str, reason['loc']))}: {reason['msg']}): run the same release everywhere"
        ) from error
