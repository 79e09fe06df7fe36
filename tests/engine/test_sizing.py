"""What the engine chooses where the configuration leaves the batch size or the memory open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize

from penstock.engine import EngineConfig, InferenceEngine
from penstock.engine.paged.kv_plan import check_memory
from penstock.engine.sizing import Memory, SizedConfig, memory_of_machine, sized
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
    settings: dict[str, int] = SMALL,
    parameters: int = 134_515_008,
    workers: int = 1,
    **given: Any,
) -> SizedConfig:
    (directory / "config.json").write_text(json.dumps(settings))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}}).encode()
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
    config = chosen(tmp_path, 32 * GB, LARGE, 8_030_261_248)
    assert 1 <= config.max_batch_size < 32
    assert config.kv_cache_memory >= config.max_batch_size * 1024 * 131_072  # bytes of a token


def test_what_was_given_acts(tmp_path: Path) -> None:
    config = chosen(tmp_path, 4 * GB, max_batch_size=500, kv_cache_memory=ByteSize(100))
    assert (config.max_batch_size, config.kv_cache_memory) == (500, 100)
    assert chosen(tmp_path, 4 * GB, max_batch_size=500).kv_cache_memory > GB // 4
    few = chosen(tmp_path, 64 * GB, kv_cache_memory=ByteSize(GB // 8))
    assert few.max_batch_size == GB // 8 // (1024 * 2 * 30 * 3 * 64 * 2)
    assert chosen(tmp_path, 64 * GB, prefill_chunk_size=10).max_batch_size == 8


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


def test_a_system_that_says_nothing_has_half_of_its_memory_free(tmp_path: Path) -> None:
    total, available = memory_of_machine(tmp_path, tmp_path)
    assert available == total // 2 > 0


def test_more_than_there_is_is_refused() -> None:
    total = memory_of_machine().total
    with pytest.raises(ConfigurationError, match="set at most"):
        check_memory(total, 1, torch.device("cpu"))
    check_memory(total - 1, 1, torch.device("cpu"))
