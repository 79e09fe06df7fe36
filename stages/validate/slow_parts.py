"""What a request may have to wait for before it is validated: images and documents to be fetched, documents to be read,
and grammars to be compiled. Others pass it meanwhile, and no tenant keeps these from another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar, cast

from ...engine.grammar.checker import GrammarChecker
from ...engine.preparing.documents import READERS, has_files, read_documents
from ...engine.preparing.prepare import Preparer
from ...engine.preparing.remote_files import RemoteFiles, as_named
from ...schemas.errors import DeadlineExceeded
from ...schemas.params import Grammar
from ...schemas.registry import ModelCard
from ...streams.gate import FairGate
from ...streams.stores.named_files import NamedFileStore
from ..contract import Pipe
from ..visits import leave_turn

FETCHED_TOGETHER = 16  # requests whose images and documents are fetched at the same time

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
    """Waits for them. Its methods raise `InvalidRequest`, `Overloaded`, `DeadlineExceeded` and `CancelledMeanwhile`."""

    def __init__(self, pipe: Pipe, grammars: GrammarChecker) -> None:
        self._grammars = grammars
        self._compiling = FairGate(1, "grammars to be compiled")
        self._pipe = pipe
        self._remote = RemoteFiles(pipe.settings.image_allowed_urls, pipe.settings.document_allowed_urls)
        self._files = NamedFileStore(pipe.broker, pipe.settings.max_body_size)
        self._fetching = FairGate(FETCHED_TOGETHER, "images and documents to be fetched", share=FETCHED_TOGETHER // 2)
        self._reading = FairGate(READERS, "files to be read")

    @asynccontextmanager
    async def contents(
        self, request: Request, preparer: Preparer, waiter: Waiter
    ) -> AsyncIterator[tuple[Request, Mapping[str, bytes]]]:
        """The request with what its documents say, and the bytes of its images by URL or id; inside, those of the files
        that it names are in memory.

        Raises what `NamedFileStore.read` raises, too.
        """
        fetched: dict[str, bytes] = {}
        if wanted := self._remote.wanted(request, sees=preparer.sees):
            async with self._turn(self._fetching, waiter):
                fetched = await self._remote.fetch(wanted)
        if not has_files(request):
            yield request, fetched
            return
        held = waiter.size + sum(map(len, fetched.values()))
        async with self._turn(self._reading, waiter._replace(size=held)):
            named = await self._files.read(waiter.tenant, request)
            read = await read_documents(request, preparer.limits, {**named, **as_named(fetched)})
            yield cast(Request, read), fetched | {id: file.data for id, file in named.items()}

    async def check(self, grammar: Grammar, model: ModelCard, param: str, waiter: Waiter) -> None:
        """Return if the model can follow the grammar. Raises `ModelLoadError`, too."""
        compiled = grammar, model.source, model.backend, model.revision
        if self._grammars.knows(*compiled, param=param):
            return
        async with self._turn(self._compiling, waiter):
            await self._grammars.check(*compiled, param=param)

    @asynccontextmanager
    async def _turn(self, gate: FairGate, waiter: Waiter) -> AsyncIterator[None]:
        leave_turn()
        async with gate.turn(waiter.tenant, waiter.size):
            if self._pipe.cancellations.include(waiter.tenant, waiter.id):
                raise CancelledMeanwhile
            if waiter.deadline <= self._pipe.now():
                raise DeadlineExceeded("The deadline passed while the request waited to be validated.")
            yield
