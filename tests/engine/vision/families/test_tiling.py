"""How pictures of LFM2-VL, Command A Vision and their kind are cut up, against transformers' own processors.

Those want torchvision, of which they use four functions; here they are torch's, which torchvision calls.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import image_processing_backends
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.perception_lm.processing_perception_lm import PerceptionLMProcessor

from penstock.engine.vision.families.bounds import budget
from penstock.engine.vision.families.covering import CoveringProcessor
from penstock.engine.vision.families.family import FAMILIES
from penstock.engine.vision.families.fitting import FittingProcessor
from penstock.engine.vision.families.merging import MergingProcessor
from penstock.engine.vision.families.numbers import RESAMPLING
from penstock.engine.vision.families.padding import PaddingProcessor
from penstock.engine.vision.families.thumbnails import ThumbnailProcessor, tile_bounds
from penstock.engine.vision.families.tiling import TilingProcessor
from penstock.schemas.errors import ModelLoadError

SMALL = {"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 2, "max_image_tokens": 6, "max_tiles": 4}
COVER: dict[str, Any] = {"size": {"height": 32, "width": 32}, "max_patches": 4}
Save = Callable[..., TilingProcessor]


def resize(image: torch.Tensor, size: Sequence[int], interpolation: Any, antialias: bool) -> torch.Tensor:
    if image.ndim == 3:
        return resize(image[None], size, interpolation, antialias)[0]
    mode = RESAMPLING.get(interpolation, interpolation)  # torchvision takes Pillow's numbers, too
    return torch.nn.functional.interpolate(image, size, mode=mode, antialias=antialias)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    shift, scale = (torch.as_tensor(one, dtype=image.dtype)[:, None, None] for one in (mean, std))
    return image.sub(shift).div_(scale)


def pad(
    image: torch.Tensor, padding: Sequence[int], fill: int | Sequence[int], padding_mode: str = "constant"
) -> torch.Tensor:
    left, top, right, bottom = padding
    assert not np.any(fill) and padding_mode == "constant"
    return torch.nn.functional.pad(image, (left, right, top, bottom))


@pytest.fixture(scope="module")
def processors() -> Iterator[Callable[[str], Any]]:
    """Finds the module with transformers' processor of a family."""
    functional: Any = ModuleType("torchvision.transforms.v2.functional")
    functional.resize, functional.normalize, functional.pad = resize, normalize, pad
    functional.InterpolationMode = SimpleNamespace(BILINEAR="bilinear", BICUBIC="bicubic", LANCZOS="lanczos")
    parents = [ModuleType(name) for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")]
    parents[-1].__dict__["functional"] = functional
    with pytest.MonkeyPatch.context() as patch:
        for one in (*parents, functional):
            patch.setitem(sys.modules, one.__name__, one)
        patch.setattr(image_processing_backends, "tvF", functional, raising=False)
        patch.setattr(image_processing_backends, "pil_torch_interpolation_mapping", {2: "bilinear", 3: "bicubic"})

        def module(family: str) -> Any:
            found = importlib.import_module(f"transformers.models.{family}.image_processing_{family}")
            patch.delitem(sys.modules, found.__name__)
            return found

        yield module


@pytest.fixture(scope="module")
def theirs(processors: Callable[[str], Any]) -> Callable[..., Any]:
    """Makes transformers' processor of LFM2-VL with some settings."""
    made: Callable[..., Any] = processors("lfm2_vl").Lfm2VlImageProcessor
    return made


@pytest.fixture(scope="module")
def covering(processors: Callable[[str], Any]) -> Callable[..., Any]:
    """Makes that of Command A Vision."""
    made: Callable[..., Any] = processors("cohere2_vision").Cohere2VisionImageProcessor
    return made


@pytest.fixture(scope="module")
def merging(processors: Callable[[str], Any]) -> Callable[..., Any]:
    """Makes that of Gemma 4 12B."""
    made: Callable[..., Any] = processors("gemma4_unified").Gemma4UnifiedImageProcessor
    return made


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(name: str = "preprocessor_config.json", **given: Any) -> TilingProcessor:
        (tmp_path / name).write_text(json.dumps(given))
        return TilingProcessor(tmp_path)

    return save


def noise(width: int, height: int) -> Image.Image:
    numbers = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(numbers)


@pytest.mark.parametrize("size", [(8, 9), (60, 40), (41, 90), (300, 70), (33, 200), (64, 64)])
@pytest.mark.parametrize(
    "given",
    [
        SMALL,
        SMALL | {"use_thumbnail": False, "min_tiles": 1, "resample": 3},
        SMALL | {"do_image_splitting": False, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
        SMALL | {"do_normalize": False, "max_pixels_tolerance": 1.0},
        SMALL | {"do_rescale": False, "tile_size": 64},
    ],
)
def test_pictures_are_prepared_as_by_transformers(
    given: dict[str, Any], size: tuple[int, int], theirs: Callable[..., Any], save: Save
) -> None:
    """But for the empty places behind the patches of a picture that has fewer than others might."""
    picture = noise(*size)
    wanted = theirs(**given)(images=[picture], return_row_col_info=True, return_tensors="pt")
    own = save(**given)
    made = own(images=[picture])
    count = made["pixel_values"].shape[1]
    assert count == wanted["pixel_attention_mask"].sum(1).max()
    assert made["spatial_shapes"].tolist() == wanted["spatial_shapes"].tolist()
    assert made["pixel_attention_mask"].tolist() == wanted["pixel_attention_mask"][:, :count].tolist()
    assert np.array_equal(made["pixel_values"], wanted["pixel_values"][:, :count].numpy())
    processor: Any = SimpleNamespace(
        image_token="*",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
        image_processor=theirs(**given),
    )
    for name in ("_get_image_num_tokens", "_compute_tokens_per_tile", "_compute_tokens_for_image"):
        setattr(processor, name, getattr(Lfm2VlProcessor, name).__get__(processor))
    processor._build_image_tokens = Lfm2VlProcessor._build_image_tokens.__get__(processor)
    family = FAMILIES["lfm2_vl"]
    for is_marked in (True, False):
        unmarked = {} if is_marked else {"use_image_special_tokens": False}
        own = save("processor_config.json", image_processor=given, **unmarked)
        grid = family.grid({}, own(images=[picture]))
        text = Lfm2VlProcessor.replace_image_token(processor, wanted, 0, use_image_special_tokens=is_marked)
        assert family.write({}, grid, "*") == text and text.count("*") * 4 == wanted["pixel_attention_mask"].sum()


def test_a_thin_picture_is_shown_with_more_tokens(save: Save) -> None:
    """Those of one row, where transformers has no room for them."""
    made = save(**SMALL)(images=[noise(640, 17)])
    rows, columns, _, whole, _ = made["tiles"]
    assert (rows, columns, whole) == (1, 4, 15)
    assert made["pixel_attention_mask"].sum(1).tolist() == [16] * 4 + [60]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(width=st.integers(8, 9000), height=st.integers(8, 9000))
def test_sizes_are_those_of_transformers(width: int, height: int, theirs: Callable[..., Any], save: Save) -> None:
    """With the settings of the published models."""
    processor, own = theirs(), save(image_processor_type="Lfm2VlImageProcessorFast", do_image_splitting=True)
    names = "downsample_factor", "min_image_tokens", "max_image_tokens", "encoder_patch_size"
    known = {name: getattr(processor, name) for name in names}
    columns, rows = processor.smart_resize(height, width, **known)
    tolerance = processor.max_pixels_tolerance
    del known["min_image_tokens"]
    tiles = 1, 1
    if processor._is_image_too_large(height, width, **known, max_pixels_tolerance=tolerance):
        tiles = processor._get_grid_layout(height, width, 2, 10, 512)[:2]
    assert own.cut(width, height) == (tiles[1], tiles[0], rows, columns)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({}, "has no preprocessor_config.json"),
        ({"tile_size": 500}, "tile_size 500 must be a multiple of 32"),
        ({"min_tiles": 11}, r"min_tiles \(11\) at most max_tiles \(10\)"),
        ({"resample": 0}, "resample one of 2, 3"),
    ],
)
def test_settings_that_cannot_be_used_are_named(given: dict[str, Any], fault: str, save: Save) -> None:
    with pytest.raises(ModelLoadError, match=fault):
        save(**given)


