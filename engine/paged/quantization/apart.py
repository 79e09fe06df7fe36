"""Each expert's weights as modules of their own, so that what rounds a model's products finds theirs, too.

transformers keeps those of all experts of a layer in one tensor for each of two products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...plain.mixture import by_expert
from ..decoding.experts import is_experts


class ExpertsApart(nn.Module):
    """In the place of transformers' experts: a module for each, with two products. They share the tensors' memory."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._num_experts: int = experts.num_experts
        self.is_transposed: bool = experts.is_transposed
        self._kinds = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
        self._activate: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
        for expert in range(self._num_experts):
            module = nn.Module()
            for kind in self._kinds:
                weight = getattr(experts, kind).detach()[expert]
                module.add_module(kind, _product(weight.T if self.is_transposed else weight))
            self.add_module(str(expert), module)
        for name, parameter in experts.named_parameters(recurse=False):
            if name not in self._kinds:  # biases
                self.register_parameter(name, parameter)
        self.post_expert_norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, E], and for each token its experts and their weights, [T, K] each → [T, E]."""
        return by_expert(self._mix, self._num_experts, hidden_states, top_k_index, top_k_weights)

    def _mix(self, expert: int, rows: Tensor) -> Tensor:
        inner, outer = (self._multiply(expert, kind) for kind in self._kinds)
        mixed = outer(self._activate(inner(rows)))
        return mixed if self.post_expert_norm is None else self.post_expert_norm(mixed)

    def _multiply(self, expert: int, kind: str) -> Callable[[Tensor], Tensor]:
        product, biases = self.get_submodule(f"{expert}.{kind}"), getattr(self, f"{kind}_bias", None)
        return product if biases is None else lambda rows: product(rows) + biases[expert]


def set_apart(model: nn.Module) -> None:
    """Replace the experts of all layers of a model of transformers."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if name == "experts" and is_experts(module):
                setattr(parent, name, ExpertsApart(module))


def _product(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        product = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    product.weight = nn.Parameter(weight, requires_grad=False)
    return product
