"""The states of batches: one entry per batch under `<tenant>.<batch id>`, changed by compare-and-set."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...schemas.errors import StreamNotFound
from ...schemas.jobs import TOKEN_PATTERN
from ...schemas.openai.batches import Batch
from ..port import Broker
from ..topology import BATCH_STATES


async def list_batches(broker: Broker, tenant: str | None = None) -> list[Batch]:
    """The batches of one tenant, or of all, oldest first."""
    entries = await (await broker.bucket(BATCH_STATES)).entries(f"{tenant}." if tenant else "")
    found = [Batch.model_validate_json(entry.value) for entry in entries]
    return sorted(found, key=lambda batch: (batch.created_at, batch.id))


async def find_batch(broker: Broker, tenant: str, id: str) -> Batch:
    """Raises `StreamNotFound`."""
    return await change_batch(broker, tenant, id, lambda batch: batch)


async def change_batch(broker: Broker, tenant: str, id: str, update: Callable[[Batch], Batch]) -> Batch:
    """Replace a batch by `update` of it and return the result; `update` runs again if another process writes first.

    Raises `StreamNotFound`.
    """
    states = await broker.bucket(BATCH_STATES)
    while re.fullmatch(TOKEN_PATTERN, id) and (entry := await states.get(f"{tenant}.{id}")) is not None:
        before = Batch.model_validate_json(entry.value)
        after = update(before)
        if after == before or await states.update(before.key, after.model_dump_json().encode(), entry.revision):
            return after
    raise StreamNotFound(f"There is no batch {id!r}.", code="batch_not_found", param="batch_id")
