"""Blocks of every type, expanded as the reference package expands them, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.checkpoints.gguf.types import BLOCKS
from penstock.engine.checkpoints.gguf.weights import dequantize, rounded_of


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # in the reference, of scales at the ends
def test_random_blocks_are_expanded_bit_for_bit(kind: str) -> None:
    """More of them than are expanded at a time; some scales are NaN, infinite or subnormal."""
    weights, size = BLOCKS[kind]
    raw = np.random.default_rng(0).integers(0, 256, (300_000 // weights + 1, size), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).ravel()
    found = dequantize(torch.from_numpy(raw).flatten(), kind).float().numpy()
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.5
    assert np.array_equal(expected[numbers].view(np.uint32), found[numbers].view(np.uint32))
    assert np.isnan(found[~numbers]).all()


@pytest.mark.parametrize("kind", [kind for kind, (weights, _) in BLOCKS.items() if weights > 1])
def test_levels_stand_for_the_same_numbers_bit_for_bit(kind: str) -> None:
    """Alone, and widened as they are beside those of Q6_K."""
    weights, size = BLOCKS[kind]
    raw = np.random.default_rng(0).integers(0, 60, (8 * 512 // weights, size), dtype=np.uint8)  # scales are finite
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(8, 512)
    found = rounded_of(torch.from_numpy(raw).flatten(), kind, 8)
    assert np.array_equal(expected, found.numbers.numpy())
    assert np.array_equal(expected, found.widened(16).numbers.numpy())


def test_weights_in_blocks_take_the_dtype_that_is_asked_for() -> None:
    raw = torch.zeros(34, dtype=torch.uint8)
    assert dequantize(raw, "Q8_0", torch.bfloat16).dtype == torch.bfloat16
    assert dequantize(torch.zeros(8, dtype=torch.uint8), "F32", torch.bfloat16).dtype == torch.float32
