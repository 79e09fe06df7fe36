"""The memory that weights of a GGUF file in K types take is known before they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_cases import PROMPTS, Case
from gguf_files import write_gguf
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.planning.sizing import footprint

CASE = Case("llama", "llama", {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 512}, {})
MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K"}  # as the files called Q4_K_M and Q5_K_M have them


@pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")
@pytest.mark.parametrize(
    ("kind", "others"), [("Q4_K", {}), ("Q5_K", {}), ("Q6_K", {}), ("Q4_K", MIXED), ("Q5_K", MIXED)]
)
def test_what_loaded_weights_take_is_what_was_estimated(
    kind: str, others: dict[str, str], make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"

    def chosen(name: str, values: Any) -> str | None:
        return others.get(name.split(".")[-2], kind) if values.ndim == 2 else None

    write_gguf(make_model(CASE), path, "llama", chosen)
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", kv_cache_memory=ByteSize(16 << 20))
    expected = footprint(config).weights
    with InferenceEngine(config) as engine:
        backend: Any = engine._driver.backend
        taken = backend.weight_bytes + 2 * 512 * 512  # and the embedding, in bfloat16
        answer = engine.generate(PROMPTS[:1], GenerationParams(max_tokens=4, ignore_eos=True))[0]
        assert len(answer.token_ids) == 4
    assert expected == pytest.approx(taken, rel=0.05)
    assert expected >= taken  # too little would let a worker start that does not fit
