"""Gemma 3n's tower against numbers that timm 1.0.31 has computed with the same weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3nVisionConfig

from penstock.engine.vision.processor import VisionProcessor
from penstock.engine.vision.towers.mobilenet import MobileNetV5
from penstock.schemas.errors import ModelLoadError

SMALL = {"channel_multiplier": 0.02, "msfa_output_resolution": 4}
FOUND = {
    (64, 64): [0.135322, -0.14304, 0.259376, -0.318356, 0.194183],
    (80, 80): [0.121551, -0.131098, 0.241032, -0.298841, 0.183688],
    (96, 64): [0.13393, -0.141833, 0.257521, -0.316382, 0.193122],
}
SHAPES = "54094230d0ddb9eeb135e13ca55d5bf24749b70d7b3d9d7355ff3a2864359231"  # of the published tower's weights


def waves(count: int, step: float) -> torch.Tensor:
    return torch.sin(torch.arange(count, dtype=torch.float64) * step).float()


@torch.inference_mode()
def test_features_are_those_of_timm() -> None:
    """Also where sides are odd on the way, and where the last picture is not enlarged by a whole number.

    In float64: such weights make of the last bits of float32, which differ among processors, the third digit.
    """
    tower = MobileNetV5(Gemma3nVisionConfig(model_args=SMALL))
    for number, (_, weight) in enumerate(sorted(tower.timm_model.named_parameters())):
        found = waves(weight.numel(), 1.3 + number * 0.01).reshape(weight.shape)
        weight.data = found * 0.3 + 1 if weight.ndim == 1 else found * 0.2
    tower.double()
    for (width, height), wanted in FOUND.items():
        made = tower(waves(3 * width * height, 0.7).reshape(1, 3, height, width).double()).last_hidden_state
        assert made.shape == (1, 2048, 4, 4)
        assert made[0, ::500, 1, 2].tolist() == pytest.approx(wanted, abs=2e-6)


def test_weights_have_the_names_and_shapes_of_timm() -> None:
    with torch.device("meta"):
        tower = MobileNetV5(Gemma3nVisionConfig())
    shapes = sorted((name, list(weight.shape)) for name, weight in tower.timm_model.named_parameters())
    assert hashlib.sha256(repr(shapes).encode()).hexdigest() == SHAPES


def test_a_directory_without_settings_of_its_processor_sees_as_the_published_models_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "image_token_id": 9}))
    processor = VisionProcessor.of(tmp_path)
    assert processor is not None
    image, tokens = processor.sample()
    pixels = processor.inputs(image)["pixel_values"]
    assert tokens == [9] * 256 and pixels.shape == (1, 3, 768, 768)
    assert pixels.min() < 0.02 and 0.98 < pixels.max() <= 1, "scaled, and nothing else"


@pytest.mark.parametrize(
    "changes", [{"architecture": "mobilenetv5_base"}, {"model_args": {"stem_size": 32}}, {"hidden_size": 1024}]
)
def test_other_towers_of_timm_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="of timm's towers mobilenetv5_300m_enc with 2048 and no options"):
        MobileNetV5(Gemma3nVisionConfig(**changes))
