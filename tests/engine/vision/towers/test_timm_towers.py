"""The towers of FastVLM and Perception LM against numbers that timm 1.0.31 has computed with the same weights."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from transformers import TimmWrapperConfig

from penstock.engine.vision.towers.timm_towers import TimmTower
from penstock.schemas.errors import ModelLoadError

FAST, LARGE, GIGANTIC = "fastvit_mci3", "vit_pe_core_large_patch14_336", "vit_pe_core_gigantic_patch14_448"
LANG = "vit_pe_lang_large_patch14_448"
SMALL_FAST: dict[str, Any] = {"inference_mode": True, "layers": (1, 1, 1, 1, 1), "embed_dims": (8, 8, 16, 32, 64)}
SMALL: dict[str, Any] = {
    **{"embed_dim": 64, "num_heads": 4, "depth": 2, "img_size": [56, 56], "ref_feat_shape": [3, 3]},
    **{"global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1},
}
FOUND: list[tuple[str, dict[str, Any], tuple[int, int], tuple[int, ...], list[float]]] = [
    (FAST, SMALL_FAST, (64, 64), (1, 128, 1, 1), [-0.0062, 0.0622, 0.0406, 0.0129, -0.0338]),
    (FAST, SMALL_FAST, (128, 128), (1, 128, 2, 2), [-0.0001, 0.0368, 0.0512, -0.0659, -0.0397]),
    (FAST, SMALL_FAST, (200, 130), (1, 128, 3, 4), [-0.0001, 0.0385, 0.0628, -0.0626, -0.0386]),
    (LARGE, SMALL, (56, 56), (2, 17, 64), [1.7938, 0.5724, 1.5561, -2.5727, 4.7427]),
    (GIGANTIC, SMALL | {"mlp_ratio": 2.0}, (56, 56), (2, 16, 64), [0.0628, 0.4557, 1.299, -0.1061, 3.1632]),
    (LANG, SMALL | {"patch_size": 14}, (56, 56), (2, 17, 64), [1.7938, 0.5724, 1.5561, -2.5727, 4.7427]),
]


def tower_of(name: str, options: dict[str, Any]) -> TimmTower:
    tower = TimmTower(TimmWrapperConfig(architecture=name, model_args=options))
    tower.train(False)
    return tower


def waves(count: int, step: float) -> torch.Tensor:
    return torch.sin(torch.arange(count, dtype=torch.float64) * step).float()


@pytest.mark.parametrize(("name", "options", "size", "shape", "wanted"), FOUND)
@torch.inference_mode()
def test_features_are_those_of_timm(
    name: str, options: dict[str, Any], size: tuple[int, int], shape: tuple[int, ...], wanted: list[float]
) -> None:
    """Also where sides are odd on the way."""
    tower, scales = tower_of(name, options), (1, 3) if name == FAST else (1,)
    for number, (own, weight) in enumerate(sorted(tower.timm_model.named_parameters())):
        found = waves(weight.numel(), 1.3 + number * 0.01).reshape(weight.shape)
        is_scale = weight.ndim in scales and not own.endswith("bias") and not (name != FAST and weight.ndim == 3)
        weight.data = found * 0.3 + 1 if is_scale else found * 0.2
    for number, (own, buffer) in enumerate(sorted(tower.timm_model.named_buffers())):
        if buffer.is_floating_point():
            buffer.copy_(waves(buffer.numel(), 0.9 + number * 0.01) * 0.3 + (1 if "var" in own else 0))
    width, height = size
    made = tower(waves(shape[0] * 3 * width * height, 0.7).reshape(shape[0], 3, height, width)).last_hidden_state
    assert made.shape == shape
    some = made[0, ::30, 0, -1] if name == FAST else made[1, -1, ::13]
    assert some.tolist() == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        (FAST, {"inference_mode": True}, "1791b5c835bada6186c1941bf87ddcc6ab712178ee1ab72d0d66ec82c4f65a1c"),
        (LANG, {}, "6d5433849bfc34a0eab078c475e8bd8786ad2b0b00c51dbd73a7a65475675b51"),
        ("vit_pe_lang_gigantic_patch14_448", {}, "fc528b5317bc7092a1ad8e7efb1b055971938ac9c0d07a2c2c97b2f2a4a23477"),
        (
            LARGE,
            SMALL | {"depth": 23, "img_size": 448, "ref_feat_shape": [32, 32], "embed_dim": 1024, "num_heads": 16},
            "6d5433849bfc34a0eab078c475e8bd8786ad2b0b00c51dbd73a7a65475675b51",
        ),
    ],
)
def test_weights_have_the_names_and_shapes_of_timm(name: str, options: dict[str, Any], shapes: str) -> None:
    with torch.device("meta"):
        tower = tower_of(name, options)
    found = sorted((name, list(weight.shape)) for name, weight in tower.timm_model.state_dict().items())
    assert hashlib.sha256(repr(found).encode()).hexdigest() == shapes


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        ("fastvit_mci2", SMALL_FAST, "'fastvit_mci2'; of timm's towers fastvit_mci3, vit_pe_core_large_patch14_336"),
        (FAST, {}, "it is supported with inference_mode true and no options but"),
        (FAST, {"inference_mode": True, "cls_ratio": 3}, "it is supported with inference_mode true and no options but"),
        (LARGE, {}, "of which use_post_transformer_norm must be false and global_pool empty"),
        (LARGE, SMALL | {"global_pool": "map"}, "use_post_transformer_norm must be false and global_pool empty"),
        (LANG, {"num_reg_tokens": 4}, "is supported with embed_dim, num_heads"),
        (LANG, {"patch_size": 16}, "is supported with embed_dim, num_heads"),
    ],
)
def test_other_towers_of_timm_are_refused(name: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelLoadError, match=fault):
        tower_of(name, options)
