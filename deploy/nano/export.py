"""Writes a trained network as a directory that transformers, Penstock and every other Qwen3 runtime load."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from network import Network, Shape
from safetensors.torch import save_file
from tokenizers import Tokenizer
from vocabulary import SPECIAL, TEMPLATE

CONTEXT = 2048


def configuration(shape: Shape, end: int, turn: int) -> dict[str, Any]:
    """`config.json`; `end` and `turn` are the ids that end a text and a turn."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **shape.to_dict(),
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": turn,
        "pad_token_id": end,
    }


def export(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Write or replace the model in `directory`; a reader sees each file old or new, never half. The card stays."""
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()
    }
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(part / "tokenizer.json"))
    end, _, turn = (int(tokenizer.token_to_id(token) or 0) for token in SPECIAL)
    files: dict[str, Any] = {
        "config.json": configuration(network.shape, end, turn),
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [turn, end],
            "pad_token_id": end,
            "max_new_tokens": 512,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[2],
            "pad_token": SPECIAL[0],
            "additional_special_tokens": [SPECIAL[1], SPECIAL[2]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    }
    for name, content in files.items():
        (part / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(TEMPLATE, part / TEMPLATE.name)
    directory.mkdir(parents=True, exist_ok=True)
    for path in part.iterdir():
        path.chmod(0o644)
        os.replace(path, directory / path.name)
    part.rmdir()
