"""The projector of MiniCPM-V 4.6, whose tower merges windows on its way. Needs no torch."""

from __future__ import annotations

from math import isqrt
from typing import Any

from .....schemas.errors import ModelLoadError
from .vision import CLIP_ATTENTION, CLIP_LAYER, Projector, Vision, both

_TOWER = "model.vision_tower"
_WINDOWS = f"{_TOWER}.vit_merger"
_MERGER = "model.merger.mlp.0"
_SIDE = 4  # of the square of patches that one token shows


def _minicpm(vision: Vision) -> dict[str, Any]:
    layers = vision.find("wa_layer_indexes")
    if not isinstance(layers, list) or len(layers) != 1:
        raise ModelLoadError(f"{vision.gguf.path} has no one layer in wa_layer_indexes; convert the model again")
    if (side := vision.need("projector.scale_factor")) != _SIDE:  # such files lack what merges windows
        raise ModelLoadError(
            f"{vision.gguf.path} shows {side} by {side} patches in a token, which is not supported; use a file with "
            f"{_SIDE} by {_SIDE} (downsample_mode 16x)"
        )
    own = {
        "hidden_act": "gelu_pytorch_tanh",
        "image_size": isqrt(vision.size("v.position_embd.weight", 0)) * vision.need("patch_size"),
    }
    return {"insert_layer_id": layers[0], "vision_config": vision.tower | own}


def _minicpm_processor(vision: Vision) -> dict[str, Any]:
    return vision.colours | {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "scale_resolution": vision.need("image_size"),
        "patch_size": vision.need("patch_size"),
    }


MINICPM = Projector(
    "minicpmv4_6",
    "MiniCPMV4_6ForConditionalGeneration",
    {"qwen35": "qwen3_5_text"},
    "model.language_model",
    "<|image_pad|>",
    {
        "v.position_embd.weight": f"{_TOWER}.embeddings.position_embedding.weight",
        **both(
            {
                "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
                "v.post_ln": f"{_TOWER}.post_layernorm",
                "v.vit_merger.ln1": f"{_WINDOWS}.layer_norm1",
                "v.vit_merger.ds_ln": f"{_WINDOWS}.pre_norm",
                "v.vit_merger.ds_ffn_up": f"{_WINDOWS}.linear_1",
                "v.vit_merger.ds_ffn_down": f"{_WINDOWS}.linear_2",
                "mm.input_norm": f"{_MERGER}.pre_norm",
                "mm.up": f"{_MERGER}.linear_1",
                "mm.down": f"{_MERGER}.linear_2",
                **{f"v.vit_merger.{name}": f"{_WINDOWS}.{own}" for name, own in CLIP_ATTENTION.items()},
            }
        ),
    },
    f"{_TOWER}.encoder.layers",
    CLIP_LAYER,
    "mm.down.weight",
    _minicpm,
    _minicpm_processor,
)
