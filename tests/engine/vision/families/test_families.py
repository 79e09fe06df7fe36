"""How images are written into prompts, against transformers' own processors and positions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.aria.processing_aria import AriaProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor
from transformers.models.granite_docling.processing_granite_docling import GraniteDoclingProcessor
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLModel
from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.janus.processing_janus import DEFAULT_SYSTEM_PROMPT, JanusProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.models.video_llama_3.processing_video_llama_3 import VideoLlama3Processor

from penstock.engine import EngineRequest, GenerationParams
from penstock.engine.models import read_model_info
from penstock.engine.vision.defaults import completed
from penstock.engine.vision.families.family import FAMILIES, family_of, why_blind
from penstock.engine.vision.families.writing import image_token
from penstock.engine.vision.images import PromptImage, marks
from penstock.engine.vision.layout import ImageLayout
from penstock.engine.vision.sight import load_sight
from penstock.schemas.errors import InvalidRequest, ModelLoadError
from penstock.schemas.openai.chat import ChatMessage

TILES: dict[str, Any] = {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4}
QWEN: dict[str, Any] = {"vision_config": {"spatial_merge_size": 2}}
CLIP: dict[str, Any] = {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}}
SIGLIP: dict[str, Any] = {"vision_config": {"model_type": "siglip_vision_model", "patch_size": 14}}
PIXTRAL: dict[str, Any] = {"vision_config": {"model_type": "pixtral", "patch_size": 16}}
TOKENS = {"image_token": "*", "fake_image_token": "<fake_token_around_image>", "image_seq_len": 64}


def written(kind: str, config: dict[str, Any], made: dict[str, Any]) -> str:
    family = family_of(config | {"model_type": kind})
    assert family is not None
    return family.write(config | {"model_type": kind}, family.grid(config, made), "*")


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (1, 1), (2, 3)])
@pytest.mark.parametrize(("kind", "theirs"), [("smolvlm", SmolVLMProcessor), ("idefics3", Idefics3Processor)])
def test_tiles_are_written_as_by_transformers(kind: str, theirs: Any, rows: int, columns: int) -> None:
    made = {"rows": [[rows]], "cols": [[columns]]}
    own = SimpleNamespace(**TOKENS, global_image_token="<global-img>", global_image_tag="<global-img>")
    assert written(kind, TILES, made) == theirs.replace_image_token(own, made, 0)


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 36, 2)])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "lfm3_vl",
        "glm_ocr",
        "exaone4_5",
        "paddleocr_vl",
        "glm4v",
        "glm4v_moe",
        "glm46v",
        "glmga",
    ],
)
def test_patches_are_written_as_by_transformers(kind: str, grid: tuple[int, int, int]) -> None:
    made = {"image_grid_thw": np.array([grid])}
    own = SimpleNamespace(image_token="*", image_processor=SimpleNamespace(merge_size=2))
    theirs: Any = Qwen2_5_VLProcessor.replace_image_token
    assert written(kind, QWEN, made) == theirs(own, made, 0)


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize(("config", "extra"), [(CLIP, 1), (SIGLIP, 0)])
def test_features_of_a_tower_are_counted_as_by_transformers(config: Any, extra: int, strategy: str) -> None:
    made = {"pixel_values": np.zeros((1, 3, 336, 336))}
    own = SimpleNamespace(
        image_token="*", patch_size=14, num_additional_image_tokens=extra, vision_feature_select_strategy=strategy
    )
    theirs: Any = LlavaProcessor.replace_image_token
    assert written("llava", config | {"vision_feature_select_strategy": strategy}, made) == theirs(own, made, 0)


@pytest.mark.parametrize("size", [(64, 96), (80, 112)])
def test_the_tokens_of_a_page_are_counted_as_by_transformers(size: tuple[int, int]) -> None:
    made = {"image_sizes": [size]}  # those of the second are no multiples of a token's
    own = SimpleNamespace(image_token="*", effective_patch_size=32)
    theirs: Any = LightOnOcrProcessor.replace_image_token
    assert written("lighton_ocr", PIXTRAL | {"spatial_merge_size": 2}, made) == theirs(own, made, 0)


@pytest.mark.parametrize(
    ("kind", "merge", "wanted"),
    [
        ("mistral3", 2, "***[IMG_BREAK]***[IMG_END]"),
        ("llava", 1, "******[IMG_BREAK]******[IMG_BREAK]******[IMG_BREAK]******[IMG_END]"),
    ],
)
def test_rows_end_in_breaks(kind: str, merge: int, wanted: str) -> None:
    """As in transformers' processor of Pixtral, which cannot be imported without torchvision."""
    assert written(kind, PIXTRAL | {"spatial_merge_size": merge}, {"image_sizes": [(64, 96)]}) == wanted


