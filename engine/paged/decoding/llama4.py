"""Llama 4's mixtures of experts, in the form of other mixtures, and its attention without scales by position.

transformers computes all experts for every token, with inputs of zero for those that are not chosen. Here only the
chosen ones compute. Queries are scaled by position from `floor_scale` on, where a context ends (`context.py`): before,
the scale is 1. Source: `Llama4TextMoe` and `Llama4TextAttention` in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...plain.mixture import Experts


class TransposedExperts(Experts):
    """All experts of a layer, gates before ups, inputs by outputs: [X, E, 2 I] and [X, I, E]."""

    is_transposed = True

    def __init__(self, experts: Any) -> None:
        nn.Module.__init__(self)
        self.num_experts = experts.num_experts
        self.gate_up_proj, self.down_proj, self.act_fn = experts.gate_up_proj, experts.down_proj, experts.act_fn
        if "rounded" in vars(experts):
            vars(self)["rounded"] = vars(experts)["rounded"]

    def _mix(self, expert: int, rows: Tensor) -> Tensor:
        return self._apply_gate(rows @ self.gate_up_proj[expert]) @ self.down_proj[expert]


class ScaledMixture(nn.Module):
    """A token's shares multiply what its experts get, and not what they make."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self.top_k: int = mixture.top_k
        self.router, self.shared_expert = mixture.router, mixture.shared_expert
        self.experts = TransposedExperts(mixture.experts)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T, E] → [T, E], and the routes to all experts [T, X]."""
        x = hidden_states.flatten(0, -2)
        shares, routes = self.router(x)
        chosen = routes.topk(self.top_k, dim=-1).indices  # [T, K]
        scaled = (x[:, None] * shares.gather(1, chosen)[..., None]).flatten(0, 1)
        made: Tensor = self.experts(scaled, chosen.view(-1, 1), torch.ones_like(scaled[:, :1]))
        return self.shared_expert(x) + made.view(len(x), self.top_k, -1).sum(1), routes


def replace_mixtures(model: nn.Module) -> None:
    """Put these in the places of transformers', where the model is a Llama 4."""
    for module in list[Any](model.modules()):
        kind = type(module).__name__
        if kind == "Llama4TextAttention":
            module.attn_temperature_tuning = False
        elif kind == "Llama4TextDecoderLayer" and module.is_moe_layer:
            module.feed_forward = ScaledMixture(module.feed_forward)
