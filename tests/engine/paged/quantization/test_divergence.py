"""What rounding the inputs of products costs: the bundled model beside the same weights in float32."""

from __future__ import annotations

from contextlib import closing

import pytest

from penstock.api.bench.quality import BUNDLED_TEXT
from penstock.api.terminal.texts import split
from penstock.engine import EngineConfig
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.paged.quality import Reader, compare

LENGTH, TEXTS = 32, 32


@pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_rounding_inputs_changes_answers_little(method: str) -> None:
    """By 0.00086; by one scale for each group, from numbers in bfloat16, it would be 0.00099."""
    model = str(resolve_model(BUNDLED))
    texts = split(BUNDLED_TEXT.read_text("utf-8"), model, LENGTH)[:TEXTS]
    exact, rounded = (
        Reader(EngineConfig(model=model, dtype=dtype, device="cpu", quantization=method), LENGTH)
        for dtype in ("float32", "bfloat16")
    )
    with closing(exact), closing(rounded):
        assert rounded.slow_paths == ()
        assert compare(exact, rounded, texts, lambda _: None).divergence < 0.00093
