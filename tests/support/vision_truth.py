"""What transformers makes of prompts with images: eager attention in float32, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from greedy import is_clear

from penstock.engine import EngineRequest
from penstock.engine.vision.features import ORDER
from penstock.engine.vision.processor import VisionProcessor

_STATIC = {"gemma4_unified"}  # with caches of another kind, other masks


def reference(directory: Path) -> Any:
    """The model in `directory` as transformers runs it, ends of text ignored."""
    from transformers import AutoModelForImageTextToText

    library: Any = AutoModelForImageTextToText
    model = library.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def expected(
    model: Any, request: EngineRequest, processor: VisionProcessor, family: str, count: int, said: Sequence[int] = ()
) -> tuple[int, ...]:
    """The `count` tokens that a `reference` generates after a prompt.

    `said` is what an engine answered. Where the model's logits in one pass leave no doubt that it would generate the
    same, it does not: that takes many times as long.
    """
    if len(said) == count and _says(model, request, processor, family, said):
        return tuple(said)
    cache = {"cache_implementation": "static"} if family in _STATIC else {}
    output = model.generate(**_inputs(request, processor, family), max_new_tokens=count, do_sample=False, **cache)
    return tuple(output[0, len(request.prompt) :].tolist())


@torch.inference_mode()
def _says(model: Any, request: EngineRequest, processor: VisionProcessor, family: str, said: Sequence[int]) -> bool:
    if family in _STATIC or processor.image_token in said:  # which would stand for another image
        return False
    inputs = _inputs(request, processor, family)
    ids = torch.tensor([[*request.prompt, *said[:-1]]])
    longer = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if processor.types and processor.types in inputs:
        longer[processor.types] = processor.type_ids(ids)
    if any(len(request.prompt) in one.shape[1:2] for one in (inputs | longer).values()):
        return False  # another input goes token by token
    return is_clear(model(**inputs | longer).logits[0, len(request.prompt) - 1 :], said)


@torch.inference_mode()
def first_logits(model: Any, request: EngineRequest, processor: VisionProcessor, family: str) -> torch.Tensor:
    """The logits [V] of a `reference` behind a prompt."""
    logits: torch.Tensor = model(**_inputs(request, processor, family)).logits[0, -1]
    return logits


def _inputs(request: EngineRequest, processor: VisionProcessor, family: str) -> dict[str, torch.Tensor]:
    ids = torch.tensor([request.prompt])
    inputs = _joined(request, processor, family) if request.images else {}
    if request.images and processor.types:
        inputs[processor.types] = processor.type_ids(ids)
        if family == "ernie4_5_vl_moe":  # the tokens around images have the ids behind theirs
            apart = (ids >= processor.image_token) & (ids <= processor.image_token + 2)
            inputs["moe_mm_token_type_ids"] = apart.int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def _joined(request: EngineRequest, processor: VisionProcessor, family: str) -> dict[str, torch.Tensor]:
    """The inputs of all images of a prompt, as transformers' processors put them together."""
    each = [processor.inputs(image) for image in request.images]
    for one in each:
        one.pop(ORDER, None)  # transformers' model finds marks by their ids
    if family in ("ministral3", "mistral3", "lighton_ocr"):
        height, width = (max(one["pixel_values"].shape[axis] for one in each) for axis in (2, 3))
        for one in each:
            pixels = one["pixel_values"]
            lacking = (0, height - pixels.shape[2]), (0, width - pixels.shape[3])
            one["pixel_values"] = np.pad(pixels, ((0, 0), (0, 0), *lacking))
    if family == "idefics2":
        height, width = (max(one["pixel_values"].shape[axis] for one in each) for axis in (3, 4))
        for one in each:
            lacking = (0, height - one["pixel_values"].shape[3]), (0, width - one["pixel_values"].shape[4])
            for name, before in (("pixel_values", 3), ("pixel_attention_mask", 2)):
                one[name] = np.pad(one[name], (*[(0, 0)] * before, *lacking))
    if family == "lfm2_vl":
        most = max(one["pixel_values"].shape[1] for one in each)
        for one in each:
            for name in ("pixel_values", "pixel_attention_mask"):
                behind = (0, most - one[name].shape[1])
                one[name] = np.pad(one[name], ((0, 0), behind, (0, 0))[: one[name].ndim])
    if family in ("llava_next", "llava_next_video", "granite_vision", "granite4_vision", "llava_onevision"):
        most = max(one["pixel_values"].shape[1] for one in each)
        for one in each:
            tiles = most - one["pixel_values"].shape[1]
            one["pixel_values"] = np.pad(one["pixel_values"], ((0, 0), (0, tiles), (0, 0), (0, 0), (0, 0)))
    if family == "llava_onevision":  # how many pictures each prompt has
        each[1:] = [{name: array for name, array in one.items() if name != "batch_num_images"} for one in each[1:]]
    if family == "mllama":
        return _crossed(request, each, processor)
    axis = 1 if family in ("perception_lm", "smolvlm", "granite_docling", "idefics2") else 0
    if family in ("minicpmv4_6", "minicpmv4_7"):
        packed = np.concatenate([one.pop("pixel_values") for one in each], 3)
        sizes = np.concatenate([one["target_sizes"] for one in each])
        return {"pixel_values": torch.from_numpy(packed), "target_sizes": torch.from_numpy(sizes)}
    whole = {name: [one[name] for one in each if name in one] for name in {**each[0], **each[-1]}}
    return {
        name: torch.from_numpy(np.concatenate(arrays, min(axis, arrays[0].ndim - 1))) for name, arrays in whole.items()
    }


def _crossed(
    request: EngineRequest, each: Sequence[dict[str, Any]], processor: VisionProcessor
) -> dict[str, torch.Tensor]:
    """Images beside a prompt, and which tokens attend to which tiles of them."""
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    made = {name: torch.from_numpy(np.concatenate([one[name] for one in each], 1)) for name in each[0]}
    tiles = [[int(one["aspect_ratio_mask"].sum()) for one in each]]
    reading = [get_cross_attention_token_mask([*request.prompt], processor.image_token)]
    mask = convert_sparse_cross_attention_mask_to_dense(reading, tiles, 4, len(request.prompt))
    return made | {"cross_attention_mask": torch.from_numpy(mask)}
