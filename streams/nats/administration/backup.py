"""Copies the streams and buckets of a deployment into files, and back into other servers: JetStream's own snapshots.

A server that has run alone does not bring its streams into a cluster that it joins, so this is also the way from one
server to three. What servers keep in memory is left out: parts create that again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from nats.aio.msg import Msg

from ....schemas.errors import StartupError
from ..connection.link import Link, status
from ..management import BUCKET, STREAM_EXISTS, ApiError, Json, call

CHUNK = 128 << 10  # bytes of a message
PATIENCE = 60.0  # seconds for the next message; a server writes a whole stream before it answers the last one
_END = "204"  # the status of a snapshot that is whole
_NOBODY = "503"  # the status of a message that nobody listens for
_WAIT = 0.05  # seconds until such a message is sent again
_ABOUT, _DATA = ".json", ".snapshot"  # end the names of files


async def save(link: Link, namespace: str, directory: Path) -> list[str]:
    """Write all streams of the namespace into `directory`, which is created; returns their names on the server.

    Raises `StartupError`.
    """
    names = await _names(link, namespace)
    if not names:
        raise StartupError(f"NATS at {link.address} has no streams of the namespace {namespace!r}: nothing to save")
    _make(directory)
    for name in names:
        async with _listening(link) as answers, _listening(link) as chunks:
            asked = {"deliver_subject": chunks.inbox, "chunk_size": CHUNK}
            about = _checked(name, await answers.ask(f"{link.access.api}STREAM.SNAPSHOT.{name}", asked))
            with (directory / f"{name}{_DATA}").open("xb") as file:
                while (chunk := await chunks.take()).data:
                    file.write(chunk.data)
                    if chunk.reply:
                        await link.send(chunk.reply, b"")
            if (end := status(chunk.headers)) not in (None, _END):
                raise StartupError(f"the snapshot of {name} broke off ({end}): remove {directory}, and try again")
            # The last one: a stream without it was not saved whole.
            kept = {"config": about["config"], "state": about["state"]}
            (directory / f"{name}{_ABOUT}").write_text(json.dumps(kept))
    return names


async def load(link: Link, namespace: str, directory: Path) -> list[str]:
    """Create the streams that `save` wrote into `directory`, with what was in them; returns their names.

    Raises `StartupError`; then none is there that was not before.
    """
    found = _saved(directory)
    if foreign := [name for name in found if not name.startswith(_prefixes(namespace))]:
        raise StartupError(f"{directory} is of another namespace ({foreign[0]}): give it with --namespace")
    if there := await _names(link, namespace):
        raise StartupError(
            f"NATS at {link.address} has streams of the namespace {namespace!r} already ({there[0]}): restore into "
            "servers without them"
        )
    created: list[str] = []
    try:
        for name in found:
            await _load_one(link, directory, name)
            created.append(name)
    except BaseException:
        for name in created:  # rather nothing than a part
            await call(link, f"STREAM.DELETE.{name}")
        raise
    return found


async def _load_one(link: Link, directory: Path, name: str) -> None:
    about = json.loads((directory / f"{name}{_ABOUT}").read_text())
    async with _listening(link) as answers:
        answer = _checked(name, await answers.ask(f"{link.access.api}STREAM.RESTORE.{name}", about))
        with (directory / f"{name}{_DATA}").open("rb") as file:
            while chunk := file.read(CHUNK):
                _checked(name, await answers.ask(answer["deliver_subject"], chunk))
        _checked(name, await answers.ask(answer["deliver_subject"], b""))


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StartupError(f"{directory} cannot be made: {error.strerror}; name one that does not exist") from error


def _saved(directory: Path) -> list[str]:
    """The names of the streams that were saved there. Raises `StartupError` where some are not whole, or none is."""
    found = sorted(path.name.removesuffix(_ABOUT) for path in directory.glob(f"*{_ABOUT}"))
    begun = sorted(path.name.removesuffix(_DATA) for path in directory.glob(f"*{_DATA}"))
    if not found or begun != found:
        raise StartupError(f"{directory} holds no backup, or one that broke off: make it again")
    return found


class _Listening:
    """Messages to an inbox of their own, in order. What is asked arrives once, as chunks may not come twice."""

    def __init__(self, link: Link) -> None:
        self.inbox = link.new_inbox()
        self._link = link
        self._messages: asyncio.Queue[Msg] = asyncio.Queue()

    def hear(self, message: Msg) -> None:
        self._messages.put_nowait(message)

    async def ask(self, subject: str, data: bytes | Json) -> Msg:
        message = data if isinstance(data, bytes) else orjson.dumps(data)
        clock = asyncio.get_running_loop().time
        end = clock() + self._link.timeout
        while True:
            await self._link.send(subject, message, reply=self.inbox)
            answer = await self.take()
            if status(answer.headers) != _NOBODY:
                return answer
            # It reached nobody: in a cluster our server may not know yet who listens for the chunks.
            if clock() >= end:
                raise StartupError(f"NATS at {self._link.address}: nobody takes {subject}; try again")
            await asyncio.sleep(_WAIT)

    async def take(self) -> Msg:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._messages.get()
        except TimeoutError:
            raise StartupError(f"NATS at {self._link.address} did not go on for {PATIENCE:g} s; try again") from None


@asynccontextmanager
async def _listening(link: Link) -> AsyncIterator[_Listening]:
    listening = _Listening(link)
    subscription = await link.subscribe(listening.inbox, listening.hear)
    try:
        await link.flush()
        yield listening
    finally:
        await link.unsubscribe(subscription)


def _checked(name: str, message: Msg) -> Any:
    """What the server answered. Raises `StartupError` where it is an error."""
    answer = orjson.loads(message.data) if message.data else {}
    if "error" in answer:
        error = ApiError(answer["error"])
        advice = "; restore into servers without it" if error.code == STREAM_EXISTS else ""
        raise StartupError(f"stream {name}: {error}{advice}")
    return answer


async def _names(link: Link, namespace: str) -> list[str]:
    """The names of the namespace's streams that are in files."""
    found: list[str] = []
    while True:
        answer = await call(link, "STREAM.LIST", {"offset": len(found)})
        found += [each["config"]["name"] if each["config"]["storage"] == "file" else "" for each in answer["streams"]]
        if len(found) >= answer["total"] or not answer["streams"]:
            return sorted(name for name in found if name.startswith(_prefixes(namespace)))


def _prefixes(namespace: str) -> tuple[str, str]:
    return f"{namespace}_".upper(), f"{BUCKET}{namespace}_"
