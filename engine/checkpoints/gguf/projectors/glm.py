"""The projectors of GLM-4.1V to 4.6V and of GLM-OCR, which is of the same kind. Needs no torch."""

from __future__ import annotations

from typing import Any

from .vision import Projector, Vision, both

_VISUAL = "model.visual"
_FRAMES = 2  # an image is as many, all alike
_PIXELS = 12544, 9633792  # of all frames, in GLM-4.6V and GLM-OCR


def _glm(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    return {
        "vision_config": {
            "depth": tower["num_hidden_layers"],
            "hidden_size": vision.width,
            "intermediate_size": tower["intermediate_size"],
            "out_hidden_size": vision.size("mm.model.fc.weight", 0),
            "num_heads": tower["num_attention_heads"],
            "image_size": tower["image_size"],
            "patch_size": tower["patch_size"],
            "rms_norm_eps": tower["layer_norm_eps"],
            "spatial_merge_size": vision.size("mm.patch_merger.weight", 2),
            "temporal_patch_size": _FRAMES,
            "hidden_act": vision.activation("gelu", "silu"),
            "attention_bias": "v.blk.0.attn_qkv.bias" in vision.gguf.tensors,
        }
    }


def _glm_processor(vision: Vision) -> dict[str, Any]:
    return vision.colours | {
        "image_processor_type": "Glm46VImageProcessor",
        "patch_size": vision.need("patch_size"),
        "merge_size": vision.size("mm.patch_merger.weight", 2),
        "temporal_patch_size": _FRAMES,
        "size": {"shortest_edge": _PIXELS[0], "longest_edge": _PIXELS[1]},
    }


_PRODUCTS = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj"} | {
    f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")
}
_LAYER = {"ln1.weight": "norm1.weight", "ln2.weight": "norm2.weight"} | {
    f"{name}.weight": f"{own}.weight" for name, own in _PRODUCTS.items()
}
_NAMES = {
    "v.patch_embd.weight": f"{_VISUAL}.patch_embed.proj.weight",
    "v.patch_embd.weight.1": f"{_VISUAL}.patch_embed.proj.weight",
    "v.patch_embd.bias": f"{_VISUAL}.patch_embed.proj.bias",
    "v.post_ln.weight": f"{_VISUAL}.post_layernorm.weight",
    "mm.model.fc.weight": f"{_VISUAL}.merger.proj.weight",
    **both({"mm.patch_merger": f"{_VISUAL}.downsample", "mm.post_norm": f"{_VISUAL}.merger.post_projection_norm"}),
    **{f"mm.{part}.weight": f"{_VISUAL}.merger.{part}_proj.weight" for part in ("gate", "up", "down")},
}
GLM4V = Projector(
    "glm4v",
    "Glm4vForConditionalGeneration",
    {"glm4": "glm4v_text", "glm4moe": "glm4v_moe_text"},
    "model.language_model",
    "<|image|>",
    _NAMES
    | {
        "v.norm_embd.weight": f"{_VISUAL}.post_conv_layernorm.weight",
        "v.position_embd.weight": f"{_VISUAL}.embeddings.position_embedding.weight",
    },
    f"{_VISUAL}.blocks",
    _LAYER | {"attn_qkv.bias": "attn.qkv.bias"},
    "mm.model.fc.weight",
    _glm,
    _glm_processor,
    optional=frozenset({"attn_qkv.bias"}),
    tokens={"image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>"},
    models={"glm4moe": ("glm4v_moe", "Glm4vMoeForConditionalGeneration")},
)
GLM_OCR = GLM4V._replace(
    model_type="glm_ocr",
    class_name="GlmOcrForConditionalGeneration",
    texts={"glm4": "glm_ocr_text"},
    names=_NAMES,
    layer=_LAYER
    | {f"attn_{part}_norm.weight": f"attn.{part}_norm.weight" for part in "qk"}
    | {f"{name}.bias": f"{own}.bias" for name, own in _PRODUCTS.items()},
    optional=frozenset(f"{name}.bias" for name in _PRODUCTS),
    models={},
)