@pytest.mark.parametrize("size", [(8, 9), (60, 40), (41, 90), (300, 70), (33, 200), (64, 64)])
@pytest.mark.parametrize(
    "given",
    [
        COVER,
        COVER | {"max_patches": 6, "resample": 2, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
        COVER | {"crop_to_patches": False},
        COVER | {"do_normalize": False},
    ],
)
def test_pictures_are_covered_as_by_transformers(
    given: dict[str, Any], size: tuple[int, int], covering: Callable[..., Any], tmp_path: Path
) -> None:
    picture = noise(*size)
    wanted = covering(**given)(images=[picture], return_tensors="pt")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    made = CoveringProcessor(tmp_path)(images=[picture])
    assert [*made["num_patches"]] == [*wanted["num_patches"]]
    assert np.array_equal(made["pixel_values"], wanted["pixel_values"].numpy())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(8, 9000), height=st.integers(8, 9000))
def test_tiles_cover_as_many_rows_and_columns_as_in_transformers(
    width: int, height: int, processors: Callable[[str], Any], tmp_path: Path
) -> None:
    """With the settings of the published model."""
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Cohere2VisionImageProcessorFast"}')
    theirs = processors("cohere2_vision").get_optimal_tiled_canvas
    assert CoveringProcessor(tmp_path).grid(width, height) == theirs((height, width), (512, 512), 1, 12)


