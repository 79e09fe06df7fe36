"""The projectors of Qwen 2, 2.5 and 3 VL, of Qwen 3.5, of Qwen 2.5 Omni and of EXAONE 4.5. Needs no torch."""

from __future__ import annotations

import re
from typing import Any

from .vision import Projector, Vision, both


def _qwen2(vision: Vision) -> dict[str, Any]:
    """The metadata has another length of the perceptrons, or none."""
    ratio = max(vision.size("v.blk.0.ffn_up.weight", axis) for axis in (0, 1)) / vision.width
    return {
        "vision_config": {
            "depth": vision.need("block_count"),
            "embed_dim": vision.width,
            "hidden_size": vision.size("mm.2.weight", 0),
            "mlp_ratio": int(ratio) if ratio.is_integer() else ratio,
            "num_heads": vision.need("attention.head_count"),
            "patch_size": vision.need("patch_size"),
            "spatial_merge_size": vision.merge("mm.0.weight"),
            "temporal_patch_size": _FRAMES,
            "hidden_act": vision.activation("gelu", "quick_gelu"),
        }
    }


def _qwen2_5(vision: Vision) -> dict[str, Any]:
    layers, every = vision.need("block_count"), vision.need("n_wa_pattern")
    own = {
        "hidden_act": vision.activation("gelu", "silu"),
        "window_size": _WINDOW,
        "fullatt_block_indexes": list(range(every - 1, layers, every)),
    }
    return {"vision_config": _tower(vision) | own}


def _exaone(vision: Vision) -> dict[str, Any]:
    layers = vision.need("block_count")
    every = vision.find("n_wa_pattern", 1)
    own = {
        "hidden_act": vision.activation("gelu", "silu"),
        "num_key_value_heads": vision.need("attention.head_count_kv"),
        "window_size": vision.find("window_size", _WINDOW),
        "fullatt_block_indexes": list(range(every - 1, layers, every)),
    }
    return {"vision_config": _tower(vision) | own}


def _qwen3(vision: Vision) -> dict[str, Any]:
    own = {
        "hidden_act": vision.activation("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        "num_position_embeddings": vision.size("v.position_embd.weight", 0),
        "deepstack_visual_indexes": _deep_layers(vision),
    }
    return {"vision_config": _tower(vision) | own}


def _tower(vision: Vision) -> dict[str, Any]:
    """What both have in common."""
    tower = vision.tower
    return {
        "depth": tower["num_hidden_layers"],
        "hidden_size": vision.width,
        "intermediate_size": tower["intermediate_size"],
        "out_hidden_size": vision.size("mm.2.weight", 0),
        "num_heads": tower["num_attention_heads"],
        "patch_size": tower["patch_size"],
        "spatial_merge_size": vision.merge("mm.0.weight"),
        "temporal_patch_size": _FRAMES,
    }


def _deep_layers(vision: Vision) -> list[int]:
    """The layers whose features the language model's first layers get."""
    return sorted(int(match[1]) for name in vision.gguf.tensors if (match := _DEEP.fullmatch(name)))


def _deep_names(vision: Vision) -> dict[str, str]:
    parts = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
    return both(
        {
            f"v.deepstack.{layer}.{part}": f"model.visual.deepstack_merger_list.{index}.{own}"
            for index, layer in enumerate(_deep_layers(vision))
            for part, own in parts.items()
        }
    )


def _qwen3_processor(vision: Vision) -> dict[str, Any]:
    return _qwen_processor(vision) | {"min_pixels": _PIXELS_OF_3[0], "max_pixels": _PIXELS_OF_3[1]}


def _exaone_processor(vision: Vision) -> dict[str, Any]:
    pixels = {f"{name}_pixels": vision.need(f"image_{name}_pixels") for name in ("min", "max")}
    return _qwen_processor(vision) | pixels


def _qwen_processor(vision: Vision) -> dict[str, Any]:
    return vision.colours | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.need("patch_size"),
        "merge_size": vision.merge("mm.0.weight"),
        "temporal_patch_size": _FRAMES,
        "min_pixels": _PIXELS[0],
        "max_pixels": _PIXELS[1],
    }


