"""Matrix products in the fastest form for a device: weights packed once, several products of one input fused.

On a CPU with compiled kernels, weights have the kernels' layout. If oneDNN uses the same one, it multiplies many rows;
otherwise (bfloat16 on CPUs with AMX or without AVX-512, any weight without oneDNN) the kernels multiply any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...adapters.low_rank import Adaptation, Part
from ...cpu.layouts import paired
from ...cpu.library import PLAIN, Kernels, Product
from .turning import Orders

_HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
"""Whether torch was built with oneDNN: on Macs it is not."""

if _HAS_ONEDNN:
    reorder = torch.ops.mkldnn._reorder_linear_weight
    """Converts a weight [O, I] to oneDNN's layout."""

    _POINTWISE = torch.ops.mkldnn._linear_pointwise.default
    _BINARY = torch.ops.mkldnn._linear_pointwise.binary

_FEW_ROWS = 64
HELD = "held"
"""The attribute of a module whose weight is absent: the product of its levels, which is its `forward`."""


def packs_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this CPU: one with AVX2 alone does not."""
    return _HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear(Protocol):
    """x W' + b, [T, I] → [T, O], alone or with a common next operation; none changes its arguments.

    `nbytes` is the size of `weight`, which may be in oneDNN's layout; `product` describes it to the compiled kernels.
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


class MakeLinear(Protocol):
    """Makes one `Linear` of modules that share their input, outputs side by side; takes over the modules' memory.

    The outputs of the first modules get other `orders`, those of the rest keep theirs.
    """

    def __call__(self, parts: Sequence[nn.Linear], orders: Orders = ()) -> Linear: ...


class Unfused:
    """A product whose next operation is separate and in place: a subclass must return a tensor of its own."""

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
    """A weight in the layout of the compiled kernels, which multiply any number of rows by it."""

    def __init__(self, product: Product, weight: Tensor, nbytes: int, kernels: Kernels) -> None:
        """`nbytes` as in `Linear`."""
        self.product: Product = product
        self.weight, self.nbytes, self._kernels = weight, nbytes, kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.product.outputs)

    def _multiply(self, x: Tensor) -> Tensor:
        return self._kernels.multiply(self.product, x)


class PlainLinear(Unfused):
    """torch's own product, for devices that need no packing."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self._bias)


class PackedLinear:
    """A weight in oneDNN's layout, with its fused post-operations; `functional.linear` would repack it at each call.

    A fused multiplication is free for few rows, but costs more than a separate one for many.
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


def make_packed(
    weight: Tensor, bias: Tensor | None, kernels: Kernels | None
) -> PackedLinear | CompiledLinear | PlainLinear:
    """The product for a CPU: by oneDNN, by the kernels, or by both if they share the layout."""
    packs = _HAS_ONEDNN
    if weight.dtype == torch.bfloat16:
        packs = packs_bfloat16()
    elif weight.dtype == torch.float16:
        packs = packs and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if kernels is None or not kernels.take(weight.dtype, weight.shape[1]):
        return PackedLinear(weight, bias) if packs else PlainLinear(weight, bias)
    if packs and not (kernels.has_tiles and weight.dtype == torch.bfloat16):
        shared = PackedLinear(weight, bias, kernels)
        if shared.product is not None:
            return shared
    ours = paired(weight)
    return CompiledLinear(Product.of(weight.shape, PLAIN, ours, None, bias), ours, weight.nbytes, kernels)


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b with a weight from `reorder`."""
    product: Tensor = _POINTWISE(x, weight, bias, "none", [], "")
    return product


class Views(Unfused):
    """The products of unchanged modules, side by side: nothing is copied or taken over."""

    weight, nbytes = torch.empty(0), 0

    def __init__(self, parts: Sequence[nn.Linear], orders: Orders = ()) -> None:
        self._parts, self._orders = parts, orders

    def __call__(self, x: Tensor) -> Tensor:
        made = [part(x) for part in self._parts]
        made[: len(self._orders)] = [one[..., order] for one, order in zip(made, self._orders, strict=False)]
        return torch.cat(made, dim=-1)


class Adaptable(Unfused):
    """A product with those of the adapters that the step uses."""

    def __init__(self, linear: Linear, adaptation: Adaptation, parts: Sequence[Part]) -> None:
        self._linear, self._adaptation, self.parts = linear, adaptation, parts
        self.weight, self.nbytes, self.product = linear.weight, linear.nbytes, linear.product

    def __call__(self, x: Tensor) -> Tensor:
        return self._adaptation.add(self.parts, x, self._linear(x))

    def silu(self, x: Tensor) -> Tensor:
        return super().silu(x) if self._adaptation.is_active else self._linear.silu(x)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return super().add(x, other) if self._adaptation.is_active else self._linear.add(x, other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        return super().mul(x, other) if self._adaptation.is_active else self._linear.mul(x, other)


def known_product(linear: Linear) -> Product:
    """That of one which is known to have it."""
    assert linear.product is not None
    return linear.product


def known_products(linears: Sequence[Linear]) -> list[Product]:
    """Those of them that have one."""
    return [linear.product for linear in linears if linear.product is not None]


class Applied(nn.Module):
    """A `Linear` as a module, for transformers' code."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


class _Watched(nn.Linear):
    """A linear layer that notes in `reads` whether others than itself read its weight."""

    reads: set[nn.Module]
    is_running = False

    def forward(self, input: Tensor) -> Tensor:
        self.is_running = True
        try:
            return super().forward(input)
        finally:
            self.is_running = False

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and not self.is_running:
            self.reads.add(self)
        return super().__getattr__(name)


@contextmanager
def noting_reads(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yields a set for those linear layers whose weights the model's own code reads inside, as some routers' does."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    reads: set[nn.Module] = set()
    for module in linears:
        module.__class__ = _Watched
        vars(module)["reads"] = reads
    try:
        yield reads
    finally:
        for module in linears:
            module.__class__ = nn.Linear
            for own in ("reads", "is_running"):
                vars(module).pop(own, None)


def replace_linears(model: nn.Module, make: Callable[[Sequence[nn.Linear]], Linear], but: Set[nn.Module]) -> None:
    """Put products in the places of a model's linear layers, `but` these."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module) is nn.Linear and module not in but:
                setattr(parent, name, Applied(make([module])))


def fused_weight(parts: Sequence[nn.Linear]) -> Tensor:
    """Concatenate the weights of several products of the same input."""
    return torch.cat([part.weight for part in parts])


def fused_bias(parts: Sequence[nn.Linear]) -> Tensor | None:
    """Concatenate the biases of several products; all or none have one."""
    return None if parts[0].bias is None else torch.cat([part.bias for part in parts])


def release(parts: Iterable[nn.Linear]) -> None:
    """Free the weights of modules whose weights were copied elsewhere."""
    for part in parts:
        part.weight = nn.Parameter(part.weight.new_empty(0), requires_grad=False)
        part.register_parameter("bias", None)
        for own in ("rounded", HELD, "forward"):
            vars(part).pop(own, None)
