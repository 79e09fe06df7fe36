"""Checkpoints of GPTQ, AWQ, compressed-tensors, ModelOpt and FP8, against the numbers that their weights stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_files import COMPRESSED, FORMATS, GPTQ, Format, by_row, gptq, groups_of, write
from pydantic import ByteSize
from safetensors.torch import load_file, save_file

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints import packed_weights
from penstock.engine.checkpoints.packed_weights import byte_readers
from penstock.engine.checkpoints.rounded import ReadRounded
from penstock.engine.checkpoints.widths import byte_widths
from penstock.engine.cpu.layouts import numbers
from penstock.engine.cpu.library import BLOCK as ROWS
from penstock.engine.cpu.library import FINE, INT4, INT8, PLAIN, UNEVEN
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.models import count_parameters, packed_files, read_model_info
from penstock.engine.planning.sizing import weights_of_model
from penstock.schemas.errors import ModelLoadError

PROMPTS = [[7, 90, 301, 45, 12], [5 + 3 * index % 400 for index in range(40)]]


def generate(model: Path) -> list[list[int]]:
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory=ByteSize(16 << 20))
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=24, temperature=0, ignore_eos=True)
        outputs = engine.generate(PROMPTS, params)
        return [list(output.choices[0].token_ids) for output in outputs]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_packed_checkpoint_says_what_its_numbers_say(
    form: Format, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    expanded = write(model_directory("qwen2"), tmp_path / "packed", form)
    shutil.copytree(model_directory("qwen2"), tmp_path / "plain")
    save_file(
        {name: weight.contiguous() for name, weight in expanded.items()},
        tmp_path / "plain" / "model.safetensors",
        {"format": "pt"},
    )
    assert generate(tmp_path / "packed") == generate(tmp_path / "plain")
    assert count_parameters(tmp_path / "packed") == count_parameters(tmp_path / "plain")


IN_TWO_BITS = {"gptq-2": Format(GPTQ | {"bits": 2, "desc_act": False}, gptq(2, 1, ordered=False))}
WITH_LEVELS = {
    **dict.fromkeys(("gptq-2", "gptq-4", "gptq-v2", "awq", "compressed-4", "compressed-4-with-zeros"), INT4),
    **dict.fromkeys(("gptq-8", "compressed-8"), INT8),
    **{"compressed-nvfp4": FINE, "modelopt-nvfp4": FINE, "compressed-mxfp4": UNEVEN},
}


@pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
@pytest.mark.parametrize("name", [*(name for name in FORMATS if "-and-" not in name), *IN_TWO_BITS])
@torch.inference_mode()
def test_levels_are_kept_in_bfloat16(
    name: str, model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products multiply by the checkpoint's numbers; weights with levels are never expanded."""
    expected = write(model_directory("qwen2"), tmp_path / "packed", (FORMATS | IN_TWO_BITS)[name])
    if name in WITH_LEVELS:
        monkeypatch.setattr(packed_weights, "expand", lambda *_: pytest.fail("a weight was expanded"))
    config = EngineConfig(model=str(tmp_path / "packed"), dtype="bfloat16", device="cpu")
    with InferenceEngine(config) as engine:
        backend: Any = engine._driver.backend
        _, *products = [linear.product for linear in backend.runner._decoder.linears()[:5]]
        for part, product in zip(("self_attn.o", "mlp.gate", "mlp.up", "mlp.down"), products, strict=True):
            if name in WITH_LEVELS:
                found = numbers(product, torch.bfloat16, 0, -(-product.outputs // ROWS))[: product.outputs]
                assert product.kind == WITH_LEVELS[name]
                assert torch.allclose(found, expected[f"model.layers.0.{part}_proj.weight"], atol=1e-6, rtol=1e-5)
            else:
                assert product is None or product.kind == PLAIN
        answers = engine.generate(PROMPTS, GenerationParams(max_tokens=8, temperature=0, ignore_eos=True))
        assert [len(answer.token_ids) for answer in answers] == [8, 8]


IN_BYTES = ("compressed-int8", "compressed-fp8", "fp8-blocks", "fp8", "modelopt-fp8-by-row")


def bytes_of(model: Path) -> dict[str, ReadRounded]:
    packed = packed_files(model)
    assert packed is not None
    found = byte_readers(packed.files, packed.weights, packed.packing)
    assert {f"{module}.weight" for module in found} == byte_widths(packed.weights, packed.packing).keys()
    return found


@pytest.mark.parametrize("name", IN_BYTES)
def test_bytes_with_their_scales_are_the_numbers_that_they_stand_for(
    name: str, model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU keeps them, unless a block has half a group."""
    form = FORMATS[name]
    if name == "fp8-blocks":
        write(model_directory("qwen2"), tmp_path / "halves", form)
        assert not bytes_of(tmp_path / "halves")
        monkeypatch.setattr("packed_files.BLOCK", 64)
        form = form._replace(settings=form.settings | {"weight_block_size": [64, 64]})
    expected = write(model_directory("qwen2"), tmp_path / "packed", form)
    found = bytes_of(tmp_path / "packed")
    assert any("mlp.down_proj" in module for module in found)
    for module, read in found.items():
        assert torch.equal(read().numbers, expected[f"{module}.weight"].float())


def test_the_memory_of_levels_is_known_before_they_are_read(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes = {}
    for name in ("compressed-mxfp4", "awq", "gptq-8", "modelopt-nvfp4", "gptq-in-order-of-activations"):
        write(model_directory("qwen2"), tmp_path / name, FORMATS[name])
        config = EngineConfig(model=str(tmp_path / name), dtype="bfloat16", device="cpu")
        sizes[name] = weights_of_model(config, "cpu").kept
    assert sizes["compressed-mxfp4"] < sizes["awq"] < sizes["gptq-8"] < sizes["gptq-in-order-of-activations"]
    assert sizes["modelopt-nvfp4"] == sizes["gptq-8"]


def test_columns_in_an_order_that_the_configuration_denies_are_refused(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    form = Format(GPTQ | {"bits": 4, "desc_act": False}, gptq(4, 1, ordered=True))
    write(model_directory("qwen2"), tmp_path / "packed", form)
    with pytest.raises(ModelLoadError, match=r"g_idx are in an order of activations, .* set desc_act to true"):
        InferenceEngine(EngineConfig(model=str(tmp_path / "packed"), dtype="bfloat16", device="cpu"))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"quant_method": "bitsandbytes"}, "is quantised by 'bitsandbytes', which is not supported; supported: one of"),
        ({"bits": 4}, "is quantised by None"),
        (GPTQ | {"bits": 3}, "is quantised by gptq to 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "has AWQ's layout 'gemv'"),
        (COMPRESSED | {"format": "mxfp6-pack-quantized"} | groups_of(6), "layout 'mxfp6-pack-quantized'"),
        (COMPRESSED | {"format": "mixed-precision"} | groups_of(4, type="float"), "has weights of 4 floating bits"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "is quantised by modelopt to 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt"}, "is quantised by modelopt to None"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "by modelopt to 'MIXED_PRECISION'"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}} | groups_of(8), "'sparse-24-bitmask'"),
        (COMPRESSED | groups_of(6), "has weights of 6 bits"),
    ],
)
def test_another_method_is_refused_by_its_name(
    settings: dict[str, Any], fault: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """When the configuration is read, by the command line already."""
    write(model_directory("qwen2"), tmp_path / "packed", Format(settings, by_row))
    with pytest.raises(ModelLoadError, match=fault):
        read_model_info(tmp_path / "packed", "m")


def test_a_missing_part_is_named(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    write(model_directory("qwen2"), tmp_path / "packed", FORMATS["gptq-4"])
    weights = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.0.self_attn.q_proj.scales"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack model\.layers\.0\.self_attn\.q_proj\.scales; download them again"):
        count_parameters(tmp_path / "packed")


def test_packed_weights_without_a_word_in_the_configuration(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    write(model_directory("qwen2"), tmp_path / "packed", FORMATS["gptq-4"])
    shutil.copy(model_directory("qwen2") / "config.json", tmp_path / "packed")
    with pytest.raises(ModelLoadError, match=r"_proj\.qweight is packed, and .*config\.json has no quantization_conf"):
        count_parameters(tmp_path / "packed")
