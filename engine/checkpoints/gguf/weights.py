"""Reads the weights of GGUF files: expanded, each when it is asked for, or as levels and scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isqrt

import torch
from torch import Tensor

from ..experts import module_names
from ..lazy import LazyWeight
from ..rounded import Blocks, ReadRounded, Rounded, blocks_of
from .blocks import LEVELS
from .file import Gguf, GgufWeight, Groups, Tiles
from .models import constants_of
from .pairs import weights_of
from .types import BLOCKS

_CHUNK = 1 << 18  # weights that are expanded at a time, so that what is between stays in the cache
_LEVELS_CHUNK = 1 << 21  # the same of levels alone
_COLOURS = 3
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def lazy_weights(gguf: Gguf, dtype: torch.dtype) -> dict[str, LazyWeight]:
    """All weights by transformers' names; quantised ones become `dtype`, others keep the file's."""

    def lazy(weight: GgufWeight) -> LazyWeight:
        return LazyWeight(lambda: _read(weight, dtype))

    constants = {
        name: LazyWeight(partial(torch.tensor, numbers, dtype=dtype)) for name, numbers in constants_of(gguf).items()
    }
    return {name: lazy(weight) for name, weight in weights_of(gguf).items()} | constants


def level_readers(gguf: Gguf) -> dict[str, ReadRounded]:
    """The weights of the language model whose levels can be kept, by the names of their modules."""
    found: dict[str, ReadRounded] = {}
    for name, weight in weights_of(gguf).items():
        if weight.keeps_levels and weight.types <= {*LEVELS}:
            if weight.is_transposed:
                modules = enumerate(module_names(name, weight.shape[0]))
                found |= {module: _Expert(weight, expert) for expert, module in modules}
            elif weight.groups is not None:
                found[name.removesuffix(".weight")] = _Grouped(weight, weight.groups)
            else:
                found[name.removesuffix(".weight")] = _Levels(weight)
    return found


@dataclass(frozen=True, slots=True)
class _Levels:
    """Reads the levels of a weight."""

    weight: GgufWeight

    def __call__(self) -> Rounded:
        weight, tiles = self.weight, self.weight.tiles
        found = rounded_of(_data(weight), weight.tensor.type, weight.shape[0], _factor(weight))
        if tiles is None or not tiles.by_columns:
            return found
        groups = tiles._replace(size=tiles.size // found.size)
        zeros = None if found.zeros is None else _untiled(found.zeros, groups, 1)
        scales = _untiled(found.scales, groups, 1)
        return found._replace(levels=_untiled(found.levels, tiles, 1), scales=scales, zeros=zeros)

    def blocks(self) -> list[Blocks]:
        """As the file has it, rows in transformers' order; none where columns have another one, or there is a scale."""
        weight = self.weight
        if weight.tensor.scale is not None or (weight.tiles is not None and weight.tiles.by_columns):
            return []
        return [Blocks(weight.tensor.type, _data(weight).view(weight.shape[0], -1), weight.shape[1])]


@dataclass(frozen=True, slots=True)
class _Expert:
    """Reads the levels of one expert: an output of each of its tensors, and again, or one tensor behind the other."""

    weight: GgufWeight
    expert: int

    def __call__(self) -> Rounded:
        parts = [read() for read in self._parts]
        return Rounded.in_turns(parts) if self.weight.in_turns else Rounded.joined(parts)

    def blocks(self) -> list[Blocks]:
        """As `_Levels` has them; none unless all are of one type."""
        parts = blocks_of(self._parts)
        if len(self.weight.types) > 1 or not parts or not self.weight.in_turns:
            return parts
        return [parts[0]._replace(data=torch.stack([part.data for part in parts], dim=1).flatten(0, 1))]

    @property
    def _parts(self) -> list[_Levels]:
        tensors = self.weight.tensor, *self.weight.more
        return [_Levels(GgufWeight(one, one.shape[1:], expert=self.expert)) for one in tensors]


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Reads the levels of several tensors whose rows are in groups."""

    weight: GgufWeight
    groups: Groups

    def __call__(self) -> Rounded:
        found = Rounded.joined([read() for read in self._parts])
        zeros = None if found.zeros is None else _in_groups(found.zeros, self.groups)
        levels, scales = (_in_groups(each, self.groups) for each in (found.levels, found.scales))
        return found._replace(levels=levels, scales=scales, zeros=zeros)

    def blocks(self) -> list[Blocks]:
        """As `_Levels` has them; none unless all are of one type."""
        parts = blocks_of(self._parts)
        if len(self.weight.types) > 1 or not parts:
            return []
        return [parts[0]._replace(data=_in_groups(torch.cat([part.data for part in parts]), self.groups))]

    @property
    def _parts(self) -> list[_Levels]:
        return [_Levels(GgufWeight(one, one.shape)) for one in (self.weight.tensor, *self.weight.more)]


def rounded_of(data: Tensor, kind: str, rows: int, factor: float | None = None) -> Rounded:
    """The levels and scales of a weight that lies in `data` in so many rows; `kind` is a quantised type.

    All numbers are multiplied by `factor`.
    """
    weights, size = BLOCKS[kind]
    lines = data.view(rows, -1, size)
    step = max(1, _LEVELS_CHUNK // (lines.shape[1] * weights))
    levels = torch.empty((rows, lines.shape[1] * weights), dtype=torch.int8, device=data.device)
    scales, zeros = list[Tensor](), list[Tensor]()
    for start in range(0, rows, step):
        found = LEVELS[kind](lines[start : start + step].reshape(-1, size)).times(factor)
        levels[start : start + step] = found.levels.reshape(-1, levels.shape[1])
        scales.append(found.scales.reshape(-1, lines.shape[1] * weights // found.levels.shape[-1]))
        if found.zeros is not None:
            zeros.append(found.zeros.reshape(scales[-1].shape))
    offsets = torch.cat(zeros) if zeros else None
    return Rounded(levels, torch.cat(scales), offsets, found.bits, found.middle, found.levels.shape[-1], found.table)


def _data(weight: GgufWeight) -> Tensor:
    """The bytes of a weight, rows in transformers' order."""
    tensor, path = weight.tensor, weight.tensor.path
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    data = content[tensor.start : tensor.start + tensor.nbytes]
    if weight.expert is not None:
        data = data.view(tensor.shape[0], -1)[weight.expert]
    rows = data.view(*weight.shape[:1], -1)
    if weight.heads is not None:
        return _paired(rows, weight.heads, weight.apart) if weight.apart else _by_halves(rows, weight.heads)
    return data if weight.tiles is None or weight.tiles.by_columns else _untiled(rows, weight.tiles, 0)


