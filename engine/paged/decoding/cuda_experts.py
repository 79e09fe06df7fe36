"""Mixtures of experts on a GPU: what the tokens of a step choose is sorted by expert on the device, and one kernel
computes all experts' blocks of rows for the first weight and its gates, another for the second.

transformers' functions take a dozen operations for this, and read the weights of few rows at a quarter of the speed.
Nothing waits for the host, so that steps can be recorded as CUDA graphs.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from triton import next_power_of_2

from ..cuda import expert_kernels as kernels
from .experts import clamp_of, is_experts, kind_of, used_by

_log = logging.getLogger(__name__)

_MOST_PLACED = 1024  # pairs of a token and an expert that one kernel sorts; torch sorts more
_OWN, _OTHERS = 64, 128  # pairs of one program of it, and those that it compares them with at a time
_TRIED = 16  # rows, of the comparison with transformers' experts
_FAR, _FAR_ROUNDED = 1e-4, 0.03  # the most that they may differ by, in float32 and in other dtypes
_KINDS = {"silu": kernels.SILU.value, "gelu": kernels.GELU.value, "clamped": kernels.CLAMPED.value}


class _Tile(NamedTuple):
    """Of one program: rows, outputs, inputs at a time; and its warps and stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class GroupedExperts(nn.Module):
    """The weights of transformers' experts of one layer, `TakenExperts`."""

    def __init__(self, experts: Any, kind: str, num_used: int) -> None:
        """`kind` is that of `kind_of`; a token passes `num_used` experts."""
        super().__init__()
        self.num_experts: int = experts.num_experts
        self._share = num_used / self.num_experts
        self._kind = _KINDS[kind]
        self._alpha, self._limit = clamp_of(experts) or (0.0, 0.0)
        is_mixed = kind == "clamped"  # gates and ups in turns
        self._inner, self._inner_bias = _taken(experts, "gate_up_proj", is_mixed=is_mixed)
        self._outer, self._outer_bias = _taken(experts, "down_proj")
        self._padded = next_power_of_2(self.num_experts)

    @property
    def num_active_weights(self) -> int:
        return int((self._inner.numel() + self._outer.numel()) * self._share)

    @property
    def active_bytes(self) -> int:
        return int((self._inner.nbytes + self._outer.nbytes) * self._share)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return []

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, E], and for each token its experts and their weights, [T, K] each → [T, E]."""
        x, used = hidden_states.contiguous(), top_k_index.shape[1]
        order, bounds = self._sorted(top_k_index.contiguous())
        pairs = len(order)
        tile = _tile(pairs / self.num_experts, x.dtype)
        blocks = min(self.num_experts, pairs) + pairs // tile.rows
        size, width = x.shape[1], self._outer.shape[2]
        sizes = {"num_warps": tile.warps, "num_stages": tile.stages}
        found = x.new_empty((pairs, width))
        gates = self._alpha, self._limit, self._kind
        first = x, order, bounds, self._inner, self._inner_bias, found, used
        grid = -(-width // tile.columns), blocks
        kernels.inner[grid](*first, size, width, self.num_experts, *gates, self._padded, *tile[:3], **sizes)
        made = x.new_empty((pairs, size))
        second = found, order, bounds, self._outer, self._outer_bias, top_k_weights.contiguous(), made
        grid = -(-size // tile.columns), blocks
        kernels.outer[grid](*second, width, size, self.num_experts, self._padded, *tile[:3], **sizes)
        return made.view(-1, used, size).sum(1)

    def _sorted(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs of tokens and experts in the order of the experts, and where each expert's begin."""
        flat, pairs = chosen.flatten(), chosen.numel()
        if pairs > _MOST_PLACED:
            found, order = flat.sort(stable=True)
            edges = torch.arange(self.num_experts + 1, device=flat.device, dtype=flat.dtype)
            return order, torch.searchsorted(found, edges, out_int32=True)
        order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
        bounds = torch.empty(self.num_experts + 1, dtype=torch.int32, device=flat.device)
        grid = (-(-max(pairs, self.num_experts + 1) // _OWN),)
        kernels.place[grid](flat, order, bounds, pairs, self.num_experts, _OWN, _OTHERS)
        return order, bounds


def group_experts(model: nn.Module) -> list[GroupedExperts]:
    """Put these experts in the place of transformers', as far as the kernels know them; returns them.

    The first of each kind must compute what transformers' own do.
    """
    own: list[GroupedExperts] = []
    agree: dict[type[nn.Module], bool] = {}
    num_used = used_by(model)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if not is_experts(module) or not (kind := kind_of(module)):
                continue
            if type(module) not in agree:
                agree[type(module)] = _agrees(module, kind, num_used)
            if agree[type(module)]:
                own.append(GroupedExperts(module, kind, num_used))
                setattr(parent, name, own[-1])
                for weight in ("gate_up_proj", "down_proj"):
                    setattr(module, weight, None)
    return own


@torch.inference_mode()
def _agrees(experts: Any, kind: str, num_used: int) -> bool:
    """Whether the kernels compute, of some rows, what transformers' experts do."""
    like: Tensor = experts.down_proj
    size, dtype = like.shape[2 if experts.is_transposed else 1], like.dtype
    own = torch.Generator().manual_seed(0)  # the process's stays where it is
    x = torch.randn((_TRIED, size), generator=own).to(like)
    shares, chosen = torch.rand((_TRIED, experts.num_experts), generator=own).to(like.device).topk(num_used)
    shares = (shares / shares.sum(-1, keepdim=True)).to(dtype)
    expected: Tensor = experts(x, chosen, shares).float()
    try:
        found = GroupedExperts(experts, kind, num_used)(x, chosen, shares).float()
    except Exception as error:  # of Triton, for example: a GPU that it does not know
        _log.warning("experts run in transformers' functions: %r", error)
        return False
    difference = float((found - expected).norm() / expected.norm())
    if not difference <= (_FAR if dtype == torch.float32 else _FAR_ROUNDED):
        _log.warning("experts run in transformers' functions: the kernels differ from them by %.3g", difference)
        return False
    return True


def _taken(experts: Any, name: str, *, is_mixed: bool = False) -> tuple[Tensor, Tensor | None]:
    """A weight [X, O, I] and its bias [X, O]; what is mixed comes apart, gates first."""
    weight: Tensor = getattr(experts, name).detach()
    bias: Tensor | None = getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
    weight = weight.transpose(1, 2) if experts.is_transposed else weight
    if is_mixed:
        weight = _apart(weight)
        bias = None if bias is None else _apart(bias)
    return weight.contiguous(), None if bias is None else bias.contiguous()


def _apart(mixed: Tensor) -> Tensor:
    return torch.cat((mixed[:, ::2], mixed[:, 1::2]), dim=1)


def _tile(rows: float, dtype: torch.dtype) -> _Tile:
    """For so many rows of an expert on average."""
    if dtype == torch.float32:
        return _Tile(16, 32, 32, 4, 2)
    if rows <= 4:
        return _Tile(16, 32, 128, 4, 4)
    if rows <= 32:
        return _Tile(32, 64, 64, 4, 4)
    return _Tile(64, 128, 64, 8, 3)
