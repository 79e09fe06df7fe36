"""The kinds of projectors: files with the vision part of a model in GGUF, in transformers' terms. Needs no torch.

Source of the names and of what is not in the metadata: llama.cpp's converters (its folder `conversion`, and before that
`tools/mtmd/legacy-models`) and its loader `tools/mtmd/clip.cpp`. Images are prepared by the rules of transformers'
processors, for which the files have most numbers; the others are those that the models were published with.
"""

from __future__ import annotations

from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import Gguf
from .gemma import GEMMA4, GEMMA4_UNIFIED
from .glm import GLM4V, GLM_OCR
from .hunyuan import HUNYUAN
from .janus import JANUS
from .lfm import LFM2
from .llama4 import LLAMA4
from .minicpm import MINICPM
from .paddle import PADDLE
from .qwen import QWEN
from .vision import CLIP_LAYER, Projector, Vision, both


def projector_of(gguf: Gguf) -> Projector | None:
    """The kind of the projector in a file; None if it is not supported."""
    kind = projector_type(gguf)
    if kind == "pixtral" and "mm.patch_merger.weight" not in gguf.tensors:
        return _PIXTRAL
    if kind == "glm4v" and "v.position_embd.weight" not in gguf.tensors:
        return GLM_OCR
    return PROJECTORS.get(kind)


def projector_type(gguf: Gguf) -> str:
    """The first files of LLaVA do not say it."""
    found = gguf.metadata.get("clip.projector_type") or gguf.metadata.get("clip.vision.projector_type")
    return str(found or ("mlp" if gguf.metadata.get("clip.has_llava_projector") else "unknown"))


def _smolvlm(vision: Vision) -> dict[str, Any]:
    tower = vision.tower | {"hidden_act": vision.activation("gelu_pytorch_tanh", "gelu_pytorch_tanh")}
    return {"scale_factor": vision.merge("mm.model.fc.weight"), "vision_config": tower}


def _smolvlm_processor(vision: Vision) -> dict[str, Any]:
    side = vision.need("image_size")
    return vision.colours | {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": vision.find("preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
    }


def _llava(vision: Vision) -> dict[str, Any]:
    """The layers end with the one that is looked at: converters leave later ones out."""
    layers = vision.need("block_count")
    if vision.find("image_grid_pinpoints") or vision.find("mm_patch_merge_type", "flat") != "flat":
        raise ModelLoadError(
            f"{vision.gguf.path} is of LLaVA 1.6, which sees an image in tiles of its own kind and is not supported; "
            "use LLaVA 1.5, or another model that sees"
        )
    if (seen := vision.find("feature_layer", [layers])) != [layers]:
        raise ModelLoadError(
            f"{vision.gguf.path} looks at the layers {seen} of {layers}, which is not supported; use another model"
        )
    tower = vision.tower | {"model_type": "clip_vision_model", "hidden_act": vision.activation("gelu", "quick_gelu")}
    return {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "vision_config": tower}


def _llava_processor(vision: Vision) -> dict[str, Any]:
    side = vision.need("image_size")
    return vision.colours | {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }


def _internvl(vision: Vision) -> dict[str, Any]:
    tower, tensors = vision.tower, vision.gguf.tensors
    merge, side = vision.merge("mm.model.mlp.1.weight"), tower["image_size"] // tower["patch_size"]
    return {
        "image_seq_length": (side // merge) ** 2,
        "downsample_ratio": 1 / merge,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_config": tower
        | {
            "hidden_act": vision.activation("gelu", "gelu"),
            "attention_bias": "v.blk.0.attn_q.bias" in tensors,
            "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
            "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        },
    }


def _internvl_processor(vision: Vision) -> dict[str, Any]:
    side = vision.need("image_size")
    return vision.colours | {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": side, "width": side},
        "min_patches": vision.find("preproc_min_tiles", 1),
        "max_patches": vision.find("preproc_max_tiles", 12),
    }


def _pixtral(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    return {
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": "mm.1.bias" in vision.gguf.tensors,
        "spatial_merge_size": vision.find("spatial_merge_size", 1),
        "vision_config": tower
        | {
            "model_type": "pixtral",
            "head_dim": tower["hidden_size"] // tower["num_attention_heads"],
            "hidden_act": vision.activation("gelu", "gelu"),
        },
    }


def _pixtral_processor(vision: Vision) -> dict[str, Any]:
    return vision.colours | {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": vision.need("image_size")},
        "patch_size": vision.need("patch_size"),
    }


def _gemma3(vision: Vision) -> dict[str, Any]:
    tower = vision.tower
    side = tower["image_size"] // tower["patch_size"] // vision.find("projector.scale_factor", 4)
    own = {"model_type": "siglip_vision_model", "vision_use_head": False, "hidden_act": "gelu_pytorch_tanh"}
    return {"mm_tokens_per_image": side**2, "vision_config": tower | own}


def _gemma3_processor(vision: Vision) -> dict[str, Any]:
    side = vision.need("image_size")
    return vision.colours | {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
    }


_LLAVA = "model.vision_tower"
_JOINT = "model.multi_modal_projector"
_PIXTRAL = Projector(
    "llava",
    "LlavaForConditionalGeneration",
    {"llama": "llama", "mistral3": ""},  # a Mistral's or Ministral's
    "model.language_model",
    "[IMG]",
    {
        "v.patch_embd.weight": f"{_LLAVA}.patch_conv.weight",
        "v.pre_ln.weight": f"{_LLAVA}.ln_pre.weight",
        **both({"mm.1": f"{_JOINT}.linear_1", "mm.2": f"{_JOINT}.linear_2"}),
    },
    f"{_LLAVA}.transformer.layers",
    {
        f"{name}.weight": f"{own}.weight"
        for name, own in (
            *(("ln1", "attention_norm"), ("ln2", "ffn_norm"), ("attn_out", "attention.o_proj")),
            *((f"attn_{part}", f"attention.{part}_proj") for part in "qkv"),
            *((f"ffn_{part}", f"feed_forward.{part}_proj") for part in ("gate", "up", "down")),
        )
    },
    "mm.2.weight",
    _pixtral,
    _pixtral_processor,
    optional=frozenset({"mm.1.bias", "mm.2.bias"}),
    ignored=frozenset({"v.token_embd.img_break"}),
    permuted=frozenset({"attn_q.weight", "attn_k.weight"}),
)
_MERGING = {
    **_PIXTRAL.names,
    "mm.input_norm.weight": f"{_JOINT}.norm.weight",
    "mm.patch_merger.weight": f"{_JOINT}.patch_merger.merging_layer.weight",
}
PROJECTORS: dict[str, Projector] = {
    "idefics3": Projector(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        {"llama": "llama"},
        "model.text_model",
        "<image>",
        {
            "v.position_embd.weight": "model.vision_model.embeddings.position_embedding.weight",
            "mm.model.fc.weight": "model.connector.modality_projection.proj.weight",
            **both(
                {
                    "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
                    "v.post_ln": "model.vision_model.post_layernorm",
                }
            ),
        },
        "model.vision_model.encoder.layers",
        CLIP_LAYER,
        "mm.model.fc.weight",
        _smolvlm,
        _smolvlm_processor,
    ),
    "mlp": Projector(
        "llava",
        "LlavaForConditionalGeneration",
        {"llama": "llama"},
        "model.language_model",
        "<image>",
        {
            "v.class_embd": f"{_LLAVA}.embeddings.class_embedding",
            "v.patch_embd.weight": f"{_LLAVA}.embeddings.patch_embedding.weight",
            "v.position_embd.weight": f"{_LLAVA}.embeddings.position_embedding.weight",
            **both(
                {
                    "v.pre_ln": f"{_LLAVA}.pre_layrnorm",
                    "mm.0": f"{_JOINT}.linear_1",
                    "mm.2": f"{_JOINT}.linear_2",
                }
            ),
        },
        f"{_LLAVA}.encoder.layers",
        CLIP_LAYER,
        "mm.2.weight",
        _llava,
        _llava_processor,
        unused={  # it lies behind the layers, and what they make is looked at
            f"{_LLAVA}.post_layernorm.weight": "v.pre_ln.weight",
            f"{_LLAVA}.post_layernorm.bias": "v.pre_ln.bias",
        },
    ),
    "gemma3": Projector(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {"gemma3": "gemma3_text"},
        "model.language_model",
        "<image_soft_token>",
        {
            "v.position_embd.weight": f"{_LLAVA}.embeddings.position_embedding.weight",
            "mm.input_projection.weight": f"{_JOINT}.mm_input_projection_weight",
            "mm.soft_emb_norm.weight": f"{_JOINT}.mm_soft_emb_norm.weight",
            **both(
                {
                    "v.patch_embd": f"{_LLAVA}.embeddings.patch_embedding",
                    "v.post_ln": f"{_LLAVA}.post_layernorm",
                }
            ),
        },
        f"{_LLAVA}.encoder.layers",
        CLIP_LAYER,
        "mm.input_projection.weight",
        _gemma3,
        _gemma3_processor,
        output_axis=1,
        spare="<unused",  # converters leave the image token out, which lies behind the rest of the vocabulary
        offsets={"mm.soft_emb_norm.weight": -1},  # converters add it
        tokens={"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
    ),
    "gemma4v": GEMMA4,
    "gemma4uv": GEMMA4_UNIFIED,
    **QWEN,
    "lfm2": LFM2,
    "llama4": LLAMA4,
    "paddleocr": PADDLE,
    "janus_pro": JANUS,
    "hunyuanvl": HUNYUAN,
    "minicpmv4_6": MINICPM,
    "glm4v": GLM4V,
    "internvl": Projector(
        "internvl",
        "InternVLForConditionalGeneration",
        {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "llama": "llama"},
        "model.language_model",
        "<IMG_CONTEXT>",
        {
            "v.class_embd": f"{_LLAVA}.embeddings.cls_token",
            "v.position_embd.weight": f"{_LLAVA}.embeddings.position_embeddings",
            **both(
                {
                    "v.patch_embd": f"{_LLAVA}.embeddings.patch_embeddings.projection",
                    "mm.model.mlp.0": f"{_JOINT}.layer_norm",
                    "mm.model.mlp.1": f"{_JOINT}.linear_1",
                    "mm.model.mlp.3": f"{_JOINT}.linear_2",
                }
            ),
        },
        f"{_LLAVA}.encoder.layer",
        {
            **{"ls1.weight": "lambda_1", "ls2.weight": "lambda_2"},
            **{f"attn_{part}_norm.weight": f"attention.{part}_norm.weight" for part in "qk"},
            **both({f"attn_{part}": f"attention.{part}_proj" for part in "qkv"}),
            **both({"ln1": "layernorm_before", "ln2": "layernorm_after", "attn_out": "attention.projection_layer"}),
            **both({"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        },
        "mm.model.mlp.3.weight",
        _internvl,
        _internvl_processor,
        optional=frozenset(
            {f"attn_{part}.bias" for part in "qkv"}
            | {f"attn_{part}_norm.weight" for part in "qk"}
            | {"ln1.bias", "ln2.bias"}
        ),
        dimensions={"v.class_embd": 3, "v.position_embd.weight": 3},
    ),
    "pixtral": _PIXTRAL._replace(
        model_type="mistral3",
        class_name="Mistral3ForConditionalGeneration",
        names=_MERGING,
    ),
    "lightonocr": _PIXTRAL._replace(  # whose parts have names of their own
        model_type="lighton_ocr",
        class_name="LightOnOcrForConditionalGeneration",
        texts={"qwen3": "qwen3"},
        mark="<|image_pad|>",
        names={
            name: own.replace(_LLAVA, "model.vision_encoder").replace(_JOINT, "model.vision_projection")
            for name, own in _MERGING.items()
            if not own.endswith(".bias")
        },
        layers="model.vision_encoder.transformer.layers",
        optional=frozenset(),
        ignored=frozenset(),
    ),
}