@pytest.mark.parametrize("crops", [0, 1, 3])
def test_gemma_is_written_as_by_transformers(crops: int) -> None:
    made = {"num_crops": [crops]}
    own = SimpleNamespace(full_image_sequence="\n\n<start_of_image>****<end_of_image>\n\n")
    theirs: Any = Gemma3Processor.replace_image_token
    assert written("gemma3", {"mm_tokens_per_image": 4}, made) == theirs(own, made, 0)


@pytest.mark.parametrize(("kind", "theirs"), [("gemma4", Gemma4Processor), ("gemma4_unified", Gemma4UnifiedProcessor)])
@pytest.mark.parametrize("count", [1, 66])
def test_gemma_4_is_written_as_by_transformers(kind: str, theirs: Any, count: int) -> None:
    made = {"num_soft_tokens_per_image": [count]}
    own = SimpleNamespace(boi_token="<|image>", image_token="*", eoi_token="<image|>")
    wanted = theirs.replace_image_token(own, made, 0)
    assert written(kind, {"vision_config": {"patch_size": 16}}, made) == wanted


@pytest.mark.parametrize(
    ("fewest", "most", "wanted"),
    [
        (None, None, 280),
        (None, 512 * 512, 70),
        (None, 10_000, 70),
        (None, 140 * 48**2, 140),
        (None, 10_000_000, 280),
        (281 * 48**2, None, 560),
        (10_000_000, None, 1120),
        (10_000_000, 600 * 48**2, 560),
        (10_000, None, 280),
    ],
)
def test_gemma_4_takes_as_many_tokens_as_its_bounds_allow(fewest: int | None, most: int | None, wanted: int) -> None:
    """A number that its processor knows, for each of which a token has 48 x 48 pixels."""
    family = family_of({"model_type": "gemma4", "vision_config": {"patch_size": 16}})
    assert family is not None and family.bounded is not None
    assert family.bounded(Gemma4ImageProcessorPil(), fewest, most) == {"max_soft_tokens": wanted}


def test_a_gemma_4_without_a_tower_takes_text_alone() -> None:
    for kind in ("gemma4", "gemma4_unified"):
        config: dict[str, Any] = {"model_type": kind, "vision_config": None, "text_config": {}}
        assert family_of(config) is None


@pytest.mark.parametrize(("kind", "theirs"), [("internvl", InternVLProcessor), ("qianfan_ocr", QianfanOCRProcessor)])
def test_tiles_in_a_row_are_written_as_by_transformers(kind: str, theirs: Any) -> None:
    made = {"num_patches": [3]}
    own = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="*", image_seq_length=256, image_seq_len=256
    )
    assert written(kind, {"image_seq_length": 256}, made) == theirs.replace_image_token(own, made, 0)


