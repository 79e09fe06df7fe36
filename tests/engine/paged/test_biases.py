"""Biases by position, far behind the beginning and in 16 bits, against the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor

from penstock.engine import EngineConfig
from penstock.engine.paged.attention import Rules, attend_alone
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.biases import biased, biased_by
from penstock.engine.planning.model_files import ModelFiles

HEADS, SIZE, SCALING = 4, 16, 0.25


def numbers(heads: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [1, H, T, D] each."""
    random = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, n, count, SIZE, generator=random) for n in (HEADS, heads, heads))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def attended(query: Tensor, key: Tensor, value: Tensor, biases: Tensor) -> Tensor:
    """What queries see with `biases` [Hq, T] of keys, in float64."""
    query, key, value = (each[0].double() for each in (query, key, value))
    key, value = (each.repeat_interleave(len(query) // len(each), 0) for each in (key, value))
    scores = query @ key.mT * SCALING + biases.double()[:, None]
    scores += torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("start", [0, 30_000])
@pytest.mark.parametrize(
    ("dtype", "far"), [(torch.float32, 3e-3), (torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
def test_slopes_are_kept_far_behind_the_beginning(dtype: torch.dtype, far: float, start: int) -> None:
    query, key, value = numbers(HEADS, 300, dtype)
    positions, slopes = torch.arange(300) + start, torch.tensor([0.5, 0.21, 0.0625, 0.004])
    wide = biased(query, key, positions, slopes, SCALING)
    assert [each.shape[-1] for each in wide] == [SIZE + 3] * 2
    found = attend_alone(wide[0][0], wide[1][0], value[0], Rules(SCALING))
    wanted = attended(query, key, value, slopes[:, None] * torch.arange(300))
    assert (found.double() - wanted).abs().max() < far


def test_queries_that_share_a_key_have_biases_of_their_own() -> None:
    query, key, value = numbers(2, 40, torch.float32)
    biases = torch.randn(HEADS, 40, generator=torch.Generator().manual_seed(6))
    wide = biased_by(query, key, biases)
    assert [each.shape[-1] for each in wide] == [SIZE + 3] * 2, "two queries share a key"
    found = attend_alone(wide[0][0], wide[1][0], value[0], Rules(SCALING))
    assert (found.double() - attended(query, key, value, biases * SCALING)).abs().max() < 1e-5


@pytest.mark.parametrize("shape", ["bloom", "falcon_rw", "mpt"])
def test_the_files_say_how_wide_keys_are(shape: str, model_directory: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(model_directory(shape)), device="cpu", kv_cache_memory=ByteSize(8 << 20))
    backend = PagedBackend(config)
    assert backend.kv_bytes_per_token == ModelFiles.of(config).cache(1, 1)
    backend.close()
