"""Weight-only quantisation at load, from the same checkpoint: int8 and int4 by groups of 32 inputs (`rounding`).

With int4 the output head and the inputs of attention are int8: a head's errors directly change which token is chosen,
and those of a few values' weights cost as much quality as all other products together.

The compiled kernels multiply whole numbers, any number of rows; those of CUDA multiply levels by bfloat16. On a CPU
without kernels, torch's for quantised weights read less memory than a
product of floats, which sets the speed for few rows, and compute more slowly, so that for many rows the weight is
expanded for each product into a buffer that all layers share. All compute with the numbers of `dequantized`; only the
compiled ones in bfloat16 round the inputs, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....schemas.errors import ConfigurationError
from ...checkpoints.quantized import PRECISE
from ...checkpoints.rounded import Rounded, TakesLevels, blocks_of
from ...cpu.layouts import fours, grouped, nibbles
from ...cpu.library import BLOCK, FINE, GROUP, INT4, INT8, UNEVEN, Kernels, Product
from ...cuda.levels import LevelKernels, unsupported
from ...vision.families.names import body_of, language_model_of
from ..decoding.linear import (
    HELD,
    CompiledLinear,
    Linear,
    PlainLinear,
    Unfused,
    fused_bias,
    fused_weight,
    make_packed,
)
from .blocks import Packer
from .on_cuda import LevelMaker
from .rounding import to_int4, to_int8

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHODS = ("int8", "int4")

_PART = 64 * BLOCK  # outputs whose levels are packed at a time
_INT8_ROWS, _INT4_ROWS = 16, 112  # the most rows for which torch's kernels are faster than expanding


def linear_maker(
    quantization: str | None,
    device: torch.device,
    kernels: Kernels | None = None,
    levels: LevelMaker | None = None,
) -> Callable[[Tensor, Tensor | None], Linear]:
    """A function that turns a weight [O, I] and a bias [O] into a product for `device`.

    Raises `ConfigurationError` for a quantisation that is unknown or not available on this device.
    """
    if quantization is None:
        return partial(make_packed, kernels=kernels) if device.type == "cpu" else PlainLinear
    if quantization not in METHODS:
        raise ConfigurationError([f"quantization={quantization!r}: must be one of {', '.join(METHODS)}, or left out"])
    if levels is not None:
        return partial(_quantized_on_cuda, levels, quantization)
    if device.type != "cpu":
        reason = unsupported(device)
        raise ConfigurationError([f"quantization={quantization!r}: {reason}; or leave it out"])
    buffer = _Buffer()
    return lambda weight, bias: _place(rounded(weight, quantization), bias, weight.dtype, buffer, kernels)


def _quantized_on_cuda(levels: LevelMaker, quantization: str, weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.dtype != torch.bfloat16:
        name = str(weight.dtype).removeprefix("torch.")
        raise ConfigurationError([f"quantization={quantization!r}: takes bfloat16 on a GPU, not {name}; set dtype"])
    return levels.of(rounded(weight, quantization), bias, weight.dtype)


class ProductMaker:
    """Turns the weights of modules into products for a device: rounded, or as levels if they were loaded as such."""

    def __init__(self, quantization: str | None, device: torch.device, kernels: Kernels | None = None) -> None:
        """Raises `ConfigurationError` as `linear_maker` does."""
        self._levels = None if unsupported(device) else LevelMaker(LevelKernels(device))
        self._make = linear_maker(quantization, device, kernels, self._levels)
        precise = "int8" if quantization == "int4" else quantization
        self._make_precise = linear_maker(precise, device, kernels, self._levels)
        self._is_cpu, self.kernels, self._buffer = device.type == "cpu", kernels, _Buffer()
        self._packer = None if kernels is None or not self._is_cpu else Packer(kernels)
        self.is_quantized = quantization is not None  # set where weights were loaded as levels, too

    @property
    def takes_levels(self) -> TakesLevels | None:
        """For which weights there are products of whatever levels a file has; None if for none."""
        if self._levels is not None:
            return self._levels.take
        return self.kernels.take if self._is_cpu and self.kernels is not None else None

    def __call__(self, parts: Sequence[nn.Linear], name: str, is_head: bool) -> Linear:
        """One product of modules that share their input; `name` is that of the first."""
        if len(parts) == 1 and (held := vars(parts[0]).get(HELD)) is not None:
            product: Linear = held
            return product
        bias, dtype = fused_bias(parts), parts[0].weight.dtype
        readers = (getattr(part, "rounded", None) for part in parts)
        if self._packer is not None and (blocks := blocks_of(readers)):
            packed = self._packer.pack(blocks, bias, dtype)
            if packed is not None:
                self.is_quantized = True
                return packed
        if self._levels is not None and (made := self._levels.of_modules(parts, bias, dtype)) is not None:
            self.is_quantized = True
            return made
        loaded = Rounded.of_modules(parts) if self._is_cpu else None
        if loaded is not None and (loaded.is_own or self.kernels is not None):
            self.is_quantized = True
            return _place(loaded, bias, dtype, self._buffer, self.kernels)
        make = self._make_precise if is_head or is_precise(name) else self._make
        return make(fused_weight(parts), bias)


def is_precise(name: str) -> bool:
    """Whether int4 leaves the module of this name at int8, other than the output head."""
    return name.rpartition(".")[2] in PRECISE


def quantizable(model: PreTrainedModel, quantization: str) -> Iterable[tuple[str, nn.Linear, str]]:
    """The modules whose weights are quantised, that is, all products: name, module and method.

    Of a model that sees images those of the language model and its head: the tower stays as it is.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    text: nn.Module | None = language_model_of(body_of(model))
    inside = {*(model if text is None else text).modules(), head}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module in inside:
            yield name, module, "int8" if module is head or is_precise(name) else quantization


