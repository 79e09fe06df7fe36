"""Matrix products in the form that a device likes best: weights packed once, several products of one input fused.

On a CPU with compiled kernels the layout of a weight is ours. Where oneDNN happens to use the same one, it multiplies
many rows; where it does not (bfloat16 on CPUs with AMX), the kernels do it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..cpu.layouts import paired
from ..cpu.library import PLAIN, Kernels, Product

reorder = torch.ops.mkldnn._reorder_linear_weight
"""A weight [O, I] in oneDNN's layout."""

_POINTWISE = torch.ops.mkldnn._linear_pointwise.default
_BINARY = torch.ops.mkldnn._linear_pointwise.binary
_FEW_ROWS = 64


class Linear(Protocol):
    """x W' + b, [T, I] → [T, O], and the same with what often follows; none of them changes its arguments.

    `nbytes` is what one row's product reads of `weight`, which may be oneDNN's; `product` is that for the compiled
    kernels.
    """

    weight: Tensor
    nbytes: int

    @property
    def product(self) -> Product | None: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        ...

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """The product plus `other` [T, O]."""
        ...

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """The product times `other` [T, O], element by element."""
        ...


class Unfused:
    """A product, and what follows it as an operation of its own. What a subclass returns must be its own to change."""

    product: Product | None = None

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x), inplace=True)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).mul_(other)


class CompiledLinear(Unfused):
    """A weight in the layout of the compiled kernels, which multiply by it any number of rows."""

    def __init__(self, product: Product, weight: Tensor, nbytes: int, kernels: Kernels) -> None:
        """`nbytes` as in `Linear`."""
        self.product: Product = product
        self.weight, self.nbytes, self._kernels = weight, nbytes, kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.product.outputs)

    def _multiply(self, x: Tensor) -> Tensor:
        return self._kernels.multiply(self.product, x)


class PlainLinear(Unfused):
    """As torch does it: for devices whose libraries take weights as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self._bias)


class PackedLinear:
    """oneDNN's own layout of the weight, and its fused post-operations. `functional.linear` would pack at each call.

    Fused multiplications are free for few rows and cost more than separate ones for many: of [4864, 896] with 256 rows
    the product takes 2.6 ms, with a fused factor 3.1, and the factor alone 0.1.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels | None = None) -> None:
        self.weight, self._bias = reorder(weight), bias
        self.nbytes = weight.nbytes
        self.product: Product | None = None
        if kernels is not None:
            product = Product.of(weight.shape, PLAIN, self.weight, None, bias)
            self.product = product if kernels.agree(product, self.weight, weight.dtype, self) else None

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_packed(x, self.weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        if len(x) > _FEW_ROWS:
            return functional.silu(self(x), inplace=True)
        product: Tensor = _POINTWISE(x, self.weight, self._bias, "swish", [], "")
        return product

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        product: Tensor = _BINARY(x, other, self.weight, self._bias, "add")
        return product

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        if len(x) > _FEW_ROWS:
            return self(x).mul_(other)
        product: Tensor = _BINARY(x, other, self.weight, self._bias, "mul")
        return product


def make_packed(weight: Tensor, bias: Tensor | None, kernels: Kernels | None) -> PackedLinear | CompiledLinear:
    """The product for a CPU: by oneDNN, by the kernels, or by both where one layout suits them."""
    if kernels is None or not kernels.take(weight):
        return PackedLinear(weight, bias)
    if not (kernels.has_tiles and weight.dtype == torch.bfloat16):
        shared = PackedLinear(weight, bias, kernels)
        if shared.product is not None:
            return shared
    ours = paired(weight)
    return CompiledLinear(Product.of(weight.shape, PLAIN, ours, None, bias), ours, weight.nbytes, kernels)


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b with a weight that `reorder` made."""
    product: Tensor = _POINTWISE(x, weight, bias, "none", [], "")
    return product


class Applied(nn.Module):
    """A `Linear` where transformers' code expects a module."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


def fused_weight(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight for several products of the same input: all with a bias or none."""
    weight = torch.cat([part.weight for part in parts])
    if parts[0].bias is None:
        return weight, None
    return weight, torch.cat([part.bias for part in parts])


def release(parts: Iterable[nn.Linear]) -> None:
    """Free the weights of modules that something else has taken over."""
    for part in parts:
        part.weight = nn.Parameter(part.weight.new_empty(0), requires_grad=False)
        part.register_parameter("bias", None)