@pytest.mark.parametrize("theirs", [Qwen2_5_VLModel, Glm4vModel])
@given(
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    data=st.data(),
)
def test_positions_are_those_of_transformers(
    theirs: Any, parts: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Text before each image, and some behind: every range of tokens gets its part of the whole."""
    ids: list[int] = []
    images = []
    for text, rows, columns in parts:
        ids += [5] * text
        grid = 1, 2 * rows, 2 * columns
        images.append(PromptImage("0" * 64, len(ids), rows * columns, grid))
        ids += [9] * (rows * columns)
    ids += [5] * 3
    tokens: Any = torch.tensor([ids])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    own: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    own.get_vision_position_ids = partial(theirs.get_vision_position_ids, own)
    grids: Any = torch.tensor([image.grid for image in images])
    wanted, deltas = theirs.get_rope_index(own, tokens, (tokens == 9).int(), image_grid_thw=grids)
    delta = int(deltas[0, 0])
    later = np.tile(np.arange(len(ids), len(ids) + 9) + delta, (3, 1))
    whole = np.concatenate([wanted[:, 0].numpy(), later], axis=1)
    request = EngineRequest("r", tuple(ids), GenerationParams(), seed=0, images=tuple(images))
    layout = ImageLayout.of(request, 9, 2)
    start = data.draw(st.integers(0, whole.shape[1] - 1))
    end = data.draw(st.integers(start + 1, whole.shape[1]))
    place = layout.place(start, end)
    found = np.tile(np.arange(start, end) + place.shift, (3, 1)) if place.positions is None else place.positions
    assert found.tolist() == whole[:, start:end].tolist()
    shown = [(one.image.offset, one.first + index, row) for one in place.images for index, row in enumerate(one.rows)]
    assert [offset + token for offset, token, _ in shown] == [
        at for at in range(start, end) if at < len(ids) and ids[at] == 9
    ]
    assert [start + row for _, _, row in shown] == [offset + token for offset, token, _ in shown]


@pytest.mark.parametrize("axes", [3, 4])
def test_images_are_numbered_among_positions_as_by_transformers(axes: int) -> None:
    family = FAMILIES["hunyuan_vl"]
    rope = {"mrope_section": [2] * axes}
    own: Any = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(spatial_merge_size=2), text_config=SimpleNamespace(rope_parameters=rope)
        )
    )
    own.get_vision_position_ids = partial(HunYuanVLModel.get_vision_position_ids, own)
    sizes, ids, images = [(4, 6), (2, 8), (6, 4)], [5, 5], []
    for size in sizes:
        made = {"image_grid_thw": np.array([(1, *size)])}
        grid = family.grid(QWEN, made)
        count = len(family.write(QWEN, grid, "*"))
        theirs: Any = SimpleNamespace(
            image_token="*",
            cat_extra_token=True,
            image_processor=SimpleNamespace(merge_size=2, spatial_patch_size=1),
        )
        assert count == len(HunYuanVLProcessor.replace_image_token(theirs, made, 0))
        images.append(PromptImage("0" * 64, len(ids), count, grid))
        ids += [9] * count + [5] * 3
    tokens: Any = torch.tensor([ids])
    grids: Any = torch.tensor([(1, *size) for size in sizes])
    wanted, deltas = HunYuanVLModel.get_rope_index(own, tokens, (tokens == 9).int(), image_grid_thw=grids)
    assert int(deltas) == 0
    request = EngineRequest("r", tuple(ids), GenerationParams(), seed=0, images=tuple(images))
    config = {"text_config": {"rope_scaling": {"xdrope_section": [2] * axes}}}
    layout = ImageLayout.of(request, 9, 0, axes=family.axes(config))
    for start, end in ((0, len(ids)), (7, 20), (30, len(ids) + 5)):
        place = layout.place(start, end)
        later = np.tile(np.arange(len(ids), len(ids) + 9), (axes, 1))
        whole = np.concatenate([wanted[:, 0].numpy(), later], axis=1)
        assert place.positions is not None and place.positions.tolist() == whole[:, start:end].tolist()
    assert layout.place(len(ids), len(ids) + 5).shift == 0
    with pytest.raises(ModelLoadError, match="gives 0 numbers of dimensions that rotate by position"):
        family.axes({"text_config": {}})


def test_ids_of_image_tokens_that_files_leave_out_are_those_of_transformers() -> None:
    for kind in ("hunyuan_vl", "kimi_k25"):
        assert completed({"model_type": kind})["image_token_id"] == AutoConfig.for_model(kind).image_token_id
        assert completed({"model_type": kind, "image_token_id": 7})["image_token_id"] == 7


def test_marks_tell_images_and_their_parts_apart() -> None:
    one, other = (PromptImage(digit * 64, 10, 20, (1, 4, 4)) for digit in "ab")
    assert marks([one], 0, 10) == marks([one], 30, 46) == b""
    seen = [marks([image], begin, begin + 16) for image in (one, other) for begin in (0, 16)]
    assert len(set(seen)) == 4
    assert marks([one], 16, 32) == marks([PromptImage("a" * 64, 10, 20, (1, 4, 4))], 16, 32)
    assert marks([PromptImage("a" * 64, 10, 20, (1, 4, 4), (None, 99))], 16, 32) != marks([one], 16, 32)


@pytest.mark.parametrize("kind", ["shieldgemma2", "t5gemma2"])
def test_prompts_that_see_both_ways_are_not_supported(kind: str) -> None:
    config = {"model_type": kind, "vision_config": {}, "text_config": {}}
    assert family_of(config) is None
    assert "lets tokens see each other in both directions in a way that is not" in why_blind(config)


@pytest.mark.parametrize("given", [{}, {"num_hidden_layers": 34, "sliding_window": 1024, "hidden_size": 2560}])
@pytest.mark.parametrize(("kind", "text"), [("gemma3", "gemma3_text"), ("llava", "llama"), ("llava_next", "mistral")])
def test_what_a_config_leaves_out_is_as_in_transformers(
    kind: str, text: str, given: dict[str, Any], tmp_path: Path
) -> None:
    config = {"model_type": kind, "torch_dtype": "bfloat16", "text_config": {"model_type": text, **given}}
    found = completed(config)["text_config"]
    theirs = AutoConfig.for_model(kind, text_config={"model_type": text, **given}).text_config.to_dict()
    assert found.pop("dtype") == "bfloat16"
    found.pop("sliding_window_pattern", None)
    assert len(found) > 6 and {name: theirs[name] for name in found if name in theirs} == found
    whole = completed({"model_type": kind, "text_config": {"model_type": text, "vocab_size": 9, "dtype": "float32"}})
    assert (whole["text_config"]["vocab_size"], whole["text_config"]["dtype"]) == (9, "float32")
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_token_index": 3}))
    info = read_model_info(tmp_path, "m")
    assert (info.vocabulary_size, info.context_length) == (found["vocab_size"], found["max_position_embeddings"])
    other = {"model_type": "new_vl", "text_config": {"model_type": "new"}}
    assert completed(other) == other


def test_other_models_take_text_alone(tmp_path: Path) -> None:
    config = {"model_type": "new_vl", "vision_config": {}, "text_config": {}}
    assert family_of(config) is None and family_of({"model_type": "llama"}) is None
    assert why_blind({"model_type": "llama"}) == "takes text alone"
    assert all(name in why_blind(config) for name in FAMILIES)
    with pytest.raises(ModelLoadError, match="image_token_id"):
        image_token({"model_type": "llava"})
    text = {"vocab_size": 9, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": text, "image_token_index": 3})
    )
    assert read_model_info(tmp_path, "m").sees
    assert load_sight(str(tmp_path), "paged").processor is not None
    assert load_sight(str(tmp_path), "hf").processor is None
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = ChatMessage.model_validate({"role": "user", "content": [image]})
    with pytest.raises(InvalidRequest, match=r"^m takes text alone with the backend 'hf', and sees with 'paged'; "):
        load_sight(str(tmp_path), "hf").look([message], "m", {})


SEEN_BY_OTHERS = sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*FAMILIES})


@pytest.mark.parametrize("kind", [*SEEN_BY_OTHERS, "ovis2"])
def test_an_image_for_a_model_that_takes_text_alone_is_refused(kind: str, tmp_path: Path) -> None:
    """Whether transformers could show it one or not; a family that sees lacks its image processor here."""
    sizes = {"vocab_size": 9, "max_position_embeddings": 64}
    config = {"model_type": kind, "vision_config": {}, "text_config": sizes, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not read_model_info(tmp_path, "m").sees
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = ChatMessage.model_validate({"role": "user", "content": [image]})
    with pytest.raises(InvalidRequest, match=r"^m takes text alone.*; leave the image out, or ask") as refusal:
        load_sight(str(tmp_path), "paged").look([message], "m", {})
    assert (refusal.value.code, refusal.value.param) == (
        "unsupported_capability",
        "messages[0].content[0].image_url.url",
    )


@pytest.mark.parametrize("count", [1, 4])
def test_aya_vision_is_written_as_by_transformers(count: int) -> None:
    made = {"num_patches": [count]}
    own = SimpleNamespace(
        patch_size=28,
        img_size=364,
        start_of_img_token="<|START_OF_IMG|>",
        end_of_img_token="<|END_OF_IMG|>",
        img_patch_token="*",
        tile_token="TILE",
        tile_global_token="TILE_GLOBAL",
    )
    theirs: Any = AyaVisionProcessor.replace_image_token
    tower = {"vision_config": {"model_type": "siglip_vision_model", "image_size": 364, "patch_size": 14}}
    assert written("aya_vision", tower | {"downsample_factor": 2}, made) == theirs(own, made, 0)
    with pytest.raises(ModelLoadError, match="vision_feature_select_strategy 'default'; it must be 'full'"):
        written("aya_vision", tower | {"vision_feature_select_strategy": "default"}, made)


def test_vipllava_is_written_as_by_transformers() -> None:
    """Which leaves the first of the tower's tokens out whatever else its files say."""
    made = {"pixel_values": np.zeros((1, 3, 336, 336))}
    own = SimpleNamespace(
        image_token="*", patch_size=14, num_additional_image_tokens=1, vision_feature_select_strategy="default"
    )
    theirs: Any = LlavaProcessor.replace_image_token
    assert written("vipllava", CLIP | {"vision_feature_select_strategy": "full"}, made) == theirs(own, made, 0)


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 2)])
def test_docling_is_written_as_by_transformers(grid: tuple[int, int], is_fine: bool) -> None:
    made = {"rows": [grid[:1]], "cols": [grid[1:]]} | ({"tile_fine_mask": np.ones(1, bool)} if is_fine else {})
    own = SimpleNamespace(**TOKENS, global_image_tag="<global-img>")
    theirs: Any = GraniteDoclingProcessor.replace_image_token
    assert written("granite_docling", {"vision_config": {}}, made) == theirs(own, made, 0)


