"""Bytes of any size, in any broker's buckets: what an object is stands under its name, its bytes in pieces beside."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from ...schemas import codec
from ...schemas.errors import STORE_FULL, BrokerUnavailable, StorageFull, StreamFull
from ..port import Broker, Bucket
from ..topology import OBJECT_DATA

CHUNK = 128 << 10  # bytes of an object in one message, where the broker takes as much
LOOK = 0.1  # seconds between two looks for a piece that must be there
LOOKS = 20


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`size` in bytes, in `chunks` entries under the key `version`; `about` is its owner's."""

    name: str
    about: dict[str, Any]
    version: str
    size: int = 0
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Objects:
    """Names are keys of buckets; an object lives as long as the entries there. `chunk` is in bytes."""

    _infos: Bucket
    _data: Bucket
    _chunk: int

    @classmethod
    async def of(cls, broker: Broker, bucket: str, data: str = OBJECT_DATA) -> Objects:
        """Those named in `bucket`; their bytes are in the bucket `data`."""
        return cls(await broker.bucket(bucket), await broker.bucket(data), min(CHUNK, broker.max_payload // 2))

    async def put(self, name: str, data: AsyncIterable[bytes], about: dict[str, Any]) -> ObjectInfo | None:
        """Store a whole object. One that has the name already stays, and this returns None.

        What `data` raises is raised again, and nothing has changed then. Raises `StorageFull`.
        """
        try:
            return await self._put(ObjectInfo(name, about, uuid.uuid4().hex), data)
        except StreamFull as error:
            if not error.storage:
                raise
            raise StorageFull(STORE_FULL) from error

    async def _put(self, info: ObjectInfo, data: AsyncIterable[bytes]) -> ObjectInfo | None:
        try:
            async for piece in _pieces(data, self._chunk):
                await self._data.put(f"{info.version}.{info.chunks}", piece)
                info = replace(info, size=info.size + len(piece), chunks=info.chunks + 1)
        except BaseException:
            with contextlib.suppress(BrokerUnavailable):  # what is left of it then goes with its age
                await self._drop(info)
            raise
        # A write that fails may have happened all the same, and then the bytes must be there.
        try:
            if await self._infos.create(info.name, orjson.dumps(info)) is not None:
                return info
        except StreamFull:
            await self._drop(info)
            raise
        await self._drop(info)
        return None

    async def info(self, name: str) -> ObjectInfo | None:
        entry = await self._infos.get(name)
        return None if entry is None else codec.build(ObjectInfo, orjson.loads(entry.value))

    async def infos(self, prefix: str = "") -> list[ObjectInfo]:
        """Those whose names begin so, the oldest first."""
        return [codec.build(ObjectInfo, orjson.loads(entry.value)) for entry in await self._infos.entries(prefix)]

    async def read(self, info: ObjectInfo) -> AsyncIterator[bytes]:
        """The bytes, piece by piece. Raises `BrokerUnavailable`, also where the object was deleted meanwhile."""
        for number in range(info.chunks):
            yield await self._piece(info, number)

    async def delete(self, info: ObjectInfo) -> None:
        await self._infos.delete(info.name)
        await self._drop(info)

    async def _piece(self, info: ObjectInfo, number: int) -> bytes:
        for _ in range(LOOKS):
            if (entry := await self._data.get(f"{info.version}.{number}")) is not None:
                return entry.value
            if await self.info(info.name) != info:
                raise BrokerUnavailable("an object was removed while it was read")
            await asyncio.sleep(LOOK)  # it was written before its name, so it is there
        raise BrokerUnavailable(f"a piece of the object {info.name} cannot be read")

    async def _drop(self, info: ObjectInfo) -> None:
        for number in range(info.chunks):
            await self._data.delete(f"{info.version}.{number}")


async def _pieces(data: AsyncIterable[bytes], size: int) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for part in data:
        rest += part
        while len(rest) >= size:
            yield bytes(rest[:size])
            del rest[:size]
    if rest:
        yield bytes(rest)
