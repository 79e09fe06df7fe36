"""Tiny random models that see images, one of each family: a directory with weights, tokenizer and image processor."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tiny_model import make_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "initializer_range": 0.3,
}
_COHERE2 = _TEXT | {
    "model_type": "cohere2",
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.3,
}
_QWEN = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.3,
}
_QWEN3 = _QWEN | {"intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_HYBRID = {  # of a head's 32 numbers 16 rotate, by time, row and column in turns
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": _MROPE | {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5},
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_GLM = _QWEN | {"intermediate_size": 48, "out_hidden_size": 64, "image_size": 56}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_GLM_SIZE = {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 112 * 112}  # of two frames

_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 14,
    "initializer_range": 0.3,
}

_GEMMA4 = {
    **_TEXT,
    "model_type": "gemma4_text",
    "vocab_size_per_layer_input": 640,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "final_logit_softcapping": 5.0,
}
_GEMMA4_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 300,
    "initializer_range": 0.3,
}
_BUFFERS = {
    "std_bias": (-0.5, 0.5),
    "std_scale": (0.5, 2),
    "input_min": (-2, -1),
    "input_max": (1, 2),
    "output_min": (-2, -1),
    "output_max": (1, 2),
}
_GEMMA4_PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}

_PLACE = "<\uff5chy_place\u2581holder\u2581no\u2581{}\uff5c>"  # HunyuanVL's marks

_MINICPM: tuple[
    list[str], dict[str, Any], dict[str, Any]
] = (  # larger images become slices behind the whole; the tower merges windows on its way
    ["<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|video_pad|>"],
    {
        "text_config": _TEXT | _HYBRID | {"model_type": "qwen3_5_text"},
        "vision_config": _SIGLIP | {"num_hidden_layers": 3, "patch_size": 2},
        "insert_layer_id": 0,
        "tie_word_embeddings": False,
    },
    {"image_processor_type": "MiniCPMV4_6ImageProcessor", "scale_resolution": 32, "patch_size": 2},
)

# The marks of each family, the first of which stands for a part of an image; configuration; image processor.
FAMILIES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        ["<image>"],
        {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _CLIP, "vision_feature_layer": -2},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": 56},
    ),
    "llava_next": (
        ["<image>"],
        {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": _CLIP,
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
    ),
    "llava_next_video": (
        ["<image>", "<video>"],
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _CLIP,
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
    ),
    "granite_vision": (  # which uses several layers of its tower
        ["<image>"],
        {
            "text_config": _TEXT | {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0},
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "num_hidden_layers": 4},
            "vision_feature_layer": [-4, -3, 1, -1],
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96]],
        },
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"height": 32, "width": 32}, "crop_size": 32},
    ),
    "granite4_vision": (  # which adds features before some layers, the first and the last among them
        ["<image>"],
        {
            "text_config": _TEXT
            | {"model_type": "granite4_vision_text", "num_hidden_layers": 7}
            | {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
            "vision_config": _SIGLIP
            | {"model_type": "siglip_vision_model", "num_hidden_layers": 4}
            | {"hidden_size": 64, "vision_use_head": False},
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96]],
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0], [-3, 2]],
            "spatial_vision_layer": -2,
            "spatial_target_layers": [1, 3, 5, 6],
            "qformer_config": {"intermediate_size": 48, "num_hidden_layers": 1, "cross_attention_frequency": 1}
            | {"use_qformer_text_input": False, "model_type": "blip_2_qformer"},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"height": 32, "width": 32}, "crop_size": 32},
    ),
    "llava_onevision": (
        ["<image>", "<video>"],
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_grid_pinpoints": [[32 * rows, 32 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
            "vision_aspect_ratio": "anyres_max_3",
        },
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 32, "width": 32}},
    ),
    "vipllava": (
        ["<image>"],
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _CLIP,
            "vision_feature_layer": [-2, -3, 1],
        },
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": 56},
    ),
    "llama4": (  # whose mark of an image also stands before the view of the whole
        ["<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>"],
        {
            "text_config": _TEXT
            | {"model_type": "llama4_text", "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 96}
            | {"num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0]},
            "vision_config": _SIGLIP
            | {"vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48}
            | {"intermediate_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 32, "width": 32}, "max_patches": 4},
    ),
    "mllama": (  # two of whose layers attend to images
        ["<|image|>"],
        {
            "text_config": _TEXT
            | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "rope_parameters": {"rope_theta": 10_000.0}}
            | {"bos_token_id": 1, "vocab_size": 512},  # behind which the image token lies
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_global_layers": 2,
                "attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "vision_output_dim": 96,
                "intermediate_layers_indices": [0, 2],
                "initializer_range": 0.3,
            },
        },
        {"image_processor_type": "MllamaImageProcessor", "size": {"height": 32, "width": 32}, "max_image_tiles": 4},
    ),
    "fast_vlm": (  # whose tower has convolutions
        ["<image>"],
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "fastvit_mci3",
                "hidden_size": 128,
                "model_args": {"inference_mode": True, "layers": [1, 1, 1, 1, 1], "embed_dims": [8, 8, 16, 32, 64]},
            },
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 192}, "crop_size": 192},
    ),
    "perception_lm": (  # which pools what its tower makes
        ["<|image|>", "<|video|>"],
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "vit_pe_core_large_patch14_336",
                "model_args": {"embed_dim": 32, "num_heads": 2, "depth": 2, "mlp_ratio": 2.0, "global_pool": ""}
                | {"img_size": [56, 56], "ref_feat_shape": [4, 4]}
                | {"use_post_transformer_norm": False, "init_values": 0.1},
            },
            "projector_pooling_ratio": 2,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PerceptionLMImageProcessor", "tile_size": 56, "max_num_tiles": 4},
    ),
    "kimi_k25": (
        ["<|media_pad|>", "<|media_begin|>", "<|media_end|>"],
        {
            "text_config": _TEXT
            | {"model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
            | {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
            | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 64}
            | {"num_key_value_heads": 4},
            "vision_config": _SIGLIP | {"pos_emb_height": 6, "pos_emb_width": 6},
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 8, "max_patches": 40},
    ),
    "aria": (  # whose pictures have black beside them, which the tower does not see
        ["<|img|>"],
        {
            "text_config": _TEXT
            | {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2},
            "vision_config": _SIGLIP | {"model_type": "idefics3_vision", "patch_size": 70, "image_size": 490},
            "projector_patch_to_query_dict": {"49": 12},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "AriaImageProcessor", "max_image_size": 490, "min_image_size": 70},
    ),
    "hunyuan_vl": (  # whose images have numbers among the positions of their tokens, which have four
        [_PLACE.format(number) for number in (102, 100, 101)],
        {
            "text_config": _TEXT
            | {"model_type": "hunyuan_vl_text", "head_dim": 16}
            | {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 3.0, "factor": 1.0}
                | {"mrope_section": [2, 3, 1, 2]}
            },
            "vision_config": {
                **{name: value for name, value in _SIGLIP.items() if name != "image_size"},
                "max_image_size": 64,
            },
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "HunYuanVLImageProcessor", "patch_size": 8, "min_pixels": 1024, "max_pixels": 4096},
    ),
    "aya_vision": (  # whose place of an image is no token
        ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"],
        {
            "text_config": _COHERE2,
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        },
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32}, "max_patches": 4},
    ),
    "cohere2_vision": (
        ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"],
        {
            "text_config": _COHERE2,
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "alignment_intermediate_size": 96,
        },
        {
            "image_processor_type": "Cohere2VisionImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 4,
        },
    ),
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "granite_docling": (
        [
            *("<image>", "<fake_token_around_image>", "<global-img>"),
            *(f"<row_{row}_col_{column}>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)),
        ],
        {
            "text_config": _TEXT
            | {"model_type": "granite_docling_text", "embedding_multiplier": 3.0, "logits_scaling": 2.5}
            | {"attention_multiplier": 0.25, "residual_multiplier": 0.7},
            "vision_config": _SIGLIP | {"scale_factor": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
            "density_router_hidden_size": 8,  # which nothing uses
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "GraniteDoclingImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 4,
        },
    ),
    "got_ocr2": (
        ["<imgpad>", "<img>", "</img>"],
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 80,
                "patch_size": 8,
                "window_size": 4,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
                "initializer_range": 0.3,
            },
        },
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 80, "width": 80}, "crop_to_patches": True},
    ),
    "qianfan_ocr": (  # whose place of an image is no token of it
        ["<IMG_CONTEXT>", "<img>", "</img>"],
        {
            "text_config": _TEXT | {"model_type": "qwen3", "head_dim": 16, "sliding_window": None},
            "vision_config": _SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8]},
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32}, "max_patches": 4},
    ),
    "deepseek_ocr2": (  # whose queries are as many as in the published model
        ["<image>"],
        {
            "text_config": _TEXT
            | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            "vision_config": {
                "sam_config": {
                    "hidden_size": 16,
                    "output_channels": 8,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 48,
                    "patch_size": 1,
                    "window_size": 6,
                    "global_attn_indexes": [],
                    "downsample_channels": [8, 32],
                    "initializer_range": 0.3,
                },
                "encoder_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "initializer_range": 0.3,
                },
            },
        },
        {
            "image_processor_type": "DeepseekOcr2ImageProcessor",
            "size": {"height": 48, "width": 48},
            "tile_size": 48,
        },
    ),
    "video_llama_3": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": {name: value for name, value in _SIGLIP.items() if name != "image_size"}
            | {"patch_size": 14},
        },
        {
            "image_processor_type": "VideoLlama3ImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        },
    ),
    "ovis2": (  # whose marks between tiles have features, too
        ["<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": {**_SIGLIP, "hidden_stride": 2, "vocab_size": 48},
            "hidden_size": 64,
            "vocab_size": 640,
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "Ovis2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "crop_to_patches": True,
            "max_patches": 4,
        },
    ),
    "idefics2": (  # which shows quarters and the whole
        ["<image>", "<fake_token_around_image>"],
        {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": _SIGLIP,
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 3,
                "resampler_depth": 2,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
                "initializer_range": 0.3,
            },
        },
        {
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"shortest_edge": 16, "longest_edge": 32},
            "do_image_splitting": True,
        },
    ),
    "janus": (  # whose other half makes pictures
        ["<image_placeholder>", "<begin_of_image>", "<end_of_image>"],
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _SIGLIP | {"projection_dim": 64, "mlp_ratio": 2.0},
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 16,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "JanusImageProcessor", "size": {"height": 32, "width": 32}},
    ),
    "deepseek_vl": (
        ["<image_placeholder>"],
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        },
        {"image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 32, "width": 32}},
    ),
    "deepseek_vl_hybrid": (  # as 7B, which has two towers
        ["<image_placeholder>"],
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 8,
                "window_size": 4,
                "global_attn_indexes": [0],
                "mlp_dim": 48,
                "initializer_range": 0.3,
            },
        },
        {
            "image_processor_type": "DeepseekVLHybridImageProcessor",
            "size": {"height": 32, "width": 32},
            "high_res_size": {"height": 64, "width": 64},
        },
    ),
    "smolvlm": (
        [
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            "<row_1_col_1>",
            "<row_1_col_2>",
            "<row_2_col_1>",
            "<row_2_col_2>",
        ],
        {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _SIGLIP, "scale_factor": 2},
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
        },
    ),
    "qwen2_vl": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT | {"rope_parameters": _MROPE},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "initializer_range": 0.3,
            },
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "qwen2_5_vl": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT | {"rope_parameters": _MROPE},
            "vision_config": _QWEN
            | {"intermediate_size": 64, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]},
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "qwen3_vl": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT | {"rope_parameters": _MROPE, "head_dim": 16},
            "vision_config": _QWEN3 | {"deepstack_visual_indexes": [0, 1]},
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "qwen3_vl_moe": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT | _EXPERTS | {"rope_parameters": _MROPE, "head_dim": 16},
            "vision_config": _QWEN3 | {"deepstack_visual_indexes": [0, 1]},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "qwen3_5": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {"text_config": _TEXT | _HYBRID, "vision_config": _QWEN3, "tie_word_embeddings": False},
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "qwen3_5_moe": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT | _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 64},
            "vision_config": _QWEN3,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "internvl": (
        ["<IMG_CONTEXT>", "<img>", "</img>"],
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8]},
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32}, "max_patches": 4},
    ),
    "lfm2_vl": (  # larger images become tiles, with a view of the whole
        [
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{column}|>" for row, column in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1))),
        ],
        {
            "text_config": _TEXT
            | {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "model_type": "siglip2_vision_model",
                **{name: value for name, value in _SIGLIP.items() if name != "image_size"},
                "num_patches": 16,
                "vision_use_head": False,
            },
            "projector_hidden_size": 48,
            "downsample_factor": 2,
            "tie_word_embeddings": True,
        },
        {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "encoder_patch_size": 8,
            "tile_size": 32,
            "min_image_tokens": 2,
            "max_image_tokens": 8,
            "max_tiles": 4,
        },
    ),
    "lfm3_vl": (  # patches as in the Qwen models, but plain positions
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT
            | {
                "model_type": "lfm3",
                "head_dim": 16,
                "layer_types": ["conv", "sliding_attention", "full_attention"],
                "sliding_window": 20,
                "conv_L_cache": 5,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "patch_size": 14,
                "initializer_range": 0.3,
            },
            "projector_hidden_size": 48,
            "tie_word_embeddings": True,
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "glm4v": (
        ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"],
        {"text_config": _TEXT | {"rope_parameters": _GLM_ROPE}, "vision_config": _GLM, "tie_word_embeddings": False},
        {"image_processor_type": "Glm4vImageProcessor", "size": _GLM_SIZE},
    ),
    "glm4v_moe": (
        ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"],
        {
            "text_config": _TEXT
            | {
                "rope_parameters": _GLM_ROPE,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 1,
            },
            "vision_config": _GLM,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Glm4vImageProcessor", "size": _GLM_SIZE},
    ),
    "glm46v": (
        ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"],
        {
            "text_config": _TEXT | {"model_type": "glm4v_text", "rope_parameters": _GLM_ROPE},
            "vision_config": _GLM | {"model_type": "glm4v_vision"},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Glm46VImageProcessor", "size": _GLM_SIZE},
    ),
    "glmga": (
        ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"],
        {
            "text_config": _TEXT | {"model_type": "glm4v_text", "rope_parameters": _GLM_ROPE},
            "vision_config": _GLM | {"model_type": "glm4v_vision"},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "GlmgaImageProcessor", "size": _GLM_SIZE, "patch_expand_factor": 2},
    ),
    "glm_ocr": (
        ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"],
        {
            "text_config": _TEXT | {"rope_parameters": _MROPE, "head_dim": 16},
            "vision_config": _GLM,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Glm46VImageProcessor", "size": _GLM_SIZE},
    ),
    "ernie4_5_vl_moe": (  # whose tokens in and around images pass experts of their own
        ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
        {
            "text_config": _TEXT
            | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [64, 32], "moe_num_shared_experts": 1}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]}},
            "vision_config": _QWEN | {"depth": 3, "intermediate_size": 64},
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        },
    ),
    "exaone4_5": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT
            | {"model_type": "exaone4", "sliding_window": 20, "sliding_window_pattern": "LG"}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "vision_config": _QWEN
            | {"intermediate_size": 64, "out_hidden_size": 64, "num_key_value_heads": 1}
            | {"window_size": 56, "fullatt_block_indexes": [1]},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "hyperclovax_vision_v2": (
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
        {
            "text_config": _TEXT
            | {"model_type": "hyperclovax", "embedding_multiplier": 3.0, "logits_scaling": 0.4}
            | {"attention_multiplier": 0.25, "residual_multiplier": 0.7},
            "vision_config": _QWEN
            | {"model_type": "qwen2_5_vl_vision", "intermediate_size": 64, "out_hidden_size": 48}
            | {"window_size": 56, "fullatt_block_indexes": [1]},
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    ),
    "paddleocr_vl": (
        ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"],
        {
            "text_config": _TEXT | {"head_dim": 16, "rope_parameters": _MROPE},
            "vision_config": _SIGLIP | {"patch_size": 14, "image_size": 56, "spatial_merge_size": 2},
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        },
    ),
    "lighton_ocr": (
        ["<|image_pad|>"],
        {
            "text_config": _TEXT | {"model_type": "qwen3", "head_dim": 16, "sliding_window": None},
            "vision_config": _PIXTRAL,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
    ),
    "gemma3": (  # an image has more tokens than the window, and than some steps
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        {
            "text_config": _TEXT
            | {
                "model_type": "gemma3_text",
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 20,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": _SIGLIP
            | {"model_type": "siglip_vision_model", "image_size": 80, "vision_use_head": False},
            "mm_tokens_per_image": 25,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 80, "width": 80}},
    ),
    "paligemma": (  # whose prompts see themselves as a whole
        ["<image>", "<bos>"],
        {
            "text_config": _TEXT | {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16},
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "projection_dim": 64,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}, "image_seq_length": 16},
    ),
    "paligemma2": (  # whose answers leave the windows of their prompts
        ["<image>", "<bos>"],
        {
            "text_config": _TEXT
            | {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 72},
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "projection_dim": 64,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}, "image_seq_length": 16},
    ),
    "gemma3n": (  # whose tokens around images, and of sounds, have embeddings of their own
        ["<image_soft_token>", "<end_of_image>", "<start_of_image>"],
        {
            "text_config": _TEXT
            | {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16, "head_dim": 16}
            | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [128] * 4, "laurel_rank": 16}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20}
            | {"activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "final_logit_softcapping": 5.0},
            "vision_config": {
                "model_args": {"channel_multiplier": 0.02, "msfa_output_resolution": 4},
                "vocab_size": 8,
                "vocab_offset": 512,
                "label_names": ["LABEL_0", "LABEL_1"],
            },
            "audio_config": {  # which nothing uses but for its tokens
                "hidden_size": 32,
                "vocab_size": 120,
                "vocab_offset": 520,
                "conf_num_hidden_layers": 1,
                "conf_num_attention_heads": 2,
                "sscp_conv_channel_size": [8, 8],
            },
            "vision_soft_tokens_per_image": 16,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}, "do_normalize": False},
    ),
    "gemma4": (  # as its large ones: image tokens see each other; an image has more tokens than the window
        ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"],
        {
            "text_config": _GEMMA4 | {"use_bidirectional_attention": "vision", "attention_k_eq_v": True},
            "vision_config": _GEMMA4_TOWER | {"standardize": True},
            "audio_config": None,
            "tie_word_embeddings": False,
        },
        _GEMMA4_PROCESSOR,
    ),
    "gemma4_e": (  # as its small ones: all is causal, with inputs of layers, and layers that share keys
        ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"],
        {
            "text_config": _GEMMA4
            | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "vision_config": _GEMMA4_TOWER | {"use_clipped_linears": True},
            "audio_config": {  # which nothing uses
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 8],
                "output_proj_dims": 32,
            },
            "tie_word_embeddings": False,
        },
        _GEMMA4_PROCESSOR,
    ),
    "gemma4_unified": (  # as 12B, which has no tower
        ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"],
        {
            "text_config": {name: value for name, value in _GEMMA4.items() if "per_layer" not in name}
            | {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision", "attention_k_eq_v": True},
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 64,
                "mm_posemb_size": 80,
                "output_proj_dims": 64,
                "initializer_range": 0.3,
            },
            "audio_config": None,
            "tie_word_embeddings": False,
        },
        _GEMMA4_PROCESSOR | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
    ),
    "mistral3": (
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {
            "text_config": _TEXT | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": _PIXTRAL,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
    ),
}

# The same of those in GGUF whose text differs from that of their families.
OTHER_TEXTS: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_omni": (  # what sees of it, with tokens of its own
        ["<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>", "<|VIDEO|>"],
        *FAMILIES["qwen2_5_vl"][1:],
    ),
    "internvl_moe": (
        FAMILIES["internvl"][0],
        FAMILIES["internvl"][1]
        | {
            "text_config": _TEXT
            | {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 64, "norm_topk_prob": True},
        },
        FAMILIES["internvl"][2],
    ),
    "ministral3": (  # a Mistral 3, whose attention grows sharper with the text
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {
            "text_config": _TEXT
            | {"model_type": "ministral3", "head_dim": 16}
            | {
                "rope_parameters": {
                    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16},
                    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                    "llama_4_scaling_beta": 0.3,
                },
            },
            "vision_config": _PIXTRAL,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
    ),
}

KINDS = {
    **{"paligemma2": "paligemma", "gemma4_e": "gemma4", "granite_vision": "llava_next"},
    **{"ministral3": "mistral3", "internvl_moe": "internvl", "qwen2_5_omni": "qwen2_5_vl"},
}
"""The model_type of families that are named otherwise here."""

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_model(directory: Path, family: str, seed: int = 0, tower: Mapping[str, Any] | None = None) -> Path:
    """Write a model of the family into `directory` and return it; `tower` are changes to its vision_config."""
    import torch
    import transformers

    library: Any = transformers
    marks, settings, processor = (FAMILIES | OTHER_TEXTS)[family]
    tokenizer: Any = make_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": marks}, replace_extra_special_tokens=False)
    written = f"<|vision_start|>{marks[0]}<|vision_end|>" if "<|vision_start|>" in marks else marks[family == "gemma3"]
    if family in ("aya_vision", "qianfan_ocr", "ovis2"):
        written = "<image>"
    if family == "llama4":
        written = marks[-1]
    if family == "hunyuan_vl":
        written = "".join(marks[index] for index in (1, 0, 2))
    tokenizer.chat_template = _TEMPLATE.replace("MARK", written)
    end = tokenizer.eos_token_id
    ids = tokenizer.convert_tokens_to_ids(marks)
    own = {"image_token_id": ids[0]}
    if family in ("minicpmv4_6", "minicpmv4_7"):
        own |= {"video_token_id": ids[-1]}
        if family == "minicpmv4_7":
            names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id")
            own |= dict(zip(names, ids[1:5], strict=True)) | {"newline_id": tokenizer.encode("\n")[0]}
    elif "<|video_pad|>" in marks:
        own |= {"vision_start_token_id": ids[1], "vision_end_token_id": ids[2], "video_token_id": ids[3]}
    if family in ("gemma4", "gemma4_e", "gemma4_unified"):
        own |= {"boi_token_id": ids[1], "eoi_token_id": ids[2], "video_token_id": ids[3], "audio_token_id": ids[4]}
    if family == "gemma3n":
        from penstock.engine.vision.towers.mobilenet import provide_tower

        own |= {"boi_token_id": ids[2], "eoi_token_id": ids[1], "audio_token_id": 639}
        provide_tower()
    if family in ("fast_vlm", "perception_lm"):
        from penstock.engine.vision.towers.timm_towers import provide_timm_towers

        provide_timm_towers()
    if family == "gemma3":
        own |= {"boi_token_index": ids[1], "eoi_token_index": ids[2]}
    if family in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga"):
        own |= {"image_start_token_id": ids[1], "image_end_token_id": ids[2], "video_token_id": ids[3]}
    if family == "ernie4_5_vl_moe":
        own |= {"image_start_token_id": ids[1], "image_end_token_id": ids[2]}
        own |= {"video_token_id": 637, "video_start_token_id": 638, "video_end_token_id": 639}
        written = "".join(marks[index] for index in (1, 0, 2))
        tokenizer.chat_template = _TEMPLATE.replace("MARK", written)
    if family == "kimi_k25":
        own |= {"video_token_id": 639}
    if family == "perception_lm":
        own |= {"video_token_id": ids[1]}
    if family == "ovis2":
        own |= {"visual_indicator_token_ids": ids[1:]}
    if family in ("llava_onevision", "llava_next_video"):
        own = {"image_token_index": ids[0], "video_token_index": ids[1]}
    if family in (
        "llava",
        "llava_next",
        "granite_vision",
        "vipllava",
        "aya_vision",
        "ministral3",
        "mistral3",
        "got_ocr2",
        "llama4",
        "fast_vlm",
        "aria",
        "mllama",
    ):
        own = {"image_token_index": ids[0]}
    text = settings["text_config"] | {"eos_token_id": end, "pad_token_id": end}
    parts = {"text_config": text, "vision_config": settings["vision_config"] | dict(tower or {})}
    config = library.AutoConfig.for_model(KINDS.get(family, family), **settings | own | parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():  # towers begin with small numbers, which make images alike
            if parameter.ndim > 1 and parameter.std() < 0.1:
                torch.nn.init.normal_(parameter, std=0.1)
            if name.endswith(("_gate", ".gate", "gate_attn", "gate_ffn")):  # Llama's, likewise
                parameter.data.fill_(0.7)
            if name.endswith("_alpha"):  # DeepSeek-VL's, likewise
                parameter.data.fill_(0.7)
            if name.endswith((".gamma", ".gamma_1", ".gamma_2")):  # which begin as if blocks were not there
                parameter.data.uniform_(0.5, 1)
        for name, buffer in model.named_buffers():  # Gemma 4's, which begin as if they were not there
            if (kind := name.rpartition(".")[2]) in _BUFFERS:
                buffer.uniform_(*_BUFFERS[kind])
    model.generation_config = library.GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def picture(width: int = 60, height: int = 40, salt: int = 0, kind: str = "PNG") -> bytes:
    """A file with a picture that differs by its salt."""
    image = Image.new("RGB", (width, height))
    image.putdata(
        [
            ((x * 7 + salt * 53) % 256, (y * 5 + salt * 91) % 256, (x * y + salt * 29) % 256)
            for y in range(height)
            for x in range(width)
        ]
    )
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def animation(frames: Sequence[int] = (0, 1)) -> bytes:
    """A GIF that moves."""
    first, *others = [Image.new("RGB", (16, 16), (80 * frame, 40, 20)) for frame in frames]
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others)
    return file.getvalue()


def damaged() -> bytes:
    """A picture of which the end is missing."""
    whole = picture()
    return whole[: len(whole) // 2]


def enormous(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is as large as that; to decode it would take that much memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