@pytest.mark.parametrize("given", [{"size": {"height": 32, "width": 48}}, {"resample": 0}, {"do_resize": False}])
def test_settings_with_which_nothing_can_be_covered_are_named(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    for kind in (CoveringProcessor, FittingProcessor):
        with pytest.raises(ModelLoadError, match="height and width, resample be one of 2, 3, and do_resize"):
            kind(tmp_path)


@pytest.mark.parametrize("size", [(8, 9), (60, 40), (41, 90), (300, 70), (33, 200), (64, 64), (500, 8)])
@pytest.mark.parametrize(
    "given",
    [
        COVER,
        COVER | {"max_patches": 6, "resample": 3, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
        COVER | {"max_patches": 16, "resize_to_max_canvas": True},
        COVER | {"max_patches": 1},
    ],
)
def test_pictures_fit_into_tiles_as_by_transformers(
    given: dict[str, Any], size: tuple[int, int], processors: Callable[[str], Any], tmp_path: Path
) -> None:
    """With the same numbers, which are rounded to bfloat16 there, too."""
    picture = noise(*size)
    wanted = processors("llama4").Llama4ImageProcessor(**given)(images=[picture], return_tensors="pt")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    made = FittingProcessor(tmp_path)(images=[picture])
    assert [*made["aspect_ratios"][0]] == wanted["aspect_ratios"][0].tolist()
    assert np.array_equal(made["pixel_values"], wanted["pixel_values"].float().flatten(0, -4).numpy())


@pytest.mark.parametrize("size", [(8, 9), (60, 40), (41, 90), (300, 70), (33, 200), (64, 64), (500, 8)])
@pytest.mark.parametrize(
    "given",
    [
        {"tile_size": 28, "max_num_tiles": 6},
        {"tile_size": 56, "resample": 2, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
        {"tile_size": 28, "max_num_tiles": 1},
        {"tile_size": 28, "vision_input_type": "vanilla"},
    ],
)
def test_thumbnails_and_tiles_are_those_of_transformers(
    given: dict[str, Any], size: tuple[int, int], processors: Callable[[str], Any], tmp_path: Path
) -> None:
    picture = noise(*size)
    wanted = processors("perception_lm").PerceptionLMImageProcessor(**given)(images=[picture], return_tensors="pt")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    made = ThumbnailProcessor(tmp_path)(images=[picture])
    assert np.array_equal(made["pixel_values"], wanted["pixel_values"].reshape(made["pixel_values"].shape).numpy())
    own: Any = SimpleNamespace(image_token="*", patch_size=14, pooling_ratio=2)
    family, config = FAMILIES["perception_lm"], {"projector_pooling_ratio": 2}
    theirs: Any = PerceptionLMProcessor.replace_image_token
    assert family.write(config, family.grid(config, made), "*") == theirs(own, made, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(8, 30_000), height=st.integers(8, 9000))
def test_a_picture_is_stretched_over_as_many_tiles_as_in_transformers(
    width: int, height: int, processors: Callable[[str], Any], tmp_path: Path
) -> None:
    """With the settings of the published models."""
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "PerceptionLMImageProcessorFast"}')
    theirs = processors("perception_lm").PerceptionLMImageProcessor()
    wanted = theirs._fit_image_to_canvas(width, height, 448) or theirs._find_closest_aspect_ratio(width, height, 448)
    assert ThumbnailProcessor(tmp_path).grid(width, height, 36) == wanted


@pytest.mark.parametrize("size", [(8, 9), (60, 40), (41, 90), (300, 70), (33, 200), (64, 64), (500, 8)])
@pytest.mark.parametrize(
    "given",
    [
        {"patch_size": 8},
        {
            "patch_size": 8,
            "max_patches": 12,
            "resample": 2,
            "image_mean": [0.4, 0.5, 0.6],
            "image_std": [0.2, 0.3, 0.4],
        },
        {"patch_size": 7, "merge_size": 3, "size": {"max_height": 6, "max_width": 6}},
    ],
)
def test_pictures_are_padded_as_by_transformers(
    given: dict[str, Any], size: tuple[int, int], processors: Callable[[str], Any], tmp_path: Path
) -> None:
    picture = noise(*size)
    wanted = processors("kimi_k25").Kimi_K25ImageProcessor(**given)(images=[picture], return_tensors="pt")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    made = PaddingProcessor(tmp_path)(images=[picture])
    assert made["image_grid_thw"].tolist() == wanted["image_grid_thw"].tolist()
    assert np.array_equal(made["pixel_values"], wanted["pixel_values"].numpy().reshape(made["pixel_values"].shape))
    with pytest.raises(ModelLoadError, match="must have the same max_height and max_width"):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"max_height": 3}}))
        PaddingProcessor(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(8, 9000), height=st.integers(8, 9000))