@pytest.mark.parametrize("count", [1, 4])
def test_command_a_vision_is_written_as_by_transformers(count: int) -> None:
    made = {"num_patches": [count]}
    own = SimpleNamespace(
        patch_size=16,
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        image_token="*",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    theirs: Any = Cohere2VisionProcessor.replace_image_token
    tower = {"vision_config": {"model_type": "siglip_vision_model", "image_size": 512, "patch_size": 16}}
    assert written("cohere2_vision", tower | {"downsample_factor": 2}, made) == theirs(own, made, 0)


@pytest.mark.parametrize(("side", "crops"), [(490, 1), (980, 1), (490, 6)])
def test_aria_is_written_as_by_transformers(side: int, crops: int) -> None:
    made = {"pixel_values": np.zeros((crops, 3, side, side), np.int8), "num_crops": crops}
    own = SimpleNamespace(image_token="*", size_conversion={490: 128, 980: 256})
    theirs: Any = AriaProcessor.replace_image_token
    tower = {"vision_config": {"patch_size": 14}}
    assert written("aria", tower, made) == theirs(own, made, 0)
    with pytest.raises(ModelLoadError, match="does not say in projector_patch_to_query_dict how many tokens show"):
        written("aria", tower | {"projector_patch_to_query_dict": {"9": 2}}, made)


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 36, 2)])
def test_kimi_is_written_as_by_transformers(grid: tuple[int, int, int]) -> None:
    made = {"image_grid_thw": np.array([grid])}
    own = SimpleNamespace(image_token="*", image_processor=SimpleNamespace(merge_size=2))
    theirs: Any = Kimi_K25Processor.replace_image_token
    assert written("kimi_k25", {"vision_config": {}}, made) == theirs(own, made, 0)


