"""Numbers of four bits with a point in safetensors: NVFP4 of compressed-tensors and ModelOpt, and MXFP4.

The numbers are worked out from the definitions of E2M1, E4M3 and E8M0, in numpy and float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from packed_files import FORMATS, Format, write
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.checkpoints.packed_weights import lazy_packed_weights, packed_level_readers
from penstock.engine.models import count_parameters, packed_files, read_model_info, read_shapes
from penstock.schemas.errors import ModelLoadError

Numbers = npt.NDArray[np.float32]
ROWS, INPUTS, MODULE = 254, 512, "model.layers.0.mlp.up_proj"


def e2m1(levels: npt.NDArray[np.uint8]) -> Numbers:
    sign = np.where(levels & 8, -1, 1).astype(np.float32)
    exponent, mantissa = (levels >> 1 & 3).astype(np.float32), (levels & 1).astype(np.float32)
    return sign * np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2 ** (exponent - 1)).astype(np.float32)


def e4m3(codes: npt.NDArray[np.uint8]) -> Numbers:
    sign = np.where(codes & 128, -1, 1).astype(np.float32)
    exponent, mantissa = (codes >> 3 & 15).astype(np.float32), (codes & 7).astype(np.float32)
    return sign * np.where(exponent == 0, mantissa * 2**-9, (1 + mantissa / 8) * 2 ** (exponent - 7)).astype(np.float32)


def unpacked(packed: npt.NDArray[np.uint8]) -> Numbers:
    """The first of two numbers is in the low half of their byte."""
    levels = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    levels[:, ::2], levels[:, 1::2] = packed & 15, packed >> 4
    return e2m1(levels)


def checkpoint(directory: Path, settings: dict[str, Any], **parts: Tensor) -> Path:
    """A directory with one packed weight."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    save_file({f"{MODULE}.{name}": part for name, part in parts.items()}, directory / "model.safetensors")
    return directory


