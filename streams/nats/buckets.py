"""Keys and values in JetStream: one stream per bucket, one message per key, in the layout of other NATS clients.

A deleted key leaves nothing behind (other clients leave a marker for watchers; we have no watchers).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable

from nats import nuid

from ..port import MESSAGE_ID, Entry, Held, Message, Published
from ..prefixes import begins
from .connection.link import Link
from .direct import batches, held_subjects, last_message, stored_messages
from .management import EXPECTED_SEQUENCE, WRONG_REVISION, ApiError, call

Store = Callable[[str, bytes, dict[str, str]], Awaitable[Published]]

_KEPT = 4  # prefixes whose entries a bucket keeps from one reading to the next
_MOST_KEPT = 1 << 18  # bytes of each
_ENTRY = 200  # bytes of an entry without its key and value
_MARKERS = ("KV-Operation", "Nats-Marker-Reason")  # left by other clients and by the server


class JetStreamBucket:
    """Implements `Bucket`. `store` publishes with the given headers and raises `ApiError` if the server refuses.

    Entries that are read again and again, such as the registry's, are fetched only when the bucket has changed.
    """

    def __init__(self, link: Link, name: str, store: Store) -> None:
        self._link = link
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._written = link.access.key_values + self._prefix
        self._store = store
        self._ids = nuid.NUID()
        # By prefix, with the version of what was held then, the least recently read first.
        self._kept: OrderedDict[str, tuple[tuple[object, ...], list[Entry]]] = OrderedDict()

    async def get(self, key: str) -> Entry | None:
        message = await last_message(self._link, self._stream, self._prefix + key)
        return None if message is None or _is_marker(message) else self._entry(message)

    async def entries(self, prefix: str = "") -> list[Entry]:
        wildcard = self._wildcard(prefix)
        held = await held_subjects(self._link, self._stream, wildcard)
        version, kept = self._kept.get(prefix, ((), []))
        if version != held.version:
            kept = await self._read(prefix, wildcard, held)
            if sum(_ENTRY + len(entry.key) + len(entry.value) for entry in kept) <= _MOST_KEPT:
                self._kept[prefix] = held.version, kept
            else:
                self._kept.pop(prefix, None)
        if prefix in self._kept:
            self._kept.move_to_end(prefix)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return list(kept)

    async def scan(self, prefix: str) -> AsyncGenerator[list[Entry], None]:
        is_wanted = begins(prefix)
        async for messages in batches(self._link, self._stream, self._wildcard(prefix)):
            entries = [self._entry(message) for message in messages if not _is_marker(message)]
            yield [entry for entry in entries if is_wanted(entry.key)]

    async def _read(self, prefix: str, wildcard: str, held: Held) -> list[Entry]:
        newest: dict[str, Message] = {}
        for message in await stored_messages(self._link, self._stream, wildcard) if held.by_subject else ():
            newest.pop(message.subject, None)  # a lagging replica returned an older value
            # It returns deleted keys too, but a message newer than the list is a key all the same.
            if message.subject in held.by_subject or message.sequence > held.last:
                newest[message.subject] = message
        entries = [self._entry(message) for message in newest.values() if not _is_marker(message)]
        is_wanted = begins(prefix)
        return [entry for entry in entries if is_wanted(entry.key)]

    async def put(self, key: str, value: bytes) -> int:
        return (await self._write(key, value, {})).sequence

    async def create(self, key: str, value: bytes) -> int | None:
        if (revision := await self.update(key, value, 0)) is not None:
            return revision
        message = await last_message(self._link, self._stream, self._prefix + key)
        if message is None or _is_marker(message):
            return await self.update(key, value, message.sequence if message else 0)
        return None

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        headers = {EXPECTED_SEQUENCE: str(revision)}
        try:
            return (await self._write(key, value, headers)).sequence
        except ApiError as error:
            if error.code not in WRONG_REVISION:
                raise
            # The server checks the revision before the id, so this may be our own write, whose answer was lost.
            newest = await last_message(self._link, self._stream, self._prefix + key)
            ours = newest is not None and newest.headers.get(MESSAGE_ID) == headers[MESSAGE_ID]
            return newest.sequence if newest is not None and ours else None

    async def delete(self, key: str) -> None:
        await call(self._link, f"STREAM.PURGE.{self._stream}", {"filter": self._prefix + key})

    async def filled(self) -> tuple[int, int]:
        info = await call(self._link, f"STREAM.INFO.{self._stream}")
        return info["state"]["bytes"], max(0, info["config"].get("max_bytes", 0))

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> Published:
        # The id identifies a write of ours whose answer was lost.
        headers[MESSAGE_ID] = self._ids.next().decode()
        return await self._store(self._written + key, value, headers)

    def _wildcard(self, prefix: str) -> str:
        """It stands for whole tokens, so that a prefix that ends within one reads slightly too much."""
        return f"{self._prefix}{prefix[: prefix.rfind('.') + 1]}>"

    def _entry(self, message: Message) -> Entry:
        return Entry(message.subject[len(self._prefix) :], message.data, message.sequence)


def _is_marker(message: Message) -> bool:
    return any(name in message.headers for name in _MARKERS)