@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (3, 2)])
def test_llama_4_is_written_as_by_transformers(grid: tuple[int, int]) -> None:
    made = {"aspect_ratios": [grid], "pixel_values": np.zeros((1, 3, 336, 336), np.int8)}
    theirs: Any = Llama4Processor
    own = SimpleNamespace(patch_size=14, downsample_ratio=4)
    own._prompt_split_image = partial(theirs._prompt_split_image, own)
    tower = {"vision_config": {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5}}
    family = FAMILIES["llama4"]
    assert family.write(tower, family.grid(tower, made), "<|patch|>") == theirs.replace_image_token(own, made, 0)


def test_pictures_with_one_number_of_tokens_are_written_as_by_transformers() -> None:
    own = SimpleNamespace(image_token="*", num_image_tokens=576)
    theirs: Any = DeepseekVLProcessor.replace_image_token
    tower = {"vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16}}
    assert written("deepseek_vl", tower, {}) == theirs(own, {}, 0)
    own.image_start_token, own.image_end_token = "<begin_of_image>", "<end_of_image>"
    janus: Any = JanusProcessor
    assert written("janus", {"vision_config": {}}, {}) == janus.replace_image_token(own, {}, 0)
    assert FAMILIES["janus"].opening == DEFAULT_SYSTEM_PROMPT
    got: Any = GotOcr2Processor
    pages = {"num_pages_per_batch": [1], "patch_indices": [1], "num_image_tokens": got.num_image_tokens}
    assert got.images_kwargs["crop_to_patches"] is False
    assert written("got_ocr2", {"vision_config": {}}, {}) == got.replace_image_token(
        own, {"num_patches": [1]}, 0, **pages
    )


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 2)])
def test_ovis_is_written_as_by_transformers(grid: tuple[int, int]) -> None:
    made = {"grids": np.array([grid])}
    family, config = FAMILIES["ovis2"], {"vision_config": {"image_size": 448, "patch_size": 14, "hidden_stride": 2}}
    theirs: Any = Ovis2Processor.replace_image_token
    wanted = theirs(SimpleNamespace(image_seq_length=256), made, 0)
    assert family.write(config, family.grid(config, made), "<IMG_ATOM>") == wanted
    other: Any = {"vision_config": {"tokenize_function": "gumbel_argmax"}}
    with pytest.raises(ModelLoadError, match="'gumbel_argmax', by which an image looks different each time"):
        family.write(other, grid, "*")


