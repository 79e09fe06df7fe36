"""The kind of projector of Janus-Pro; see `table.py`. What draws pictures is not in such a file."""

from __future__ import annotations

from typing import Any

from .vision import Projector, Vision, both

_TOWER = "model.vision_model"
_DRAWING = {  # as small as can be: it is dropped once it is loaded
    **{"embed_dim": 1, "num_embeddings": 1, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1]},
    **{"num_res_blocks": 1, "projection_dim": 1, "image_token_embed_dim": 1, "num_hidden_layers": 1},
}


def _depth(vision: Vision) -> int:
    """How many layers lie between the tower and the language model."""
    return sum(name.startswith("mm.") and name.endswith(".weight") for name in vision.gguf.tensors)


def _janus(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    own = {
        "hidden_act": vision.activation("gelu", "gelu"),
        "mlp_ratio": vision.need("feed_forward_length") / vision.width,
    }
    own |= {"projection_dim": vision.size("mm.0.weight", 0), "depth": _depth(vision), "use_qk_norm": False}
    own["attention_bias"] = "v.blk.0.attn_q.bias" in vision.gguf.tensors
    return {"vision_config": tower | own, "vq_config": _DRAWING}


def _janus_processor(vision: Vision) -> dict[str, Any]:
    side = vision.need("image_size")
    return vision.colours | {"image_processor_type": "JanusImageProcessor", "size": {"height": side, "width": side}}


def _aligner(vision: Vision) -> dict[str, str]:
    layers = {f"mm.{number}": f"model.aligner.hidden_layers.{number - 1}" for number in range(1, _depth(vision))}
    return both({"mm.0": "model.aligner.fc1", **layers})


JANUS = Projector(
    "janus",
    "JanusForConditionalGeneration",
    {"llama": "llama"},
    "model.language_model",
    "<image_placeholder>",
    {
        "v.position_embd.weight": f"{_TOWER}.embeddings.position_embedding.weight",
        **both(
            {"v.patch_embd": f"{_TOWER}.embeddings.patch_embedding", "v.post_ln": f"{_TOWER}.post_layernorm"},
        ),
    },
    f"{_TOWER}.encoder.layers",
    {
        **both({f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}),
        **both({"attn_out": "self_attn.projection_layer", "ln1": "layer_norm1", "ln2": "layer_norm2"}),
        **both({"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    },
    "mm.0.weight",
    _janus,
    _janus_processor,
    optional=frozenset(f"attn_{part}.bias" for part in "qkv"),
    names_of=_aligner,
)