def dequantized(weight: Tensor, quantization: str) -> Tensor:
    """The numbers that the quantised `weight` [O, I] stands for, float32 [O, I]."""
    return rounded(weight, quantization).numbers


def rounded(weight: Tensor, method: str) -> Rounded:
    """Round a weight [O, I] by itself."""
    return to_int4(weight) if method == "int4" and fits_int4(weight.shape) else to_int8(weight)


def _place(
    loaded: Rounded, bias: Tensor | None, dtype: torch.dtype, buffer: _Buffer, kernels: Kernels | None
) -> Linear:
    if kernels is not None and kernels.take(dtype, loaded.levels.shape[1]):
        return _Compiled(loaded, bias, dtype, kernels)
    return (_Int8Linear if loaded.zeros is None else _Int4Linear)(loaded, bias, dtype, buffer)


def fits_int4(shape: Sequence[int]) -> bool:
    """Whether torch's int4 kernel supports the shape [O, I]; if not, int8 replaces it."""
    return shape[0] % 16 == 0 and shape[1] % (2 * GROUP) == 0


class _Buffer:
    """Memory for one expanded weight, shared by all layers of a model."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if self._memory.dtype != dtype or self._memory.numel() < rows * columns:
            self._memory = torch.empty(rows * columns, dtype=dtype)
        return self._memory[: rows * columns].view(rows, columns)


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
    """One copy of the levels, in the layout of the compiled kernels.

    In bfloat16 they quantise the inputs, too, and multiply whole numbers; in float32 they dequantise the levels.
    """

    def __init__(self, rounded: Rounded, bias: Tensor | None, dtype: torch.dtype, kernels: Kernels) -> None:
        levels, scales, zeros, bits, middle, size, table = rounded
        pack = nibbles if bits == 4 else lambda part: fours(part - middle)
        packed = torch.cat([pack(part) for part in torch.split(levels, _PART)])
        factors = grouped(torch.stack((scales,) if zeros is None else (scales, zeros), dim=-1))
        kind = UNEVEN if table else INT4 if bits == 4 else INT8 if size == GROUP else FINE
        factors = factors.float() if dtype == torch.float32 else factors
        product = Product.of(levels.shape, kind, packed, factors, bias, middle if kind == INT4 else 0, table)
        super().__init__(product, packed, packed.nbytes + factors.nbytes, kernels)


class _Int8Linear(_Quantized):
    """Stores the levels twice if the shape allows: for torch's int4 kernel in two halves, and for expanding.

    torch's own int8 kernel has one scale for each row, which loses twice as much.
    """

    def __init__(self, rounded: Rounded, bias: Tensor | None, dtype: torch.dtype, buffer: _Buffer) -> None:
        super().__init__(len(rounded.levels), bias)
        self._buffer, self.weight, self._scales = buffer, rounded.levels, rounded.scales.to(dtype)
        self.nbytes = self.weight.nbytes + self._scales.nbytes
        self.most_few = _INT8_ROWS if fits_int4(self.weight.shape) else 0
        if self.most_few:
            levels = self.weight.to(torch.int32) + 128  # = 16 · high + low
            self._halves = [_pack_int4(half) for half in (levels >> 4, levels & 15)]
            zeros = torch.zeros_like(self._scales)
            factors = (16 * self._scales, zeros), (self._scales, 8 * self._scales)
            self._factors = [_pack_factors(*both) for both in factors]

    def _few(self, x: Tensor) -> Tensor:
        high, low = (_int4_product(x, *both) for both in zip(self._halves, self._factors, strict=True))
        return high.add_(low)

    def _many(self, x: Tensor) -> Tensor:
        rows, columns = self.weight.shape
        expanded = self._buffer.take(rows, columns, x.dtype).copy_(self.weight)
        whole = columns // GROUP * GROUP  # a rest has a scale of its own
        expanded[:, :whole].view(rows, -1, GROUP).mul_(self._scales[:, : whole // GROUP, None])
        expanded[:, whole:].mul_(self._scales[:, whole // GROUP :])
        return functional.linear(x, expanded)


class _Int4Linear(_Quantized):
    """Stores the levels twice: in torch's format, and two to a byte for expanding, the row's halves side by side."""

    most_few = _INT4_ROWS

    def __init__(self, rounded: Rounded, bias: Tensor | None, dtype: torch.dtype, buffer: _Buffer) -> None:
        super().__init__(len(rounded.levels), bias)
        assert rounded.zeros is not None
        self.weight = _pack_int4(rounded.levels.to(torch.int32))
        self._factors = _pack_factors(rounded.scales.to(dtype), rounded.zeros.to(dtype))
        self.nbytes = self.weight.nbytes + self._factors.nbytes
        low, high = rounded.levels.to(torch.uint8).chunk(2, dim=-1)
        self._halves = low | high << 4  # [O, I / 2]
        self._buffer = buffer

    def _few(self, x: Tensor) -> Tensor:
        return _int4_product(x, self.weight, self._factors)

    def _many(self, x: Tensor) -> Tensor:
        rows, half = self._halves.shape
        expanded = self._buffer.take(rows, 2 * half, x.dtype)
        expanded[:, :half].copy_(self._halves & 15)
        expanded[:, half:].copy_(self._halves >> 4)
        scales, zeros = self._factors.transpose(0, 1)[..., None].unbind(-2)  # [O, G, 1]
        expanded.view(rows, -1, GROUP).sub_(8).mul_(scales).add_(zeros)
        return functional.linear(x, expanded)


def _pack_int4(levels: Tensor) -> Tensor:
    """Levels 0 to 15 as torch's kernel reads them (`aten/src/ATen/native/cpu/int4mm_kernel.cpp`)."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    return packed


def _pack_factors(scales: Tensor, zeros: Tensor) -> Tensor:
    """[O, G] → [G, O, 2]."""
    return torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous()


def _int4_product(x: Tensor, packed: Tensor, factors: Tensor) -> Tensor:
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, factors)
    return product
