"""The kind of projector of LFM2-VL; see `table.py`."""

from __future__ import annotations

from typing import Any

from .....schemas.errors import ModelLoadError
from .vision import CLIP_LAYER, Projector, Vision, both

_TOWER = "model.vision_tower"
_JOINT = "model.multi_modal_projector"
_RESAMPLING = {"bilinear": 2, "bicubic": 3}


def _lfm(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    del tower["image_size"]  # that of the converter: this tower sees pictures of any size
    return {
        "downsample_factor": vision.need("projector.scale_factor"),
        "projector_hidden_size": vision.size("mm.1.weight", 0),
        "projector_bias": "mm.1.bias" in vision.gguf.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in vision.gguf.tensors,
        "vision_config": tower
        | {
            "model_type": "siglip2_vision_model",
            "hidden_act": vision.activation("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
            "num_patches": vision.size("v.position_embd.weight", 0),
            "vision_use_head": False,
        },
    }


def _lfm_processor(vision: Vision) -> dict[str, Any]:
    """How many tiles and tokens is not in the file; llama.cpp takes the published numbers, too."""
    way = vision.find("image_resize_algo", "bilinear")
    if way not in _RESAMPLING:
        raise ModelLoadError(
            f"{vision.gguf.path} resizes pictures by {way}, which is not supported; supported: {', '.join(_RESAMPLING)}"
        )
    return vision.colours | {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": vision.need("patch_size"),
        "downsample_factor": vision.need("projector.scale_factor"),
        "resample": _RESAMPLING[way],
    }


LFM2 = Projector(
    "lfm2_vl",
    "Lfm2VlForConditionalGeneration",
    {"lfm2": "lfm2"},
    "model.language_model",
    "<image>",
    {
        "v.position_embd.weight": f"{_TOWER}.embeddings.position_embedding.weight",
        **both(
            {
                "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
                "v.post_ln": f"{_TOWER}.post_layernorm",
                "mm.input_norm": f"{_JOINT}.layer_norm",
                "mm.1": f"{_JOINT}.linear_1",
                "mm.2": f"{_JOINT}.linear_2",
            }
        ),
    },
    f"{_TOWER}.encoder.layers",
    CLIP_LAYER,
    "mm.2.weight",
    _lfm,
    _lfm_processor,
    optional=frozenset({"mm.input_norm.weight", "mm.input_norm.bias", "mm.1.bias", "mm.2.bias"}),
    by_pixels=frozenset({"v.patch_embd.weight"}),
)
