"""The images of a step, for the compiled decoder: which tokens show what instead of their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...vision.tower import Vision
from ..decoding.heads import Rotations
from ..packing import Ints, Segment


class Shown(NamedTuple):
    """`features` [D, K, E] in float32: the first are in the place of embeddings, the others are added before one layer
    each; `deep` [L] has by the number of a layer which of them, 0 for none. `of` has for each token of the step the
    number of its own, or -1."""

    features: Tensor
    deep: Tensor
    of: list[int]


def show(segments: Sequence[Segment], vision: Vision | None, dtype: torch.dtype, scale: float) -> Shown | None:
    """What the tokens of `segments`, in this order, show, rounded to `dtype`; None without an image. `scale` is what
    the features in the place of embeddings are multiplied by."""
    if vision is None or not any(segment.images for segment in segments):
        return None
    placed, count = [], 0
    for segment in segments:
        placed += [one.behind(count) for one in segment.images]
        count += len(segment.tokens)
    seen = vision.see(placed, torch.device("cpu"))
    assert seen is not None
    of = [-1] * count
    for number, row in enumerate(seen.rows.tolist()):
        of[row] = number
    features = (seen.features.to(dtype) * scale, *(deep.to(dtype) for deep in seen.deep.values()))
    numbers = torch.zeros(max(seen.deep, default=-1) + 1, dtype=torch.int64)
    for number, layer in enumerate(seen.deep, start=1):
        numbers[layer] = number
    return Shown(torch.stack(features).float().contiguous(), numbers, of)


def last_position(segment: Segment) -> int:
    """The largest by which a token of the segment is rotated."""
    if segment.positions is not None:
        return int(segment.positions.max())
    return segment.end - 1 + segment.shift


@torch.inference_mode()
def turn(
    positions: Ints, angles: Callable[[Tensor, torch.dtype], Rotations], known: Mapping[str | None, Tensor], start: int
) -> int:
    """Put the rotations at `positions` [D, n] into `known` [2, P, D], from number `start` on; returns their number.

    Where those of a token are equal, as those of text are, they are those that `known` has for text.
    """
    count, is_text = positions.shape[1], torch.from_numpy((positions == positions[0]).all(0))
    plain = torch.from_numpy(positions[0])
    for kind, found in angles(torch.from_numpy(positions), torch.float32).items():
        own, text = torch.cat(found[:2]), known[kind][:, plain]
        known[kind][:, start : start + count] = torch.where(is_text[None, :, None], text, own)
    return count
