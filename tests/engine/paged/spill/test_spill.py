"""Prefixes that survive their engine: found again after a restart, with the same answers, and never wrong ones."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import lora
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.choice import Choice
from penstock.engine.output import SpillStats
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.kv.blocks import GroupSpec, KVBlocks, Tables
from penstock.engine.paged.scheduling.rows import Row
from penstock.engine.paged.spill.spill import Spill
from penstock.schemas.errors import ConfigurationError

GREEDY = GenerationParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = GenerationParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
PROMPTS = [[3 + (7 * length + index * index) % 490 for index in range(length)] for length in (16, 17, 40, 70, 200)]
FOUND = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]  # tokens: the last one is always computed

Models = Callable[[str], Path]
SPILL = "penstock.engine.paged.spill.spill."


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published goes to the writer with the next step."""
    monkeypatch.setattr(SPILL + "_INTERVAL", 0.0)


def config(model: Path, directory: Path | None, **values: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
    return EngineConfig(model=str(model), prefix_cache_dir=directory, **fields | values)


def spilled(engine: InferenceEngine) -> SpillStats:
    cache = engine.stats().cache
    assert cache is not None
    return cache.spill


def add(backend: PagedBackend, prompt: list[int], params: GenerationParams = GREEDY, salt: str = "") -> Choice:
    choice = Choice(
        EngineRequest("r", tuple(prompt), params, seed=1, cache_salt=salt), 0, backend.tokenizer, backend.info
    )
    backend.add(choice)
    return choice


def finish(backend: PagedBackend) -> None:
    """Run until nothing is left to do, for the disk either."""
    while backend.num_running or backend.num_waiting or backend.delay() <= 0:
        backend.step()
        backend.check_integrity()


def ask(backend: PagedBackend, prompt: list[int], params: GenerationParams = GREEDY, salt: str = "") -> Choice:
    choice = add(backend, prompt, params, salt)
    finish(backend)
    return choice


def spill_of(backend: PagedBackend) -> Spill:
    assert isinstance(backend._spill, Spill)
    return backend._spill


def written(backend: PagedBackend) -> None:
    """Wait for the writer."""
    spill_of(backend)._writer.submit(lambda: None).result()


def blocks_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


@pytest.mark.parametrize("shape", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("ahead", [False, True], ids=["read", "ahead"])
def test_a_restarted_engine_answers_the_same_from_disk(
    model_directory: Models, reference_of: Callable[[str], Any], tmp_path: Path, shape: str, ahead: bool
) -> None:
    """With full and with sliding attention; against an engine without a disk, and greedily against transformers."""
    model = model_directory(shape)
    plain = PagedBackend(config(model, None), ahead=ahead)
    expected = [[ask(plain, prompt, params).tokens for params in (GREEDY, SEEDED)] for prompt in PROMPTS]
    for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        reference = reference_of(shape).generate(
            ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert tokens == reference[0, len(prompt) :].tolist()
    for run in range(2):
        backend = PagedBackend(config(model, tmp_path), ahead=ahead)
        for prompt, answers, found in zip(PROMPTS, expected, FOUND, strict=True):
            first = ask(backend, prompt)
            again = ask(backend, prompt, SEEDED)
            assert [first.tokens, again.tokens] == answers
            assert (first.cached_tokens, again.cached_tokens) == (found if run else 0, found)
        stats = backend.cache_stats().spill
        assert (stats.num_found > 0) == (run > 0) and not stats.off
        backend.close()
    assert blocks_in(tmp_path)


def test_many_at_once_find_the_same_prefix(model_directory: Models, tmp_path: Path) -> None:
    """Some of them cancelled while they wait for the disk."""
    prompts = [[*PROMPTS[-1], *(5 + n for _ in range(20))] for n in range(8)]
    with InferenceEngine(config(model_directory("llama"), tmp_path, max_batch_size=4)) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    backend = PagedBackend(config(model_directory("llama"), tmp_path, max_batch_size=4))
    rows = [add(backend, prompt) for prompt in prompts]
    assert backend.num_waiting == 8
    for row in rows[0], rows[5]:
        backend.remove(row)
    assert backend.num_waiting == 6
    finish(backend)
    for index in (1, 2, 3, 4, 6, 7):
        assert tuple(rows[index].tokens) == expected[index] and rows[index].cached_tokens >= 192
    assert not rows[0].tokens and not rows[5].tokens


def test_a_prefix_comes_in_pieces(model_directory: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SPILL + "_PIECE", 3 * 16384)
    for found in (0, FOUND[-1]):
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        running = add(backend, [9] * 5, GREEDY.model_copy(update={"max_tokens": 100}))
        row = add(backend, PROMPTS[-1])
        while not row.tokens:
            if running.finish is not None:  # the disk takes its time, and the request has company until then
                running = add(backend, [9] * 5, GREEDY.model_copy(update={"max_tokens": 100}))
            backend.step()
        assert row.cached_tokens == found
        finish(backend)
        backend.close()


def test_a_full_pool_makes_room_for_what_is_on_disk(model_directory: Models, tmp_path: Path) -> None:
    """The least recently used blocks go; where requests hold all of it, the prefix is computed."""
    small = config(model_directory("llama"), tmp_path, kv_cache_memory=ByteSize(16 * 16384))
    backend = PagedBackend(small)
    expected = ask(backend, PROMPTS[3]).tokens
    backend.close()
    backend = PagedBackend(small)
    ask(backend, [450] * 200)  # fills most of the pool
    assert backend.cache_stats().num_cached_blocks >= 12
    found = ask(backend, PROMPTS[3])
    assert (found.tokens, found.cached_tokens) == (expected, 64)
    backend.close()
    backend = PagedBackend(small)
    hog = add(backend, [460] * 100, GREEDY.model_copy(update={"max_tokens": 130}))
    while hog.index < 100:
        backend.step()
    crowded = add(backend, PROMPTS[3])
    finish(backend)
    assert (crowded.tokens, crowded.finish, hog.finish) == (expected, "length", "length")


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "corrupted": lambda own, _: own[:-9] + b"corrupted",
    "truncated": lambda own, _: own[:5000],
    "empty": lambda own, _: b"",
    "foreign": lambda _, other: other,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_logged_once_removed_and_computed_anew(
    model_directory: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    backend = PagedBackend(config(model_directory("llama"), tmp_path))
    expected = ask(backend, PROMPTS[-1]).tokens
    backend.close()
    whole = [path.read_bytes() for path in blocks_in(tmp_path)]
    assert len(whole) == 13
    for index, path in enumerate(blocks_in(tmp_path)):
        path.write_bytes(DAMAGES[damage](whole[index], whole[index - 1]))
    for cached, damaged in ((0, 12), (192, 0)):
        caplog.clear()
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        row = ask(backend, PROMPTS[-1])
        assert (row.tokens, row.cached_tokens) == (expected, cached)
        assert backend.cache_stats().spill.num_damaged == damaged
        lines = [record.getMessage() for record in caplog.records]
        assert [line.startswith("12 damaged blocks") for line in lines] == [True] * (damaged > 0)
        backend.close()


def test_a_damaged_block_leaves_those_before_it(model_directory: Models, tmp_path: Path) -> None:
    backend = PagedBackend(config(model_directory("llama"), tmp_path))
    row = ask(backend, PROMPTS[-1])
    backend.close()
    fifth = blocks_in(tmp_path)[0].with_name(f"{keys_of(row)[4].hex()}.kv")
    fifth.write_bytes(b"nothing")
    backend = PagedBackend(config(model_directory("llama"), tmp_path))
    again = ask(backend, PROMPTS[-1])
    assert (again.tokens, again.cached_tokens) == (row.tokens, 64)


def keys_of(choice: Choice) -> list[bytes]:
    row = Row(choice, 0, Tables(0))
    row.extend_keys(16)
    return row.tables.keys


def copied(model: Path, path: Path, **changes: Any) -> Path:
    """A copy of a model, with other values in its config.json."""
    shutil.copytree(model, path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def retrained(model: Path, path: Path) -> Path:
    """A copy of a model in which one weight differs by little."""
    copied(model, path)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in sorted(weights) if "v_proj" in name)
    weights[name][0, 0] += 0.01
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


class TestIdentity:
    """A block is used only where every number would be the same."""

    PROMPT = PROMPTS[2]

    @pytest.fixture
    def model(self, model_directory: Models, tmp_path: Path) -> Path:
        return copied(model_directory("llama"), tmp_path / "model")

    @pytest.fixture
    def cached(self, model: Path, tmp_path: Path) -> Callable[..., int]:
        """How many tokens an engine finds that another one with the usual settings has written."""
        backend = PagedBackend(config(model, tmp_path / "disk"))
        ask(backend, self.PROMPT, salt="tenant")
        backend.close()

        def cached(other: Path = model, salt: str = "tenant", **values: Any) -> int:
            backend = PagedBackend(config(other, tmp_path / "disk", **values))
            row = ask(backend, self.PROMPT, salt=salt)
            assert row.finish == "length"
            backend.close()
            return row.cached_tokens

        return cached

    def test_the_same_model_elsewhere_is_the_same(
        self, cached: Callable[..., int], model: Path, tmp_path: Path
    ) -> None:
        assert cached() == 32
        assert cached(copied(model, tmp_path / "elsewhere")) == 32
        assert cached(max_batch_size=3, kv_cache_memory=ByteSize(8 << 20), speculation="off") == 32

    @pytest.mark.parametrize(
        "values",
        [
            {"salt": "another tenant"},
            {"dtype": "bfloat16"},
            {"quantization": "int8"},
            {"compile_kernels": False},
            {"max_sequence_length": 512},
        ],
        ids=lambda values: next(iter(values)),
    )
    def test_other_settings(self, cached: Callable[..., int], values: dict[str, Any]) -> None:
        assert cached(**values) == 0
        assert cached() == 32

    def test_other_weights(self, cached: Callable[..., int], model: Path, tmp_path: Path) -> None:
        assert cached(retrained(model, tmp_path / "other")) == 0
        assert cached(copied(model, tmp_path / "rope", rms_norm_eps=0.001)) == 0

    def test_weights_replaced_in_place(self, cached: Callable[..., int], model: Path, tmp_path: Path) -> None:
        """Under the same path, with the same size and time: what was noted of the files is not believed."""
        file = model / "model.safetensors"
        before = file.stat()
        shutil.copy(retrained(model, tmp_path / "other") / file.name, file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size
        assert cached() == 0

    def test_other_threads(self, cached: Callable[..., int]) -> None:
        """Which share the sums of a product otherwise."""
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(before + 1)
            assert cached() == 0
        finally:
            torch.set_num_threads(before)

    def test_adapters(self, model: Path, tmp_path: Path) -> None:
        sizes = lora.linear_sizes(AutoModelForCausalLM.from_pretrained(model))
        for seed in (1, 2):
            lora.make_adapter(tmp_path / f"adapter{seed}", sizes, seed=seed)
        found = {}
        for run in range(2):
            with InferenceEngine(config(model, tmp_path / "disk")) as engine:
                for seed in (1, 2):
                    engine.load_adapter(f"a{seed}", tmp_path / f"adapter{seed}")
                for adapter in (None, "a1", "a2"):
                    found[run, adapter] = engine.generate(self.PROMPT, GREEDY, adapter=adapter)
        for adapter in (None, "a1", "a2"):
            assert found[0, adapter].token_ids == found[1, adapter].token_ids
            assert (found[0, adapter].stats.cached_tokens, found[1, adapter].stats.cached_tokens) == (0, 32)


@torch.no_grad()
def test_numbers_that_are_none_are_not_written(model_directory: Models, tmp_path: Path) -> None:
    """A request that fails by them would otherwise fail after every restart. They show when the last piece is done."""
    chunked = config(model_directory("llama"), tmp_path, prefill_chunk_size=32, max_batch_size=4)
    backend = PagedBackend(chunked)
    weight = backend.runner._decoder.embedding  # type: ignore[union-attr]
    saved = weight[499].clone()
    prompt = [*PROMPTS[3][:20], 499, *PROMPTS[4][:100]]
    weight[499] = torch.nan
    assert ask(backend, prompt).finish == "error"
    weight[499] = saved
    written(backend)
    assert len(blocks_in(tmp_path)) == 1, "what came before"
    good = ask(backend, prompt)
    backend.close()
    backend = PagedBackend(chunked)
    again = ask(backend, prompt)
    assert (again.tokens, again.finish, again.cached_tokens) == (good.tokens, "length", 112)


class TestDisks:
    """Whatever the disk does, requests are answered, and one line says that it is off."""

    @pytest.fixture
    def off(self, caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
        return lambda: sum("the prefix cache on disk is off" in record.getMessage() for record in caplog.records)

    def test_no_directory(self, model_directory: Models, tmp_path: Path, off: Callable[[], int]) -> None:
        (tmp_path / "file").write_text("in the way")
        with InferenceEngine(config(model_directory("llama"), tmp_path / "file")) as engine:
            assert engine.generate(PROMPTS[2], GREEDY).finish_reason == "length"
            assert "file" in spilled(engine).off and off() == 1

    def test_a_disk_that_fails_later(self, model_directory: Models, tmp_path: Path, off: Callable[[], int]) -> None:
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        expected = [ask(backend, prompt).tokens for prompt in PROMPTS]
        backend.close()
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        ask(backend, PROMPTS[0])
        written(backend)
        (room,) = (path for path in tmp_path.iterdir() if path.is_dir())
        shutil.rmtree(room)
        room.write_text("in the way")
        for _ in range(3):
            ask(backend, [5] * 40)
        written(backend)
        assert [ask(backend, prompt).tokens for prompt in PROMPTS] == expected
        assert backend.cache_stats().spill.off and off() == 1

    def test_a_file_that_cannot_be_read(self, model_directory: Models, tmp_path: Path, off: Callable[[], int]) -> None:
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        row = ask(backend, PROMPTS[2])
        backend.close()
        first = blocks_in(tmp_path)[0].with_name(f"{keys_of(row)[0].hex()}.kv")
        first.unlink()
        first.mkdir()
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        assert ask(backend, PROMPTS[2]).tokens == row.tokens
        assert "directory" in backend.cache_stats().spill.off and off() == 1

    def test_a_disk_that_hangs(self, model_directory: Models, tmp_path: Path, off: Callable[[], int]) -> None:
        """A request waits for it no longer than for its patience; then all are computed."""
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        expected = ask(backend, PROMPTS[3]).tokens
        backend.close()
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        spill, now, hang = spill_of(backend), [0.0], threading.Event()
        spill._clock = lambda: now[0]
        spill._reader.submit(hang.wait)
        row, other = add(backend, PROMPTS[3]), add(backend, [5, 6, 7])
        for _ in range(50):
            backend.step()
        assert other.finish == "length" and not row.tokens and 0 < backend.delay() < 1
        now[0] = 6.0
        finish(backend)
        assert (row.tokens, row.cached_tokens, off()) == (expected, 0, 1)
        hang.set()

    def test_a_slow_disk_drops_blocks_and_delays_nothing(self, model_directory: Models, tmp_path: Path) -> None:
        """The writer hangs, and the engine goes on; what waits stays within its bound."""
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        spill, hang = spill_of(backend), threading.Event()
        spill._room = 3 * spill._files.file_size
        spill._writer.submit(hang.wait)
        assert ask(backend, PROMPTS[-1]).finish == "length"
        assert backend.cache_stats().spill.num_dropped == 10
        hang.set()
        written(backend)
        assert len(blocks_in(tmp_path)) == 3
        ask(backend, [7] * 40)
        backend.close()
        assert len(blocks_in(tmp_path)) == 6, "what is written makes room for others"

    def test_the_writer_is_woken_once_in_a_while(
        self, model_directory: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the engine comes back to what is left when nothing runs."""
        monkeypatch.setattr(SPILL + "_INTERVAL", 1.0)
        backend = PagedBackend(config(model_directory("llama"), tmp_path))
        spill, now = spill_of(backend), [0.0]
        spill._clock = lambda: now[0]
        ask(backend, PROMPTS[-1])
        written(backend)
        assert backend.delay() == 1.0 and blocks_in(tmp_path) == []
        now[0] = 1.0
        assert backend.delay() == 0
        finish(backend)
        written(backend)
        assert backend.delay() == inf and len(blocks_in(tmp_path)) == 13

    def test_the_limit(self, model_directory: Models, tmp_path: Path) -> None:
        limit = ByteSize(8 * 17000)
        backend = PagedBackend(config(model_directory("llama"), tmp_path, prefix_cache_limit=limit))
        for prompt in PROMPTS:
            ask(backend, prompt)
        written(backend)
        total = backend.cache_stats().spill.num_bytes
        assert 0 < total == sum(path.stat().st_size for path in blocks_in(tmp_path)) <= limit


def test_two_engines_share_a_directory(model_directory: Models, tmp_path: Path) -> None:
    """Each finds what the other has written, without a restart."""
    first, second = (PagedBackend(config(model_directory("llama"), tmp_path)) for _ in range(2))
    expected = ask(first, PROMPTS[-1]).tokens
    written(first)
    row = ask(second, PROMPTS[-1])
    assert (row.tokens, row.cached_tokens) == (expected, 192)
    with InferenceEngine(config(model_directory("llama"), None)) as engine:
        answers = [list(output.token_ids) for output in engine.generate(PROMPTS, GREEDY)]
    rows = [(add(first, prompt), add(second, prompt)) for prompt in PROMPTS]
    while any(one.delay() <= 0 or one.num_waiting for one in (first, second)):
        first.step()
        second.step()
    assert [row.tokens for row, _ in rows] == [row.tokens for _, row in rows] == answers


@pytest.mark.parametrize("backend", ["echo", "hf"])
def test_other_backends_refuse_it(model_directory: Models, tmp_path: Path, backend: str) -> None:
    with pytest.raises(ConfigurationError, match="prefix_cache_dir"):
        InferenceEngine(config(model_directory("llama"), tmp_path, backend=backend))


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 3),
    groups=st.lists(st.tuples(st.integers(1, 10), st.none() | st.integers(1, 9)), min_size=1, max_size=3),
    cached=st.lists(st.lists(st.integers(0, 7), max_size=6), min_size=3, max_size=3),
    held=st.integers(0, 6),
    length=st.integers(1, 8),
    known=st.integers(0, 8),
)
def test_filling_makes_a_prefix_match_or_changes_nothing(
    size: int, groups: list[tuple[int, int | None]], cached: list[list[int]], held: int, length: int, known: int
) -> None:
    blocks = KVBlocks(size, [GroupSpec(*group) for group in groups], max_step_tokens=1)
    keys = [bytes([index]) for index in range(8)]
    contents: dict[tuple[int, int], bytes] = {}
    for group, (pool, indices) in enumerate(zip(blocks.pools, cached, strict=False)):
        for key, block in pool.restore([keys[index] for index in indices]):
            contents[group, block] = key
    running = Tables(len(groups))
    blocks.grow(running, held * size)
    before = [dict(pool.cached()) for pool in blocks.pools]
    matched = blocks.match(keys[:length])

    def write(group: int, indices: list[int], into: list[int]) -> None:
        assert min(indices) >= known
        for index, block in zip(indices, into, strict=True):
            contents[group, block] = keys[index]

    filled = blocks.fill(keys[:length], known, write)
    blocks.check_integrity([running])
    if filled:
        assert blocks.match(keys[:length]) == length
    else:
        assert [dict(pool.cached()) for pool in blocks.pools] == before and blocks.match(keys[:length]) == matched
    for group, pool in enumerate(blocks.pools):
        for key, block in pool.cached():
            assert contents[group, block] == key
    if not filled and matched < length and known <= matched and not held:
        assert any(pool.num_blocks < length for pool in blocks.pools), "it does nothing without a reason"
