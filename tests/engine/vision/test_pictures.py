"""Pictures are prepared beside the engine's steps: what others notice of a slow one, and what becomes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ByteSize
from vision_models import damaged, make_vision_model, picture

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, ImageText, InferenceEngine
from penstock.engine.handle import RequestHandle
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.preparing.prompts import Prompt
from penstock.engine.vision.images import PromptImage
from penstock.engine.vision.layout import ImageLayout
from penstock.engine.vision.pictures import Arrays, Pictures, Turn
from penstock.schemas.events import Delta

GREEDY = GenerationParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "A sentence without any picture."


class Desk:
    """Prepares pictures as the model's processor does, but only while it is open; counts what it was given."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures, self._prepare = pictures, pictures.prepare
        self.begun = threading.Semaphore(0)  # released for each picture
        self.open = threading.Event()
        self.open.set()
        self.given: list[str] = []  # digests
        pictures.prepare = self.prepare

    def prepare(self, image: PromptImage) -> Any:
        self.given.append(image.digest)
        self.begun.release()
        self.open.wait()
        return self._prepare(image)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("pictures") / "llava", "llava")


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[tuple[InferenceEngine, Desk]]:
    backend = PagedBackend(config_of(model))
    assert backend.runner.vision is not None
    desk = Desk(backend.runner.vision.pictures)
    with InferenceEngine(config_of(model), backend=backend) as engine:
        yield engine, desk
        desk.open.set()


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory=ByteSize(4 << 20))


@pytest.fixture
def engine(loaded: tuple[InferenceEngine, Desk]) -> InferenceEngine:
    return loaded[0]


@pytest.fixture
def desk(loaded: tuple[InferenceEngine, Desk]) -> Iterator[Desk]:
    """The desk of `engine`, in order again afterwards."""
    desk, limit = loaded[1], loaded[1].pictures.limit
    desk.given.clear()
    desk.begun = threading.Semaphore(0)
    yield desk
    desk.open.set()
    desk.pictures.limit = limit


def about(engine: InferenceEngine, *salts: int, words: str = "What is this?") -> ImageText:
    """A prompt about pictures that no other test sees."""
    text = f"{words} {engine.image_mark * len(salts)} Say it in as many words as you can."
    return ImageText(text, tuple(picture(salt=salt) for salt in salts))


async def request_of(engine: InferenceEngine, prompt: Prompt) -> EngineRequest:
    return await engine._prompts.request(prompt, GREEDY)


async def ending(handle: RequestHandle) -> Delta:
    """The last delta of a request with one choice."""
    deltas: list[Delta] = []
    while not handle.finished:
        deltas += await handle.take()
    return deltas[-1]


def held(pictures: Pictures) -> int:
    """Pictures that are prepared or begun for requests that have not ended."""
    return len(pictures._pictures)


def test_others_go_on_while_a_picture_is_prepared(engine: InferenceEngine, desk: Desk, model: Path) -> None:
    async def ask() -> tuple[Any, Any, Any]:
        desk.open.clear()
        slow = asyncio.ensure_future(engine.agenerate(about(engine, 11), GREEDY))
        await asyncio.to_thread(desk.begun.acquire)
        others: list[Any] = [await engine.agenerate(TEXT, GREEDY) for _ in range(2)]
        assert not slow.done() and engine.stats().num_waiting == 1
        desk.open.set()
        return (await slow, *others)

    slow, *others = asyncio.run(ask())
    with InferenceEngine(config_of(model)) as plain:
        prompts: list[Prompt] = [about(plain, 11), TEXT]
        wanted = plain.generate(prompts, GREEDY)
    assert [slow.token_ids, *(other.token_ids for other in others)] == [
        wanted[0].token_ids,
        wanted[1].token_ids,
        wanted[1].token_ids,
    ]
    assert len(desk.given) == 1


def test_a_request_that_is_cancelled_meanwhile_ends_and_leaves_nothing(engine: InferenceEngine, desk: Desk) -> None:
    async def ask() -> None:
        desk.open.clear()
        handles = [engine.open(await request_of(engine, about(engine, 21 + index))) for index in range(3)]
        await asyncio.to_thread(desk.begun.acquire)
        for handle in handles:
            handle.cancel()
        assert [(await ending(handle)).finish_reason for handle in handles] == ["cancelled"] * 3
        assert held(desk.pictures) == 0
        desk.open.set()
        output = await engine.agenerate(about(engine, 25), GREEDY)
        assert len(output.token_ids) == 6

    asyncio.run(ask())
    assert len(desk.given) == 2, "what was not begun is not prepared"
    assert held(desk.pictures) == 0 and engine.stats().num_running == engine.stats().num_waiting == 0


