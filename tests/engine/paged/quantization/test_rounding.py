"""How weights are rounded: nearer than by the plain way, exactly where the weights lie on a grid, and for any input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.paged.quantization.rounding import to_int4, to_int8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(weight: Tensor, rounded: Tensor) -> float:
    return float((weight - rounded).square().mean())


def by_row(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scales).round() * scales


def by_extremes(weight: Tensor) -> Tensor:
    """Levels 0 and 15 are the smallest and the largest weight of each group of 32."""
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low) / 15
    return (((groups - low) / scales).round() * scales + low).view_as(weight)


def test_int8_is_nearer_than_by_row_and_by_the_largest_weight() -> None:
    weight = random(64, 512) * random(64, 512, seed=1).exp()
    rounded = to_int8(weight)
    assert rounded.levels.abs().max() <= 127 and rounded.zeros is None
    groups = weight.view(64, -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    plain = ((groups / scales).round() * scales).view_as(weight)
    assert error(weight, rounded.numbers) < 0.95 * error(weight, plain) < 0.5 * error(weight, by_row(weight))


def test_int4_is_nearer_than_by_the_extremes() -> None:
    weight = random(64, 512) * random(64, 512, seed=1).exp()
    rounded = to_int4(weight)
    assert rounded.levels.min() >= 0 and rounded.levels.max() <= 15
    assert error(weight, rounded.numbers) < 0.85 * error(weight, by_extremes(weight))


@pytest.mark.parametrize("round_weight", [to_int8, to_int4])
def test_weights_on_a_grid_are_exact(round_weight: Any) -> None:
    """Where each group reaches both ends of it."""
    generator = torch.Generator().manual_seed(0)
    low, high = (-127, 127) if round_weight is to_int8 else (0, 15)
    levels = torch.randint(low, high + 1, (16, 4, 32), generator=generator)
    levels[..., 3], levels[..., 9] = low, high
    scales, zeros = random(16, 4, 1).abs().bfloat16().float(), random(16, 4, 1, seed=1).bfloat16().float()
    weight = levels * scales if round_weight is to_int8 else (levels - 8) * scales + zeros
    assert torch.allclose(round_weight(weight.flatten(1)).numbers, weight.flatten(1), atol=1e-6)


@pytest.mark.parametrize("round_weight", [to_int8, to_int4])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0, 2.0**-120])
def test_groups_of_equal_weights_are_exact(round_weight: Any, value: float) -> None:
    weight = torch.full((16, 64), value)
    assert torch.allclose(round_weight(weight).numbers, weight, rtol=0.004, atol=1e-20)


def test_rows_of_any_length_and_number_have_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(7, 70)
    rounded = to_int8(weight)
    assert rounded.scales.shape == (7, 3) and rounded.scales.dtype == torch.bfloat16
    assert rounded.numbers.shape == weight.shape
    assert error(weight, rounded.numbers) < 1e-4
    monkeypatch.setattr("penstock.engine.paged.quantization.rounding._CHUNK", 100)
    assert torch.equal(to_int8(weight).numbers, rounded.numbers)


def test_a_dtype_changes_nothing_but_the_weight() -> None:
    weight = random(16, 64).bfloat16()
    for round_weight in (to_int8, to_int4):
        assert torch.equal(round_weight(weight).numbers, round_weight(weight.float()).numbers)
