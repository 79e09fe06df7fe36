"""The layers of the plain decoder on CUDA: one kernel where torch's operations take two or three.

With few rows, each of these small operations costs more than it computes: a ninth of a decoding step of an 8B model was
theirs, and most of one of a smaller model with more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from ...vision.seen import Seen
from ..cuda import layer_kernels as kernels
from ..state.step import StateStep
from . import heads as with_torch
from .norm import NoNorm

if TYPE_CHECKING:  # it takes `through` from here
    from .heads import Angles, Attention, Rotations
    from .layer import Layer
    from .norm import Norm

_BLOCK = 1024  # numbers of one program of `gate`


class Update(NamedTuple):
    """What a part of a layer made [T, E]. The residual stream becomes (x + factor · made) · scalar, with the norm
    `after` of what was made, if there is one."""

    made: Tensor
    after: Norm | None = None
    factor: float = 1.0
    scalar: float = 1.0


def through(
    layers: Sequence[Layer],
    x: Tensor,
    rotations: Rotations,
    attention: Attention,
    seen: Seen | None,
    states: StateStep | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """As the function of the same name in `decoder`."""
    angles = {kind: _whole(own) for kind, own in rotations.items()}
    update: Update | None = None  # of the residual stream, to be added with the next norm
    for index, layer in enumerate(layers):
        x, h = add_norm(x, update, layer.attention_norm)
        if layer.state is None:
            found = attend(layer, h, angles[layer.kind], attention)
        else:
            found = layer.state.read([getattr(layer, name)(h) for name in layer.projections], states)
        x, h = add_norm(x, Update(layer.output(found), layer.attention_after, layer.residual), layer.mlp_norm)
        x, update = _feed(layer, x, h)
        if layer.input_after is not None and inputs is not None:
            x, _ = add_norm(x, update)
            gated = gate(layer.input_gate(x), inputs[:, index], has_gelu=True)
            update = Update(layer.input_projection(gated), layer.input_after)
        update = update._replace(scalar=layer.scalar)
        if seen is not None and index + 1 in seen.deep:
            x, _ = add_norm(x, update)
            x, update = x.index_add(0, seen.rows, seen.deep[index + 1].to(x.dtype)), None
    return x if update is None else add_norm(x, update)[0]


def _whole(angles: Angles) -> Angles:
    return angles._replace(cosines=angles.cosines.contiguous(), sines=angles.sines.contiguous())


def _feed(layer: Layer, x: Tensor, h: Tensor) -> tuple[Tensor, Update]:
    """The stream, and what the last part of a layer makes of it and its norm `h`."""
    if layer.beside is not None and layer.mlp_after is not None:
        own = layer.down(gate(layer.gate(h), layer.up(h), has_gelu=True))
        both = layer.beside.product_after(own) + layer.beside.after(layer.mix(x))
        return x, Update(both, layer.mlp_after)
    mixed = None if layer.mixture is None else layer.mix(h)
    if mixed is not None and not layer.is_gated:
        return x, Update(mixed, None, layer.residual)
    if layer.is_joined:
        gates, ups = layer.gate(h).chunk(2, dim=-1)
    else:
        gates, ups = layer.gate(h), layer.up(h)
    made = layer.down(gate(gates, ups, has_gelu=layer.has_gelu))
    if layer.has_share and mixed is not None:
        return x, Update(torch.addcmul(mixed, layer.share(h).sigmoid(), made), None, layer.residual)
    return x, Update(made if mixed is None else made + mixed, layer.mlp_after, layer.residual)


def add_norm(x: Tensor, update: Update | None, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """The stream with an update, and its norm, or itself where there is no norm."""
    norm = None if isinstance(norm, NoNorm) else norm
    if update is None and norm is None:
        return x, x
    count, size = x.shape
    padded = next_power_of_2(size)
    total = x if update is None else torch.empty_like(x)
    normed = total if norm is None else torch.empty_like(x)
    made, after, factor, scalar = update or (None, None, 1.0, 1.0)
    given = made, *_numbers(after), float(factor), float(scalar), total, normed, *_numbers(norm)
    kernels.add_norm[(count,)](x, *given, size, padded, num_warps=min(16, max(1, padded // 512)))
    return total, normed


def _numbers(norm: Norm | None) -> tuple[Tensor | None, float | None]:
    """What a kernel takes of a norm."""
    return (None, None) if norm is None else (norm.weight, norm.epsilon)


def attend(layer: Layer, h: Tensor, angles: Angles, attention: Attention) -> Tensor:
    """As the function of the same name in `heads`."""
    if layer.norms_rows:
        return with_torch.attend(layer, h, angles, attention)
    heads = layer.qkv(h).view(len(h), -1, layer.head_dim).transpose(0, 1)  # [Hq + 2 H, T, D], gates behind queries
    if layer.num_parts == 1:
        heads = torch.cat((heads, heads[layer.num_q_heads :]))
    rotate(heads, layer, angles)
    spread = 1 + layer.has_gates
    query, others = heads[: spread * layer.num_q_heads : spread], heads[spread * layer.num_q_heads :]
    if angles.scales is not None:
        query *= angles.scales
    found = attention(layer.number, query, others if layer.num_parts else None)
    if layer.has_gates:
        gates = heads[1 : 2 * layer.num_q_heads : 2]
        given = gates, *gates.stride()[:2], layer.head_dim, next_power_of_2(layer.head_dim)
        kernels.open_gates[(len(h), layer.num_q_heads)](found, *given, num_warps=1)
    return found


def rotate(heads: Tensor, layer: Layer, angles: Angles) -> None:
    """Norm heads [H, T, D] and rotate queries and keys, in place, as far as the layer does."""
    turning = layer.num_q_heads + (layer.num_kv_heads if layer.num_parts else 0)
    count = turning + (layer.num_kv_heads if layer.norms_values else 0)
    rotated = angles.cosines.shape[-1] if layer.rotates else 0
    if not rotated and layer.head_norm is None:
        return
    size = rotated or layer.head_dim
    own = (angles.cosines, angles.sines) if rotated else (None, None)
    sizes = layer.head_dim, size, next_power_of_2(size // 2), next_power_of_2(max(1, layer.head_dim - size))
    given = (layer.num_q_heads, 1 + layer.has_gates, turning, *own, layer.head_norm, layer.epsilon)
    has_norms = layer.head_norm is not None
    kernels.rotate[(heads.shape[1], count)](heads, *heads.stride()[:2], *given, has_norms, *sizes, num_warps=1)


def gate(gates: Tensor, ups: Tensor, *, has_gelu: bool = False) -> Tensor:
    """SiLU of `gates` [T, W] times `ups`, or GELU of them, in the memory of `gates` if it is whole."""
    count, size = gates.shape
    out = gates if gates.is_contiguous() else gates.new_empty(gates.shape)
    kind = (kernels.GELU if has_gelu else kernels.SILU).value
    grid = count, -(-size // _BLOCK)
    kernels.gate[grid](gates, gates.stride(0), ups, ups.stride(0), out, size, kind, _BLOCK)
    return out
