"""From conversations to rows of tokens: the same step always trains on the same ones.

A step's conversations are sorted by length and cut into a few tensors of like length, so that little is padded and no
conversation sees another. Knows nothing of networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from corpus import sample
from torch import Tensor
from vocabulary import Codec, Encoded

MULTIPLE = 16  # lengths are rounded up to it
SPARSE = 4  # of the prompts' tokens, one in so many is learnt: enough to learn to copy, at a quarter of the cost


class Batch(NamedTuple):
    """Rows of tokens [B, T], the token after each, and how much each of these counts."""

    ids: Tensor
    targets: Tensor
    weights: Tensor


def conversations(
    codec: Codec, seed: int, indices: Iterable[int], mix: dict[str, float], longest: int
) -> list[Encoded]:
    """The conversations with these numbers, those left out that are longer than `longest` tokens."""
    encoded = (codec.encode(sample(seed, index, mix)) for index in indices)
    return [one for one in encoded if len(one.ids) <= longest]


def batches(encoded: Sequence[Encoded], most: int, prompt_weight: float, padding: int) -> list[Batch]:
    """Tensors of at most `most` tokens each, or one row.

    The assistant's tokens have the weight 1, some of the others `prompt_weight`.
    """
    result: list[Batch] = []
    rows: list[Encoded] = []
    for one in [*sorted(encoded, key=lambda one: len(one.ids)), None]:
        width = 0 if one is None else -(-len(one.ids) // MULTIPLE) * MULTIPLE
        if rows and (one is None or width * (len(rows) + 1) > most):
            result.append(_stack(rows, prompt_weight, padding))
            rows = []
        if one is not None:
            rows.append(one)
    return result


def _stack(rows: list[Encoded], prompt_weight: float, padding: int) -> Batch:
    width = -(-max(len(row.ids) for row in rows) // MULTIPLE) * MULTIPLE
    ids = torch.full((len(rows), width + 1), padding)
    weights = torch.zeros(len(rows), width + 1)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = torch.tensor(row.ids)
        weights[place, : len(row.ids)] = torch.tensor(
            [
                1.0 if said else prompt_weight * (spot % SPARSE == len(row.ids) % SPARSE)
                for spot, said in enumerate(row.said)
            ]
        )
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights[:, 1:].contiguous())
