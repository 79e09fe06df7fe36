"""The layers of the plain decoder on CUDA: one kernel where torch's operations take two or three.

With few rows, each of these small operations costs more than it computes: a ninth of a decoding step of an 8B model was
theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...vision.tower import Seen
from ..cuda import kernels
from ..cuda.attention import power_of_2
from ..state.step import StateStep

if TYPE_CHECKING:  # it takes `through` from here
    from .decoder import Rotations
    from .heads import Angles, Attention
    from .layer import Layer
    from .norm import Norm

_BLOCK = 1024  # numbers of one program of `gate`


def through(
    layers: Sequence[Layer],
    x: Tensor,
    rotations: Rotations,
    attention: Attention,
    seen: Seen | None,
    states: StateStep | None = None,
) -> Tensor:
    """As the function of the same name in `decoder`; there are no layers with `states`."""
    (angles,) = rotations.values()
    angles = angles._replace(cosines=angles.cosines.contiguous(), sines=angles.sines.contiguous())
    update: Tensor | None = None  # of the residual stream, to be added with the next norm
    for index, layer in enumerate(layers):
        x, h = add_norm(x, update, layer.attention_norm)
        heads = layer.qkv(h).view(len(x), -1, angles.cosines.shape[-1]).transpose(0, 1)  # [Hq + 2 H, T, D]
        rotate(heads[: layer.num_q_heads + layer.num_kv_heads], angles, layer.head_norm, layer.epsilon)
        mixed = attention(layer.number, heads[: layer.num_q_heads], heads[layer.num_q_heads :])
        x, h = add_norm(x, layer.output(mixed), layer.mlp_norm)
        update = layer.down(gate(layer.gate(h), layer.up(h)))
        if seen is not None and index < len(seen.deep):
            x, update = (x + update).index_add(0, seen.rows, seen.deep[index].to(x.dtype)), None
    return x if update is None else x + update


def add_norm(x: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """The sum of two [T, E], or the first alone, and its norm."""
    count, size = x.shape
    padded = power_of_2(size)
    total, normed = x if update is None else torch.empty_like(x), torch.empty_like(x)
    given = (x, update, total, normed, norm.weight, norm.epsilon, size)
    kernels.add_norm[(count,)](*given, padded, num_warps=min(16, max(1, padded // 512)))
    return total, normed


def rotate(heads: Tensor, angles: Angles, weights: Tensor | None, epsilon: float) -> None:
    """Rotate queries and keys [H, T, D] in place; before that, normalise each head where there are `weights`."""
    count, num_tokens, size = heads.shape
    strides = heads.stride()[:2]
    given = (heads, *strides, angles.cosines, angles.sines, weights, epsilon)
    kernels.rotate[(num_tokens, count)](*given, size, power_of_2(size // 2), num_warps=1)


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """SiLU of `gates` times `ups`, in the memory of `gates`."""
    count = gates.numel()
    kernels.gate[(-(-count // _BLOCK),)](gates, ups, count, _BLOCK)
    return gates
