"""Attention to chosen tokens: which ones are, and models that choose in other dtypes than float32.

`test_paged_oracle.py` compares their tokens with transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.paged.choosing import Choice, with_parts

PROMPT = [3 + 7 * index * index % 500 for index in range(70)]


def choice_of(queries: torch.Tensor, top: int) -> Choice:
    return Choice(queries, torch.ones(queries.shape[:2]), 1.0, top, start=4)


def seen(choice: Choice, keys: torch.Tensor, own: torch.Tensor) -> list[list[int]]:
    """The keys that each query attends to, where all but the first four of a head's numbers are of its `own` keys."""
    count = len(choice.queries)
    whole = with_parts(keys[None], own[None])[0]
    hidden = torch.ones((count, len(own)), dtype=torch.bool).triu_(len(own) - count + 1)
    unchosen = choice.unchosen(slice(None), whole, hidden)
    assert unchosen is not None
    return [(~row & ~later).nonzero().flatten().tolist() for row, later in zip(unchosen, hidden, strict=True)]


def test_the_most_similar_tokens_are_chosen_and_of_equal_ones_the_first() -> None:
    """Whatever follows: a request has the same tokens alone and in a batch, whose rows are as long as the longest."""
    keys, own = torch.rand(3, 6, 4), torch.tensor([[0.0], [2.0], [0.0], [1.0], [0.0], [3.0]])
    assert seen(choice_of(torch.ones(2, 1, 1), 3), keys, own) == [[0, 1, 3], [1, 3, 5]]
    assert seen(choice_of(-torch.ones(1, 1, 1), 2), keys, own) == [[0, 1]], "none is similar"
    longer = torch.cat((own, torch.zeros(3, 1)))
    assert seen(choice_of(-torch.ones(1, 1, 1), 2), torch.rand(3, 9, 4), longer) == [[0, 1]]
    assert choice_of(torch.ones(1, 1, 1), 6).unchosen(slice(None), keys, torch.zeros(1, 6, dtype=torch.bool)) is None


@pytest.mark.parametrize("changes", [{}, {"quantization": "int8"}, {"dtype": "float16"}], ids=str)
def test_a_model_that_chooses_computes_in_half_precision(
    changes: dict[str, Any], model_directory: Callable[[str], Path]
) -> None:
    params = GenerationParams(temperature=0, max_tokens=1, logprobs=1)
    found = []
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16", **changes}):
        config = EngineConfig.model_validate(
            {"model": str(model_directory("glm_moe_dsa")), "device": "cpu", **settings}
        )
        with InferenceEngine(config) as engine:
            logprobs = engine.generate(PROMPT, params).logprobs
            assert logprobs is not None
            found.append(logprobs[0].logprob)
    assert found[1] == pytest.approx(found[0], abs=0.5)
