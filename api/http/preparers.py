"""The models that clients name, and what turns their prompts into tokens in this process."""

from __future__ import annotations

import asyncio
import sys

import structlog

from ...engine.preparing.documents import READERS, has_files, read_documents
from ...engine.preparing.prepare import Preparer
from ...engine.preparing.preparers import PreparerCache
from ...engine.preparing.remote_files import RemoteFiles, as_named
from ...engine.vision.reading import ANY, ImageLimits
from ...schemas.errors import Fatal, InvalidRequest, Overloaded
from ...schemas.openai.completions import ChatRequest, CompletionRequest
from ...schemas.openai.content import NO_FILES, NamedFiles
from ...schemas.openai.embeddings import PooledRequest
from ...schemas.registry import ModelCard
from ...streams.gate import FairGate
from ...streams.stores.named_files import NamedFileStore
from ...streams.stores.registry import Registry

log = structlog.get_logger(__name__)

FETCHED_TOGETHER = 4  # requests to be counted whose images and documents are fetched at the same time

Counted = ChatRequest | CompletionRequest | PooledRequest


class Preparers:
    """The preparers of the models in `registry`, each loaded when it is first needed."""

    def __init__(
        self,
        registry: Registry,
        files: NamedFileStore,
        limits: ImageLimits = ANY,
        remote: RemoteFiles | None = None,
    ) -> None:
        """`files` has what requests name by id, `remote` fetches what they name by URL, from nowhere by default;
        `limits` are those of images."""
        self.files = files
        self._registry = registry
        self._remote = remote or RemoteFiles()
        self._fetching = FairGate(FETCHED_TOGETHER, "images and documents to be fetched", share=FETCHED_TOGETHER // 2)
        self._cache = PreparerCache(limits=limits)
        self._reading = FairGate(READERS, "files to be read")
        self.counting = FairGate(1, "prompts to be counted")  # a long one takes a second, and hundreds of megabytes

    async def card(self, name: str | None) -> ModelCard:
        """The model of this name, with Ollama's tag or without, or the only one. Raises `InvalidRequest` and
        `ModelNotFound`."""
        if name is None and not self._registry.models:
            await self._registry.look()
        models = self._registry.models
        if name is None and len(models) != 1:
            known = ", ".join(models) or "none yet"
            raise InvalidRequest(
                f"model is missing. Served: {known}.", code="missing_required_parameter", param="model"
            )
        if name is None:
            return next(iter(models.values()))
        card = await self._registry.find(await self._registry.untagged(name))
        if card is None:
            raise self._registry.unknown(name)
        return card

    async def of(self, card: ModelCard) -> Preparer:
        """The preparer of a model. Raises `Overloaded` if this machine cannot load its tokenizer."""
        self._cache.keep([*self._registry.models.values(), card])
        try:
            return await self._cache.get(card)
        except Fatal as error:
            log.error("cannot load a tokenizer", model=card.name, reason=str(error))
            raise Overloaded(
                f"The bridge cannot load the tokenizer of {card.name!r}; see its log.", code="tokenizer_unavailable"
            ) from None

    async def prompt(self, card: ModelCard, request: Counted, tenant: str, size: int) -> list[int]:
        """The tokens of the prompt, however many; `size` is how many bytes its request has.

        Raises `InvalidRequest`, and what `of` and `NamedFileStore.read` raise.
        """
        preparer = await self.of(card)
        files: NamedFiles = NO_FILES
        if wanted := self._remote.wanted(request, sees=preparer.sees):
            async with self._fetching.turn(tenant, size):
                files = as_named(await self._remote.fetch(wanted))
            size += sum(len(file.data) for file in files.values())
        if not has_files(request):
            async with self.counting.turn(tenant, size):
                return await self._tokens(preparer, request, card.name, files)
        async with self._reading.turn(tenant, size):
            files = {**files, **await self.files.read(tenant, request)}
            request = await read_documents(request, preparer.limits, files)
            async with self.counting.turn(tenant, size):
                return await self._tokens(preparer, request, card.name, files)

    async def _tokens(self, preparer: Preparer, request: Counted, name: str, files: NamedFiles) -> list[int]:
        fetched = {id: file.data for id, file in files.items()}
        found = await asyncio.to_thread(
            preparer.prepare, request, fetched=fetched, context_length=sys.maxsize, name=name, seed=0
        )
        return found.prompts[0]
