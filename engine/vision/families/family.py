"""The families of models that see images. Knows no torch and no transformers."""

from __future__ import annotations

from .anyres import NEXT_SIZES, ONEVISION_SIZES, granite4_layers, write_granite4, write_next, write_onevision
from .bounds import bounds, budget, frame_bounds
from .canvas import Canvas
from .covering import CoveringProcessor, write_covering
from .crossing import num_tiles, write_crossed
from .fitting import FittingProcessor, rows_and_columns_of_tiles, write_fitting
from .form import PROCESSORS, Family
from .merging import MergingProcessor
from .padding import PaddingProcessor, write_padded
from .slices import image_number, slices, write_aya, write_slices
from .thumbnails import ThumbnailProcessor, tile_bounds, tiles_and_side, write_thumbnails
from .tiling import TilingProcessor, write_tiles
from .writing import (
    GEMMA3N_PROCESSOR,
    GOT_TEMPLATE,
    JANUS_OPENING,
    PALIGEMMA_TEMPLATE,
    Config,
    crops,
    gemma4_settings,
    gemma_tokens,
    hunyuan_axes,
    join_idefics2,
    join_paligemma,
    merge_side,
    merged_rows_and_columns,
    mutual_soft_tokens,
    no_grid,
    ovis_marks,
    patches,
    patches_and_side,
    pixtral_patch,
    prompt_length,
    rows_and_columns,
    rows_by_columns,
    rows_columns_and_route,
    shape,
    side_and_crops,
    sides_and_crops,
    sizes,
    sizes_and_count,
    soft_tokens,
    tile_count,
    views,
    write_aria,
    write_docling,
    write_fast,
    write_gemma,
    write_gemma3n,
    write_got,
    write_hunyuan,
    write_idefics2,
    write_internvl,
    write_janus,
    write_lighton,
    write_llava,
    write_merged,
    write_ocr,
    write_ovis,
    write_patches,
    write_pixtral,
    write_siglip,
    write_smolvlm,
    write_vipllava,
)


def family_of(config: Config) -> Family | None:
    """The family of a model with this config.json; None if it sees no images, or in a way that is not supported."""
    kind = config.get("model_type", "")
    if kind in FAMILIES:
        if kind == "llava" and config.get("vision_config", {}).get("model_type") == "pixtral":
            return _PIXTRAL
        if kind in ("gemma4", "gemma4_unified") and not config.get("vision_config"):  # its other parts may be missing
            return None
        return FAMILIES[kind]
    return None


def why_blind(config: Config) -> str:
    """Why a model without a family takes no images, as the end of a sentence."""
    kind = config.get("model_type", "")
    if kind in _BIDIRECTIONAL:
        return f"takes text alone: {kind} lets tokens see each other in both directions in a way that is not supported"
    if kind in FAMILIES:
        return f"takes text alone: its files have no {' and no '.join(PROCESSORS)}, which would say how it sees"
    if "vision_config" in config:
        return f"takes text alone: images are not supported for {kind}, but for {', '.join(sorted(FAMILIES))}"
    return "takes text alone"


