"""Products for a GPU of weights that stay levels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ....schemas.errors import ModelLoadError
from ...checkpoints.gguf.weights import rounded_of
from ...checkpoints.rounded import Blocks, Rounded, blocks_of
from ...cuda.compiling import NotCompiled
from ...cuda.levels import LevelKernels, LevelWeight
from ..decoding.linear import Linear, PlainLinear, Unfused

_BY_ARITHMETIC = {
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
}
"""GGUF's types that a GPU unpacks; others have grids, which are in the machine's memory."""


class LevelLinear(Unfused):
    """A weight of levels."""

    def __init__(self, weight: LevelWeight, bias: Tensor | None, kernels: LevelKernels) -> None:
        """Raises `ModelLoadError` where the products cannot be compiled."""
        try:
            kernels.prepare(weight)
        except NotCompiled as error:
            raise ModelLoadError(f"{error}; or set dtype to float16, in which a GPU expands weights") from error
        self._weight, self._bias, self._kernels = weight, bias, kernels
        self.weight, self.nbytes = weight.levels, weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        product = self._kernels.multiply(self._weight, x.reshape(-1, x.shape[-1]), self._bias)
        return product.view(*x.shape[:-1], self._weight.outputs)


class LevelMaker:
    """Makes products on a GPU of what files hold as levels, and of weights that were rounded."""

    def __init__(self, kernels: LevelKernels) -> None:
        self._kernels = kernels
        self.take = kernels.take

    def of_modules(self, parts: Sequence[nn.Module], bias: Tensor | None, dtype: torch.dtype) -> Linear | None:
        """One product of modules whose outputs are side by side; None unless all were loaded as levels."""
        readers = [getattr(part, "rounded", None) for part in parts]
        blocks = blocks_of(readers)
        rounded = self._read(blocks) if _all_known(blocks) else Rounded.of_modules(parts)
        return None if rounded is None else self.of(rounded, bias, dtype)

    def of(self, rounded: Rounded, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        if not self.take(dtype, rounded.levels.shape[1]):
            return PlainLinear(rounded.numbers.to(self._kernels.device, dtype), bias)
        return LevelLinear(LevelWeight.of(rounded, self._kernels.device), bias, self._kernels)

    def _read(self, blocks: Sequence[Blocks]) -> Rounded:
        """Unpack blocks on the GPU: on a CPU torch's operations take seconds for a GB."""
        with self._kernels.device:
            return Rounded.joined(
                [rounded_of(block.data.to(self._kernels.device), block.kind, len(block.data)) for block in blocks]
            )


def _all_known(blocks: Sequence[Blocks]) -> bool:
    return bool(blocks) and all(block.kind in _BY_ARITHMETIC for block in blocks)
