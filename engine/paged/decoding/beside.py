"""Gemma 4's mixtures of experts, which stand beside a layer's own product.

Both see the same stream, each by norms of its own, and so does the router.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .norm import Norm

_POINTER = ctypes.c_void_p


class Beside(ctypes.Structure):
    """The norms of such a layer as the kernels read them."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("router_norm", "norm", "after", "product_after")),
        ("epsilon", ctypes.c_float),
    ]


class MixtureBeside:
    """One layer's; `after` and `product_after` are the norms of what it and the layer's own product make."""

    def __init__(self, module: Any) -> None:
        """`module` is the model's layer."""
        self._module, self.router = module, module.router
        self.norm = Norm(module.pre_feedforward_layernorm_2)
        self.product_after, self.after = (
            Norm(one) for one in (module.post_feedforward_layernorm_1, module.post_feedforward_layernorm_2)
        )

    @property
    def experts(self) -> Any:
        """The layer's at the time: packed ones take their place."""
        return self._module.experts

    def __call__(self, x: Tensor) -> Tensor:
        """What the experts make of a stream [1, T, E]."""
        _, shares, chosen = self.router(x[0])
        made: Tensor = self.experts(self.norm(x[0]), chosen, shares)
        return made[None]

    def compiled(self, address: Callable[[Tensor], int]) -> Beside:
        """`address` keeps float32 numbers alive, and tells where they are."""
        of_router = self.router.scale.float() * self.router.scalar_root_size
        norms = (address(one.weight) for one in (self.norm, self.after, self.product_after))
        return Beside(address(of_router), *norms, self.norm.epsilon)
