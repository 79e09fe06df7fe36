"""FastVLM's tower against numbers that timm 1.0.31 has computed with the same weights."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from transformers import TimmWrapperConfig

from penstock.engine.vision.fastvit import FastViT
from penstock.schemas.errors import ModelLoadError

SMALL: dict[str, Any] = {"inference_mode": True, "layers": (1, 1, 1, 1, 1), "embed_dims": (8, 8, 16, 32, 64)}
FOUND = {
    (64, 64): [-0.0062, 0.0622, 0.0406, 0.0129, -0.0338],
    (128, 128): [-0.0001, 0.0368, 0.0512, -0.0659, -0.0397],
    (200, 130): [-0.0001, 0.0385, 0.0628, -0.0626, -0.0386],
}
SHAPES = "1791b5c835bada6186c1941bf87ddcc6ab712178ee1ab72d0d66ec82c4f65a1c"  # of the published tower's weights


def tower_of(name: str = "fastvit_mci3", **options: Any) -> FastViT:
    tower = FastViT(TimmWrapperConfig(architecture=name, model_args=options))
    tower.train(False)
    return tower


def waves(count: int, step: float) -> torch.Tensor:
    return torch.sin(torch.arange(count, dtype=torch.float64) * step).float()


@torch.inference_mode()
def test_features_are_those_of_timm() -> None:
    """Also where sides are odd on the way."""
    tower = tower_of(**SMALL)
    for number, (name, weight) in enumerate(sorted(tower.timm_model.named_parameters())):
        found = waves(weight.numel(), 1.3 + number * 0.01).reshape(weight.shape)
        weight.data = found * 0.3 + 1 if weight.ndim in (1, 3) and not name.endswith("bias") else found * 0.2
    for number, (name, buffer) in enumerate(sorted(tower.timm_model.named_buffers())):
        if buffer.is_floating_point():
            buffer.copy_(waves(buffer.numel(), 0.9 + number * 0.01) * 0.3 + (1 if "var" in name else 0))
    for (width, height), wanted in FOUND.items():
        made = tower(waves(3 * width * height, 0.7).reshape(1, 3, height, width)).last_hidden_state
        assert made.shape == (1, 128, -(-height // 64), -(-width // 64))
        assert made[0, ::30, 0, -1].tolist() == pytest.approx(wanted, abs=2e-4)


def test_weights_have_the_names_and_shapes_of_timm() -> None:
    with torch.device("meta"):
        tower = tower_of(inference_mode=True)
    shapes = sorted((name, list(weight.shape)) for name, weight in tower.timm_model.state_dict().items())
    assert hashlib.sha256(repr(shapes).encode()).hexdigest() == SHAPES


@pytest.mark.parametrize(
    ("name", "options"),
    [("fastvit_mci2", SMALL), ("fastvit_mci3", {}), ("fastvit_mci3", {"inference_mode": True, "cls_ratio": 3})],
)
def test_other_towers_of_timm_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="of timm's towers fastvit_mci3 with inference_mode true and no options"):
        tower_of(name, **options)
