"""Weight-only quantisation at load, from the same checkpoint: int8 by output row, int4 by groups of 32 weights.

With int4 the output head is int8: its errors would directly change which token is chosen.

Kernels for quantised weights, compiled ones or torch's, read less memory, which sets the speed for few rows; for many
they compute more slowly than a product of floats. Above some number of rows the weight is therefore expanded for each
product: with AMX block by block in the cache, else into a buffer that all layers share. All variants compute with the
numbers of `dequantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ...schemas.errors import ConfigurationError
from ..cpu.layouts import interleaved, padded
from ..cpu.library import BLOCK, INT4, INT8, MOST_ROWS, Kernels, Product
from .linear import CompiledLinear, Linear, PlainLinear, Unfused, make_packed, multiply_packed, reorder

METHODS = ("int8", "int4")

_GROUP = 32
_INT8_ROWS, _INT4_ROWS = 32, 112  # the most rows for which torch's kernels are faster than expanding


def linear_maker(
    quantization: str | None, device: torch.device, kernels: Kernels | None = None
) -> Callable[[Tensor, Tensor | None], Linear]:
    """A function that turns a weight [O, I] and a bias [O] into a product for `device`.

    Raises `ConfigurationError` for a quantisation that is unknown or not available on this device.
    """
    if quantization is None:
        return partial(make_packed, kernels=kernels) if device.type == "cpu" else PlainLinear
    if quantization not in METHODS:
        raise ConfigurationError([f"quantization={quantization!r}: must be one of {', '.join(METHODS)}, or left out"])
    if device.type != "cpu":
        raise ConfigurationError([f"quantization={quantization!r}: runs only on a CPU, not on {device}; leave it out"])
    buffer = _Buffer()
    return lambda weight, bias: _quantize(weight, bias, quantization, buffer, kernels)


def of_head(quantization: str | None) -> str | None:
    """How to quantise the output head if the other products use `quantization`."""
    return "int8" if quantization == "int4" else quantization


def quantizable(model: PreTrainedModel, quantization: str) -> Iterable[tuple[str, nn.Linear, str]]:
    """The modules whose weights are quantised, that is, all products: name, module and method."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module, of_head(quantization) or quantization if module is head else quantization