def test_sizes_before_padding_are_those_of_transformers(
    width: int, height: int, processors: Callable[[str], Any], tmp_path: Path
) -> None:
    """With the settings of the published models."""
    (tmp_path / "preprocessor_config.json").write_text('{"auto_map": {}}')
    wanted, _ = processors("kimi_k25").navit_resize(height, width, 14, 2, 16_384, 512)
    assert PaddingProcessor(tmp_path).size(width, height) == wanted


@pytest.mark.parametrize(
    ("fewest", "most", "wanted", "tiles"),
    [
        *[(None, None, 6, 4), (None, 100, 1, 1), (None, 56**2 * 3 + 5, 3, 1)],
        *[(56**2 * 8 + 1, None, 9, 9), (10**6, 56**2 * 7, 7, 4)],
    ],
)
def test_a_picture_is_stretched_over_as_many_tiles_as_its_bounds_allow(
    fewest: int | None, most: int | None, wanted: int, tiles: int, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"tile_size": 56, "max_num_tiles": 6}')
    own = ThumbnailProcessor(tmp_path)
    options = tile_bounds(own, fewest, most)
    assert options == {"max_num_tiles": wanted}
    assert own(images=[noise(50, 50)], **options)["pixel_values"].shape[1] == 1 + tiles


@pytest.mark.parametrize("given", [{"resample": 0}, {"do_resize": False}])
def test_settings_with_which_no_thumbnails_can_be_made_are_named(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    with pytest.raises(ModelLoadError, match="must be one of 2, 3, and do_resize true"):
        ThumbnailProcessor(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(8, 9000), height=st.integers(8, 9000), enlarges=st.booleans())
def test_a_picture_fits_into_as_many_tiles_as_in_transformers(
    width: int, height: int, enlarges: bool, processors: Callable[[str], Any], tmp_path: Path
) -> None:
    """With the settings of the published models, and with those by which a picture is enlarged."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resize_to_max_canvas": enlarges}))
    theirs = processors("llama4")
    sizes = torch.tensor(theirs.find_supported_resolutions.__wrapped__(16, SimpleNamespace(height=336, width=336)))
    wanted = theirs.get_best_fit((height, width), sizes, enlarges)
    rows, columns = FittingProcessor(tmp_path).grid(width, height)
    assert [rows * 336, columns * 336] == wanted.tolist()


@pytest.mark.parametrize("size", [(8, 9), (60, 40), (41, 90), (300, 9), (5, 700), (64, 64)])
@pytest.mark.parametrize(
    "given", [{}, {"do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "resample": 2}, {"pooling_kernel_size": 3}]
)
def test_squares_are_cut_as_by_transformers(
    given: dict[str, Any], size: tuple[int, int], merging: Callable[..., Any], tmp_path: Path
) -> None:
    picture, given = noise(*size), {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70} | given
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    own = MergingProcessor(tmp_path)
    for most in (70, 140):
        wanted = merging(**given)(images=[picture], max_soft_tokens=most, return_tensors="pt")
        made = own(images=[picture], **budget(own, most * (4 * given["pooling_kernel_size"]) ** 2, None))
        assert [*made["num_soft_tokens_per_image"]] == [*wanted["num_soft_tokens_per_image"]]
        for name in ("pixel_values", "image_position_ids"):
            assert np.array_equal(made[name], wanted[name].numpy())


@pytest.mark.parametrize("given", [{"max_soft_tokens": 71}, {"resample": 0}, {"do_resize": False}])
def test_settings_with_which_no_squares_can_be_cut_are_named(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    with pytest.raises(ModelLoadError, match="must be one of 70, 140, 280, 560, 1120, resample one of 2, 3, and do_re"):
        MergingProcessor(tmp_path)
