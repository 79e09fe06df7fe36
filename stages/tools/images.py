"""The images that tools return: kept as files of the tenant, which the model sees and the client can fetch."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from functools import partial

from ...engine.vision.reading import ImageLimits, check_image
from ...schemas.errors import InvalidRequest, StorageFull
from ...schemas.loops import KeepImage, KeptImage
from ...streams.outages import through_outages
from ...streams.stores.files import put_file
from ...streams.stores.objects import Objects
from ...streams.topology import FILES
from ..contract import Pipe


class ToolImages:
    """Those of all responses."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._limits = ImageLimits.of(pipe.settings)

    def keeper(self, tenant: str, model: str) -> KeepImage | None:
        """What keeps the images of a tenant's tools for a model; None if it sees none."""
        return partial(self.keep, tenant) if self.are_seen(model) else None

    def are_seen(self, model: str) -> bool:
        card = self._pipe.registry.named(model)
        return card is not None and "image" in card.modalities

    async def keep(self, tenant: str, data: bytes, kind: str) -> KeptImage:
        """Store an image of the media type `kind`; says why not if no model can be shown it."""
        id, settings = f"file-{uuid.uuid4().hex}", self._pipe.settings
        try:
            if len(data) > settings.max_body_size // 4:
                raise InvalidRequest(f"it has {len(data)} bytes, and {settings.max_body_size // 4} are allowed")
            await asyncio.to_thread(check_image, data, self._limits, "the image", kind)
            await through_outages(partial(self._put, f"{tenant}.{id}", data, kind, settings.responses_ttl), id)
        except (InvalidRequest, StorageFull) as refusal:
            return KeptImage(f"[image of type {kind}, not shown: {refusal}]")
        return KeptImage(f"[image {id}]", id)

    async def _put(self, name: str, data: bytes, kind: str, lifetime: float) -> None:
        async def whole() -> AsyncIterator[bytes]:
            yield data

        objects = await Objects.of(self._pipe.broker, FILES)
        filename = f"image.{kind.rpartition('/')[2]}"
        await put_file(objects, name, whole(), filename, "assistants_output", lifetime)