@pytest.mark.parametrize(("crops", "tokens"), [(0, 257), (6, 1121)])
def test_whole_and_crops_are_counted_as_by_transformers(crops: int, tokens: int) -> None:
    made = {"num_local_patches": [crops], "pixel_values": np.zeros((1, 3, 1024, 1024), np.uint8)}
    made |= {"pixel_values_local": np.zeros((crops, 3, 768, 768), np.uint8)} if crops else {}
    images = SimpleNamespace(size={"height": 1024, "width": 1024}, tile_size=768)
    own = SimpleNamespace(image_token="*", patch_size=16, downsample_ratio=4, image_processor=images)
    theirs: Any = DeepseekOcr2Processor.replace_image_token
    found = written("deepseek_ocr2", {"vision_config": {"sam_config": {}}}, made)
    assert found == theirs(own, made, 0) == "*" * tokens
    assert FAMILIES["deepseek_ocr2"].options({}) == DeepseekOcr2Processor.images_kwargs


@pytest.mark.parametrize("side", [1, 2])
def test_merged_patches_are_counted_as_by_transformers(side: int) -> None:
    made = {"image_grid_thw": np.array([(1, 4, 6)]), "image_merge_sizes": np.array([side])}
    own = SimpleNamespace(image_token="*", image_processor=SimpleNamespace(merge_size=side))
    theirs: Any = VideoLlama3Processor.replace_image_token
    assert written("video_llama_3", {"vision_config": {}}, made) == theirs(own, made, 0)


@pytest.mark.parametrize("mode", ["16x", "4x"])
@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (3, 2)])
def test_minicpm_is_written_as_by_transformers(grid: tuple[int, int], mode: str) -> None:
    sizes = [(8, 12), *[(4, 8)] * (grid[0] * grid[1])]
    made = {"grids": [grid], "target_sizes": np.array(sizes), "num_patches_per_image": [len(sizes)]}
    marks = {"image_start": "<image>", "image_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>"}
    own = SimpleNamespace(image_token="*", slice_mode=True, **{f"{name}_token": mark for name, mark in marks.items()})
    theirs: Any = MiniCPMV4_6Processor.replace_image_token
    wanted = theirs(own, made, 0, image_token_divisor=4 if mode == "4x" else 16)
    assert written("minicpmv4_6", {"downsample_mode": mode}, made) == wanted


def test_images_of_minicpm_are_numbered_as_by_transformers() -> None:
    own = SimpleNamespace(image_id_start_token="<image_id>", image_id_end_token="</image_id>")
    theirs: Any = MiniCPMV4_6Processor._prepend_local_ids
    numbers = FAMILIES["minicpmv4_6"].numbers
    assert numbers is not None
    found = [numbers(SimpleNamespace(use_image_id=True), number) + text for number, text in enumerate("ab")]
    assert found == theirs(own, ["One * and * another."], ["a", "b"], "*")
    assert numbers(SimpleNamespace(use_image_id=False), 1) == ""
