"""Pictures pass the tower in parts, one between two steps: what goes on meanwhile, whose turn it is, what is dropped.

Steps are made one by one, with all pictures prepared that can be; the oracle is transformers' own generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ByteSize
from torch import Tensor
from vision_models import make_vision_model, picture
from vision_truth import expected, reference

from penstock.engine import EngineConfig, EngineRequest, GenerationParams
from penstock.engine.choice import Choice
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.stalls import StallClock
from penstock.engine.vision import blocks
from penstock.engine.vision.chat import GivenImage
from penstock.engine.vision.images import PromptImage
from penstock.engine.vision.layout import ImageLayout
from penstock.engine.vision.pictures import Arrays, Pictures, Turn
from penstock.engine.vision.reading import ANY
from penstock.engine.vision.tower import Vision

HIGH, LOW = 0, 2  # lanes
LONG, SHORT = 30, 4  # tokens of an answer
TILES = 5  # of each picture here: four, and the whole

Make = Callable[..., "Bench"]
_numbers = count(1)


class Recorder:
    """Passes pictures through a tower, and keeps of which each part was; `breaks` is one that cannot be encoded.

    Pictures are prepared while it is open.
    """

    def __init__(self, vision: Vision) -> None:
        pictures = vision.pictures
        self._encode, self._prepare = pictures.encode, pictures.prepare
        self.parts_of: list[str] = []  # digests of pictures
        self.breaks = ""
        self.open = threading.Event()
        self._prepared: list[tuple[Arrays, str]] = []
        pictures.encode, pictures.prepare = self.encode, self.prepare

    def prepare(self, image: PromptImage) -> Arrays:
        self.open.wait()
        arrays = self._prepare(image)
        self._prepared.append((arrays, image.digest))
        return arrays

    def encode(self, arrays: Arrays) -> Iterator[Tensor | None]:
        (digest,) = [digest for known, digest in self._prepared if known is arrays]
        for features in self._encode(arrays):
            self.parts_of.append(digest)
            if digest == self.breaks:
                raise RuntimeError("the tower is broken")
            yield features


class Bench:
    """A backend that is stepped by hand."""

    def __init__(self, backend: PagedBackend, model: Any, family: str) -> None:
        assert backend.runner.vision is not None
        self.backend, self.vision, self._model, self._family = backend, backend.runner.vision, model, family
        self.pictures, self.recorder = self.vision.pictures, Recorder(self.vision)

    def choice(
        self, words: str, *salts: int, priority: int = HIGH, length: int = SHORT, beside: Choice | None = None
    ) -> Choice:
        """Of a request about pictures that differ by their salts, of the tenant of `beside`, or one of its own."""
        mark, tokenizer = self.vision.processor.mark(self.backend.tokenizer), self.backend.tokenizer
        given = [GivenImage(picture(salt=salt), ANY, "image") for salt in salts]
        text = f"{words} {mark * len(salts)} Well?"
        ids, images = self.vision.processor.insert(text, given, tokenizer, context_length=2000)
        params = GenerationParams(temperature=0, max_tokens=length, ignore_eos=True)
        name = f"request {next(_numbers)}"
        tenant = name if beside is None else beside.request.cache_salt
        request = EngineRequest(name, tuple(ids), params, seed=0, priority=priority, images=images, cache_salt=tenant)
        return Choice(request, 0, tokenizer, self.backend.info)

    def add(self, *choices: Choice) -> None:
        for choice in choices:
            self.backend.add(choice)

    def step(self) -> list[str]:
        """Prepare all pictures that are begun, and step; returns of which pictures a part was encoded."""
        self.recorder.open.set()
        wait(self.pictures._begun)
        self.recorder.open.clear()
        before = len(self.recorder.parts_of)
        self.backend.step()
        self.backend.check_integrity()
        return self.recorder.parts_of[before:]

    def run(self, *choices: Choice) -> list[list[str]]:
        """Step until these have ended; returns what each step encoded."""
        steps: list[list[str]] = []
        while any(choice.finish is None for choice in choices):
            assert len(steps) < 200, "some wait for ever"
            assert self.backend.delay() == 0 or self.pictures._begun, "nothing waits without need"
            steps.append(self.step())
        return steps

    def check(self, *choices: Choice) -> None:
        """They have ended with what transformers makes of them."""
        for one in choices:
            request, processor = one.request, self.vision.processor
            assert tuple(one.tokens) == expected(
                self._model, request, processor, self._family, request.params.max_tokens, tuple(one.tokens)
            )


def digest(choice: Choice) -> str:
    (image,) = choice.request.images
    return image.digest


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices are fastest so
    root = tmp_path_factory.mktemp("parts")
    directory_of = cache(lambda family: make_vision_model(root / family, family))
    reference_of = cache(lambda family: reference(directory_of(family)))
    benches: list[Bench] = []

    def start(family: str = "smolvlm", **changes: Any) -> Bench:
        own: dict[str, Any] = {
            "kv_cache_memory": ByteSize(16 << 20),
            "dtype": "float32",
            "device": "cpu",
            "speculation": "off",
        }
        backend = PagedBackend(EngineConfig(model=str(directory_of(family)), **own | changes))
        benches.append(Bench(backend, reference_of(family), family))
        return benches[-1]

    yield start
    for bench in benches:
        bench.recorder.open.set()
        bench.backend.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shared(make: Make) -> Bench:
    return make()


@pytest.fixture
def bench(shared: Bench) -> Bench:
    """One that earlier tests have used, for prompts of which it knows nothing."""
    assert not shared.pictures._pictures and not shared.backend.num_running and not shared.backend.num_waiting
    shared.recorder.parts_of.clear()
    shared.recorder.breaks = ""
    return shared


def test_a_stream_gets_a_token_between_all_parts_of_a_picture(bench: Bench) -> None:
    stream = bench.choice("A long story.", length=LONG)
    seeing = bench.choice("Here is", 1, beside=stream)
    bench.add(stream)
    bench.step()
    bench.add(seeing)
    counts = []
    while not seeing.tokens and stream.finish is None:
        before = len(stream.tokens)
        counts.append((len(bench.step()), len(stream.tokens) - before))
    assert counts == [(0, 1), *[(1, 1)] * TILES, (0, 1)], "prepared, encoded part by part, computed"
    assert [len(parts) for parts in bench.run(stream, seeing)] == [0] * (LONG - len(counts) - 1)
    bench.check(stream, seeing)


def test_a_picture_alone_waits_for_nothing(bench: Bench) -> None:
    seeing = bench.choice("Here is", 1)
    bench.add(seeing)
    assert [len(parts) for parts in bench.run(seeing)] == [0, *[1] * TILES, *[0] * SHORT]
    bench.check(seeing)


def test_a_picture_of_many_parts_does_not_stall(bench: Bench) -> None:
    """Each of its parts takes longer than a request may stand still."""
    seeing, now = bench.choice("Here is", 1), 0.0
    stalls = StallClock(8.0, lambda: now)
    bench.add(seeing)
    bench.step()
    for _ in range(TILES):
        bench.step()
        for _ in range(3):
            now += 3.0
            assert stalls.check([seeing]) == []
    bench.run(seeing)


def test_no_part_waits_while_the_next_picture_is_prepared(bench: Bench) -> None:
    first, second = bench.choice("Here is", 1), bench.choice("And here", 2)
    bench.add(first)
    bench.step()
    bench.add(second)
    assert bench.step() == [digest(first)] and not bench.pictures._begun[0].done()
    assert bench.backend.delay() == 0
    bench.run(first, second)
    bench.check(first, second)


def test_features_have_the_same_bits_in_all_schedules(bench: Bench) -> None:
    alone, beside, stream = (
        bench.choice("Here is", 1),
        bench.choice("Here is", 1),
        bench.choice("A story.", length=LONG),
    )
    bench.add(alone)
    bench.run(alone)
    bench.add(stream)
    bench.step()
    bench.add(beside, bench.choice("And here", 2))
    bench.run(beside, stream)
    (image,) = alone.request.images
    first, second = [bench.vision._cache[one.request.cache_salt, image.identity] for one in (alone, beside)]
    at_once = bench.vision._encode_at_once(bench.vision.processor.inputs(image))
    assert torch.equal(first, second) and torch.equal(first, at_once)


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        *[("llava", 3), ("qwen2_vl", 2), ("qwen2_5_vl", 3), ("qwen3_vl", 3), ("mistral3", 2), ("gemma3", 2)],
        *[("gemma4", 2), ("qwen3_vl_moe", 3), ("qwen3_5", 3), ("lfm3_vl", 3), ("glm4v", 3), ("glm4v_moe", 3)],
        *[("glm_ocr", 3), ("exaone4_5", 3), ("paddleocr_vl", 2), ("lighton_ocr", 2)],
        *[
            ("llava_next", 3),
            ("granite_vision", 4),
            ("llava_onevision", 2),
            ("vipllava", 3),
            ("minicpmv4_6", 3),
            ("minicpmv4_7", 3),
            ("got_ocr2", 3),
            ("deepseek_vl", 2),
            ("janus", 2),
            ("video_llama_3", 2),
            ("deepseek_vl_hybrid", 5),
            ("hyperclovax_vision_v2", 3),
            ("hunyuan_vl", 2),
            ("llava_next_video", 3),
            ("kimi_k25", 2),
            ("aria", 2),
            ("fast_vlm", 14),
            ("granite4_vision", 4),
        ],
    ],
)
def test_a_picture_that_is_seen_as_a_whole_passes_block_by_block(family: str, blocks: int, make: Make) -> None:
    bench = make(family)
    stream, at_once = bench.choice("A long story.", length=LONG), bench.choice("Here is", 1)
    by_blocks, cancelled = (
        bench.choice(words, salt, beside=stream) for words, salt in (("And here", 2), ("And now", 3))
    )
    bench.add(stream, at_once)
    bench.run(at_once)
    bench.vision.budget = 0
    bench.add(by_blocks)
    counts = []
    while not by_blocks.tokens and stream.finish is None:
        before = len(stream.tokens)
        counts.append((len(bench.step()), len(stream.tokens) - before))
    assert counts == [(0, 1), *[(1, 1)] * blocks, (0, 1)]
    bench.add(cancelled)
    assert [len(bench.step()) for _ in range(2)] == [0, 1]
    bench.backend.remove(cancelled)
    bench.run(stream, by_blocks)
    assert len(bench.recorder.parts_of) == 1 + blocks + 1
    bench.check(stream, at_once, by_blocks)
    arrays = bench.vision.processor.inputs(at_once.request.images[0])
    (image,) = at_once.request.images
    with torch.inference_mode():  # as in steps
        *_, features = bench.vision.encode(arrays)
    assert features is not None
    assert torch.equal(features, bench.vision._cache[at_once.request.cache_salt, image.identity]), "with the same bits"


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gemma3n", "gemma4", "llava", "smolvlm"])
def test_a_tower_pauses_in_a_model_that_is_known_already(family: str, make: Make) -> None:
    """Though it is not tried again; one that sees tiles needs no pauses within them."""
    make(family)
    bench = make(family)
    assert bench.vision.pauses == (family != "smolvlm")
    bench.vision.budget = 0
    seeing = bench.choice("Here is", 1)
    bench.add(seeing)
    assert sum(map(len, bench.run(seeing))) > 1
    bench.check(seeing)


def test_a_tower_that_is_built_otherwise_is_not_cut_into_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    descendants = blocks._descendants
    monkeypatch.setattr(blocks, "_descendants", lambda module, name: [*descendants(module, name)][::-1])
    bench = make("qwen2_vl")
    assert "cannot pause within an image" in caplog.text
    bench.vision.budget = 0
    seeing = bench.choice("Here is", 1)
    bench.add(seeing)
    assert [len(parts) for parts in bench.run(seeing)] == [0, 1, *[0] * SHORT]
    bench.check(seeing)


def test_a_cancelled_picture_leaves_the_tower_at_once(bench: Bench) -> None:
    stream, seeing = bench.choice("A long story.", length=LONG), bench.choice("Here is", 1)
    bench.add(stream, seeing)
    assert [len(bench.step()) for _ in range(3)] == [0, 1, 1]
    bench.backend.remove(seeing)
    assert not bench.pictures._pictures and bench.pictures.num_bytes == 0
    again = replace(seeing.request, id="again")
    later = Choice(again, 0, bench.backend.tokenizer, bench.backend.info)
    assert [bench.step() for _ in range(3)] == [[]] * 3
    bench.add(later)
    bench.run(stream, later)
    assert len(bench.recorder.parts_of) == 2 + TILES, "it begins anew"
    bench.check(stream, later)


def test_what_two_prompts_need_stays_while_one_of_them_does(bench: Bench) -> None:
    one = bench.choice("Here is", 1)
    mate = Choice(replace(one.request, id="mate"), 0, bench.backend.tokenizer, bench.backend.info)
    bench.add(one, mate)
    assert [len(bench.step()) for _ in range(3)] == [0, 1, 1]
    bench.backend.remove(one)
    bench.run(mate)
    assert len(bench.recorder.parts_of) == TILES
    bench.check(mate)


def test_pictures_of_one_lane_pass_the_tower_in_their_order(bench: Bench) -> None:
    first, second = bench.choice("Here is", 1), bench.choice("And here", 2, 3)
    bench.add(first, second)
    bench.run(first, second)
    third, fourth = (image.digest for image in second.request.images)
    assert bench.recorder.parts_of == [*[digest(first)] * TILES, *[third] * TILES, *[fourth] * TILES]
    bench.check(first, second)


def test_a_picture_of_a_higher_lane_goes_first(bench: Bench) -> None:
    stream = bench.choice("A long story.", priority=LOW, length=LONG)
    low, high = bench.choice("Here is", 1, priority=LOW), bench.choice("And here", 2, priority=HIGH)
    bench.add(stream, low)
    assert [len(bench.step()) for _ in range(3)] == [0, 1, 1]
    bench.add(high)
    bench.run(stream, low, high)
    assert bench.recorder.parts_of == [
        *[digest(low)] * 3,  # the third while the other is prepared
        *[digest(high)] * TILES,
        *[digest(low)] * (TILES - 3),
    ]
    bench.check(stream, low, high)


def test_pictures_of_a_lower_lane_wait_for_urgent_prompts_alone(make: Make) -> None:
    bench = make(prefill_chunk_size=16, max_batch_size=8)
    low, high = bench.choice("Here is", 1, priority=LOW), bench.choice("Word by word. " * 20, priority=HIGH)
    bench.add(low)
    assert [len(bench.step()) for _ in range(2)] == [0, 1]
    bench.add(high)
    meanwhile: list[str] = []
    while not high.tokens and len(meanwhile) < TILES:
        meanwhile += bench.step()
    assert high.num_computed > 4 * 16 and not meanwhile, "several steps, and none of them longer by a part"
    assert [len(parts) for parts in bench.run(high)] == [1] * (SHORT - 1)
    bench.run(low)
    bench.check(low, high)


def test_a_picture_gets_ready_while_the_batch_is_full(make: Make) -> None:
    """Others take the seats that come free before; it takes the first one after."""
    bench = make(max_batch_size=2)
    streams = [bench.choice("A long story.", length=LONG), bench.choice("A short one.", length=SHORT)]
    seeing, text = bench.choice("Here is", 1), bench.choice("No picture.", length=2 * TILES)
    bench.add(*streams, seeing, text)
    bench.run(streams[1])
    assert not bench.recorder.parts_of, "nobody has asked for it: no seat was free"
    bench.run(text)
    assert len(bench.recorder.parts_of) == TILES
    later = bench.choice("Somebody else.")
    bench.add(later)
    bench.run(seeing)
    assert not later.tokens
    bench.run(*streams, later)
    bench.check(*streams, seeing, text, later)


def test_a_picture_that_breaks_the_tower_fails_its_request_alone(bench: Bench) -> None:
    stream, good, bad = bench.choice("A story.", length=LONG), bench.choice("Here is", 1), bench.choice("And here", 2)
    bench.recorder.breaks = digest(bad)
    bench.add(stream, bad, good)
    bench.run(stream, bad, good)
    assert bad.finish == "error" and bench.recorder.parts_of.count(digest(bad)) == 1
    assert not bench.pictures._pictures
    bench.check(stream, good)


def test_a_preempted_prompt_keeps_what_passed_the_tower(make: Make, shared: Bench) -> None:
    """It loses its blocks, and its place to the stream before it, while its second picture is encoded."""
    seeing = len(shared.choice("Here are", 1, 2).prompt)
    words = next(words for words in map("so ".__mul__, range(40)) if len(shared.choice(words).prompt) % 16 == 6)
    num_blocks = len(shared.choice(words).prompt) // 16 + 1 + -(-seeing // 16)
    memory = ByteSize(num_blocks * 16 * 3 * 2 * 2 * 16 * 4)
    bench = make(kv_cache_memory=memory, max_batch_size=2, max_sequence_length=16 * num_blocks)
    bench.pictures.limit = 1  # so that a prompt begins with the pictures that there are
    stream, two = bench.choice(words, length=LONG), bench.choice("Here are", 1, 2)
    bench.add(stream, two)
    for _ in range(LONG):
        bench.step()
        if two.preemptions:
            break
    assert TILES < len(bench.recorder.parts_of) <= 2 * TILES
    bench.run(stream, two)
    first, second = (image.digest for image in two.request.images)
    assert bench.recorder.parts_of == [*[first] * TILES, *[second] * TILES]
    bench.check(stream, two)


def prepare(image: PromptImage) -> Arrays:
    return {"pixels": np.array([*image.digest.encode()], np.uint8)}


def layout(name: str) -> ImageLayout:
    return ImageLayout(name, (PromptImage(name, 0, 5, (1,)),), [], None)


def test_an_old_picture_of_a_lower_lane_goes_before_new_urgent_prompts() -> None:
    """A level of priority outranks a limited number of arrivals, and so it does for pictures."""
    passed: list[str] = []

    def encode(arrays: Arrays) -> Iterator[Tensor | None]:
        for features in (None, torch.zeros(1, 1, 10)):
            passed.append("".join(map(chr, arrays["pixels"])))
            yield features

    pictures = Pictures(prepare, encode, lambda key: False)
    old, new = layout("old"), layout("new")
    pictures.visible(old, 0, 10, Turn(1500, 1), runs=False, is_first=True)
    pictures.visible(new, 0, 10, Turn(1600, 0), runs=False, is_first=False)
    wait(pictures._begun)
    assert pictures.advance(Turn(1499, 0)) and passed == ["new"]
    assert pictures.advance(Turn(1501, 0)) and passed == ["new", "old"]
    assert pictures.advance(None) and pictures.advance(None) and passed == ["new", "old", "old", "new"]
    assert not pictures.advance(None)
    assert [pictures.visible(one, 0, 10, Turn(1, 0), runs=False, is_first=True) for one in (old, new)] == [10, 10]
    pictures.close()
