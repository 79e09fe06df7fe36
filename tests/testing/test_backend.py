"""Penstock's own backends pass the suite that plug-ins are held to."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from gguf_files import write_gguf
from pydantic import ByteSize

from penstock.engine import EngineConfig
from penstock.testing.backend import BackendConformance


class TestEcho(BackendConformance):
    config = EngineConfig(model="echo", backend="echo")


class TestHf(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_tiny_model(cls, tiny_model: Path) -> None:
        cls.config = EngineConfig(model=str(tiny_model), backend="hf", dtype="float32", device="cpu")


class TestPaged(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_tiny_model(cls, tiny_model: Path) -> None:
        cls.config = EngineConfig(model=str(tiny_model), backend="paged", dtype="float32", device="cpu")


class TestLlamaCpp(BackendConformance):
    kind: ClassVar[str | None] = None  # of the matrices; F32

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_tiny_model(cls, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        pytest.importorskip("llama_cpp", reason="needs pip install 'penstock[llama-cpp]'")
        path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
        write_gguf(tiny_model, path, "llama", lambda _, values: cls.kind if values.ndim == 2 else None)
        cls.config = EngineConfig(model=str(path), backend="llama_cpp")


class TestLlamaCppInLevels(TestLlamaCpp):
    kind = "Q4_1"


@pytest.mark.filterwarnings("ignore")  # vLLM's own
class TestVllm(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_tiny_model(cls, tiny_model: Path) -> None:
        pytest.importorskip("vllm", reason="needs pip install 'penstock[vllm]'")
        memory = ByteSize(64 << 20)
        cls.config = EngineConfig(model=str(tiny_model), backend="vllm", dtype="float32", kv_cache_memory=memory)
