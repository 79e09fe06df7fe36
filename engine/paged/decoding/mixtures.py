"""Mixtures of experts in the compiled decoder, which chooses the experts by itself."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...cpu.library import Kernels, Product
from ...cpu.mixture import Choosing, Mixture
from .experts import PackedExperts
from .linear import make_packed
from .precision import in_float32

_WITH_SIGMOIDS = {"Lfm2MoeTopKRouter"}
"""The names of routers whose shares are sigmoids, with a bias for each expert that counts in the choice alone."""

_LEAST = 1e-6  # what these add to the sum of a row's shares


class Routed:
    """One layer's mixture: a softmax or sigmoids of the routes to all experts, of which the largest few count."""

    def __init__(self, module: Any, dtype: torch.dtype, kernels: Kernels, factor: float = 1.0) -> None:
        """`module` is the model's own, and `is_known`; what it adds is multiplied by `factor`."""
        self.gate, self.packed = router_of(module), module.experts
        self.experts, self.kernels = self.packed.compiled, kernels
        self.used: int = self.gate.top_k
        weight, bias = self.gate.weight.detach().to(dtype), getattr(self.gate, "bias", None)
        self._router = make_packed(weight, None if bias is None else bias.detach(), kernels)
        self._given: tuple[Tensor | None, ...] = ()  # what the router is called with besides
        self.choosing = Choosing(self.used, bool(getattr(self.gate, "norm_topk_prob", True)))  # others' always are
        if type(self.gate).__name__ in _WITH_SIGMOIDS:
            preferences = module.expert_bias.detach().float().contiguous() if self.gate.use_expert_bias else None
            self._given = (preferences,)
            scale = float(self.gate.routed_scaling_factor)
            self.choosing = Choosing(self.used, self.choosing.is_normed, True, preferences, scale, _LEAST)
        router: Product | None = self._router.product
        assert router is not None
        self.mixture: Mixture = self.experts.mixture(router, self.choosing, factor)

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

    def choose(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the model does in float32, for inputs [T, E]: by what it chooses [T, experts], the shares of those that it
        takes and their numbers [T, K]."""
        with in_float32(self.gate):
            routes, shares, chosen = self.gate(h, *self._given)
        if self.choosing.preferences is not None:
            routes = routes.sigmoid() + self.choosing.preferences
        return routes, shares.float(), chosen

    @property
    def address(self) -> int:
        """Where the kernels find it."""
        return ctypes.addressof(self.mixture)


def router_of(module: Any) -> Any:
    """What chooses the experts: transformers calls it by one of two names."""
    return module.gate if hasattr(module, "gate") else module.router
