"""Files that clients upload and that batches write: objects named `<tenant>.<file id>`, with what the API shows of a
file as their metadata."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable

from ...schemas.errors import StreamNotFound
from ...schemas.jobs import TOKEN_PATTERN
from ...schemas.openai.batches import FINAL
from ..port import Broker
from ..topology import FILES
from .batches import list_batches
from .objects import ObjectInfo, Objects


async def put_file(
    objects: Objects, name: str, data: AsyncIterable[bytes], filename: str, purpose: str, lifetime: float
) -> ObjectInfo | None:
    """Store a file that expires `lifetime` seconds from now; None if the name is taken.

    Raises `StorageFull`, and whatever `data` raises.
    """
    now = int(objects.now())
    times = {"created_at": now, "expires_at": now + int(lifetime)}
    return await objects.put(name, data, {"object": "file", **times, "filename": filename, "purpose": purpose})


async def find_file(broker: Broker, tenant: str, id: str, param: str = "file_id") -> ObjectInfo:
    """Raises `StreamNotFound`, for `param`, if the tenant has no such file, or if it has expired."""
    if re.fullmatch(TOKEN_PATTERN, id):
        info = await (await Objects.of(broker, FILES)).info(f"{tenant}.{id}")
        if info is not None and not _has_expired(info, broker):
            return info
    raise StreamNotFound(f"There is no file {id!r}.", code="file_not_found", param=param)


async def list_files(broker: Broker, tenant: str) -> list[ObjectInfo]:
    """The files of a tenant that have not expired, oldest first."""
    return [
        info for info in await (await Objects.of(broker, FILES)).infos(f"{tenant}.") if not _has_expired(info, broker)
    ]


async def files_in_use(broker: Broker) -> set[str]:
    """The names of the files that unfinished batches read from."""
    batches = await list_batches(broker)
    return {f"{batch.tenant}.{batch.input_file_id}" for batch in batches if batch.status not in FINAL}


async def delete_expired_files(broker: Broker) -> None:
    """Delete all expired files except those that unfinished batches read from."""
    objects = await Objects.of(broker, FILES)
    if expired := [info for info in await objects.infos() if _has_expired(info, broker)]:
        in_use = await files_in_use(broker)
        for info in expired:
            if info.name not in in_use:
                await objects.delete(info)


def _has_expired(info: ObjectInfo, broker: Broker) -> bool:
    return bool(info.about["expires_at"] <= broker.now())