def dequantized(weight: Tensor, quantization: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that the quantised `weight` [O, I] stands for, with scales rounded to `dtype`: float32 [O, I]."""
    if quantization == "int8" or not _fits_int4(weight):
        rows, scales = _by_row(weight)
        return rows * scales.to(dtype).float()[:, None]
    groups = _by_group(weight)
    scales, zeros = groups.scales.to(dtype).float(), groups.zeros.to(dtype).float()
    return ((groups.levels - 8) * scales[..., None] + zeros[..., None]).view_as(weight)


def _quantize(weight: Tensor, bias: Tensor | None, method: str, buffer: _Buffer, kernels: Kernels | None) -> Linear:
    is_int4 = method == "int4" and _fits_int4(weight)
    if kernels is not None and kernels.take(weight):
        return _Compiled(weight, bias, INT4 if is_int4 else INT8, buffer, kernels)
    return (_Int4Linear if is_int4 else _Int8Linear)(weight, bias, buffer)


def _fits_int4(weight: Tensor) -> bool:
    """Whether torch's int4 kernel supports the shape; if not, int8 replaces it."""
    return weight.shape[0] % 16 == 0 and weight.shape[1] % (2 * _GROUP) == 0


def _by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127 as float32 [O, I], and the scale of each row [O]."""
    weight = weight.float()
    scales = (weight.abs().amax(-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round(), scales


class _Groups(NamedTuple):
    """`levels` 0 to 15 [O, G, 32]; a weight is (level - 8) · scale + zero, `scales` and `zeros` [O, G]."""

    levels: Tensor
    scales: Tensor
    zeros: Tensor


def _by_group(weight: Tensor) -> _Groups:
    groups = weight.float().view(len(weight), -1, _GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    levels = ((groups - low[..., None]) / scales[..., None]).round().clamp_(0, 15)
    return _Groups(levels, scales, low + 8 * scales)


class _Buffer:
    """Memory for one expanded weight, shared by all layers of a model."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._packed: dict[tuple[int, int], Tensor] = {}  # by shape, in oneDNN's layout

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self._memory.dtype != dtype or self._memory.numel() < rows * columns:
            self._memory = torch.empty(rows * columns, dtype=dtype)
        return self._memory[: rows * columns].view(rows, columns)

    def clear(self) -> None:
        self._packed.clear()

    def take_packed(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if (rows, columns) not in self._packed:
            self._packed[rows, columns] = reorder(torch.zeros((rows, columns), dtype=dtype))
        return self._packed[rows, columns]


class _Quantized(Unfused):
    """Multiplies few rows with `_few`, and many with the expanded weight in `_many`."""

    most_few: int
    weight: Tensor
    nbytes: int

    def __init__(self, size: int, bias: Tensor | None) -> None:
        self._size, self._bias = size, bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):  # a step that only fills the cache needs no logits
            return x.new_empty((*x.shape[:-1], self._size))
        product = self._few(rows) if len(rows) <= self.most_few else self._many(rows)
        if self._bias is not None:
            product += self._bias
        return product.view(*x.shape[:-1], self._size)

    def _few(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _many(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Compiled(CompiledLinear):
    """One copy of the levels, in the layout of `kernels.c`; without AMX, expanded for oneDNN if there are many rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: int, buffer: _Buffer, kernels: Kernels) -> None:
        self._buffer, self._bias = buffer, bias
        self._scales: Tensor | None = None  # those that the expanded weight does not include
        if kind == INT8:
            rows, row_scales = _by_row(weight)
            self._scales = row_scales.to(weight.dtype)
            scales = padded(self._scales.float()[:, None], BLOCK, 1)
            packed = interleaved(rows.abs().to(torch.uint8) | (rows < 0).to(torch.uint8) << 7, weight.dtype)
        else:
            groups = _by_group(weight)
            both = torch.stack((groups.scales, groups.zeros), dim=-1).to(weight.dtype)  # [O, G, 2]
            blocks = padded(both.flatten(1), BLOCK, 1).view(-1, BLOCK, both.shape[1], 2)
            scales = blocks.permute(0, 2, 3, 1).contiguous()
            low, high = interleaved(groups.levels.view_as(weight).to(torch.uint8), weight.dtype).unbind(2)
            packed = low | high << 4
        product = Product.of(weight.shape, kind, packed, scales, bias)
        super().__init__(product, packed, packed.nbytes + scales.nbytes, kernels)
        self._for_onednn = not (kernels.has_tiles and weight.dtype == torch.bfloat16)
        if self._for_onednn:
            expanded = buffer.take_packed(weight.shape[0], weight.shape[1], weight.dtype)
            self._for_onednn = kernels.agree(product, expanded, weight.dtype, self._expanded)
            buffer.clear()  # an output head's is large and rarely needed

    def _multiply(self, x: Tensor) -> Tensor:
        return self._expanded(x) if self._for_onednn and len(x) > MOST_ROWS else super()._multiply(x)

    def _expanded(self, x: Tensor) -> Tensor:
        weight = self._buffer.take_packed(self.product.outputs, self.product.inputs, x.dtype)
        self._kernels.expand(self.product, weight, x.dtype)
        result = multiply_packed(x, weight)
        if self._scales is not None:
            result.mul_(self._scales)
        return result if self._bias is None else result.add_(self._bias)


class _Int8Linear(_Quantized):
    most_few = _INT8_ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None, buffer: _Buffer) -> None:
        super().__init__(len(weight), bias)
        rows, scales = _by_row(weight)
        self.weight, self._scales = rows.to(torch.int8), scales.to(weight.dtype)
        if weight.dtype == torch.bfloat16 and weight.shape[1] % 16:  # torch's kernel reads past the end of a row
            self.most_few = 0
        self.nbytes = self.weight.nbytes + self._scales.nbytes
        self._buffer = buffer

    def _few(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self._scales)
        return product

    def _many(self, x: Tensor) -> Tensor:
        rows, columns = self.weight.shape
        expanded = self._buffer.take(rows, columns, x.dtype).copy_(self.weight)
        return functional.linear(x, expanded).mul_(self._scales)


class _Int4Linear(_Quantized):
    """Stores the levels twice: in the kernel's format, and two to a byte for expanding, the row's halves side by side.

    Source of the kernel's format: torch's `aten/src/ATen/native/cpu/int4mm_kernel.cpp`.
    """

    most_few = _INT4_ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None, buffer: _Buffer) -> None:
        super().__init__(len(weight), bias)
        groups = _by_group(weight)
        levels = groups.levels.view_as(weight).to(torch.int32)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        both = torch.stack((groups.scales, groups.zeros), dim=-1)  # [O, G, 2]
        self._scales_and_zeros = both.transpose(0, 1).contiguous().to(weight.dtype)
        self.nbytes = self.weight.nbytes + self._scales_and_zeros.nbytes
        low, high = levels.to(torch.uint8).chunk(2, dim=-1)
        self._halves = low | high << 4  # [O, I / 2]
        self._buffer = buffer

    def _few(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, _GROUP, self._scales_and_zeros)
        return product

    def _many(self, x: Tensor) -> Tensor:
        rows, half = self._halves.shape
        expanded = self._buffer.take(rows, 2 * half, x.dtype)
        expanded[:, :half].copy_(self._halves & 15)
        expanded[:, half:].copy_(self._halves >> 4)
        scales, zeros = self._scales_and_zeros.transpose(0, 1)[..., None].unbind(-2)  # [O, G, 1]
        expanded.view(rows, -1, _GROUP).sub_(8).mul_(scales).add_(zeros)
        return functional.linear(x, expanded)
