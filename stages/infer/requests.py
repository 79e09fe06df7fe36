"""The engine's requests for a job: one for each prompt that is not finished yet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...engine import EmbeddingInput, EngineRequest
from ...engine.text.tool_formats import thought_end
from ...engine.vision.images import PromptImage
from ...schemas.jobs import Priority, ValidatedJob
from ..transcript import Transcript
from .relay import OutputPublisher

_RANKS: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}


def requests_of(publisher: OutputPublisher, transcript: Transcript) -> list[EngineRequest]:
    """One engine request for each prompt that is not finished yet."""
    job = publisher.job
    requests = []
    n = job.params.n
    for index, prompt in enumerate(job.prompts):
        choices = slice(index * n, (index + 1) * n)
        if transcript.finish_reasons and None not in transcript.finish_reasons[choices]:
            continue
        request = request_of(job, prompt, publisher.adapter, publisher.images, publisher.epoch)
        generated = tuple(map(tuple, transcript.token_ids[choices]))
        requests.append(replace(request, first_choice=choices.start, generated=generated))
    return requests


def request_of(
    job: ValidatedJob,
    prompt: tuple[int, ...],
    adapter: str | None,
    images: tuple[PromptImage, ...] = (),
    epoch: int = 1,
) -> EngineRequest:
    """The engine request of one prompt of a job, from its beginning; `adapter` is the engine's name for the job's."""
    kind = partial(EmbeddingInput, dimensions=job.dimensions) if job.is_pooled else EngineRequest
    return kind(
        id=f"{job.tenant}.{job.id}.{epoch}",
        prompt=prompt,
        params=job.params,
        seed=job.params.seed or 0,
        epoch=epoch,
        cache_salt=job.tenant,
        priority=_RANKS[job.priority],
        adapter=adapter,
        images=images,
        border=thought_end(job.form),
    )