_FRAMES = 2  # an image is as many, all alike
_WINDOW = 112  # pixels on a side, of all models of Qwen 2.5 VL
_PIXELS = 3136, 12845056  # of Qwen 2 and 2.5
_PIXELS_OF_3 = 65536, 16777216
_DEEP = re.compile(r"v\.deepstack\.(\d+)\.norm\.weight")
_QWEN_NAMES = {
    "v.patch_embd.weight": "model.visual.patch_embed.proj.weight",
    "v.patch_embd.weight.1": "model.visual.patch_embed.proj.weight",
    "v.post_ln.weight": "model.visual.merger.ln_q.weight",
    **both({"mm.0": "model.visual.merger.mlp.0", "mm.2": "model.visual.merger.mlp.2"}),
}
_QWEN_LAYER = {"ln1.weight": "norm1.weight", "ln2.weight": "norm2.weight"} | both(
    dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv") | {"attn_out": "attn.proj"}
)
_GATED = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_QWEN_TEXT = "model.language_model"
_QWEN2_5 = Projector(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    {"qwen2vl": "qwen2_5_vl_text"},
    _QWEN_TEXT,
    "<|image_pad|>",
    _QWEN_NAMES,
    "model.visual.blocks",
    _QWEN_LAYER | both(_GATED),
    "mm.2.weight",
    _qwen2_5,
    _qwen_processor,
)
QWEN: dict[str, Projector] = {
    "qwen2vl_merger": Projector(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {"qwen2vl": "qwen2_vl_text"},
        _QWEN_TEXT,
        "<|image_pad|>",
        _QWEN_NAMES | {"v.post_ln.bias": "model.visual.merger.ln_q.bias"},
        "model.visual.blocks",
        _QWEN_LAYER | both({"ln1": "norm1", "ln2": "norm2", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        "mm.2.weight",
        _qwen2,
        _qwen_processor,
    ),
    "qwen2.5vl_merger": _QWEN2_5,
    "qwen2.5o": _QWEN2_5._replace(mark="<|IMAGE|>", ignored_parts=("a.", "mm.a.")),  # what hears
    "exaone4_5": Projector(
        "exaone4_5",
        "Exaone4_5_ForConditionalGeneration",
        {"exaone4": "exaone4"},
        _QWEN_TEXT,
        "<|image_pad|>",
        _QWEN_NAMES,
        "model.visual.blocks",
        {"ln1.weight": "norm1.weight", "ln2.weight": "norm2.weight"}
        | both({"attn_qkv": "attn.qkv", "attn_out": "attn.proj"} | _GATED),
        "mm.2.weight",
        _exaone,
        _exaone_processor,
    ),
    "qwen3vl_merger": Projector(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {
            **{"qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_vl_moe_text"},
            **{"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"},
        },
        _QWEN_TEXT,
        "<|image_pad|>",
        {
            "v.patch_embd.weight": "model.visual.patch_embed.proj.weight",
            "v.patch_embd.weight.1": "model.visual.patch_embed.proj.weight",
            "v.patch_embd.bias": "model.visual.patch_embed.proj.bias",
            "v.position_embd.weight": "model.visual.pos_embed.weight",
            **both(
                {
                    "v.post_ln": "model.visual.merger.norm",
                    "mm.0": "model.visual.merger.linear_fc1",
                    "mm.2": "model.visual.merger.linear_fc2",
                }
            ),
        },
        "model.visual.blocks",
        both(
            {
                **{"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"},
                **{"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
            }
        ),
        "mm.2.weight",
        _qwen3,
        _qwen3_processor,
        names_of=_deep_names,
        models={
            "qwen3vlmoe": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
            "qwen35": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
            "qwen35moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        },
    ),
}
