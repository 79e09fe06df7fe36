"""Mixtures of experts in the compiled decoder, which chooses the experts by itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...cpu.library import Kernels, Product
from ...cpu.mixture import Choosing, Mixture
from .beside import MixtureBeside
from .experts import PackedExperts
from .linear import make_packed
from .precision import in_float32

_WITH_SIGMOIDS = {"Lfm2MoeTopKRouter": ("expert_bias", 1e-6), "MiniMaxM2TopKRouter": ("e_score_correction_bias", 0.0)}
"""The names of routers whose shares are sigmoids; what their mixture calls a number for each expert that counts in the
choice alone, and what they add to the sum of a row's shares."""


class Routed:
    """One layer's mixture: a softmax or sigmoids of the routes to all experts, of which the largest few count."""

    def __init__(self, module: Any, dtype: torch.dtype, kernels: Kernels, factor: float = 1.0) -> None:
        """`module` is the model's own, and `is_known`; what it adds is multiplied by `factor`."""
        self.gate, self.packed = router_of(module), module.experts
        self.experts, self.kernels = self.packed.compiled, kernels
        self.used = used_of(module)
        self.prepare: Callable[[Tensor], Tensor] = module.norm if isinstance(module, MixtureBeside) else (lambda h: h)
        routing = self.gate.proj if isinstance(module, MixtureBeside) else self.gate
        weight, bias = routing.weight.detach().to(dtype), getattr(routing, "bias", None)
        self._router = make_packed(weight, None if bias is None else bias.detach(), kernels)
        self._given: tuple[Tensor | None, ...] = ()  # what the router is called with besides
        self.choosing = Choosing(self.used, bool(getattr(self.gate, "norm_topk_prob", True)))  # others' always are
        if (kind := type(self.gate).__name__) in _WITH_SIGMOIDS:
            name, least = _WITH_SIGMOIDS[kind]
            own: Tensor | None = getattr(module, name, None)
            preferences = None if own is None else own.detach().float().contiguous()
            self._given = (preferences,)
            scale = float(getattr(self.gate, "routed_scaling_factor", 1))
            self.choosing = Choosing(self.used, self.choosing.is_normed, True, preferences, scale, least)
        if isinstance(module, MixtureBeside):
            factors = self.gate.per_expert_scale.detach().float().contiguous()
            self.choosing = Choosing(self.used, True, factors=factors)
        router: Product | None = self._router.product
        assert router is not None
        self.mixture: Mixture = self.experts.mixture(router, self.choosing, factor)

    @staticmethod
    def is_known(module: Any, dtype: torch.dtype, kernels: Kernels) -> bool:
        """Whether the kernels know such a router, and the experts; whether they compute the same is to be checked."""
        gate, packed = router_of(module), module.experts
        if not isinstance(packed, PackedExperts) or packed.compiled is None or not packed.compiled.take(dtype):
            return False
        if isinstance(module, MixtureBeside):
            return bool(kernels.take(dtype, packed.compiled.sizes.outer))
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


def used_of(module: Any) -> int:
    """How many experts a row passes."""
    gate = router_of(module)
    used: int = gate.config.top_k_experts if isinstance(module, MixtureBeside) else gate.top_k
    return used


def router_of(module: Any) -> Any:
    """What chooses the experts: transformers calls it by one of two names."""
    return module.gate if hasattr(module, "gate") else module.router