def _factor(weight: GgufWeight) -> float | None:
    """What all numbers of a weight are multiplied by."""
    scale = weight.tensor.scale
    if scale is None:
        return None
    content = torch.from_file(str(scale.path), shared=False, size=scale.path.stat().st_size, dtype=torch.uint8)
    factors = content[scale.start : scale.start + scale.nbytes].clone().view(torch.float32)
    return float(factors[weight.expert if weight.expert is not None and len(factors) > 1 else 0])


def _read(weight: GgufWeight, dtype: torch.dtype) -> Tensor:
    if weight.is_transposed or weight.in_turns:
        return _read_experts(weight, dtype)
    if weight.is_latent:
        keys, values = (_read(GgufWeight(part, part.shape), dtype) for part in (weight.tensor, *weight.more))
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
    if weight.more:
        parts = [_read(GgufWeight(part, part.shape), dtype) for part in (weight.tensor, *weight.more)]
        if weight.groups is not None:
            return _in_groups(torch.cat(parts), weight.groups)
        return torch.stack(parts, dim=2) if weight.is_split_in_time else torch.cat(parts)
    if weight.leading:
        own = _read(weight._replace(shape=weight.tensor.shape, leading=0), dtype)
        return torch.cat((own.new_zeros((weight.leading, *own.shape[1:])), own))
    expanded = dequantize(_data(weight), weight.tensor.type, dtype, _factor(weight))
    if weight.groups is not None:
        return _in_groups(expanded.view(weight.shape[0], -1), weight.groups).view(weight.shape)
    if weight.is_by_axis:
        return expanded.view(weight.tensor.shape).transpose(0, 1).contiguous()
    expanded = expanded.view(weight.shape)
    if weight.is_by_colour:
        side = isqrt(weight.shape[-1] // _COLOURS)
        return expanded.view(-1, _COLOURS, side, side).permute(0, 2, 3, 1).reshape(weight.shape)
    if weight.tiles is not None and weight.tiles.by_columns:
        expanded = _untiled(expanded, weight.tiles, 1)
    if weight.is_decay:
        return (-expanded).log()
    return expanded + weight.offset if weight.offset else expanded


def _read_experts(weight: GgufWeight, dtype: torch.dtype) -> Tensor:
    """All experts of a layer, in memory of one more."""
    found = torch.empty(weight.shape, dtype=dtype)
    for expert in range(len(found)):
        own = [GgufWeight(one, one.shape[1:], expert=expert) for one in (weight.tensor, *weight.more)]
        parts = [_read(part, dtype) for part in own]
        outputs = torch.stack(parts, dim=1).flatten(0, 1) if weight.in_turns else torch.cat(parts)
        found[expert] = outputs.T if weight.is_transposed else outputs
    return found


def _by_halves(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of queries and keys, where those that rotate together are neighbours."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _paired(rows: Tensor, heads: int, count: int) -> Tensor:
    """Of the first `count` rows of each head, the first half and the second in turns."""
    parts = rows.view(heads, -1, rows.shape[1])
    turned = parts[:, :count].view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(heads, count, -1)
    return torch.cat((turned, parts[:, count:]), dim=1).reshape(rows.shape)


def _in_groups(rows: Tensor, groups: Groups) -> Tensor:
    parts = torch.split(rows, [groups.num_groups * size for size in groups.sizes])
    return torch.cat([part.view(groups.num_groups, -1, rows.shape[1]) for part in parts], dim=1).flatten(0, 1)


def _untiled(tensor: Tensor, tiles: Tiles, dim: int) -> Tensor:
    """Bring rows or columns from the file's order into the model's."""
    first, rest = tensor.narrow(dim, 0, tiles.start), tensor.narrow(dim, tiles.start, tensor.shape[dim] - tiles.start)
    heads = rest.reshape(*rest.shape[:dim], tiles.repeats, tiles.groups, tiles.size, *rest.shape[dim + 1 :])
    return torch.cat((first, heads.transpose(dim, dim + 1).reshape(rest.shape)), dim)


def dequantize(data: Tensor, kind: str, dtype: torch.dtype = torch.float32, factor: float | None = None) -> Tensor:
    """The numbers [N] that bytes of the type `kind` stand for, times `factor`; what are no blocks keep their dtype."""
    if kind in _PLAIN:
        plain = data.clone().view(_PLAIN[kind])
        return plain if factor is None else plain * factor
    weights, size = BLOCKS[kind]
    blocks = data.view(-1, size)
    result = torch.empty(len(blocks), weights, dtype=dtype)
    step = _CHUNK // weights
    for start in range(0, len(blocks), step):
        result[start : start + step] = LEVELS[kind](blocks[start : start + step]).times(factor).numbers
    return result.flatten()
