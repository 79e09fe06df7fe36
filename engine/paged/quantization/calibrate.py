"""Rounds a model's weights so that its layers compute nearly the same on given texts.

Layer by layer, from what reaches it after the layers before are rounded. A product's weights are rounded input by
input, and the weights of the inputs that remain make up for the error (GPTQ, https://arxiv.org/abs/2210.17323).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....schemas.errors import ModelLoadError
from ...checkpoints.rounded import Rounded
from ...cpu.library import GROUP
from ...vision.families.names import body_of, language_model_of
from ..decoding.precision import in_float32
from .quantize import fits_int4, rounded
from .rounding import fit_int4, fit_int8, int4_levels, int8_levels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DAMPING = 0.01  # of the mean square of an input, added to each: keeps inputs that hardly occur from exploding
_DOUBT = 0.5  # more of it if there were no rows, half as much with as many rows as inputs, see `_damping`
_BATCH = 8  # texts that pass through a layer together


Run = Callable[[Tensor], Tensor]
"""Runs a layer on its input [B, T, E]."""


class Moments(NamedTuple):
    """What is known of the inputs x of a product: the sum of x x' [I, I] over so many rows."""

    products: Tensor
    rows: int

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """Those of rows [T, I]."""
        return cls(rows.T @ rows, len(rows))

    def plus(self, other: Moments | None) -> Moments:
        return self if other is None else Moments(self.products + other.products, self.rows + other.rows)


class _Given(NamedTuple):
    """What a layer gets besides its input."""

    own: tuple[Any, ...]
    named: dict[str, Any]


class _Stop(Exception):
    """The inputs of the first layer are known."""


@torch.inference_mode()
def calibrate(
    model: PreTrainedModel,
    methods: Mapping[str, str],
    texts: Sequence[Sequence[int]],
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Rounded]:
    """Round the weights of the modules in `methods`, each to "int8" or "int4", for `texts` of equal length.

    `progress` gets the number of modules done. The model ends with the rounded weights. Raises `ModelLoadError` for a
    model without a list of decoder layers.
    """
    layers = _layers(model)
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules() if name in methods}
    found: dict[str, Rounded] = {}

    def settle(module: Any, result: Rounded) -> None:
        found[names[module]] = result
        module.weight.copy_(result.numbers)
        progress(len(found))

    inside = {module for layer in layers for module in layer.modules()}
    for module, name in names.items():  # those outside the layers first, such as the head: it may be the embedding
        if module not in inside:
            settle(module, rounded(_weight(module), methods[name]))
    with in_float32(model):
        states, runs = _inputs(model, layers, torch.tensor(texts))
        for layer, own in zip(layers, runs, strict=True):
            products = [module for module in layer.modules() if module in names]
            moments = _observe(own, products, states)
            for module in products:
                weight, method = _weight(module), methods[names[module]]
                if module in moments:
                    settle(module, calibrated(weight.float().contiguous(), moments[module], method))
                else:  # an expert that no text needs
                    settle(module, rounded(weight, method))
            states = [run(state) for run, state in zip(own, states, strict=True)]
    return found


def calibrated(weight: Tensor, known: Moments, method: str) -> Rounded:
    """Round a weight [O, I] for the inputs of which this is `known`."""
    inputs = weight.shape[1]
    if method == "int4" and not fits_int4(weight.shape):
        method = "int8"
    pad = -inputs % GROUP
    moments = known.products + _damping(known)
    weight, moments = functional.pad(weight.clone(), (0, pad)), functional.pad(moments, (0, pad, 0, pad))
    moments.diagonal()[inputs:] = 1
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor = torch.linalg.cholesky(inverse, upper=True)
    levels, scales, zeros = torch.empty_like(weight), [], []
    for start in range(0, len(moments), GROUP):
        here, later = slice(start, start + GROUP), slice(start + GROUP, None)
        group, own = weight[:, here].clone(), factor[here, here]
        if method == "int4":
            scale, zero = fit_int4(group, own.diagonal() ** -2)
        else:
            scale, zero = fit_int8(group), None
        errors = torch.empty_like(group)
        for column in range(GROUP):
            old = group[:, column : column + 1]
            level = int8_levels(old, scale) if zero is None else int4_levels(old, scale, zero)
            new = level * scale if zero is None else (level - 8) * scale + zero
            error = (old - new) / own[column, column]
            levels[:, start + column], errors[:, column] = level[:, 0], error[:, 0]
            group[:, column + 1 :] -= error * own[column, column + 1 :]
        weight[:, later] -= errors @ factor[here, later]
        scales.append(scale)
        zeros += [] if zero is None else [zero]
    found = levels[:, :inputs].to(torch.int8), torch.cat(scales, dim=1).bfloat16()
    return Rounded.int4(*found, torch.cat(zeros, dim=1).bfloat16()) if zeros else Rounded(*found)


