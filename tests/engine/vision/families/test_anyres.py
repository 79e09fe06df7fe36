"""How many tokens LLaVA-NeXT, Granite 4 Vision and LLaVA-OneVision have for a picture, against transformers' own."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaOnevisionConfig, LlavaOnevisionImageProcessorPil
from transformers.image_processing_utils import select_best_resolution
from transformers.models.granite4_vision.processing_granite4_vision import Granite4VisionProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from vision_models import picture

from penstock.engine.vision.families.anyres import NEXT_SIZES, ONEVISION_SIZES, best_size
from penstock.engine.vision.families.family import FAMILIES
from penstock.engine.vision.images import PromptImage
from penstock.engine.vision.processor import VisionProcessor
from penstock.engine.vision.reading import ImageLimits
from penstock.schemas.errors import ModelLoadError

CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
NAME = "LlavaOnevisionImageProcessor"
SMALL: dict[str, Any] = {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 64], [64, 64]]}
sides = st.integers(8, 4000)


def theirs_of(kind: Any, sizes: list[list[int]], **own: Any) -> Any:
    processor: Any = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=sizes), image_token="*", **own
    )
    for name in ("_get_number_of_features", "_get_unpadded_features", "replace_image_token"):
        setattr(processor, name, getattr(kind, name).__get__(processor))
    return processor


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (
            {"vision_config": CLIP},
            {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        (
            {"vision_config": SIGLIP, "vision_feature_select_strategy": "full"},
            {"patch_size": 14, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
        ),
    ],
)
@given(height=sides, width=sides)
def test_next_has_the_tokens_of_transformers(config: Any, own: Any, height: int, width: int) -> None:
    side = config["vision_config"]["image_size"]
    made = {"image_sizes": np.array([(height, width)]), "pixel_values": np.zeros((1, 1, 3, side, side), np.uint8)}
    family = FAMILIES["llava_next"]
    sizes = NEXT_SIZES if side == 336 else [[384, 384 * count] for count in range(1, 11)] + [[768, 384], [768, 768]]
    config = config | ({} if side == 336 else {"image_grid_pinpoints": sizes})
    assert family.options(config) == {"image_grid_pinpoints": sizes}
    theirs = theirs_of(LlavaNextProcessor, sizes, **own)
    assert family.write(config, family.grid(config, made), "*") == theirs.replace_image_token(made, 0)


@given(height=sides, width=sides)
def test_granite_4_has_the_tokens_of_transformers(height: int, width: int) -> None:
    made = {"image_sizes": np.array([(height, width)]), "pixel_values": np.zeros((1, 1, 3, 384, 384), np.uint8)}
    sizes = [[384, 384 * count] for count in range(1, 11)] + [[768, 384], [768, 768]]
    tower = {"vision_config": SIGLIP | {"patch_size": 16}, "vision_feature_select_strategy": "full"}
    config = tower | {"image_grid_pinpoints": sizes, "downsample_rate": "4/8"}
    own = {"patch_size": 16, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    theirs, family = (
        theirs_of(Granite4VisionProcessor, sizes, **own, downsample_rate="4/8"),
        FAMILIES["granite4_vision"],
    )
    assert family.write(config, family.grid(config, made), "*") == theirs.replace_image_token(made, 0)


@pytest.mark.parametrize("most", [4, 9])
@settings(max_examples=60)
@given(height=sides, width=sides)
def test_onevision_has_the_tokens_of_transformers(most: int, height: int, width: int) -> None:
    """Also one of two pictures in a prompt, which has no tiles."""
    named = {"vision_aspect_ratio": f"anyres_max_{most}"}
    own = {"num_image_tokens": 729, "vision_feature_select_strategy": "full", **named}
    theirs, family, config = theirs_of(LlavaOnevisionProcessor, ONEVISION_SIZES, **own), FAMILIES["llava_onevision"], {}
    config = {"vision_config": SIGLIP, **named}
    for count in (1, 2):
        made = {
            "image_sizes": np.array([(height, width)] * count),
            "pixel_values": np.zeros((count, 1, 3, 384, 384), np.uint8),
            "batch_num_images": np.array([count]),
        }
        assert family.write(config, family.grid(config, made), "*") == theirs.replace_image_token(made, 0)
        if count == 1:  # as many features as the model makes
            rows, columns = (side // 384 for side in best_size(height, width, ONEVISION_SIZES))
            features = torch.zeros(1 + rows * columns, 729, 1)
            model: Any = SimpleNamespace(config=LlavaOnevisionConfig(vision_config=SIGLIP))
            pack: Any = LlavaOnevisionModel.pack_image_features
            packed, _ = pack(model, [features], [(height, width)], torch.zeros(1), **named)
            assert len(packed[0]) == family.write(config, (height, width, 1), "*").count("*")


@given(height=sides, width=sides)
def test_the_best_size_is_that_of_transformers(height: int, width: int) -> None:
    for sizes in (NEXT_SIZES, ONEVISION_SIZES):
        assert best_size(height, width, sizes) == tuple(select_best_resolution((height, width), sizes))


@pytest.mark.parametrize(
    ("kind", "config", "fault"),
    [
        ("llava_next", {"vision_config": SIGLIP}, "'default', with which a siglip_vision_model"),
        (
            "llava_next",
            {"vision_config": CLIP, "vision_feature_select_strategy": "full"},
            "'full', with which a clip_vision_model cannot be used; it must be 'default'",
        ),
        (
            "llava_next",
            {"vision_config": CLIP, "image_grid_pinpoints": [[336, 336], [600, 336]]},
            "image_grid_pinpoints that are not all multiples of 336 pixels",
        ),
        ("llava_onevision", {"vision_config": SIGLIP, "vision_aspect_ratio": "anyres"}, "vision_aspect_ratio 'anyres'"),
    ],
)
def test_what_is_not_supported_is_named(kind: str, config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelLoadError, match=fault):
        FAMILIES[kind].write(config, (60, 40, 1), "*")


@pytest.fixture
def processor(tmp_path: Path) -> VisionProcessor:
    """One for tiles of 32 pixels."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SMALL | {"image_processor_type": NAME}))
    sizes = SMALL["image_grid_pinpoints"]
    tower = SIGLIP | {"image_size": 32, "patch_size": 8}
    config = {"model_type": "llava_onevision", "image_token_index": 5, "vision_config": tower}
    return VisionProcessor(tmp_path, config | {"image_grid_pinpoints": sizes}, FAMILIES["llava_onevision"])


def test_one_of_several_pictures_is_prepared_as_by_transformers(processor: VisionProcessor) -> None:
    """And the same picture alone in another way."""
    own: Any = LlavaOnevisionImageProcessorPil(**SMALL)
    files = [picture(60, 40, 1), picture(30, 70, 2)]
    pictures = [Image.open(BytesIO(file)) for file in files]
    for shown, wanted in (
        (files[:1], own(pictures[0], return_tensors="np")),
        (files, own([pictures], return_tensors="np")),
    ):
        for index, file in enumerate(shown):
            grid = processor._grid(file, ImageLimits(), "image", len(shown) > 1)
            found = processor.inputs(PromptImage("0" * 64, 0, 1, grid, (None, None), file))
            assert np.array_equal(found["pixel_values"][0], wanted["pixel_values"][index])
            assert found["image_sizes"].tolist() == [wanted["image_sizes"][index].tolist()]
            assert found["batch_num_images"].tolist() == [len(shown)]
