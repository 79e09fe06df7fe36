"""Objects of any size in a broker's buckets: an entry describes each, others, mostly of a second bucket, have its bytes
in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from ...schemas.errors import STORE_FULL, BrokerUnavailable, StorageFull, StreamFull
from ...schemas.wire import codec
from ..port import Broker, Bucket, Entry
from ..topology import OBJECT_DATA

CHUNK = 128 << 10  # bytes of one piece, if the broker accepts that much
POLL_INTERVAL = 0.1  # seconds between two reads of a piece that must exist
MAX_POLLS = 20
BESIDE = "="  # begins the version of an object whose pieces are in the bucket of its entry: no name begins so


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`size` in bytes, in `chunks` entries with keys below `version`; `about` is the caller's metadata. One that was
    cleared has no version."""

    name: str
    about: dict[str, Any]
    version: str
    size: int = 0
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of a bucket; their names are its keys, and they expire with its entries. `_chunk` is in bytes."""

    _infos: Bucket
    _data: Bucket
    _chunk: int
    now: Callable[[], float]
    """Unix seconds, by the clock that all who read the objects share."""
    _are_beside: bool = False

    @classmethod
    async def of(cls, broker: Broker, bucket: str, data: str = OBJECT_DATA, *, beside: bool = False) -> Objects:
        """The objects described in `bucket`, whose bytes are in the bucket `data`.

        With `beside`, the bytes of new ones are in `bucket`, too, and so are gone when nothing describes them any more.
        """
        chunk = min(CHUNK, broker.max_payload // 2)
        return cls(await broker.bucket(bucket), await broker.bucket(data), chunk, broker.now, beside)

    async def put(
        self, name: str, data: AsyncIterable[bytes], about: dict[str, Any], revision: int = 0
    ) -> ObjectInfo | None:
        """Store an object, in place of one that was cleared where that has the `revision`; None if the name is taken.

        Raises `StorageFull`, and whatever `data` raises; nothing has changed then.
        """
        try:
            return await self._put(ObjectInfo(name, about, self._new_version()), data, revision)
        except StreamFull as error:
            if not error.storage:
                raise
            raise StorageFull(STORE_FULL) from error

    async def _put(self, info: ObjectInfo, data: AsyncIterable[bytes], revision: int) -> ObjectInfo | None:
        try:
            async for piece in _pieces(data, self._chunk):
                await self._bytes_of(info).put(f"{info.version}.{info.chunks}", piece)
                info = replace(info, size=info.size + len(piece), chunks=info.chunks + 1)
        except BaseException:
            with contextlib.suppress(BrokerUnavailable):  # the remaining pieces then expire
                await self._drop(info)
            raise
        # A write that fails may have been stored all the same; its bytes must exist then.
        try:
            value = orjson.dumps(info)
            stored = (
                self._infos.update(info.name, value, revision) if revision else self._infos.create(info.name, value)
            )
            if await stored is not None:
                return info
        except StreamFull:
            await self._drop(info)
            raise
        await self._drop(info)
        return None

    async def info(self, name: str) -> ObjectInfo | None:
        found = await self.look(name)
        return found and found[0]

    async def look(self, name: str) -> tuple[ObjectInfo, int] | None:
        """An object, and the revision by which it may be changed."""
        entry = await self._infos.get(name)
        return None if entry is None else _read(entry)

    async def look_at_all(self, prefix: str = "") -> list[tuple[ObjectInfo, int]]:
        """Those whose names begin with `prefix`, least recently changed first."""
        return [_read(entry) for entry in await self._infos.entries(prefix)]

    async def infos(self, prefix: str = "") -> list[ObjectInfo]:
        """The objects whose names begin with `prefix`, oldest first."""
        return [info for info, _ in await self.look_at_all(prefix)]

    async def scan(self, prefix: str) -> AsyncIterator[list[ObjectInfo]]:
        """`infos`, some at a time, however many there are; what changes meanwhile is in it twice, once, or not."""
        async for entries in self._infos.scan(prefix):
            yield [_read(entry)[0] for entry in entries]

    async def note(self, info: ObjectInfo, about: dict[str, Any], revision: int) -> bool:
        """Change what is said about an object; False if it has changed since it had this `revision`."""
        return await self._infos.update(info.name, orjson.dumps(replace(info, about=about)), revision) is not None

    async def clear(self, info: ObjectInfo, revision: int) -> bool:
        """Delete an object's bytes, so that only its name is left; False if it has changed since this `revision`.

        A name that is deleted, too, could be one that somebody has stored anew in between.
        """
        empty = orjson.dumps(ObjectInfo(info.name, {}, ""))
        if await self._infos.update(info.name, empty, revision) is None:
            return False
        await self._drop(info)
        return True

    async def read(self, info: ObjectInfo) -> AsyncIterator[bytes]:
        """The bytes, piece by piece. Raises `BrokerUnavailable`, also if the object is deleted meanwhile."""
        for number in range(info.chunks):
            yield await self._piece(info, number)

    async def renew(self, name: str) -> None:
        """Have an object live as long again as a new one; harmless if there is none. Raises `StorageFull`."""
        if (entry := await self._infos.get(name)) is None:
            return
        old = codec.build(ObjectInfo, orjson.loads(entry.value))
        new = replace(old, version=self._new_version())
        try:
            for number in range(old.chunks):
                await self._bytes_of(new).put(f"{new.version}.{number}", await self._piece(old, number))
            is_renewed = await self._infos.update(name, orjson.dumps(new), entry.revision) is not None
        except StreamFull as error:
            await self._drop(new)
            raise StorageFull(STORE_FULL) from error
        await self._drop(old if is_renewed else new)  # another process has renewed or deleted it meanwhile

    async def delete(self, info: ObjectInfo) -> None:
        await self._infos.delete(info.name)
        await self._drop(info)

    async def _piece(self, info: ObjectInfo, number: int) -> bytes:
        for _ in range(MAX_POLLS):
            if (entry := await self._bytes_of(info).get(f"{info.version}.{number}")) is not None:
                return entry.value
            if await self.info(info.name) != info:
                raise BrokerUnavailable(f"the object {info.name} was deleted while it was read")
            await asyncio.sleep(POLL_INTERVAL)  # it was written before the name, so it exists
        raise BrokerUnavailable(f"a piece of the object {info.name} cannot be read")

    async def _drop(self, info: ObjectInfo) -> None:
        for number in range(info.chunks):
            await self._bytes_of(info).delete(f"{info.version}.{number}")

    def _bytes_of(self, info: ObjectInfo) -> Bucket:
        return self._infos if info.version.startswith(BESIDE) else self._data

    def _new_version(self) -> str:
        return (BESIDE if self._are_beside else "") + uuid.uuid4().hex


def _read(entry: Entry) -> tuple[ObjectInfo, int]:
    return codec.build(ObjectInfo, orjson.loads(entry.value)), entry.revision


async def _pieces(data: AsyncIterable[bytes], size: int) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for part in data:
        rest += part
        while len(rest) >= size:
            yield bytes(rest[:size])
            del rest[:size]
    if rest:
        yield bytes(rest)