def test_one_of_two_requests_with_a_picture_may_leave(engine: InferenceEngine, desk: Desk) -> None:
    async def ask() -> None:
        desk.open.clear()
        first, second = [
            engine.open(await request_of(engine, about(engine, 31, words=words))) for words in ("One.", "Two.")
        ]
        await asyncio.to_thread(desk.begun.acquire)
        await engine.agenerate(TEXT, GREEDY)  # steps in which both have asked
        first.cancel()
        assert (await ending(first)).finish_reason == "cancelled"
        desk.open.set()
        assert (await ending(second)).finish_reason == "length"

    asyncio.run(ask())
    assert len(desk.given) == 1 and held(desk.pictures) == 0


def test_the_same_picture_is_prepared_once(engine: InferenceEngine, desk: Desk) -> None:
    prompts: list[Prompt] = [about(engine, 41, words=words) for words in ("One.", "Two.", "One.")]
    engine.generate(prompts, GREEDY.model_copy(update={"n": 2}))
    engine.generate(about(engine, 41, words="Three."), GREEDY)
    assert len(desk.given) == 1 and held(desk.pictures) == 0


def test_a_cached_prefix_needs_no_picture(engine: InferenceEngine, desk: Desk) -> None:
    first = engine.generate(about(engine, 51), GREEDY)
    assert isinstance(engine._backend, PagedBackend) and engine._backend.runner.vision is not None
    engine._backend.runner.vision._cache.clear()
    again = engine.generate(about(engine, 51), GREEDY)
    assert again.token_ids == first.token_ids and again.stats.cached_tokens > 0
    assert len(desk.given) == 1


def test_a_picture_that_cannot_be_used_fails_its_request_alone(engine: InferenceEngine, desk: Desk) -> None:
    """As after another version of the processor has let it in."""

    async def ask() -> list[Delta]:
        good = await request_of(engine, about(engine, 61))
        bad = await request_of(engine, about(engine, 62))
        broken = replace(bad, images=tuple(replace(image, data=damaged()) for image in bad.images))
        text = await request_of(engine, TEXT)
        return list(await asyncio.gather(*[ending(engine.open(one)) for one in (good, broken, text)]))

    good, broken, text = asyncio.run(ask())
    assert (good.finish_reason, text.finish_reason) == ("length", "length")
    assert broken.finish_reason == "error" and broken.error is not None
    assert "the image is damaged" in broken.error.message and broken.error.code == "invalid_image"
    assert held(desk.pictures) == 0 and len(desk.given) == 2


def test_requests_are_served_whatever_their_pictures_take(engine: InferenceEngine, desk: Desk) -> None:
    """Also those whose own pictures exceed the limit."""
    salts: Sequence[tuple[int, ...]] = [(71, 72, 73), (74, 75), (76,), (77, 78), (71, 79)]
    prompts: list[Prompt] = [*(about(engine, *one) for one in salts), TEXT]
    desk.pictures.limit = 1
    outputs = engine.generate(prompts, GREEDY)
    assert len(desk.given) == len(set(desk.given)) == 9 and held(desk.pictures) == 0
    assert [output.token_ids for output in outputs] == [engine.generate(one, GREEDY).token_ids for one in prompts]


def layouts(*sizes: int) -> list[ImageLayout]:
    """Prompts with so many pictures, one in each 10 tokens."""
    return [
        ImageLayout(
            f"prompt {number}", tuple(PromptImage(f"{index}", 10 * index, 5, (1,)) for index in range(size)), [], None
        )
        for number, size in enumerate(sizes)
    ]


def encode(arrays: Arrays) -> Iterator[torch.Tensor]:
    """Makes features of as many bytes, in one part."""
    yield torch.from_numpy(arrays["pixels"])


def look(pictures: Pictures, line: Sequence[ImageLayout]) -> list[int]:
    """What is visible of prompts of 100 tokens that do not run, after what is in hand is prepared and encoded."""
    wait(pictures._begun)
    while pictures.advance(None):
        pass
    turns = [Turn(number, 0) for number in range(len(line))]
    return [
        pictures.visible(one, 0, 100, turn, runs=False, is_first=one is line[0])
        for one, turn in zip(line, turns, strict=True)
    ]


def test_no_picture_is_begun_while_enough_of_them_wait() -> None:
    begun: list[str] = []

    def prepare(image: PromptImage) -> Any:
        begun.append(image.digest)
        return {"pixels": np.zeros(100, np.uint8)}

    pictures = Pictures(prepare, encode, lambda key: False, limit=150)
    first, second, third = line = layouts(1, 3, 1)
    assert look(pictures, line) == [0, 0, 0]
    assert look(pictures, line) == [100, 10, 0], "the second fills the limit, and begins with what there is"
    assert look(pictures, line) == [100, 10, 0] and pictures.num_bytes == 200
    assert pictures.take(first.keyed[0][0]) is not None
    assert look(pictures, [second, third]) == [0, 0]
    assert look(pictures, [second, third]) == [100, 0] and pictures.num_bytes == 300
    wait(pictures._begun)
    assert begun == ["0", "0", "1", "2"]
    assert look(pictures, [third]) == [0] and look(pictures, [third]) == [100], "the first in line gets what it lacks"
    pictures.forget(second)
    assert pictures.num_bytes == 100
    pictures.forget(third)
    assert pictures.num_bytes == 0
    pictures.close()
