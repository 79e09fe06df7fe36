"""Requests with images, and a backend that is stepped until they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import wait

from penstock.engine import EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.choice import Choice
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.preparing.prompts import Prompt


def requests_of(engine: InferenceEngine, prompts: Sequence[Prompt], params: GenerationParams) -> list[EngineRequest]:
    async def make() -> list[EngineRequest]:
        return [await engine._prompts.request(prompt, params) for prompt in prompts]

    return asyncio.run(make())


def run(backend: PagedBackend, requests: Sequence[EngineRequest]) -> list[tuple[int, ...]]:
    """Step a backend until all requests have ended; every step must leave it in order."""
    choices = [Choice(request, 0, backend.tokenizer, backend.info) for request in requests]
    for choice in choices:
        backend.add(choice)
    assert backend.runner.vision is not None
    while any(choice.finish is None for choice in choices):
        wait(backend.runner.vision.pictures._begun)  # so that each run takes the same steps
        backend.step()
        backend.check_integrity()
    assert all(choice.finish == "length" for choice in choices), [choice.finish for choice in choices]
    return [tuple(choice.tokens) for choice in choices]