_QWEN = Family(
    patches,
    write_patches,
    merge=merge_side,
    blocks=("visual.blocks", "visual.deepstack_merger_list"),
    bounded=bounds,
)
_PLAIN = _QWEN._replace(merge=lambda _: 0, blocks=("visual.blocks",))  # whose positions are plain
_GLM = _QWEN._replace(blocks=("visual.blocks",), bounded=frame_bounds)
_TILES = Family(rows_and_columns, write_smolvlm, lambda _: {"return_row_col_info": True}, is_rigid=True, tiles=1)
_INTERNVL = Family(tile_count, write_internvl, lambda _: {"crop_to_patches": True}, tiles=0)
_PIXTRAL = Family(
    sizes,
    write_pixtral,
    lambda config: {"patch_size": pixtral_patch(config)},
    blocks=("vision_tower.transformer.layers",),
)
_MINICPM = Family(
    slices,
    write_slices,
    lambda config: {"downsample_mode": config.get("downsample_mode", "16x")},
    blocks=("vision_tower.encoder.layers", "vision_tower.vit_merger"),
    may_be_blind=True,
    numbers=image_number,
)
_GEMMA4 = Family(
    soft_tokens,
    lambda _, grid, mark: f"<|image>{mark * grid[0]}<image|>",
    blocks=("vision_tower.encoder.layers",),
    mutual=mutual_soft_tokens,
    in_windows=True,
    bounded=budget,
    settings=gemma4_settings,
)
_NEXT = Family(
    sizes,
    write_next,
    lambda config: {"image_grid_pinpoints": config.get("image_grid_pinpoints") or NEXT_SIZES},
    blocks=("vision_tower.encoder.layers",),
    may_be_blind=True,
)
_FASTVIT_PARTS = ["stem", "stages.0.blocks"]  # in turn: what comes before the blocks of a stage changes their size
_FASTVIT_PARTS += [f"stages.{stage}.{part}" for stage in (1, 2) for part in ("downsample", "blocks")]
_FASTVIT_PARTS += [f"stages.{stage}.{part}" for stage in (3, 4) for part in ("downsample", "pos_emb", "blocks")]
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        crops,
        write_gemma,
        blocks=("vision_tower.encoder.layers",),
        place=lambda config: int(config.get("boi_token_index", 255_999)),
        mutual=gemma_tokens,
        defaults={  # those of its processor; crops are off
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
    ),
    "paligemma": Family(
        no_grid,
        write_siglip,
        blocks=("vision_tower.encoder.layers",),
        mutual=prompt_length,
        may_be_blind=True,
        join=join_paligemma,
        is_prefix=True,
        template=PALIGEMMA_TEMPLATE,
    ),
    "gemma3n": Family(
        no_grid,
        write_gemma3n,
        blocks=("vision_tower.timm_model.blocks",),
        settings=lambda _: GEMMA3N_PROCESSOR,
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4._replace(blocks=(), prepares=MergingProcessor),
    "aya_vision": Family(
        tile_count,
        write_aya,
        lambda _: {"crop_to_patches": True},
        tiles=0,
        may_be_blind=True,
        mark="<image>",
    ),
    "cohere2_vision": Family(
        tile_count,
        write_covering,
        tiles=0,
        may_be_blind=True,
        prepares=CoveringProcessor,
    ),
    "llama4": Family(
        rows_and_columns_of_tiles,
        write_fitting,
        tiles=0,
        may_be_blind=True,
        prepares=FittingProcessor,
        narrows=True,
        mark="<|image|>",
    ),
    "mllama": Family(
        num_tiles,
        write_crossed,
        blocks=("vision_model.transformer.layers+vision_model.global_transformer.layers",),
        may_be_blind=True,
        crosses=True,
    ),
    "perception_lm": Family(
        tiles_and_side,
        write_thumbnails,
        tiles=1,
        may_be_blind=True,
        bounded=tile_bounds,
        prepares=ThumbnailProcessor,
    ),
    "kimi_k25": Family(
        patches,
        write_padded,
        blocks=("vision_tower.layers",),
        may_be_blind=True,
        prepares=PaddingProcessor,
        narrows=True,
    ),
    "aria": Family(
        side_and_crops,
        write_aria,
        blocks=("vision_tower.encoder.layers",),
        may_be_blind=True,
        narrows=True,
    ),
    "hunyuan_vl": Family(
        merged_rows_and_columns,
        write_hunyuan,
        blocks=("vision_tower.layers",),
        may_be_blind=True,
        bounded=bounds,
        axes=hunyuan_axes,
    ),
    "fast_vlm": Family(
        shape,
        write_fast,
        blocks=("+".join(f"vision_tower.timm_model.{part}" for part in _FASTVIT_PARTS),),
        may_be_blind=True,
    ),
    "vipllava": Family(shape, write_vipllava, blocks=("vision_tower.encoder.layers",), may_be_blind=True),
    "llava": Family(shape, write_llava, blocks=("vision_tower.encoder.layers",)),
    "llava_next": _NEXT,
    "llava_next_video": _NEXT,  # of images alone
    "granite4_vision": Family(
        sizes,
        write_granite4,
        lambda config: {"image_grid_pinpoints": config.get("image_grid_pinpoints") or NEXT_SIZES},
        blocks=("vision_tower.encoder.layers",),
        may_be_blind=True,
        deep=granite4_layers,
    ),
    "llava_onevision": Family(
        sizes_and_count,
        write_onevision,
        lambda config: {"image_grid_pinpoints": config.get("image_grid_pinpoints") or ONEVISION_SIZES},
        blocks=("vision_tower.encoder.layers",),
        may_be_blind=True,
        by_count=True,
    ),
    "idefics2": Family(views, write_idefics2, is_rigid=True, tiles=1, may_be_blind=True, join=join_idefics2),
    "idefics3": _TILES,
    "granite_docling": Family(rows_columns_and_route, write_docling, tiles=1, may_be_blind=True),
    "got_ocr2": Family(
        no_grid,
        write_got,
        lambda _: {"crop_to_patches": False},
        is_rigid=True,
        blocks=("vision_tower.layers",),
        may_be_blind=True,
        narrows=True,
        template=GOT_TEMPLATE,
    ),
    "qianfan_ocr": _INTERNVL._replace(may_be_blind=True, mark="<image>"),
    "deepseek_ocr2": Family(
        sides_and_crops,
        write_ocr,
        lambda _: {"crop_to_patches": True, "min_patches": 2, "max_patches": 6},
        may_be_blind=True,
        narrows=True,
        crops="pixel_values_local",
    ),
    "video_llama_3": Family(
        patches_and_side,
        write_merged,
        blocks=("vision_model.encoder.layers",),
        may_be_blind=True,
        bounded=bounds,
    ),
    "ovis2": Family(
        rows_by_columns,
        write_ovis,
        tiles=0,
        may_be_blind=True,
        mark="<image>",
        marks=ovis_marks,
    ),
    "janus": Family(
        no_grid,
        write_janus,
        blocks=("vision_model.encoder.layers",),
        may_be_blind=True,
        opening=JANUS_OPENING,
    ),
    "deepseek_vl": Family(no_grid, write_siglip, blocks=("vision_model.encoder.layers",), may_be_blind=True),
    "deepseek_vl_hybrid": Family(
        no_grid,
        write_siglip,
        blocks=("vision_model.encoder.layers+high_res_vision_model.vision_encoder.layers",),
        may_be_blind=True,
        narrows=True,
    ),
    "smolvlm": _TILES,
    "lfm2_vl": Family(
        lambda _, made: tuple(made["tiles"]),
        lambda _, grid, mark: write_tiles(grid, mark),
        tiles=0,
        prepares=TilingProcessor,
    ),
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM._replace(canvas=Canvas.of, sample=(16, 12)),
    "internvl": _INTERNVL,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "glm_ocr": _GLM,
    "glmga": _GLM,
    "ernie4_5_vl_moe": _QWEN._replace(
        blocks=("vision_tower.blocks",),
        may_be_blind=True,
        apart=lambda config: (config.get("image_start_token_id", 101_304), config.get("image_end_token_id", 101_305)),
    ),
    "exaone4_5": _PLAIN,
    "hyperclovax_vision_v2": _PLAIN._replace(blocks=("vision_model.blocks",), may_be_blind=True),
    "paddleocr_vl": _QWEN._replace(blocks=("visual.vision_model.encoder.layers",)),
    "lfm3_vl": _PLAIN._replace(blocks=("vision_tower.layers",), narrows=True),
    "lighton_ocr": Family(sizes, write_lighton, blocks=("vision_encoder.transformer.layers",)),
    "mistral3": _PIXTRAL,
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN._replace(may_be_blind=True),
    "qwen3_5_moe": _QWEN._replace(may_be_blind=True),
}
_BIDIRECTIONAL = {"shieldgemma2", "t5gemma2"}
