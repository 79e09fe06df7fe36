"""What needs no llama.cpp: the manifest, what is refused before anything loads, and how memory is divided."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from pydantic import ByteSize

from penstock.engine import EngineConfig, InferenceEngine, find_backend
from penstock.engine.llama_cpp.backend import LlamaCppBackend
from penstock.engine.llama_cpp.plan import plan_sequences
from penstock.engine.models import BUNDLED
from penstock.engine.planning.manifest import Manifest
from penstock.engine.planning.sizing import footprint, sized
from penstock.schemas.errors import ConfigurationError


@pytest.fixture
def path(model_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(model_directory("llama"), path, "llama", lambda _, values: "Q8_0" if values.ndim == 2 else None)
    return path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if llama.cpp were installed."""
    monkeypatch.setattr(Manifest, "missing", "")


def config(path: Path | str, **values: Any) -> EngineConfig:
    default: dict[str, Any] = {"model": str(path), "backend": "llama_cpp", "kv_cache_memory": ByteSize(64 << 20)}
    return EngineConfig(**default | values)


def test_without_the_package_the_error_says_how_to_install_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.planning.manifest.find_spec", lambda name: None)
    assert (
        find_backend("llama_cpp").missing == "llama_cpp not installed; install with: pip install 'penstock[llama-cpp]'"
    )
    with pytest.raises(ConfigurationError, match=r"llama_cpp not installed; install with: pip install"):
        InferenceEngine(config(path))


def test_the_manifest_imports_nothing_large() -> None:
    assert find_backend("llama_cpp").formats == ("gguf",)
    assert "penstock.engine.llama_cpp.model" not in sys.modules or "llama_cpp" in sys.modules


@pytest.mark.usefixtures("installed")
def test_only_gguf_on_a_cpu(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="runs gguf models, and penstock-nano is safetensors"):
        InferenceEngine(config(BUNDLED))
    with pytest.raises(ConfigurationError, match="runs only on a CPU; use cpu"):
        InferenceEngine(config(path, device="cuda"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("quantization", "int4"),
        ("attention", "sdpa"),
        ("enable_cuda_graph", True),
        ("echo_rate", 5.0),
        ("prefix_cache_dir", Path("prefixes")),
    ],
)
def test_a_setting_that_it_cannot_honour_is_refused(name: str, value: Any, path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}=.*the backend 'llama_cpp' does not support.*leave it out"):
        LlamaCppBackend(config(path, **{name: value}))


def test_more_places_than_llama_cpp_has_are_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_batch_size=300: llama\.cpp runs at most 256"):
        LlamaCppBackend(config(path, max_batch_size=300))


def test_as_many_places_as_have_the_whole_context_but_at_least_four(path: Path) -> None:
    whole = plan_sequences(sized(config(path, max_batch_size=1)), 1, 2048).memory // 2  # of two sequences
    for memory, rows, length in ((8 * whole, 8, 2048), (5 * whole, 5, 2048), (2 * whole, 4, 1024)):
        chosen = sized(config(path, kv_cache_memory=ByteSize(memory), max_batch_size=None))
        plan = plan_sequences(chosen, None, 2048)
        assert (plan.rows, plan.length) == (rows, length)
        assert plan.memory <= memory
    given = plan_sequences(sized(config(path, kv_cache_memory=ByteSize(8 * whole), max_batch_size=16)), 16, 2048)
    assert (given.rows, given.length) == (16, 1024)


def test_weights_take_what_they_take_in_the_file(path: Path) -> None:
    taken = footprint(config(path, device="cpu")).weights
    assert 0.8 * path.stat().st_size < taken < path.stat().st_size
    assert footprint(config(path, device="cpu", backend="hf")).weights > 1.5 * taken
