"""The experts of a checkpoint as transformers has them: for all of a layer, one tensor for each of two products."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .lazy import LazyWeight
from .rounded import Blocks, ReadRounded, Rounded, TakesLevels, absent, blocks_of

_EXPERT = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_INNER, _OUTER = "gate_up_proj", "down_proj"
_PLACES = {
    **{"gate_proj": (_INNER, 0), "up_proj": (_INNER, 1), "down_proj": (_OUTER, 0)},
    **{"w1": (_INNER, 0), "w3": (_INNER, 1), "w2": (_OUTER, 0)},
}
"""By the name of an expert's product: that of the tensor, and the place in it."""

_WHOLE = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")  # all experts of a layer, [E, I, O]

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
    layers: dict[str, dict[str, dict[tuple[int, int], str]]] = {}
    for name in shapes:
        module = name.removesuffix(".weight")
        if (match := _EXPERT.fullmatch(module)) and match[3] in _PLACES:
            kind, place = _PLACES[match[3]]
            own = layers.setdefault(f"{match[1]}.mlp.experts", {_INNER: {}, _OUTER: {}})
            own[kind][int(match[2]), place] = module
    left, others, readers = dict(weights), dict(found), Readers()
    for experts, kinds in layers.items():
        modules = [module for own in kinds.values() for module in own.values()]
        fits = all(module in found and takes(dtype, shapes[f"{module}.weight"][1]) for module in modules)
        for kind, places in kinds.items() if fits else ():
            parts = [[places[key] for key in sorted(places) if key[0] == each] for each in range(1 + max(places)[0])]
            rows, columns = (shapes[f"{parts[0][0]}.weight"][axis] for axis in (0, 1))
            shape = len(parts), rows * len(parts[0]), columns
            left[f"{experts}.{kind}"] = LazyWeight(partial(absent, shape, dtype))
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