def _damping(known: Moments) -> Tensor:
    """What is added to the moments: inputs that a few rows never combined will be combined by others."""
    inputs, mean = len(known.products), known.products.diagonal().mean()
    share = _DAMPING + _DOUBT * inputs / (inputs + known.rows)
    return torch.eye(inputs) * (share * mean if mean > 0 else 1)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Those that text passes, and not those that attend to images."""
    config = model.config.get_text_config()
    count, crossing = config.num_hidden_layers, getattr(config, "cross_attention_layers", None) or ()
    text: nn.Module = language_model_of(body_of(model)) or model  # a tower has layers of its own
    found = [one for one in text.modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    if not found:
        raise ModelLoadError(f"{type(model).__name__} has no list of its {count} layers; quantize it while loading")
    return [layer for index, layer in enumerate(found[0]) if index not in crossing]


def _inputs(model: Any, layers: Sequence[nn.Module], texts: Tensor) -> tuple[list[Tensor], list[list[Run]]]:
    """The first layer's input for each batch of texts, and what runs each layer on each batch.

    Of the layers' other arguments most are alike for all batches. Where they are not, as those of Gemma 4's layers,
    every batch passes through the whole model once more.
    """
    states: list[Tensor] = []
    given: list[list[_Given]] = [[] for _ in layers]

    def note(layer: nn.Module, own: tuple[Any, ...], named: dict[str, Any], index: int, is_alike: bool) -> None:
        if index == 0:
            states.append(own[0] if own else named["hidden_states"])
        if is_alike:
            raise _Stop
        given[index].append(_Given(own[1:], {key: value for key, value in named.items() if key != "hidden_states"}))

    size = min(_BATCH, len(texts))
    batches = texts[: len(texts) // size * size].view(-1, size, texts.shape[1])
    for number, batch in enumerate(batches):
        is_alike = number > 1 and all(_same(first, second) for first, second, *_ in given)
        hooks = [partial(note, index=index, is_alike=is_alike) for index in range(len(layers))]
        pairs = zip(layers, hooks, strict=True)
        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer, hook in pairs]
        with _removed(handles), suppress(_Stop):
            model(batch, use_cache=False)
    numbers = range(len(batches))
    runs: list[list[Run]] = [
        [partial(_run, layer, own[number if number < len(own) else 0]) for number in numbers]
        for layer, own in zip(layers, given, strict=True)
    ]
    return states, runs


def _run(layer: nn.Module, given: _Given, state: Tensor) -> Tensor:
    result = layer(state, *given.own, **given.named)
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether both are alike, tensors inside included."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    return one is other or bool(one == other)


def _observe(runs: Sequence[Run], products: Sequence[nn.Module], states: Sequence[Tensor]) -> dict[nn.Module, Moments]:
    """What is known of each product's inputs; products that share an input share it."""
    moments: dict[nn.Module, Moments] = {}
    last: list[tuple[Tensor, Moments]] = []  # the input of the last product

    def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0].flatten(0, -2)
        if not last or (last[0][0].data_ptr(), last[0][0].shape) != (x.data_ptr(), x.shape):
            last[:] = [(x, Moments.of(x))]
        moments[module] = last[0][1].plus(moments.get(module))

    with _removed([module.register_forward_pre_hook(note) for module in products]):
        for run, state in zip(runs, states, strict=True):
            last.clear()
            run(state)
    return moments


@contextmanager
def _removed(handles: Sequence[Any]) -> Iterator[None]:
    """Remove hooks in the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
