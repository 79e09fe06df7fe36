"""The experts of a checkpoint as transformers has them: for all of a layer, one tensor for each of two products."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from .lazy import LazyWeight
from .rounded import Blocks, ReadRounded, Rounded, TakesLevels, absent, blocks_of

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_INNER, _OUTER = "gate_up_proj", "down_proj"
_PLACES = {
    **{"gate_proj": (_INNER, 0), "up_proj": (_INNER, 1), "down_proj": (_OUTER, 0)},
    **{"w1": (_INNER, 0), "w3": (_INNER, 1), "w2": (_OUTER, 0), "gate_up_proj": (_INNER, 0)},
}
"""By the name of an expert's product: that of the tensor, and the place in it."""

_MIXTRAL = ("w1", "w2", "w3")

_WHOLE = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")  # all experts of a layer, [E, I, O]

Readers = dict[str, dict[str, list[ReadRounded]]]
"""By the name of a layer's experts and the name of one of their tensors: what reads each expert's levels."""


def fold_experts(
    weights: Mapping[str, LazyWeight],
    found: Mapping[str, ReadRounded],
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    takes: TakesLevels,
) -> tuple[dict[str, LazyWeight], dict[str, ReadRounded], Readers]:
    """The weights with one `absent` tensor in the place of those of all experts whose levels can be kept; what is left
    of `found`; and the experts' own.

    A layer's experts keep their numbers unless there are levels for all of them.
    """
    left, others, readers = dict(weights), dict(found), Readers()
    for experts, kinds in _apart(shapes).items():
        modules = [module for parts in kinds.values() for own in parts for module in own]
        fits = all(module in found and takes(dtype, shapes[f"{module}.weight"][1]) for module in modules)
        for kind, parts in kinds.items() if fits else ():
            left[f"{experts}.{kind}"] = LazyWeight(partial(absent, _whole_shape(parts, shapes), dtype))
            readers.setdefault(experts, {})[kind] = [_Joined([found[module] for module in own]) for own in parts]
        for module in modules:
            others.pop(module, None)
            if fits:
                del left[f"{module}.weight"]
    for experts in {match[1] for name in shapes if (match := _WHOLE.fullmatch(name))}:
        names = [name for kind in (_INNER, _OUTER) if (name := f"{experts}.{kind}") in shapes]
        each = {name: module_names(name, shapes[name][0]) for name in names}
        fits = all(takes(dtype, shapes[name][1]) and {*modules} <= found.keys() for name, modules in each.items())
        for name, modules in each.items():
            for module in modules:
                others.pop(module, None)
            if fits:
                left[name] = LazyWeight(partial(absent, shapes[name], dtype))
                kind = name.rpartition(".")[2]
                readers.setdefault(experts, {})[kind] = [found[module] for module in modules]
    return left, others, readers


def whole_shapes(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The shapes of weights by transformers' names, with those of all experts of a layer as one tensor.

    Experts that differ, or of which some lack a part, stay apart.
    """
    found = {_by_own_name(name): shape for name, shape in shapes.items()}
    for experts, kinds in _apart(shapes).items():
        for kind, parts in kinds.items():
            modules = [module for own in parts for module in own]
            sizes = {(*shapes[f"{module}.weight"],) for module in modules}
            if len({len(own) for own in parts}) == len(sizes) == 1 and len(sizes.pop()) == 2:
                found[f"{experts}.{kind}"] = _whole_shape(parts, shapes)
                for module in modules:
                    del found[f"{module}.weight"]
    return found


def whole_weights(
    weights: Mapping[str, LazyWeight], shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> dict[str, LazyWeight]:
    """The weights by those names, among them the experts that have numbers as one tensor."""
    found = {_by_own_name(name): weight for name, weight in weights.items()}
    for experts, kinds in _apart(shapes).items():
        for kind, parts in kinds.items():
            if f"{parts[0][0]}.weight" in weights:  # or else `fold_experts` has folded them
                own = [[found.pop(f"{module}.weight") for module in modules] for modules in parts]
                found[f"{experts}.{kind}"] = LazyWeight(partial(_stacked, own, _whole_shape(parts, shapes), dtype))
    return found


def _stacked(parts: Sequence[Sequence[LazyWeight]], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """All experts of a layer, in memory of one part more."""
    found = torch.empty(shape, dtype=dtype)
    for expert, weights in zip(found, parts, strict=True):
        for to, weight in zip(expert.chunk(len(weights)), weights, strict=True):
            to.copy_(weight[...])
    return found


def _by_own_name(name: str) -> str:
    """transformers' name of a weight; files of Mixtral have another one for what chooses experts."""
    return name.replace(".block_sparse_moe.gate.", ".mlp.gate.")


def _apart(names: Iterable[str]) -> dict[str, dict[str, list[list[str]]]]:
    """By the name of a layer's experts and that of one of their tensors: the modules of each expert that are in it."""
    layers: dict[str, dict[str, dict[tuple[int, int], str]]] = {}
    for name in names:
        module = name.removesuffix(".weight")
        if (match := _EXPERT.fullmatch(module)) and match[3] in _PLACES:
            kind, place = _PLACES[match[3]]
            experts = match[1].replace(".block_sparse_moe.", ".mlp.") if match[3] in _MIXTRAL else match[1]
            own = layers.setdefault(experts, {})
            own.setdefault(kind, {})[int(match[2]), place] = module
    for kinds in layers.values():
        if all(place for _, place in kinds.get(_INNER, {(0, 0): ""})):  # ups without gates
            kinds["up_proj"] = kinds.pop(_INNER)
    return {
        experts: {
            kind: [[module for _, module in own] for _, own in groupby(sorted(places.items()), lambda one: one[0][0])]
            for kind, places in kinds.items()
        }
        for experts, kinds in layers.items()
    }


def _whole_shape(parts: Sequence[Sequence[str]], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    rows, columns = shapes[f"{parts[0][0]}.weight"]
    return [len(parts), rows * len(parts[0]), columns]


def module_names(name: str, count: int) -> list[str]:
    """What the levels of each expert are called, of a tensor of that name."""
    experts, _, kind = name.rpartition(".")
    return [f"{experts}.{expert}.{kind}" for expert in range(count)]


@dataclass(frozen=True, slots=True)
class _Joined:
    """Reads the outputs of several weights side by side."""

    readers: Sequence[ReadRounded]

    def __call__(self) -> Rounded:
        return Rounded.joined([read() for read in self.readers])

    def blocks(self) -> list[Blocks]:
        """As the file has them; none unless it has all of them."""
        return blocks_of(self.readers)
