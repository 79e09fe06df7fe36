"""The images of requests: objects named `<tenant>.<sha256>.<window>`, which expire by themselves.

The same image of a tenant is stored once in each window of time. A key names its window, so an image lives for at least
as long as the longest request that was let in with it, whoever else sends it, or has sent it before.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from functools import partial

from ...schemas.errors import StreamNotFound
from ..outages import through_outages
from ..port import Broker
from ..topology import IMAGE_WINDOW, IMAGES
from .objects import Objects
from .quotas import Quotas


def image_key(tenant: str, digest: str, now: float) -> str:
    """The name of an image that comes at `now`, in Unix seconds; `digest` is the sha256 of its bytes."""
    return f"{tenant}.{digest}.{int(now // IMAGE_WINDOW)}"


async def put_image(broker: Broker, quotas: Quotas, tenant: str, data: bytes, digest: str, now: float) -> str:
    """Store an image, unless it is stored already, and return its key.

    Raises `QuotaExceeded` for the tenant's quota, and `StorageFull`.
    """
    objects, key = await Objects.of(broker, IMAGES, IMAGES), image_key(tenant, digest, now)
    if await objects.info(key) is None:
        await quotas.check(tenant, len(data))
        await objects.put(key, _once(data), {})
    return key


async def get_image(broker: Broker, key: str, digest: str) -> bytes:
    """The bytes of an image; an outage of the broker is waited out. Raises `StreamNotFound` if it has expired."""
    objects = await Objects.of(broker, IMAGES, IMAGES)
    return await through_outages(partial(_read, objects, key, digest), key)


async def _read(objects: Objects, key: str, digest: str) -> bytes:
    info = await objects.info(key)
    data = b"" if info is None else b"".join([piece async for piece in objects.read(info)])
    if hashlib.sha256(data).hexdigest() != digest:
        raise StreamNotFound("An image of the request is no longer stored; send the request again.")
    return data


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
