"""Weights as levels and scales, and checkpoints that hold them in the format that `quantized` describes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .models import read_json, weight_files
from .quantized import GROUP_SIZE, Quantized

_SHARD = 4 << 30  # bytes of a weight file, unless one tensor is larger
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class Rounded(NamedTuple):
    """A weight [O, I]: `levels` int8 [O, I], `scales` and `zeros` bfloat16 [O, ⌈I / 32⌉]; int8 has no zeros."""

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None

    @classmethod
    def stored_as(cls, name: str, method: str, tensors: Mapping[str, Tensor]) -> Self:
        """That of a module among the tensors of a checkpoint."""
        levels, scales = tensors[f"{name}.levels"], tensors[f"{name}.scales"]
        if method == "int8":
            return cls(levels, scales, None)
        pairs = torch.stack((levels & 15, levels >> 4), dim=-1)
        return cls(pairs.flatten(1).to(torch.int8), scales, tensors[f"{name}.zeros"])

    @classmethod
    def of_modules(cls, modules: Iterable[nn.Module]) -> Self | None:
        """The outputs of several modules side by side; None unless all were loaded quantised, by one method."""
        parts: list[Rounded | None] = [getattr(module, "rounded", None) for module in modules]
        known = [part for part in parts if part is not None]
        zeros = [part.zeros for part in known if part.zeros is not None]
        if len(known) < len(parts) or len(zeros) not in (0, len(parts)):
            return None
        levels, scales = torch.cat([part.levels for part in known]), torch.cat([part.scales for part in known])
        return cls(levels, scales, torch.cat(zeros) if zeros else None)

    @property
    def numbers(self) -> Tensor:
        """What the levels stand for, float32 [O, I]."""
        inputs = self.levels.shape[1]
        levels, scales = self.levels.float(), _spread(self.scales, inputs)
        return levels * scales if self.zeros is None else (levels - 8) * scales + _spread(self.zeros, inputs)

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        scales = {f"{name}.scales": self.scales.contiguous()}
        if self.zeros is None:
            return scales | {f"{name}.levels": self.levels.contiguous()}
        low, high = self.levels.to(torch.uint8).view(len(self.levels), -1, 2).unbind(-1)
        return scales | {f"{name}.levels": low | high << 4, f"{name}.zeros": self.zeros.contiguous()}


def load_quantized(directory: Path, dtype: str, *, quantized: Quantized, **options: Any) -> Any:
    """As transformers' `from_pretrained`; each quantised module has what its weight was as `rounded`."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    del config.quantization_config
    number: torch.dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    tensors = {name: tensor for file in weight_files(directory) for name, tensor in load_file(file).items()}
    found = {name: Rounded.stored_as(name, method, tensors) for name, method in quantized.modules.items()}
    for name, rounded in found.items():
        for part in ("levels", "scales", "zeros"):
            tensors.pop(f"{name}.{part}", None)
        tensors[f"{name}.weight"] = rounded.numbers.to(number)
        if name in quantized.tied:
            tensors[f"{quantized.tied[name]}.weight"] = tensors[f"{name}.weight"]
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=number, **options)
    for name, rounded in found.items():
        loaded[0].get_submodule(name).rounded = rounded
    return loaded


def save_quantized(source: Path, to: Path, model: PreTrainedModel, found: Mapping[str, Rounded]) -> None:
    """Write a quantised checkpoint of `model`, which was loaded from the directory `source`, to the directory `to`.

    Files that are no weights are copied. config.json is written last: what is incomplete cannot be loaded.
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
    config = read_json(source / "config.json") | {"quantization_config": Quantized(methods, tied).config}
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


def _spread(factors: Tensor, inputs: int) -> Tensor:
    """[O, G] → float32 [O, I]."""
    return factors.float().repeat_interleave(GROUP_SIZE, dim=1)[:, :inputs]
