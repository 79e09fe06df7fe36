"""Weights as levels and scales, and checkpoints that hold them in the format that `quantized` describes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...schemas.errors import ModelLoadError
from .files import read_header, read_json, weight_files
from .lazy import LazyWeight
from .quantized import GROUP_SIZE, Quantized
from .widths import TABLES, stays_in_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARD = 4 << 30  # bytes of a weight file, unless one tensor is larger
TABLE = "table"
"""The attribute of a module of embeddings whose weight is absent: its `Blocks`."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


ReadRounded = Callable[[], "Rounded"]
"""Reads a weight that lies in a file as levels."""


class Blocks(NamedTuple):
    """A weight [O, I] in blocks as a file has it: `data` uint8 [O, bytes of a row], whose type ggml calls `kind`.

    MXFP4_PAIRS is MXFP4 with neighbours in one byte.
    """

    kind: str
    data: Tensor
    inputs: int


TakesLevels = Callable[[torch.dtype, int], bool]
"""Whether there are products of levels for activations of a dtype, and so many inputs."""


class Rounded(NamedTuple):
    """A weight [O, I] by groups of `size` inputs: (level - middle) * scale + zero.

    `levels` int8 [O, I], 0 to 15 if they have 4 bits; `scales` and `zeros` [O, ⌈I / size⌉]. Our own are bfloat16, with
    zeros and the middle 8 for 4 bits, without for 8. Q6_K has groups of 16 and 8 bits; I is then a multiple of 32.
    With a `table` levels have 4 bits, and stand for the numbers in it. Those of FP8 are float8_e4m3fn.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bits: int = 8
    middle: int = 0
    size: int = GROUP_SIZE
    table: tuple[int, ...] = ()

    @classmethod
    def int4(cls, levels: Tensor, scales: Tensor, zeros: Tensor) -> Self:
        """Our own form with 4 bits."""
        return cls(levels, scales, zeros, 4, 8)

    @classmethod
    def stored_as(cls, name: str, method: str, tensors: Mapping[str, Tensor]) -> Self:
        """That of a module among the tensors of a checkpoint."""
        levels, scales = tensors[f"{name}.levels"], tensors[f"{name}.scales"]
        if method == "int8":
            return cls(levels, scales)
        pairs = torch.stack((levels & 15, levels >> 4), dim=-1)
        return cls.int4(pairs.flatten(1).to(torch.int8), scales, tensors[f"{name}.zeros"])

    @classmethod
    def of_modules(cls, modules: Iterable[nn.Module]) -> Self | None:
        """The outputs of several modules side by side; None unless all were loaded quantised."""
        found: list[ReadRounded | None] = [getattr(module, "rounded", None) for module in modules]
        readers = [read for read in found if read is not None]
        return cls.joined([read() for read in readers]) if len(readers) == len(found) else None

    @classmethod
    def joined(cls, parts: Sequence[Rounded]) -> Self:
        """The outputs of several weights side by side."""
        if len({(one.scales.dtype, one.zeros is None, *one[3:]) for one in parts}) > 1:
            size = min(part.size for part in parts)
            parts = [part.widened(size) for part in parts]
        zeros = [one.zeros for one in parts if one.zeros is not None]
        levels, scales = torch.cat([one.levels for one in parts]), torch.cat([one.scales for one in parts])
        return cls(levels, scales, torch.cat(zeros) if zeros else None, *parts[0][3:])

    @classmethod
    def in_turns(cls, parts: Sequence[Rounded]) -> Self:
        """The outputs of several weights, one of each and again."""
        joined = cls.joined(parts)
        return joined.reordered(torch.arange(len(joined.levels)).view(len(parts), -1).T.flatten())

    def reordered(self, order: Tensor) -> Self:
        """Its outputs in another order [O]."""
        zeros = None if self.zeros is None else self.zeros[order]
        return self._replace(levels=self.levels[order], scales=self.scales[order], zeros=zeros)

    @property
    def is_own(self) -> bool:
        """Whether this is one of our own forms."""
        return (
            self.scales.dtype == torch.bfloat16 and self.middle == (0 if self.zeros is None else 8) and not self.table
        )

    def widened(self, size: int) -> Rounded:
        """The same numbers in the form that any with such groups can have; `size` divides that of this one's."""
        zeros = torch.zeros_like(self.scales) if self.zeros is None else self.zeros
        scales, zeros = (one.float().repeat_interleave(self.size // size, dim=1) for one in (self.scales, zeros))
        return Rounded(self._whole, scales, zeros, size=size)

    @property
    def numbers(self) -> Tensor:
        """What the levels stand for, float32 [O, I]."""
        inputs = self.levels.shape[1]
        numbers = self._whole.float() * _spread(self.scales, inputs, self.size)
        return numbers if self.zeros is None else numbers + _spread(self.zeros, inputs, self.size)

    @property
    def _whole(self) -> Tensor:
        """The levels as what scales are multiplied by, int8 or float8."""
        if self.table:
            return looked_up(self.levels, self.table)
        return self.levels - self.middle if self.middle else self.levels

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        scales = {f"{name}.scales": self.scales.contiguous()}
        if self.zeros is None:
            return scales | {f"{name}.levels": self.levels.contiguous()}
        low, high = self.levels.to(torch.uint8).view(len(self.levels), -1, 2).unbind(-1)
        return scales | {f"{name}.levels": (low | high << 4).contiguous(), f"{name}.zeros": self.zeros.contiguous()}


def blocks_of(readers: Iterable[ReadRounded | None]) -> list[Blocks]:
    """What several readers read, in their order, as their file has it; nothing unless it has blocks of all."""
    found: list[Blocks] = []
    for read in readers:
        blocks: Callable[[], list[Blocks]] | None = getattr(read, "blocks", None)
        if blocks is None or not (own := blocks()):
            return []
        found += own
    return found


def looked_up(levels: Tensor, table: Sequence[int]) -> Tensor:
    """The numbers of a table, int8, that levels stand for."""
    return torch.tensor(table, dtype=torch.int8, device=levels.device)[levels.int()]


def rounded_readers(directory: Path, quantized: Quantized) -> dict[str, ReadRounded]:
    """The quantised modules of a checkpoint by name."""
    stored = _stored(directory)

    def read(name: str, method: str) -> Rounded:
        return Rounded.stored_as(name, method, {part: stored[part]() for part in _parts(name) if part in stored})

    return {name: partial(read, name, method) for name, method in quantized.modules.items()}


def lazy_rounded_weights(
    directory: Path, quantized: Quantized, found: Mapping[str, ReadRounded], dtype: torch.dtype
) -> dict[str, LazyWeight]:
    """All weights by name: those of the modules that were `found` as the numbers that their levels stand for."""
    parts = {part for name in found for part in _parts(name)}
    weights = {name: LazyWeight(read) for name, read in _stored(directory).items() if name not in parts}
    for name, rounded in found.items():
        weight = LazyWeight(partial(_expand, rounded, dtype))
        weights |= {f"{one}.weight": weight for one in {name, quantized.tied.get(name, name)}}
    for whole, modules in quantized.wholes().items():
        parts_of_all = [weights.pop(f"{module}.weight") for module in modules]
        weights[whole] = LazyWeight(partial(_transposed, parts_of_all))
    return weights


def _transposed(parts: Sequence[LazyWeight]) -> Tensor:
    """Weights [O, I] as one tensor [E, I, O]."""
    return torch.stack([part[...].T for part in parts])


def without_numbers(
    weights: Mapping[str, LazyWeight],
    readers: Mapping[str, ReadRounded],
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    takes: TakesLevels,
    has_rows: bool = True,
) -> dict[str, LazyWeight]:
    """The weights, with an `absent` one for each of the modules in `readers`: `attach` gives those their levels.

    Embeddings keep their numbers, which are looked up, and so do heads that are tied to one; except for large ones, if
    the caller `has_rows` that it looks up in blocks.
    """
    found = {**weights}
    for module, read in readers.items():
        name = f"{module}.weight"
        if name not in shapes or not takes(dtype, shapes[name][1]):
            continue
        if not module.endswith(TABLES) or (has_rows and _table(read, shapes[name]) is not None):
            found[name] = LazyWeight(partial(absent, shapes[name], dtype))
    return found


def _table(read: ReadRounded, shape: Sequence[int]) -> Blocks | None:
    """Embeddings whose rows stay in blocks; None for others."""
    blocks = blocks_of([read])
    return blocks[0] if len(blocks) == 1 and stays_in_rows(shape, blocks[0].kind) else None


def absent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Stands for a weight whose numbers are in no memory: it has a shape and a dtype alone."""
    return torch.zeros((), dtype=dtype).expand(*shape)


def moved(weight: Tensor, device: torch.device) -> Tensor:
    """The weight on a device, where an absent one stays absent."""
    if is_absent(weight):
        return weight.new_zeros((), device=device).expand(weight.shape)
    return weight.to(device)


def is_absent(weight: Tensor) -> bool:
    return weight.ndim > 1 and weight.numel() > 1 and not any(weight.stride())


def attach(model: Any, found: Mapping[str, ReadRounded], experts: Mapping[str, Any] | None = None) -> None:
    """Leave the levels with the modules that they belong to; those of an embedding with the head that is tied to it,
    and those of `experts` with those of their layer (see `experts.Readers`).

    An absent weight of a module that is no product gets its numbers. Raises `ModelLoadError` for one without levels.
    """
    modules, head, embedding = dict(model.named_modules()), model.get_output_embeddings(), model.get_input_embeddings()
    for name, read in found.items():
        module: Any = modules.get(name)
        if module is None:
            continue
        if type(module) is not nn.Linear and is_absent(module.weight):
            if name.endswith(TABLES) and (table := _table(read, module.weight.shape)) is not None:
                vars(module)[TABLE] = table
            else:
                module.weight.data = _expand(read, module.weight.dtype)
        if module is embedding and head is not None and head.weight is module.weight:
            module = head
        if type(module) is nn.Linear:
            vars(module)["rounded"] = read
    for name, readers in (experts or {}).items():
        module = modules[name]
        vars(module)["rounded"] = readers
    for name, weight in model.named_parameters():
        if is_absent(weight) and vars(modules[name.rpartition(".")[0]]).keys().isdisjoint(("rounded", TABLE)):
            raise ModelLoadError(f"{name} has levels in its file, and cannot use them; choose another checkpoint")


def save_quantized(source: Path, to: Path, model: PreTrainedModel, found: Mapping[str, Rounded]) -> None:
    """Write a quantised checkpoint of `model`, which was loaded from the directory `source`, to the directory `to`.

    Each expert's products are modules of their own there. Files that are no weights are copied. config.json is written
    last: what is incomplete cannot be loaded.
    """
    embedding = model.get_input_embeddings()
    tied = {
        name: next(other for other, module in model.named_modules() if module is embedding)
        for name in found
        if model.get_submodule(name).weight is embedding.weight
    }
    left_out = {f"{name}.weight" for name in (*found, *tied.values())}
    tensors = {name: one.detach().contiguous() for name, one in model.state_dict().items() if name not in left_out}
    for name, rounded in found.items():
        tensors |= rounded.stored(name)
    to.mkdir(parents=True, exist_ok=True)
    _write(tensors, to)
    for file in source.iterdir():
        is_ours = file.suffix in _WEIGHTS or file.name == "config.json" or file.name.endswith(".index.json")
        if file.is_file() and not is_ours:
            shutil.copy(file, to / file.name)
    methods = {name: "int8" if rounded.zeros is None else "int4" for name, rounded in found.items()}
    transposed = [name for name, module in model.named_modules() if getattr(module, "is_transposed", False)]
    config = read_json(source / "config.json") | {"quantization_config": Quantized(methods, tied, transposed).config}
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _write(tensors: Mapping[str, Tensor], to: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], to / "model.safetensors", {"format": "pt"})
        return
    places: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        save_file(shard, to / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": places}
    (to / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2) + "\n", "utf-8")


def _stored(directory: Path) -> dict[str, Callable[[], Tensor]]:
    """What reads each tensor of a directory's weight files."""
    return {name: partial(_read, file, name) for file in weight_files(directory) for name in read_header(file)}


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _parts(name: str) -> list[str]:
    return [f"{name}.{part}" for part in ("levels", "scales", "zeros")]


def _expand(read: ReadRounded, dtype: torch.dtype) -> Tensor:
    return read().numbers.to(dtype)


def _spread(factors: Tensor, inputs: int, size: int) -> Tensor:
    """[O, G] → float32 [O, I]."""
    return factors.float().repeat_interleave(size, dim=1)[:, :inputs]
