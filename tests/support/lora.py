"""Writes LoRA adapters as PEFT does, and merges them into transformers' models by hand: W + scale · B A."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Sizes = Mapping[str, tuple[int, int]]
"""Inputs and outputs by module name."""


def linear_sizes(model: Any) -> dict[str, tuple[int, int]]:
    """All linear layers but the output head."""
    sizes = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            sizes[name] = (module.in_features, module.out_features)
        elif type(module) is Conv1D:
            sizes[name] = (module.nx, module.nf)
    return sizes


def config(rank: int = 4, **settings: Any) -> dict[str, Any]:
    """adapter_config.json as PEFT writes it."""
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none"}
    return plain | {"r": rank, "lora_alpha": 2 * rank, "use_rslora": False, "use_dora": False} | settings


def matrices(sizes: Sizes, rank: int = 4, seed: int = 0, ranks: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    """Random matrices under PEFT's names; `ranks` are those of single modules."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    for module, (inputs, outputs) in sizes.items():
        own = (ranks or {}).get(module, rank)
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn((own, inputs), generator=random) * 0.1
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn((outputs, own), generator=random) * 0.2
    return tensors


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return directory


def make_adapter(directory: Path, sizes: Sizes, rank: int = 4, seed: int = 0, **settings: Any) -> Path:
    """A random adapter of all modules in `sizes`."""
    return write_adapter(directory, matrices(sizes, rank, seed), config(rank, **settings))


@torch.no_grad()
def merged(model: Any, directory: Path, scale: float = 2.0) -> Any:
    """A copy of `model` with the adapter in its weights."""
    copy = deepcopy(model)
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "adapter_model.safetensors").items()}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = copy.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            change = scale * tensors[name.replace("lora_A", "lora_B")] @ a
            module.weight += change.T if type(module) is Conv1D else change
    return copy
