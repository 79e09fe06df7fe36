"""Weights that a file holds as levels are packed as they are read: their numbers are in memory at no time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_cases import CASES, PROMPTS, AutoConfig, AutoModelForCausalLM, Case
from gguf_files import write_gguf
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints.gguf import weights as gguf_weights
from penstock.engine.checkpoints.rounded import Rounded
from penstock.engine.cpu import layouts
from penstock.engine.cpu.library import BLOCK, PLAIN, Product
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.decoding.experts import PackedExperts
from penstock.engine.planning.sizing import footprint, weights_of_model

pytestmark = pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
WITH_EXPERTS = [case for case in CASES if "num_experts_per_tok" in case.settings]
GPT_OSS = next(case for case in CASES if case.architecture == "gpt-oss")
UNLIKE = [*WITH_EXPERTS, *(case for case in CASES if case.architecture in ("gemma3", "phi3", "qwen35")), CASES[1]]
KINDS = {"q_proj": "Q4_0", "v_proj": "Q5_1", "down_proj": "Q4_1", "w2": "Q4_1", "experts": "MXFP4"}


def kind(name: str, values: Any) -> str | None:
    """Of each weight: matrices in several types, and what chooses experts as it is."""
    is_router = name.endswith((".gate.weight", ".router.weight", "shared_expert_gate.weight", "conv1d.weight"))
    *_, parent, own, _ = (".." + name).split(".")
    return KINDS.get(own, KINDS.get(parent, "Q8_0")) if values.ndim > 1 and not is_router else None


def log_probabilities(directory: Path, weights: dict[str, Any]) -> torch.Tensor:
    """By transformers in float32, of what follows each prompt."""
    config = AutoConfig.from_pretrained(directory)
    tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
    kind: Any = type(AutoModelForCausalLM.from_config(config))
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)
    found = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in PROMPTS]
    return torch.stack(found).log_softmax(-1)


@pytest.mark.parametrize("case", UNLIKE, ids=lambda case: f"{case.model_type}-{len(case.settings)}")
@torch.inference_mode()
def test_nothing_but_embeddings_is_expanded(
    case: Case, make_model: Callable[[Case], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts included; and the answers are about as likely as they are with the file's numbers in float32."""
    directory, path = make_model(case), tmp_path / "model.gguf"
    weights = write_gguf(directory, path, case.architecture, kind, metadata=case.metadata)
    expanded: list[str] = []
    dequantize = gguf_weights.dequantize

    def noted(data: torch.Tensor, kind: str, *more: Any) -> torch.Tensor:
        if kind in {*KINDS.values(), "Q8_0"}:
            expanded.append(kind)
        return dequantize(data, kind, *more)

    monkeypatch.setattr(gguf_weights, "dequantize", noted)
    monkeypatch.setattr(Rounded, "numbers", property(lambda _: pytest.fail("levels were expanded")))
    config = EngineConfig(model=str(path), **BFLOAT16)
    expected = log_probabilities(directory, weights)
    with InferenceEngine(config) as engine:
        assert expanded == ["Q8_0"], "the embedding"
        params = GenerationParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
        for output, right in zip(engine.generate(PROMPTS, params), expected, strict=True):
            (entry,) = output.logprobs or ()
            for one in entry.top:
                assert one.logprob == pytest.approx(float(right[one.token_id]), abs=0.25)


@pytest.mark.parametrize("case", WITH_EXPERTS, ids=lambda case: case.model_type)
@torch.inference_mode()
def test_each_expert_has_the_numbers_of_the_file(
    case: Case, make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    """And a worker takes about as much memory as is said before it starts."""
    directory, path = make_model(case), tmp_path / "model.gguf"
    weights = write_gguf(directory, path, case.architecture, kind, metadata=case.metadata)
    config = EngineConfig(model=str(path), **BFLOAT16)
    with InferenceEngine(config) as engine:
        backend: Any = engine._driver.backend
        layers = [module for module in backend.runner._model.modules() if isinstance(module, PackedExperts)]
        assert len(layers) == 2
        for index, layer in enumerate(layers):
            for expert in range(4):
                inner, outer = _of_expert(weights, index, expert)
                assert np.array_equal(_numbers(layer._inner[expert].product), inner)
                assert np.array_equal(_numbers(layer._outer[expert].product), outer)
        assert engine.generate(PROMPTS[0], GenerationParams(max_tokens=4, ignore_eos=True)).token_ids
    sizes = weights_of_model(config, "cpu")
    assert sizes.kept <= sizes.read < 2 * sum(values.size for values in weights.values())
    assert footprint(config.model_copy(update={"compile_kernels": False})).weights > 1.4 * footprint(config).weights


@pytest.mark.parametrize("case", [WITH_EXPERTS[-1], GPT_OSS], ids=lambda case: case.model_type)
def test_experts_that_lack_levels_in_part_have_numbers(
    case: Case, make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    """A layer's experts compute with levels only where all of them have such."""
    directory, path = make_model(case), tmp_path / "model.gguf"

    def some(name: str, values: Any) -> str | None:
        return "F16" if name.startswith("model.layers.1.") and "down_proj" in name else kind(name, values)

    write_gguf(directory, path, case.architecture, some, metadata=case.metadata)
    with InferenceEngine(EngineConfig(model=str(path), **BFLOAT16)) as engine:
        backend: Any = engine._driver.backend
        first, second = (each for each in backend.runner._model.modules() if isinstance(each, PackedExperts))
        kinds = [layer._inner[0].product and layer._inner[0].product.kind for layer in (first, second)]
        assert kinds[0] not in (None, PLAIN) and kinds[1] in (None, PLAIN)
        assert engine.generate(PROMPTS[0], GenerationParams(max_tokens=4, ignore_eos=True)).token_ids


def test_progress_is_told_of_what_is_packed(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    case = WITH_EXPERTS[-1]
    write_gguf(make_model(case), tmp_path / "model.gguf", case.architecture, kind, metadata=case.metadata)
    told: list[tuple[int, int]] = []
    config = EngineConfig(model=str(tmp_path / "model.gguf"), **BFLOAT16)
    InferenceEngine(config, progress=lambda *done: told.append(done)).close()
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)] and len(told) > 10


def _of_expert(weights: dict[str, Any], layer: int, expert: int) -> tuple[Any, Any]:
    """Gate and up, and down."""
    own = f"model.layers.{layer}.mlp.experts"
    if f"{own}.down_proj" in weights:  # all experts of a layer, inputs by outputs
        return weights[f"{own}.gate_up_proj"][expert].T, weights[f"{own}.down_proj"][expert].T
    names = [(f".mlp.experts.{expert}.{own}_proj.", f".experts.{expert}.w{number}.") for own, number in _NAMES]
    gate, up, down = (
        next(
            values
            for name, values in weights.items()
            if name.startswith(f"model.layers.{layer}.") and any(part in name for part in parts)
        )
        for parts in names
    )
    return np.concatenate((gate, up)), down


_NAMES = (("gate", 1), ("up", 3), ("down", 2))


def _numbers(product: Product | None) -> Any:
    assert product is not None
    found = layouts.numbers(product, torch.bfloat16, 0, -(-product.outputs // BLOCK))
    return found[: product.outputs].numpy()
