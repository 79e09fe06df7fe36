"""What the engine chooses where the configuration leaves the batch size or the memory open."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize
from tiny_model import make_tiny_model

from penstock.engine import EngineConfig, InferenceEngine
from penstock.engine.cpu.machine import Memory, available_cores, memory_kills, memory_of_machine
from penstock.engine.models import read_shapes
from penstock.engine.paged.kv.kv_plan import check_memory
from penstock.engine.planning.model_files import Weights
from penstock.engine.planning.sizing import Footprint, SizedConfig, footprint, size, sized
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.errors import ConfigurationError
from penstock.schemas.params import GenerationParams

GB = 1 << 30
SMALL = {  # SmolLM2-135M
    "vocab_size": 49_152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
LARGE = {  # Llama-3-8B
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def chosen(
    directory: Path,
    machine: int,
    settings: dict[str, Any] = SMALL,
    parameters: int = 134_515_008,
    workers: int = 1,
    head: int = 0,
    **given: Any,
) -> SizedConfig:
    """What is chosen for a model of so many parameters; of these the last `head` are an output head of its own."""
    (directory / "config.json").write_text(json.dumps(settings))
    body = parameters - head
    tensors = {"w": (body, 0, 2 * body)} | ({"lm_head.weight": (head, 2 * body, 2 * parameters)} if head else {})
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": [size], "data_offsets": [start, end]}
            for name, (size, start, end) in tensors.items()
        }
    ).encode()
    with (directory / "model.safetensors").open("wb") as file:  # all holes
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * parameters)
    config = EngineConfig(model=str(directory), device="cpu", **given)
    return sized(config, workers, Memory(machine, machine * 4 // 5))


@pytest.mark.parametrize("gigabytes", [4, 16, 64])
def test_where_memory_allows_32_run_at_once(tmp_path: Path, gigabytes: int) -> None:
    config = chosen(tmp_path, gigabytes * GB)
    assert config.max_batch_size >= 32
    weights = 2 * 134_515_008
    assert config.kv_cache_memory + weights < gigabytes * GB * 4 // 5


def test_a_large_model_on_a_small_machine_runs_few_at_a_time(tmp_path: Path) -> None:
    config = chosen(tmp_path, 24 * GB, LARGE, 8_030_261_248)
    assert 1 <= config.max_batch_size < 32
    assert config.kv_cache_memory >= config.max_batch_size * 1024 * 131_072  # bytes of a token


def test_what_was_given_acts(tmp_path: Path) -> None:
    config = chosen(tmp_path, 4 * GB, max_batch_size=500, kv_cache_memory=ByteSize(100))
    assert (config.max_batch_size, config.kv_cache_memory) == (500, 100)
    assert chosen(tmp_path, 4 * GB, max_batch_size=500).kv_cache_memory > GB // 4
    few = chosen(tmp_path, 64 * GB, kv_cache_memory=ByteSize(GB // 8))
    assert few.max_batch_size == GB // 8 // (1024 * 2 * 30 * 3 * 64 * 2)
    assert chosen(tmp_path, 64 * GB, prefill_chunk_size=10).max_batch_size == 8


def test_a_small_model_takes_no_more_than_it_can_use(tmp_path: Path) -> None:
    """Twice what full rows need, with the batch size that was given, too; each token takes 23,040 bytes here."""
    settings = SMALL | {"max_position_embeddings": 512}
    assert chosen(tmp_path, 512 * GB, settings).kv_cache_memory == 2 * 32 * 512 * 23_040
    assert chosen(tmp_path, 512 * GB, settings, max_batch_size=3).kv_cache_memory == 2 * 3 * 512 * 23_040


def test_a_huge_context_takes_no_more_than_there_is(tmp_path: Path) -> None:
    config = chosen(tmp_path, 4 * GB, SMALL | {"max_position_embeddings": 10_000_000})
    assert config.max_batch_size == 32
    assert config.kv_cache_memory < 2 * GB


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("more", "numbers"),
    [
        ({}, 2 * 30 * 3 * 64 * 8192),
        ({"layer_types": ["sliding_attention"] * 25 + ["full_attention"] * 5}, 2 * 30 * 3 * 64 * 8192),
        (
            {"layer_types": ["sliding_attention"] * 25 + ["full_attention"] * 5, "sliding_window": 512},
            2 * 3 * 64 * (5 * 8192 + 25 * (512 + 256)),
        ),
        ({"multi_query": True}, 2 * 30 * 64 * 8192),
        ({"multi_query": True, "new_decoder_architecture": True}, 2 * 30 * 3 * 64 * 8192),
        (LATENT, 2 * 30 * 9 * 192 * 8192),
    ],
)
def test_a_row_takes_what_its_layers_cache(tmp_path: Path, more: dict[str, Any], numbers: int) -> None:
    config = chosen(tmp_path, 512 * GB, SMALL | more, max_batch_size=1)
    assert config.kv_cache_memory == 2 * 2 * numbers, "twice the context, in bfloat16"


@given(
    machine=st.integers(1 << 28, 1 << 40),
    workers=st.integers(1, 8),
    context=st.integers(64, 1 << 21),
    rows=st.one_of(st.none(), st.integers(1, 256)),
)
def test_what_is_chosen_fits(machine: int, workers: int, context: int, rows: int | None) -> None:
    """All workers together stay within what is free, unless even the least cache does not fit."""
    with TemporaryDirectory() as directory:
        own = SMALL | {"max_position_embeddings": context}
        config = chosen(Path(directory), machine, own, workers=workers, max_batch_size=rows)
        found = footprint(config)
    free = machine * 4 // 5
    assert config.kv_cache_memory <= 64 << 20 or workers * (found.weights + config.kv_cache_memory + GB // 2) <= free
    assert config.kv_cache_memory <= 2 * (rows or 64) * context * 23_040
    assert rows is not None or 1 <= config.max_batch_size <= 64


def test_a_choice_says_what_it_was_made_from(tmp_path: Path) -> None:
    chosen(tmp_path, GB)
    config = EngineConfig(model=str(tmp_path), device="cpu")
    basis = size(config, 2, Memory(16 * GB, 8 * GB)).basis
    assert basis is not None
    assert basis.text == "4.0 GiB free, 310.6 MiB of weights, 22.5 KiB a token, a context of 8192 tokens"
    given = {"max_batch_size": 2, "kv_cache_memory": ByteSize(GB)}
    assert size(config.model_copy(update=given), 2).basis is None


def test_workers_share_the_machine(tmp_path: Path) -> None:
    alone, one_of_four = (chosen(tmp_path, 16 * GB, workers=workers) for workers in (1, 4))
    assert one_of_four.kv_cache_memory < alone.kv_cache_memory / 3


def test_a_machine_without_room_still_has_a_cache(tmp_path: Path) -> None:
    config = chosen(tmp_path, GB // 2)
    assert config.kv_cache_memory == 64 << 20
    assert config.max_batch_size >= 1


def test_a_choice_is_made_once(tmp_path: Path) -> None:
    config = chosen(tmp_path, 16 * GB)
    assert sized(config) is config


@pytest.mark.parametrize("gigabytes", [2, 16, 64])
def test_a_footprint_has_the_cache_that_is_chosen(tmp_path: Path, gigabytes: int) -> None:
    machine = Memory(gigabytes * GB, gigabytes * GB * 4 // 5)
    sizes = chosen(tmp_path, gigabytes * GB, workers=2, head=49_152 * 576)
    config = EngineConfig(model=str(tmp_path), device="cpu")
    found = footprint(config, 2, machine)
    assert found.cache == sizes.kv_cache_memory
    assert found.weights == 2 * 134_515_008
    assert found.total == sum(found) and found.total > found.weights + found.cache
    assert footprint(sizes) == found, "nothing is chosen twice"
    given = footprint(config.model_copy(update={"kv_cache_memory": ByteSize(GB)}))
    assert given.cache == GB


def test_quantised_weights_take_less_and_a_tied_head_more(tmp_path: Path) -> None:
    embedding, total = 49_152 * 576, 134_515_008
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_memory=ByteSize(GB))

    def weights(head: int, **given: Any) -> int:
        chosen(tmp_path, GB, head=head)
        return footprint(config.model_copy(update=given)).weights

    assert weights(embedding) == 2 * total
    assert weights(0) == 2 * (total + embedding), "the head is a packed copy of the embedding"
    assert weights(0, backend="hf") == 2 * total
    for head in (embedding, 0):
        int4, int8 = weights(head, quantization="int4"), weights(head, quantization="int8")
        assert int4 < int8 < weights(head)
        packed = total - embedding - head
        assert int4 == pytest.approx(2 * embedding + 0.6 * packed + 1.1 * embedding)


def test_a_gpu_rounds_no_experts(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3_moe")
    sizes = {name: prod(shape) for name, shape in read_shapes(tmp_path).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization="int8", kv_cache_memory=ByteSize(GB))
    found = [footprint(config.model_copy(update={"device": device})).weights for device in ("cuda:0", "cpu")]
    assert experts
    assert found[0] - found[1] == pytest.approx(experts * (2 - 1.1), rel=0.01)


def test_a_footprint_needs_a_device_that_it_can_know(tmp_path: Path) -> None:
    chosen(tmp_path, GB)
    with pytest.raises(ConfigurationError, match="device='auto': the memory of a model depends on the device; name it"):
        footprint(EngineConfig(model=str(tmp_path)))
    config = EngineConfig(model=str(tmp_path), device="cuda:1")
    with pytest.raises(ConfigurationError, match="device='cuda:1': set kv_cache_memory"):
        footprint(config)
    assert footprint(config, machine=Memory(8 * GB, 8 * GB)).cache > 4 * GB
    assert footprint(EngineConfig(model="echo", backend="echo")).total < GB


def test_an_engine_of_defaults_fits_this_machine(tiny_model: Path) -> None:
    with InferenceEngine(EngineConfig(model=str(tiny_model), dtype="float32", device="cpu")) as engine:
        assert engine.generate("one", GenerationParams(max_tokens=2)).stats.generated_tokens
        cache = engine.stats().cache
        assert cache is not None
        assert 0 < cache.memory < memory_of_machine().total


MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n"


def container(root: Path, cgroup: str, **files: str) -> Memory:
    """The memory of a machine of 1,000 KiB, of which 600 are free, in control groups with these files."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(MEMINFO)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for path, text in files.items():
        file = root / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return memory_of_machine(root / "proc", root / "groups")


