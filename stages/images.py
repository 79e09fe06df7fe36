"""The images of a request on their way from validation, which stores them, to any worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..engine.preparing.documents import has_documents, without_documents
from ..engine.vision.chat import without_images
from ..engine.vision.images import PromptImage
from ..schemas.errors import GenerationFailed, StreamNotFound
from ..schemas.jobs import Job, JobImage, ValidatedJob
from ..streams.port import Broker
from ..streams.stores.images import ImageStore, ImageUse, get_image

KEPT = 64 << 20  # bytes of images that a worker keeps for the next turn of a chat


async def stored_images(
    store: ImageStore, tenant: str, images: Sequence[PromptImage], now: float, use: ImageUse
) -> tuple[JobImage, ...]:
    """Store the images of a prompt, for any worker. Raises `QuotaExceeded` and `Overloaded`."""
    found = []
    for image in images:
        key = await store.put(tenant, image.data, image.digest, now, use)
        found.append(
            JobImage(
                key=key,
                digest=image.digest,
                offset=image.offset,
                length=image.length,
                grid=image.grid,
                pixels=image.pixels,
            )
        )
    return tuple(found)


def lean_body(job: Job, request: object, images: Sequence[PromptImage]) -> Job:
    """The job without the bytes of its images and documents; `request` is its body, read."""
    body = without_images(job.body) if images else job.body
    if has_documents(request):
        body = without_documents(body)
    return job if body is job.body else job.model_copy(update={"body": body})


class StoredImages:
    """Reads the images of jobs, and keeps some."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._kept: OrderedDict[str, bytes] = OrderedDict()  # by key, the least recently used first
        self._size = 0  # bytes

    async def of(self, job: ValidatedJob) -> tuple[PromptImage, ...]:
        """The images of a job. Raises `GenerationFailed` for one that is no longer stored."""
        try:
            return tuple([self._placed(image, await self._bytes(image)) for image in job.images])
        except StreamNotFound as error:
            raise GenerationFailed(str(error)) from None

    async def _bytes(self, image: JobImage) -> bytes:
        if (data := self._kept.get(image.key)) is None:
            data = await get_image(self._broker, image.key, image.digest)
            if image.key not in self._kept:
                self._kept[image.key] = data
                self._size += len(data)
        self._kept.move_to_end(image.key)
        while self._size > KEPT and len(self._kept) > 1:
            self._size -= len(self._kept.popitem(last=False)[1])
        return data

    def _placed(self, image: JobImage, data: bytes) -> PromptImage:
        return PromptImage(image.digest, image.offset, image.length, image.grid, image.pixels, data)
