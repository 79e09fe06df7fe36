"""The kind of projector of HunyuanVL and HunyuanOCR; see `table.py`."""

from __future__ import annotations

from math import isqrt
from typing import Any

from .vision import Projector, Vision, both

_TOWER = "model.vision_tower"
_JOINT = f"{_TOWER}.patch_merger"
_POSITIONS = "v.position_embd.weight"


def _hunyuan(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    heads, epsilon = tower["num_attention_heads"], tower.pop("layer_norm_eps")
    own = {"max_image_size": isqrt(vision.size(_POSITIONS, 0)) * tower["patch_size"], "num_key_value_heads": heads}
    own |= {"rms_norm_eps": epsilon, "spatial_merge_size": vision.find("spatial_merge_size", 2)}
    own |= {"hidden_act": vision.activation("gelu", "gelu"), "text_hidden_size": vision.size("mm.model.fc.weight", 0)}
    del tower["image_size"]  # that of the converter
    return {"vision_config": tower | own}


def _hunyuan_processor(vision: Vision) -> dict[str, Any]:
    return vision.colours | {
        "image_processor_type": "HunYuanVLImageProcessor",
        "patch_size": vision.need("patch_size"),
        "merge_size": vision.find("spatial_merge_size", 2),
        "min_pixels": vision.need("image_min_pixels"),
        "max_pixels": vision.need("image_max_pixels"),
    }


HUNYUAN = Projector(
    "hunyuan_vl",
    "HunYuanVLForConditionalGeneration",
    {"hunyuan_vl": "hunyuan_vl_text"},
    "model.language_model",
    "<\uff5chy_place\u2581holder\u2581no\u2581102\uff5c>",
    {
        _POSITIONS: f"{_TOWER}.embeddings.position_embedding.weight",
        "mm.pre_norm.weight": f"{_JOINT}.before_rms.weight",
        "mm.post_norm.weight": f"{_JOINT}.after_rms.weight",
        "mm.image_begin": f"{_JOINT}.image_begin",
        "mm.image_end": f"{_JOINT}.image_end",
        "v.image_newline": f"{_JOINT}.image_newline",
        "v.view_seperator": f"{_JOINT}.image_sep",  # as it is written there
        **both(
            {
                "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
                "mm.0": f"{_JOINT}.proj_conv",
                "mm.2": f"{_JOINT}.proj_out",
                "mm.model.fc": f"{_JOINT}.mlp",
            }
        ),
    },
    f"{_TOWER}.layers",
    {
        **both({f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}),
        **both({"attn_out": "self_attn.o_proj", "ln1": "layer_norm1", "ln2": "layer_norm2"}),
        **both({"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    },
    "mm.model.fc.weight",
    _hunyuan,
    _hunyuan_processor,
    leading={_POSITIONS: 1},  # converters leave out that of a token which the tower has not
)