def as_read(directory: Path) -> tuple[Tensor, Tensor, Tensor]:
    """The weight in float32, in bfloat16, and as its levels say."""
    found = packed_files(directory)
    assert found is not None
    both = [
        lazy_packed_weights(found.files, found.weights, found.packing, dtype)[f"{MODULE}.weight"][...]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return both[0], both[1], packed_level_readers(found.files, found.weights, found.packing)[MODULE]().numbers


def check(directory: Path, expected: Numbers) -> None:
    whole, half, of_levels = as_read(directory)
    assert np.array_equal(whole.numpy().view(np.uint32), expected.view(np.uint32)), "zeros keep their signs"
    assert torch.equal(half.view(torch.int16), torch.from_numpy(expected).bfloat16().view(torch.int16))
    assert torch.equal(of_levels, torch.from_numpy(expected))


@pytest.mark.parametrize("whole", [2.0**-14, 0.003717, 1234.567])
@pytest.mark.parametrize("maker", ["compressed-tensors", "modelopt"])
def test_nvfp4_is_read_bit_for_bit(maker: str, whole: float, tmp_path: Path) -> None:
    """All numbers with all scales but the two that are none, and what one maker divides by the other multiplies by."""
    packed = np.random.default_rng(3).integers(0, 256, (ROWS, INPUTS // 2), dtype=np.uint8)
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    codes = np.stack([np.roll(codes, shift) for shift in range(INPUTS // 16)], axis=1)
    factor, scales = np.float32(whole), e4m3(codes)
    assert {*packed.ravel().tolist()} == {*range(256)}
    factors = scales / factor if maker == "compressed-tensors" else scales * factor
    levels, e4m3_scales = torch.from_numpy(packed), torch.from_numpy(codes).view(torch.float8_e4m3fn)
    if maker == "compressed-tensors":
        settings = FORMATS["compressed-nvfp4"].settings
        parts = {"weight_packed": levels, "weight_global_scale": torch.tensor([whole])}
    else:
        settings = FORMATS["modelopt-nvfp4"].settings
        parts = {"weight": levels, "weight_scale_2": torch.tensor(whole)}
    directory = checkpoint(tmp_path / "one", settings, weight_scale=e4m3_scales, **parts)
    check(directory, unpacked(packed) * np.repeat(factors, 16, axis=1))
    assert read_shapes(directory) == {f"{MODULE}.weight": [ROWS, INPUTS]}


def test_mxfp4_is_read_bit_for_bit(tmp_path: Path) -> None:
    """All numbers with all scales whose numbers float32 has whole."""
    packed = np.random.default_rng(3).integers(0, 256, (ROWS, INPUTS // 2), dtype=np.uint8)
    codes = np.stack([np.roll(np.arange(1, 255, dtype=np.uint8), shift) for shift in range(INPUTS // 32)], axis=1)
    scales = (2.0 ** (codes.astype(np.float64) - 127)).astype(np.float32)
    directory = checkpoint(
        tmp_path / "one",
        FORMATS["compressed-mxfp4"].settings,
        weight_packed=torch.from_numpy(packed),
        weight_scale=torch.from_numpy(codes),
    )
    with np.errstate(over="ignore"):
        check(directory, unpacked(packed) * np.repeat(scales, 32, axis=1))


def test_a_group_that_ends_a_row_early_is_expanded(tmp_path: Path) -> None:
    """Products of levels take 32 inputs at a time; a row of 16 more has the right numbers all the same."""
    packed = np.random.default_rng(3).integers(0, 256, (4, 24), dtype=np.uint8)
    codes = np.full((4, 3), 0x38, np.uint8)  # 1
    directory = checkpoint(
        tmp_path / "one",
        FORMATS["modelopt-nvfp4"].settings,
        weight=torch.from_numpy(packed),
        weight_scale=torch.from_numpy(codes).view(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor(0.5),
    )
    found = packed_files(directory)
    assert found is not None and not packed_level_readers(found.files, found.weights, found.packing)
    read = lazy_packed_weights(found.files, found.weights, found.packing, torch.float32)[f"{MODULE}.weight"][...]
    assert np.array_equal(read.numpy(), unpacked(packed) / 2)


MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        **{"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
    },
}


def test_modelopts_own_file_says_how_weights_are_packed(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """Where config.json does not; the modules that it excludes lie there as they are."""
    source, packed = model_directory("qwen2"), tmp_path / "packed"
    expected = write(source, packed, FORMATS["modelopt-nvfp4"], lambda name: ".mlp." in name and "_proj" in name)
    shutil.copy(source / "config.json", packed)
    (packed / "hf_quant_config.json").write_text(json.dumps(MODELOPT_FILE))
    found = packed_files(packed)
    assert found is not None and count_parameters(packed) == count_parameters(source)
    weights = lazy_packed_weights(found.files, found.weights, found.packing, torch.float32)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name][...], expected[name]) for name in expected)
    attention = {name for name in expected if "self_attn" in name}
    assert attention and all(isinstance(found.weights[name], str) for name in attention)
    other = MODELOPT_FILE | {"quantization": {"quant_algo": "W4A8_AWQ"}}
    (packed / "hf_quant_config.json").write_text(json.dumps(other))
    with pytest.raises(ModelLoadError, match="is quantised by modelopt to 'W4A8_AWQ', which is not supported"):
        read_model_info(packed, "m")


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("modelopt-nvfp4", {"weight_scale": None}, r"lack model\.layers\.0\.mlp\.up_proj\.weight_scale; download"),
        ("compressed-nvfp4", {"weight_packed": None}, r"lack .*\.up_proj\.weight_packed; download them again"),
        ("compressed-nvfp4", {"weight_global_scale": None}, r"lack .*\.up_proj\.weight_global_scale; download"),
        ("compressed-fp8", {"weight": torch.ones(2, 3, 4)}, r"up_proj\.weight is no matrix; choose a checkpoint with"),
        ("compressed-mxfp4", {"weight_scale": torch.ones(3, 2)}, r"up_proj\.weight_packed has the shape .* \[3, 2\] "),
        (
            "compressed-nvfp4",
            {"weight_global_scale": torch.ones(5)},
            r"up_proj\.weight_global_scale has the shape \[5\] and must be one number",
        ),
        ("compressed-nvfp4", {"weight_zero_point": torch.ones(1)}, r"up_proj\.weight_zero_point is not supported"),
        ("modelopt-nvfp4", {"pre_quant_scale": torch.ones(4)}, r"up_proj\.pre_quant_scale is not supported"),
        ("modelopt-fp8", {"gate_up_proj_weight_scale": torch.ones(4)}, r"gate_up_proj_weight_scale is not supported"),
    ],
)
def test_parts_that_do_not_fit_are_named_before_any_is_read(
    name: str, change: dict[str, Tensor | None], fault: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    form: Format = FORMATS[name]
    write(model_directory("qwen2"), tmp_path / "packed", form)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    for part, tensor in change.items():
        if tensor is None:
            del tensors[f"{MODULE}.{part}"]
        else:
            tensors[f"{MODULE}.{part}"] = tensor
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=fault):
        count_parameters(tmp_path / "packed")
