"""What transformers itself answers, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_CLEAR = 1e-3  # of a logit: several times what one pass and one token at a time differ by


def greedy_answers(model: Any, prompts: Sequence[list[int]], count: int) -> list[tuple[int, ...]]:
    """`count` tokens behind each prompt by the model's own `generate`, also where one of them ends an answer."""
    return [greedy_answer(model, prompt, count) for prompt in prompts]


def greedy_answer(model: Any, prompt: Sequence[int], count: int, said: Sequence[int] = ()) -> tuple[int, ...]:
    """`count` tokens behind a prompt by the model's own `generate`, also where one of them ends an answer.

    `said` is what an engine answered. Where the model's logits in one pass leave no doubt that it would generate the
    same, it does not: that takes many times as long.
    """
    if len(said) == count and _says(model, prompt, said):
        return tuple(said)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[*prompt]])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


def is_clear(logits: torch.Tensor, said: Sequence[int]) -> bool:
    """Whether each token is likelier than all others, by far enough that no rounding would change it; `logits` [N, V]
    are those from which each one was chosen."""
    best = logits.float().topk(2)
    return best.indices[:, 0].tolist() == [*said] and bool((best.values[:, 0] - best.values[:, 1] > _CLEAR).all())


@torch.no_grad()
def _says(model: Any, prompt: Sequence[int], said: Sequence[int]) -> bool:
    return is_clear(model(torch.tensor([[*prompt, *said[:-1]]])).logits[0, len(prompt) - 1 :], said)
