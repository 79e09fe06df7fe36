"""Mixtures of experts in the compiled decoder, which chooses the experts by itself."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ...cpu.library import Kernels, Product
from ...cpu.mixture import Mixture
from .experts import PackedExperts
from .linear import make_packed


class Routed:
    """One layer's mixture: a softmax over the routes to all experts, of which the largest few count."""

    def __init__(self, module: Any, dtype: torch.dtype, kernels: Kernels) -> None:
        """`module` is the model's own, and `is_known`."""
        self.gate, self.packed = router_of(module), module.experts
        self.experts, self.kernels = self.packed.compiled, kernels
        self.used: int = self.gate.top_k
        weight, bias = self.gate.weight.detach().to(dtype), getattr(self.gate, "bias", None)
        self._router = make_packed(weight, None if bias is None else bias.detach(), kernels)
        is_normed = bool(getattr(self.gate, "norm_topk_prob", True))  # others' always are
        router: Product | None = self._router.product
        assert router is not None
        self.mixture: Mixture = self.experts.mixture(router, self.used, is_normed)

    @staticmethod
    def is_known(module: Any, dtype: torch.dtype, kernels: Kernels) -> bool:
        """Whether the kernels know such a router, and the experts; whether they compute the same is to be checked."""
        gate, packed = router_of(module), module.experts
        if not isinstance(packed, PackedExperts) or packed.compiled is None or not packed.compiled.take(dtype):
            return False
        if not {name for name, _ in (*gate.named_parameters(), *gate.named_buffers())} <= {"weight", "bias"}:
            return False
        sizes = packed.compiled.sizes[:2]
        return gate.weight.shape == sizes and hasattr(gate, "top_k") and kernels.take(dtype, sizes[1])

    @property
    def address(self) -> int:
        """Where the kernels find it."""
        return ctypes.addressof(self.mixture)


def router_of(module: Any) -> Any:
    """What chooses the experts: transformers calls it by one of two names."""
    return module.gate if hasattr(module, "gate") else module.router
