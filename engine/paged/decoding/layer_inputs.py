"""Inputs that each token has for each layer, besides what the layers before it made of the token.

They are the sum of numbers that a second table has for the token, and of a product of its embedding. Gemma 4's E2B and
E4B have them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...cpu.layer_inputs import LayerInput, LayerInputs
from ...cpu.library import MOST_ROWS
from .linear import Linear, MakeLinear, known_product
from .norm import Norm
from .rows import look_up, rows_of, table_of

if TYPE_CHECKING:  # it makes `PerLayerInputs`
    from .layer import Layer


class PerLayerInputs:
    """Makes the inputs of all layers: `size` numbers each, P."""

    def __init__(self, body: Any, make: MakeLinear, dtype: torch.dtype) -> None:
        """`body` is the model's, `dtype` that of the activations."""
        table = body.embed_tokens_per_layer
        self.size: int = body.hidden_size_per_layer_input
        self.embedding, self.rows, self.scale = table.weight, rows_of(table), table.embed_scale.to(dtype)
        self.projection: Linear = make([body.per_layer_model_projection])
        self.projection_scale: float = body.per_layer_model_projection_scale
        self.norm = Norm(body.per_layer_projection_norm)
        self.sum_scale: float = body.per_layer_input_scale

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """[T], and the tokens' embeddings [T, E] → [T, L, P]."""
        found = look_up(ids, self.embedding, self.rows).to(x.dtype) * self.scale.to(x.dtype)
        projected = self.norm((self.projection(x) * self.projection_scale).view(len(ids), -1, self.size))
        made: Tensor = (projected + found.view(projected.shape)) * self.sum_scale
        return made


class CompiledInputs:
    """The same in the compiled kernels."""

    def __init__(self, inputs: PerLayerInputs, dtype: torch.dtype, address: Callable[[Tensor], int]) -> None:
        """`address` keeps a tensor alive, and tells where it is."""
        projection, rows = known_product(inputs.projection), inputs.rows
        self._made = torch.zeros((MOST_ROWS, projection.outputs))
        self._inputs = LayerInputs(
            projection=projection,
            embeddings=table_of(inputs.embedding.detach(), rows, dtype, address),
            found=None if rows is None else address(torch.zeros((MOST_ROWS, rows.size))),
            norm=address(inputs.norm.weight.detach().float().contiguous()),
            size=inputs.size,
            made=self._made.data_ptr(),
            epsilon=inputs.norm.epsilon,
            scale=float(inputs.scale),
            projection_scale=inputs.projection_scale,
            sum_scale=inputs.sum_scale,
        )

    @property
    def address(self) -> int:
        """Where the kernels find it."""
        return ctypes.addressof(self._inputs)

    def made(self, rows: int) -> Tensor:
        """Those of so many tokens of the last step, [T, L P]."""
        return self._made[:rows].clone()

    def give(self, own: Tensor | None) -> None:
        """From now on steps take these [T, L, P]; None: those that they make themselves."""
        self._inputs.are_given = own is not None
        if own is not None:
            self._made[: len(own)] = own.flatten(1)


def compiled_input(layer: Layer, address: Callable[[Tensor], int]) -> LayerInput:
    """What a layer makes of its own inputs, for the kernels; all zeros if it has none."""
    if (norm := layer.input_after) is None:
        return LayerInput()
    gate, projection = map(known_product, (layer.input_gate, layer.input_projection))
    weight = address(norm.weight.detach().float().contiguous())
    return LayerInput(gate, projection, weight, layer.index * gate.outputs, norm.epsilon)
