"""What transformers itself answers, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def greedy_answers(model: Any, prompts: Sequence[list[int]], count: int) -> list[tuple[int, ...]]:
    """`count` tokens behind each prompt by the model's own `generate`, also where one of them ends an answer."""
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        found.append(tuple(output[0, len(prompt) :].tolist()))
    return found
