"""gpt-oss as it is published, with experts in MXFP4: against transformers' own expansion and answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_cases import PROMPTS, AutoModelForCausalLM
from greedy import greedy_answers
from huggingface_hub.utils._paths import filter_repo_objects
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints import packed_weights
from penstock.engine.checkpoints.lazy import LazyWeight
from penstock.engine.cpu import layouts
from penstock.engine.cpu.library import BLOCK, UNEVEN, Product
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.models import count_parameters, packed_files, read_model_info, resolve_model
from penstock.engine.paged.decoding.experts import PackedExperts
from penstock.engine.planning.sizing import footprint, weights_of_model
from penstock.schemas.errors import ModelLoadError

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
LENGTH = 24
needs_kernels = pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")


@pytest.fixture
def models(model_directory: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A model with random blocks, and the same with the numbers that transformers makes of them."""
    source = model_directory("gpt_oss")
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    shutil.copytree(source, plain)
    shutil.copytree(source, packed)
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(source / "model.safetensors")
    expanded = dict(tensors)
    for name, weight in list(tensors.items()):
        if name.endswith("_proj") and ".experts." in name:
            count, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expanded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(expanded, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": MXFP4}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def write(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_are_expanded_bit_for_bit_as_by_transformers(dtype: torch.dtype, models: tuple[Path, Path]) -> None:
    """All pairs of levels with all scales, of which the largest make infinities; zeros keep their signs."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(2, 1, 16)  # 255 would be NaN
    name = "model.layers.0.mlp.experts.gate_up_proj"
    path = write(models[0], lambda tensors: tensors.update({f"{name}_blocks": blocks, f"{name}_scales": scales}))
    found = packed_files(path)
    assert found is not None
    read = packed_weights.lazy_packed_weights(found.files, found.weights, found.packing, dtype)[name]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    ours = read[...]
    assert ours.dtype == dtype and ours.shape == expected.shape == (2, 512, 255)
    assert torch.equal(ours.view(bits), expected.view(bits))
    levels = packed_weights.packed_level_readers(found.files, found.weights, found.packing)
    for expert in range(2):
        own = levels[f"model.layers.0.mlp.experts.{expert}.gate_up_proj"]().numbers.to(dtype)
        assert torch.equal(own.T, expected[expert])


@pytest.mark.parametrize("backend", ["paged", "hf"])
def test_a_published_checkpoint_says_what_transformers_says(backend: str, models: tuple[Path, Path]) -> None:
    packed, plain = models
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    expected = greedy_answers(model, PROMPTS, LENGTH)
    params = GenerationParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    config = EngineConfig(
        model=str(packed), backend=backend, dtype="float32", device="cpu", kv_cache_memory=ByteSize(16 << 20)
    )
    with InferenceEngine(config) as engine:
        assert [output.token_ids for output in engine.generate(PROMPTS, params)] == expected
    assert count_parameters(packed) == count_parameters(plain)


@needs_kernels
@torch.inference_mode()
def test_levels_of_experts_are_kept_in_bfloat16(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never expanded, stand for transformers' numbers, and take what is said before the start."""
    packed, plain = models
    monkeypatch.setattr(packed_weights, "expand_experts", lambda *_: pytest.fail("experts were expanded"))
    expected = load_file(plain / "model.safetensors")
    config = EngineConfig(model=str(packed), dtype="bfloat16", device="cpu", kv_cache_memory=ByteSize(16 << 20))
    with InferenceEngine(config) as engine:
        backend: Any = engine._driver.backend
        layers = [module for module in backend.runner._model.modules() if isinstance(module, PackedExperts)]
        assert len(layers) == 2
        for index, layer in enumerate(layers):
            for kind, products in (("gate_up_proj", layer._inner), ("down_proj", layer._outer)):
                right = expected[f"model.layers.{index}.mlp.experts.{kind}"]
                for expert, product in enumerate(products):
                    assert torch.equal(numbers_of(product.product), right[expert].T)
        params = GenerationParams(temperature=0, max_tokens=8, ignore_eos=True)
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
        assert [output.token_ids for output in engine.generate(PROMPTS * 4, params)] == alone * 4
        found = [product for layer in layers for product in (*layer._inner, *layer._outer)]
        numbers = sum(layer.num_weights for layer in layers)
        assert sum(product.nbytes for product in found) * 8 == 4.5 * numbers  # bits
        assert {product.product and product.product.kind for product in found} == {UNEVEN}
    without = weights_of_model(config.model_copy(update={"compile_kernels": False}), "cpu").kept
    saved = 2 * numbers - sum(product.nbytes for product in found)
    assert weights_of_model(config, "cpu").kept == pytest.approx(without - saved, rel=0.05)
    assert without == footprint(config.model_copy(update={"model": str(plain)})).weights


def test_experts_are_expanded_layer_by_layer_without_kernels(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, as transformers expands them; and `--quantization` rounds what is expanded."""
    read: list[torch.Size] = []
    get = LazyWeight.__getitem__

    def noted(self: LazyWeight, key: Any) -> Tensor:
        found = get(self, key)
        read.append(found.shape)
        return found

    monkeypatch.setattr(LazyWeight, "__getitem__", noted)
    params = GenerationParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for change in ({"compile_kernels": False}, {"quantization": "int8"}):
        config = EngineConfig(model=str(models[0]), dtype="bfloat16", device="cpu", kv_cache_memory=ByteSize(16 << 20))
        with InferenceEngine(config.model_copy(update=change)) as engine:
            answers.append([len(one.token_ids) for one in engine.generate(PROMPTS, params)])
    assert answers == [[8, 8], [8, 8]]
    assert read.count(torch.Size((4, 64, 256))) == 4  # each of two layers, twice


def lacks_scales(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def lacks_blocks(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_blocks"]


def has_too_few(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lacks_scales, r"lack model\.layers\.1\.mlp\.experts\.down_proj_scales; download them again"),
        (lacks_blocks, r"lack model\.layers\.1\.mlp\.experts\.down_proj_blocks; download them again"),
        (has_too_few, r"down_proj_blocks has the shape \[4, 64, 4, 16\], which does not go with \[4, 63, 4\] scales"),
    ],
)
def test_a_broken_checkpoint_is_refused(
    change: Callable[[dict[str, Tensor]], None], fault: str, models: tuple[Path, Path]
) -> None:
    with pytest.raises(ModelLoadError, match=fault):
        count_parameters(write(models[0], change))


def test_blocks_without_a_word_in_the_configuration_are_refused(models: tuple[Path, Path]) -> None:
    packed, plain = models
    shutil.copy(plain / "config.json", packed)
    assert read_model_info(packed, "m").architecture == "GptOssForCausalLM"
    with pytest.raises(ModelLoadError, match=r"_proj_blocks is packed, and .*config\.json has no quantization_config"):
        count_parameters(packed)


def test_the_same_weights_in_other_forms_are_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As gpt-oss has them on the hub."""
    files = ["config.json", "model-00000-of-00002.safetensors", "original/model.safetensors", "metal/model.bin"]
    asked: list[str] = []

    def download(source: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("openai/gpt-oss-20b") == tmp_path
    assert asked == files[:2]


def numbers_of(product: Product | None) -> Tensor:
    assert product is not None
    found = layouts.numbers(product, torch.bfloat16, 0, -(-product.outputs // BLOCK))
    return found[: product.outputs]
