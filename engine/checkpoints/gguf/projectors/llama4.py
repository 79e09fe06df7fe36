"""The kind of projector of Llama 4; see `table.py`. In how many tiles an image is shown is as published."""

from __future__ import annotations

from typing import Any

from .vision import CLIP_ATTENTION, Projector, Vision, both

_TOWER = "vision_model"
_ATTENTION = CLIP_ATTENTION | {"attn_out": "self_attn.o_proj"}


def _llama4(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    epsilon = tower.pop("layer_norm_eps")
    return {
        "vision_config": tower
        | {
            "hidden_act": "gelu",
            "norm_eps": epsilon,
            "pixel_shuffle_ratio": 1 / vision.need("projector.scale_factor"),
            "projector_input_dim": vision.size("mm.model.mlp.1.weight", 0),
            "projector_output_dim": vision.size("mm.model.mlp.2.weight", 0),
            "vision_output_dim": vision.size("mm.model.fc.weight", 1),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    }


def _llama4_processor(vision: Vision) -> dict[str, Any]:
    side = vision.need("image_size")
    return vision.colours | {
        "image_processor_type": "Llama4ImageProcessor",
        "size": {"height": side, "width": side},
        "max_patches": 16,
    }


LLAMA4 = Projector(
    "llama4",
    "Llama4ForConditionalGeneration",
    {"llama4": "llama4_text"},
    "language_model.model",
    "<|patch|>",
    {
        "v.class_embd": f"{_TOWER}.class_embedding",
        "v.patch_embd.weight": f"{_TOWER}.patch_embedding.linear.weight",
        "v.position_embd.weight": f"{_TOWER}.positional_embedding_vlm",
        "mm.model.mlp.1.weight": f"{_TOWER}.vision_adapter.mlp.fc1.weight",
        "mm.model.mlp.2.weight": f"{_TOWER}.vision_adapter.mlp.fc2.weight",
        "mm.model.fc.weight": "multi_modal_projector.linear_1.weight",
        **both({"v.pre_ln": f"{_TOWER}.layernorm_pre", "v.post_ln": f"{_TOWER}.layernorm_post"}),
    },
    f"{_TOWER}.model.layers",
    both(
        _ATTENTION
        | {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
        | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    ),
    "mm.model.fc.weight",
    _llama4,
    _llama4_processor,
    tokens={"boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>"},
    head="language_model.",
)
