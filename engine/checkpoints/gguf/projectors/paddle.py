"""The projector of PaddleOCR-VL. Needs no torch."""

from __future__ import annotations

from math import isqrt
from typing import Any

from .vision import CLIP_LAYER, Projector, Vision, both

_TOWER = "model.visual.vision_model"
_MERGED = 2  # patches along the side of a token


def _paddle(vision: Vision) -> dict[str, Any]:
    side = isqrt(vision.size("v.position_embd.weight", 0)) * vision.need("patch_size")
    own = {"hidden_act": "gelu_pytorch_tanh", "image_size": side, "spatial_merge_size": _MERGED}
    return {"vision_config": vision.tower | own}


def _paddle_processor(vision: Vision) -> dict[str, Any]:
    return vision.colours | {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "patch_size": vision.need("patch_size"),
        "merge_size": _MERGED,
        "size": {"shortest_edge": vision.need("image_min_pixels"), "longest_edge": vision.need("image_max_pixels")},
    }


PADDLE = Projector(
    "paddleocr_vl",
    "PaddleOCRVLForConditionalGeneration",
    {"paddleocr": "paddleocr_vl_text"},
    "model.language_model",
    "<|IMAGE_PLACEHOLDER|>",
    {
        "v.position_embd.weight": f"{_TOWER}.embeddings.position_embedding.weight",
        **both(
            {
                "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
                "v.post_ln": f"{_TOWER}.post_layernorm",
                "mm.input_norm": "model.projector.pre_norm",
                "mm.1": "model.projector.linear_1",
                "mm.2": "model.projector.linear_2",
            }
        ),
    },
    f"{_TOWER}.encoder.layers",
    CLIP_LAYER,
    "mm.2.weight",
    _paddle,
    _paddle_processor,
)
