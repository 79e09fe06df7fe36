"""Llama 3.2 Vision, some layers of which attend to images: what that means for memory, prefixes and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from vision_models import make_vision_model, picture
from vision_runs import requests_of, run
from vision_truth import expected, reference

from penstock.engine import EngineConfig, GenerationParams, ImageText, InferenceEngine
from penstock.engine.choice import Choice
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.planning.model_files import ModelFiles
from penstock.schemas.errors import ConfigurationError, InvalidRequest
from penstock.schemas.params import Grammar

GREEDY = GenerationParams(temperature=0, max_tokens=20, ignore_eos=True)
IMAGE = 2 * 2 * 2 * 16 * 4 * 17 * 4  # bytes: two layers, keys and values, two heads of 16 numbers, four tiles of 17


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("crossing") / "model", "mllama")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(config(directory)) as running:
        yield running


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return reference(directory)


def config(directory: Path, **changes: Any) -> EngineConfig:
    settings = {"kv_cache_memory": ByteSize(16 << 20), "dtype": "float32", "device": "cpu"}
    return EngineConfig(**{"model": str(directory), **settings, **changes})


def answers(
    engine: InferenceEngine, model: Any, prompts: Sequence[ImageText], count: int = 20
) -> list[tuple[int, ...]]:
    processor = engine.sight.processor
    assert processor is not None
    requests = requests_of(engine, prompts, GREEDY)
    return [expected(model, one, processor, "mllama", count) for one in requests]


def test_tokens_read_the_images_before_them_as_in_transformers(engine: InferenceEngine, model: Any) -> None:
    """In a row, apart, at both ends, in tiles or whole, and none of some before."""
    small, wide, high = picture(), picture(90, 30, 1), picture(30, 120, 2)
    prompts = [
        ImageText("<|image|><|image|> are two in a row, and <|image|> follows", (small, wide, high)),
        ImageText("some words, and then <|image|> and <|image|><|image|><|image|>", (wide, small, high, wide)),
        ImageText("<|image|>", (high,)),
    ]
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == answers(engine, model, prompts)


def test_words_before_an_image_are_other_words_with_another_image(engine: InferenceEngine) -> None:
    """Since they read it, as in transformers, no prefix is shared but by the same images in the same places."""
    text = "A long beginning, the same in all of the requests, before there is <|image|> to be seen by anybody."
    first, second = (ImageText(text, (picture(salt=salt),)) for salt in (11, 12))
    later = ImageText(first.text + " And some more words behind it, which only some have.", first.images)
    both = ImageText(later.text + "<|image|>", (*first.images, picture(salt=13)))
    engine.generate(first, GREEDY)
    assert engine.generate(second, GREEDY).stats.cached_tokens == 0
    assert engine.generate(text.replace("<|image|>", "one"), GREEDY).stats.cached_tokens == 0
    assert engine.generate(both, GREEDY).stats.cached_tokens == 0
    assert engine.generate(later, GREEDY).stats.cached_tokens >= 16, "the next turn of a chat goes on"


def test_a_prefix_outlives_what_its_image_has_left(directory: Path, engine: InferenceEngine, model: Any) -> None:
    """The blocks of tokens are found, and the image passes the tower again."""
    prompts = [
        ImageText(f"Tell all that there is to be told of <|image|>, number {n}.", (picture(salt=n),)) for n in (1, 2, 3)
    ]
    requests = requests_of(engine, prompts, GREEDY)
    wanted = answers(engine, model, prompts)
    backend = PagedBackend(config(directory, kv_cache_memory=ByteSize(8 * IMAGE), max_batch_size=2))
    assert backend.info.most_images == 2
    vision = backend.runner.vision
    assert vision is not None and vision.pauses, "its tower can pause within an image"
    before = vision.num_encoded
    assert run(backend, requests) == wanted
    assert vision.num_encoded == before + 3
    assert run(backend, requests[:1]) == wanted[:1]
    assert vision.num_encoded == before + 4
    assert backend.cache_stats().num_hit_tokens > 0
    assert len(vision._cache) == 2
    backend.close()


def test_requests_wait_for_room_for_their_images_and_for_blocks(
    directory: Path, engine: InferenceEngine, model: Any
) -> None:
    """Text goes on meanwhile, and what is preempted begins again."""
    text = "word " * 60
    prompts = [ImageText(f"{text}<|image|> {n}", (picture(salt=n),)) for n in range(4)]
    prompts.append(ImageText(f"{text}<|image|> and <|image|>", (picture(salt=7), picture(salt=8))))
    requests = [replace(one, cache_salt=one.id) for one in requests_of(engine, [*prompts, text], GREEDY)]
    wanted = answers(engine, model, prompts)
    longest = max(len(one.prompt) for one in requests) + 20
    memory = ByteSize(12 * IMAGE)
    backend = PagedBackend(config(directory, kv_cache_memory=memory, max_batch_size=6, max_sequence_length=longest))
    assert backend.info.most_images == 3
    choices = [Choice(request, 0, backend.tokenizer, backend.info) for request in requests]
    for choice in choices:
        backend.add(choice)
    most = 0
    while any(choice.finish is None for choice in choices):
        backend.step()
        backend.check_integrity()
        most = max(most, sum(not one.is_waiting and one.finish is None for one in choices[:4]))
    assert [tuple(choice.tokens) for choice in choices[:5]] == wanted
    assert 1 <= most <= 3
    assert backend.cache_stats().num_preemptions > 0
    backend.close()


def test_no_more_images_are_held_than_there_is_room_for(directory: Path, engine: InferenceEngine, model: Any) -> None:
    """Requests with one image share its room; those with others wait in line, though there are blocks for them."""
    salts = (0, 1, 1, 2, 0, 3)
    prompts = [ImageText(f"<|image|> {n}", (picture(salt=salt),)) for n, salt in enumerate(salts)]
    backend = PagedBackend(config(directory, kv_cache_memory=ByteSize(8 * IMAGE), max_batch_size=6))
    assert backend.info.most_images == 2
    requests = requests_of(engine, prompts, GREEDY)
    choices = [Choice(request, 0, backend.tokenizer, backend.info) for request in requests]
    for choice in choices:
        backend.add(choice)
    together = set[tuple[int, ...]]()
    assert backend.runner.vision is not None
    while any(choice.finish is None for choice in choices):
        wait(backend.runner.vision.pictures._begun)  # so that each run takes the same steps
        backend.step()
        backend.check_integrity()
        together.add(tuple(n for n, one in enumerate(choices) if not one.is_waiting and one.finish is None))
    assert [tuple(choice.tokens) for choice in choices] == answers(engine, model, prompts)
    assert max(len({salts[n] for n in running}) for running in together) == 2
    assert max(map(len, together)) == 4, "of these two each show the same image"
    backend.close()


def test_more_images_than_there_is_room_for_are_refused(directory: Path) -> None:
    with InferenceEngine(config(directory, kv_cache_memory=ByteSize(8 * IMAGE))) as engine:
        prompt = ImageText("<|image|><|image|><|image|>", tuple(picture(salt=salt) for salt in range(3)))
        with pytest.raises(InvalidRequest, match=r"has 3 images, and a worker of .* has room for 2 at a time"):
            engine.generate(prompt, GREEDY)
        same = ImageText(prompt.text, (picture(),) * 3)
        assert engine.generate(same, GREEDY).token_ids, "the same image counts once"
    with pytest.raises(ConfigurationError, match=f"one image takes {IMAGE} bytes.*set at least {2 * IMAGE}"):
        PagedBackend(config(directory, kv_cache_memory=ByteSize(IMAGE)))


def test_the_image_token_lies_behind_the_vocabulary(engine: InferenceEngine) -> None:
    """What looks at the tokens of a prompt leaves it out, and what would score it is refused."""
    prompt = ImageText("A <|image|> is worth words.", (picture(),))
    (request,) = requests_of(engine, [prompt], GREEDY)
    assert max(request.prompt) == engine.model_info().vocabulary_size
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 2}
    assert engine.generate(prompt, GREEDY.model_copy(update=penalties)).token_ids
    grammar = GenerationParams(temperature=0, max_tokens=12, grammar=Grammar(kind="regex", text="[a-c]+"))
    assert {*engine.generate(prompt, grammar).text} <= {*"abc"}
    with pytest.raises(InvalidRequest, match="has no scores for the tokens of images; leave prompt_logprobs out"):
        engine.generate(prompt, GREEDY.model_copy(update={"prompt_logprobs": 1}))


def test_the_files_say_what_an_image_takes(directory: Path) -> None:
    files = ModelFiles.of(config(directory))
    assert files.image() == IMAGE
    assert files.cache(16, 16) == 16 * 3 * 2 * 2 * 16 * 4, "of the layers that attend to tokens"


def test_without_an_image_processor_it_takes_text_alone(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").unlink()
    with InferenceEngine(config(tmp_path)) as engine, InferenceEngine(config(directory)) as seeing:
        text = "Some words, of which each follows from those before."
        assert engine.generate(text, GREEDY).token_ids == seeing.generate(text, GREEDY).token_ids
        with pytest.raises(InvalidRequest, match="takes text alone"):
            engine.generate(ImageText("<|image|>", (picture(),)), GREEDY)
        assert ModelFiles.of(config(tmp_path)).image() == 0