KIB = 1024
UNLIMITED = (1000 * KIB, 600 * KIB)


@pytest.mark.parametrize(
    ("cgroup", "files", "memory"),
    [
        ("0::/\n", {}, UNLIMITED),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, UNLIMITED),
        (
            "0::/a/b\n",
            {
                "a/memory.max": f"{800 * KIB}\n",
                "a/memory.current": f"{700 * KIB}\n",
                "a/memory.stat": f"anon 7\ninactive_file {200 * KIB}\n",
                "a/b/memory.max": f"{900 * KIB}\n",
                "a/b/memory.current": "0\n",
            },
            (800 * KIB, 300 * KIB),
        ),
        # The path is the host's, of which the container sees its own group as the root.
        (
            "0::/docker/c0ffee\n",
            {"memory.max": f"{500 * KIB}\n", "memory.current": f"{600 * KIB}\n"},
            (500 * KIB, 0),
        ),
        (
            "9:name=systemd:/\n4:cpu,memory:/x\n",
            {},
            UNLIMITED,
        ),
        (
            "4:memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{400 * KIB}\n",
                "memory/x/memory.usage_in_bytes": f"{100 * KIB}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "0\n",
            },
            (400 * KIB, 300 * KIB),
        ),
    ],
)
def test_a_container_has_what_its_groups_allow(
    tmp_path: Path, cgroup: str, files: dict[str, str], memory: tuple[int, int]
) -> None:
    assert container(tmp_path, cgroup, **files) == memory


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 3),
        ("0::/docker/c0ffee\n", {"cpu.max": "50000 100000\n"}, 1),
        (
            "5:cpu,cpuacct:/x\n4:memory:/y\n0::/\n",
            {
                "cpu/x/cpu.cfs_quota_us": "200000\n",
                "cpu/x/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    tmp_path: Path, cgroup: str, files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    container(tmp_path, cgroup, **files)
    assert available_cores(tmp_path / "proc", tmp_path / "groups") == cores


@pytest.mark.parametrize(
    ("cgroup", "files", "killed"),
    [
        ("0::/\n", {}, 0),
        ("0::/\n", {"../proc/vmstat": "nr_free_pages 5\noom_kill 7\n"}, 7),
        ("0::/a\n", {"a/memory.events": "oom 4\noom_kill 3\n", "../proc/vmstat": "oom_kill 7\n"}, 3),
        ("0::/docker/c0ffee\n", {"memory.events": "oom_kill 2\n"}, 2),
        ("4:memory:/y\n0::/\n", {"memory/y/memory.oom_control": "under_oom 0\noom_kill 1\n"}, 1),
    ],
)
def test_a_container_counts_what_was_killed_for_want_of_memory(
    tmp_path: Path, cgroup: str, files: dict[str, str], killed: int
) -> None:
    container(tmp_path, cgroup, **files)
    assert memory_kills(tmp_path / "proc", tmp_path / "groups") == killed


def test_a_process_has_what_its_addresses_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (500 * KIB, 900 * KIB))
    statm = tmp_path / "proc" / "self" / "statm"
    statm.parent.mkdir(parents=True)
    statm.write_text(f"{300 * KIB // resource.getpagesize()} 5 5 5 0 5 0\n")
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    assert memory_of_machine(tmp_path / "proc", tmp_path) == (500 * KIB, 200 * KIB)


FEW_ADDRESSES = """
import resource, sys
from pydantic import ByteSize
from penstock.engine import EngineConfig, InferenceEngine
from penstock.schemas.errors import ModelLoadError

config = EngineConfig(model=sys.argv[1], device="cpu", kv_cache_memory=ByteSize(64 << 20))
with InferenceEngine(config):
    pass  # so everything is imported
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
try:
    InferenceEngine(config.model_copy(update={"kv_cache_memory": ByteSize(1 << 30)}))
except ModelLoadError as error:
    print(error)
"""


def test_what_does_not_fit_into_the_addresses_is_said_in_a_line(tiny_model: Path) -> None:
    run = [sys.executable, "-c", FEW_ADDRESSES, str(tiny_model)]
    done = subprocess.run(run, check=True, capture_output=True, text=True, timeout=300)
    (line,) = done.stdout.splitlines()
    assert "set a smaller --kv-cache-memory" in line and "ulimit -v" in line


def test_a_system_that_says_nothing_has_half_of_its_memory_free(tmp_path: Path) -> None:
    total, available = memory_of_machine(tmp_path, tmp_path)
    assert available == total // 2 > 0


def test_more_than_there_is_is_refused() -> None:
    total = memory_of_machine().total
    cpu, weights = torch.device("cpu"), Weights(3, 1, 4)
    with pytest.raises(ConfigurationError, match=f"has {total} bytes of memory, .* set at most {total - 1}"):
        check_memory(total, weights, "m", cpu)
    check_memory(total - 1, weights, "m", cpu)
    with pytest.raises(ConfigurationError, match=f"weights of m take {total + 1} bytes .* has {total} bytes"):
        check_memory(1, Weights(total + 1, 1, 1), "m", cpu)


RUN = """
import json, sys
from pydantic import ByteSize
from penstock.engine import EngineConfig, InferenceEngine
from penstock.engine.cpu.process import prepare_process
from penstock.engine.planning.sizing import footprint
from penstock.schemas.params import GenerationParams

config = EngineConfig(model=sys.argv[1], device="cpu", kv_cache_memory=ByteSize(32 << 20))
expected = footprint(config)
assert "torch" not in sys.modules
prepare_process(1)
with InferenceEngine(config) as engine:
    engine.generate("one two three", GenerationParams(max_tokens=8, ignore_eos=True))
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([expected, int(lines["RssAnon"].split()[0]) << 10]))
"""


class Measured(NamedTuple):
    """What a worker's process was expected to take, and what it took without pages of files, in bytes."""

    expected: Footprint
    taken: int


def measured(directory: Path) -> Measured:
    Tokenizer(directory)  # it is kept from now on: the first process with it also holds transformers
    run = [sys.executable, "-c", RUN, str(directory)]
    done = subprocess.run(run, check=True, capture_output=True, text=True, timeout=300)
    expected, taken = json.loads(done.stdout.splitlines()[-1])
    return Measured(Footprint(*expected), taken)


@pytest.fixture
def larger_model(tmp_path: Path, tiny_model: Path) -> Path:
    """A random Llama of 73 million parameters, 146 MB in bfloat16, with the tiny model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path / "larger"
    shutil.copytree(tiny_model, directory)
    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 5, "vocab_size": 8192}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def test_a_worker_takes_what_its_footprint_says(tiny_model: Path, larger_model: Path) -> None:
    """The whole process takes no more, and at least a third: the cache fills as requests come, and only the first
    process with a tokenizer holds transformers. The larger model takes 0.8
    to 1.8 times its weights more than the tiny one: the embedding may stay in the file's pages, and the allocator keeps
    some of what packing and checking them took."""
    tiny, larger = measured(tiny_model), measured(larger_model)
    weights = larger.expected.weights - tiny.expected.weights
    assert weights > 140e6
    assert 0.8 * weights < larger.taken - tiny.taken < 1.8 * weights
    for expected, taken in (tiny, larger):
        assert expected.cache == 32 << 20
        assert expected.total / 3 < taken < expected.total
