"""Mixtures of experts in plain decoders, with the names and layouts of transformers' weights.

Source: `modeling_mixtral.py`, `modeling_qwen3_moe.py` and `modeling_gpt_oss.py` there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..cpu.mixture import Clamp
from .config import MixtureConfig


class Router(nn.Module):
    """Chooses each token's experts: a softmax over the routes to all, of which the largest few count."""

    def __init__(self, size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = config.used, config.is_normed
        self.weight = nn.Parameter(torch.empty(config.experts, size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(config.experts), requires_grad=False) if config.clamp else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, E] → the routes to all experts [T, X], and each token's shares and experts, [T, K] each."""
        routes = functional.linear(x, self.weight, self.bias)
        shares, chosen = routes.softmax(-1, dtype=torch.float32).topk(self.top_k)
        return routes, shares / shares.sum(-1, keepdim=True) if self.norm_topk_prob else shares, chosen


class Experts(nn.Module):
    """All experts of a layer, gates above ups: [X, 2 I, E] and [X, E, I]."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, size: int, config: MixtureConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.gate_up_proj = _empty(config.experts, 2 * config.inner, size)
        self.down_proj = _empty(config.experts, size, config.inner)
        self.act_fn = nn.SiLU()

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        gated: Tensor = self.act_fn(gate) * up
        return gated

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return by_expert(self._mix, self.num_experts, x, chosen, shares)

    def _mix(self, expert: int, rows: Tensor) -> Tensor:
        gated = self._apply_gate(functional.linear(rows, self.gate_up_proj[expert]))
        return functional.linear(gated, self.down_proj[expert])


class ClampedExperts(nn.Module):
    """gpt-oss's, with gates and ups in turns and weights of inputs by outputs: [X, E, 2 I] and [X, I, E]."""

    has_gate, has_bias, is_transposed = True, True, True

    def __init__(self, size: int, config: MixtureConfig, clamp: Clamp) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.alpha, self.limit = clamp
        self.gate_up_proj = _empty(config.experts, size, 2 * config.inner)
        self.gate_up_proj_bias = _empty(config.experts, 2 * config.inner)
        self.down_proj = _empty(config.experts, config.inner, size)
        self.down_proj_bias = _empty(config.experts, size)

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return by_expert(self._mix, self.num_experts, x, chosen, shares)

    def _mix(self, expert: int, rows: Tensor) -> Tensor:
        gated = self._apply_gate(torch.addmm(self.gate_up_proj_bias[expert], rows, self.gate_up_proj[expert]))
        return torch.addmm(self.down_proj_bias[expert], gated, self.down_proj[expert])


class Mixture(nn.Module):
    """In the place of a gated MLP."""

    def __init__(self, size: int, config: MixtureConfig) -> None:
        super().__init__()
        clamp, router = config.clamp, Router(size, config)
        self.add_module("gate" if clamp is None else "router", router)
        self.experts: nn.Module = Experts(size, config) if clamp is None else ClampedExperts(size, config, clamp)

    def forward(self, x: Tensor) -> Tensor:
        choose, rows = next(self.children()), x.reshape(-1, x.shape[-1])  # the router, whatever its name
        _, shares, chosen = choose(rows)
        mixed: Tensor = self.experts(rows, chosen, shares)
        return mixed.view(x.shape)


def by_expert(
    mix: Callable[[int, Tensor], Tensor], num_experts: int, x: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """[T, E], and for each token its experts and their shares, [T, K] each → [T, E].

    Rows are sorted by expert, and `mix` computes one expert's.
    """
    num_tokens, num_used = chosen.shape
    experts = chosen.reshape(-1)
    order = experts.argsort(stable=True)
    rows = x[order // num_used]  # [T·K, E], by expert
    start = 0
    for expert, count in enumerate(experts.bincount(minlength=num_experts).tolist()):
        if count:
            rows[start : start + count] = mix(expert, rows[start : start + count])
            start += count
    rows *= shares.reshape(-1, 1)[order].to(rows.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(num_tokens, num_used, -1).sum(dim=1)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
