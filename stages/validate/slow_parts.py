"""What a request may have to wait for before it is validated: images to be fetched, and documents to be read. Others
pass it meanwhile, and no tenant keeps these from another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from ...engine.preparing.documents import READERS, has_documents, read_documents
from ...engine.preparing.gate import FairGate
from ...schemas.errors import DeadlineExceeded
from ..contract import Pipe
from ..visits import leave_turn
from .remote_images import RemoteImages

FETCHED_TOGETHER = 16  # requests whose images are fetched at the same time

Request = TypeVar("Request")


class CancelledMeanwhile(Exception):
    """The client has gone while its request waited."""


class Waiter(NamedTuple):
    """A request that has slow parts; `size` in bytes, `deadline` in Unix seconds."""

    id: str
    tenant: str
    size: int
    deadline: float


class SlowParts:
    """Fetches and reads them. Both methods raise `InvalidRequest`, `Overloaded`, `DeadlineExceeded` and
    `CancelledMeanwhile`."""

    def __init__(self, pipe: Pipe) -> None:
        """Raises `ConfigurationError`."""
        self._pipe = pipe
        self._remote = RemoteImages(pipe.settings.image_allowed_urls)
        self._fetching = FairGate(FETCHED_TOGETHER, "images to be fetched")
        self._reading = FairGate(READERS, "documents to be read")

    async def fetch(self, request: object, waiter: Waiter) -> dict[str, bytes]:
        """The files of a request's remote images, by URL."""
        if not self._remote.wanted(request):
            return {}
        async with self._turn(self._fetching, waiter):
            return await self._remote.fetch(request)

    async def read(self, request: Request, most_pixels: int, waiter: Waiter) -> Request:
        """The request with the contents of its documents, as `read_documents` returns it."""
        if not has_documents(request):
            return request
        async with self._turn(self._reading, waiter):
            return await read_documents(request, most_pixels)

    @asynccontextmanager
    async def _turn(self, gate: FairGate, waiter: Waiter) -> AsyncIterator[None]:
        leave_turn()
        async with gate.turn(waiter.tenant, waiter.size):
            if self._pipe.cancellations.include(waiter.tenant, waiter.id):
                raise CancelledMeanwhile
            if waiter.deadline <= self._pipe.now():
                raise DeadlineExceeded("The deadline passed before the request's documents and images could be read.")
            yield
