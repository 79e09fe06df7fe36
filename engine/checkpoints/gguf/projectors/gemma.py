"""The projectors of Gemma 4, with a tower and without one, as 12B. Needs no torch.

What it has of sounds is not read.
"""

from __future__ import annotations

from typing import Any

from .vision import Projector, Vision, both

_TOWER = "model.vision_tower"
_PRODUCTS = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_out": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_BOUNDS = [f"{end}_{which}" for end in ("input", "output") for which in ("min", "max")]
_CLIPPED = {f"{name}.{bound}": f"{own}.{bound}" for name, own in _PRODUCTS.items() for bound in _BOUNDS}
_NORMS = {
    **{"ln1": "input_layernorm", "ln2": "pre_feedforward_layernorm"},
    **{"attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"},
    **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
}
_POOLED = 3  # patches along the side of a token, unless the file says otherwise


def _gemma4(vision: Vision) -> dict[str, Any]:
    heads = vision.need("attention.head_count")
    head_dim = vision.size("v.blk.0.attn_q.weight", 0) // heads
    own = {
        "model_type": "gemma4_vision",
        "hidden_size": vision.width,
        "intermediate_size": vision.need("feed_forward_length"),
        "num_hidden_layers": vision.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": vision.size("v.blk.0.attn_k.weight", 0) // head_dim,
        "head_dim": head_dim,
        "rms_norm_eps": vision.numbers("attention.layer_norm_epsilon", 1)[0],
        "position_embedding_size": vision.size("v.position_embd.weight", 1),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in vision.gguf.tensors,
        "standardize": "v.std_scale" in vision.gguf.tensors,
    }
    return {"vision_config": own | _patches(vision), "audio_config": None}


def _gemma4_processor(vision: Vision) -> dict[str, Any]:
    return {"image_processor_type": "Gemma4ImageProcessor"} | _patches(vision)


def _patches(vision: Vision) -> dict[str, int]:
    pooled = vision.find("projector.scale_factor", _POOLED)
    return {"patch_size": vision.need("patch_size"), "pooling_kernel_size": pooled}


GEMMA4 = Projector(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    {"gemma4": "gemma4_text"},
    "model.language_model",
    "<|image|>",
    {
        "v.patch_embd.weight": f"{_TOWER}.patch_embedder.input_proj.weight",
        "v.position_embd.weight": f"{_TOWER}.patch_embedder.position_embedding_table",
        "v.std_bias": f"{_TOWER}.std_bias",
        "v.std_scale": f"{_TOWER}.std_scale",
        "mm.input_projection.weight": "model.embed_vision.embedding_projection.weight",
    },
    f"{_TOWER}.encoder.layers",
    {
        **{f"{name}.weight": f"{own}.linear.weight" for name, own in _PRODUCTS.items()},
        **{f"{name}.weight": f"{own}.weight" for name, own in _NORMS.items()},
        **_CLIPPED,
    },
    "mm.input_projection.weight",
    _gemma4,
    _gemma4_processor,
    optional=frozenset({"v.std_bias", "v.std_scale", *_CLIPPED}),
    ignored_parts=("a.", "mm.a."),
    dimensions=dict.fromkeys(_CLIPPED, 0),
    by_pixels=frozenset({"v.patch_embd.weight"}),
    tokens={"boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
)


def _unified(vision: Vision) -> dict[str, Any]:
    own = {
        "model_type": "gemma4_unified_vision",
        "mm_embed_dim": vision.width,
        "mm_posemb_size": vision.size("v.position_embd.weight", 1),
        "output_proj_dims": vision.size("mm.input_projection.weight", 1),
        "rms_norm_eps": vision.numbers("attention.layer_norm_epsilon", 1)[0],
    }
    return {"vision_config": own | _patches(vision), "audio_config": None}


def _unified_processor(vision: Vision) -> dict[str, Any]:
    return {"image_processor_type": "Gemma4UnifiedImageProcessor"} | _patches(vision)


_EMBEDDER = "model.embed_vision"
GEMMA4_UNIFIED = Projector(
    "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
    {"gemma4": "gemma4_unified_text"},
    "model.language_model",
    "<|image|>",
    {
        "v.position_embd.weight": f"{_EMBEDDER}.pos_embedding",
        "mm.input_projection.weight": f"{_EMBEDDER}.multimodal_embedder.embedding_projection.weight",
        **both(
            {
                "v.patch_embd": f"{_EMBEDDER}.patch_dense",
                "v.patch_norm.1": f"{_EMBEDDER}.patch_ln1",
                "v.patch_norm.2": f"{_EMBEDDER}.patch_ln2",
                "v.patch_norm.3": f"{_EMBEDDER}.pos_norm",
            }
        ),
    },
    "",
    {},
    "mm.input_projection.weight",
    _unified,
    _unified_processor,
    ignored_parts=GEMMA4.ignored_parts,
    by_pixels=frozenset({"v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"}),
    by_axis=frozenset({"v.position_embd.weight"}),
    tokens=GEMMA4.tokens,
)
