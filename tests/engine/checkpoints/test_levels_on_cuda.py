"""Models whose weights stay levels in a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_cases import CASES, PROMPTS, Case
from gguf_files import write_gguf
from packed_files import FORMATS, write
from pydantic import ByteSize
from torch import Tensor

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints import packed_weights
from penstock.engine.checkpoints.gguf import weights as gguf_weights
from penstock.engine.cuda.levels import LevelKernels, LevelWeight
from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.output import GenerationOutput
from penstock.engine.paged.quality import Reader, compare
from penstock.engine.paged.quantization import quantize
from penstock.engine.planning.sizing import weights_of_model
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.errors import ConfigurationError

HAS_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
ON_CUDA: dict[str, Any] = {
    **{"dtype": "bfloat16", "device": "cuda" if HAS_GPU else "cpu", "kv_cache_memory": ByteSize(64 << 20)},
    "compile_kernels": False,
}
IN_FLOAT32: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(64 << 20)}
LLAMA = next(case for case in CASES if case.architecture == "llama")
KINDS = {"q_proj": "Q4_0", "v_proj": "Q5_1", "down_proj": "Q4_1", "o_proj": "Q8_0", "lm_head": "Q8_0"}
PARAMS = GenerationParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)


class Kernels:
    """Stands for those of CUDA where there is no GPU: reads the levels from where those read them."""

    take = staticmethod(LevelKernels.take)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, weight: LevelWeight) -> None:
        """Nothing to compile."""

    def multiply(self, weight: LevelWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        product = x.float() @ self._numbers(weight).T
        return (product if bias is None else product + bias.float()).to(x.dtype)

    def _numbers(self, weight: LevelWeight) -> Tensor:
        tiles, groups, form = *weight.levels.shape[:2], weight.form
        if form.bits == 4:
            words = weight.levels.view(torch.int32)[..., None, None]
            shifts = torch.tensor([[4 * pair, 16 + 4 * pair] for pair in range(4)], dtype=torch.int32)
            levels = (words >> shifts & 15) - form.middle
        else:
            levels = weight.levels.view(torch.float8_e4m3fn if form.is_float else torch.int8)
        lanes = levels.reshape(tiles, groups, 8, 4, 2, 2, 4).float()  # row, t, side, half, number
        rows = lanes.permute(0, 4, 2, 1, 5, 3, 6).reshape(16 * tiles, -1)[: weight.outputs]
        factors = weight.factors.float().permute(0, 4, 3, 1, 2, 5).reshape(16 * tiles, -1, weight.factors.shape[-1])
        spread = factors[: weight.outputs].repeat_interleave(rows.shape[1] // factors.shape[1], 1)
        return rows * spread[..., 0] + (spread[..., 1] if form.has_zeros else 0)


def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on models are loaded as they are on a GPU."""
    if not HAS_GPU:
        monkeypatch.setattr(quantize, "LevelKernels", Kernels)
        monkeypatch.setattr(quantize, "unsupported", lambda device: "")


def check(found: Sequence[GenerationOutput], expected: Sequence[GenerationOutput]) -> None:
    """What may follow first is about as likely."""
    for output, right in zip(found, expected, strict=True):
        (mine, *_), (other, *_) = output.logprobs or (), right.logprobs or ()
        likely = {one.token_id: one.logprob for one in other.top}
        known = [one for one in mine.top if one.token_id in likely]
        assert known
        for one in known:
            assert one.logprob == pytest.approx(likely[one.token_id], abs=0.25)


@pytest.fixture
def gguf(make_model: Callable[[Case], Path], tmp_path: Path) -> Path:
    """A plain model in blocks of several types."""

    def kind(name: str, values: Any) -> str | None:
        *_, own, _ = (".." + name).split(".")
        return KINDS.get(own, "Q4_0") if values.ndim > 1 else None

    write_gguf(make_model(LLAMA), tmp_path / "model.gguf", LLAMA.architecture, kind, metadata=LLAMA.metadata)
    return tmp_path / "model.gguf"


def test_nothing_but_the_embedding_is_expanded(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what follows is as likely as it is by the same numbers on a CPU in float32, alone and side by side."""
    with InferenceEngine(EngineConfig(model=str(gguf), **IN_FLOAT32)) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    as_on_cuda(monkeypatch)
    expanded: list[str] = []
    dequantize = gguf_weights.dequantize

    def noted(data: torch.Tensor, kind: str, *others: Any) -> torch.Tensor:
        expanded.append(kind)
        return dequantize(data, kind, *others)

    monkeypatch.setattr(gguf_weights, "dequantize", noted)
    config = EngineConfig(model=str(gguf), **ON_CUDA)
    with InferenceEngine(config) as engine:
        assert expanded.count("Q4_0") == 1, "the embedding"
        check(engine.generate(PROMPTS, PARAMS), expected)
        check(engine.generate(PROMPTS[:1], PARAMS), expected[:1])


@NEEDS_GPU  # on a CPU bytes are expanded
@pytest.mark.parametrize("name", ["compressed-fp8", "fp8", "compressed-int8", "awq", "compressed-nvfp4"])
def test_packed_weights_answer_as_on_a_cpu(
    name: str, model_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(model_directory("qwen2"), tmp_path / "packed", FORMATS[name])
    with InferenceEngine(EngineConfig(model=str(tmp_path / "packed"), **IN_FLOAT32)) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(packed_weights, "expand", lambda *_: pytest.fail("a weight was expanded"))
    with InferenceEngine(EngineConfig(model=str(tmp_path / "packed"), **ON_CUDA)) as engine:
        check(engine.generate(PROMPTS, PARAMS), expected)


@NEEDS_GPU
def test_where_levels_are_expanded_the_engine_says_so(gguf: Path, make_model: Callable[[Case], Path]) -> None:
    with InferenceEngine(EngineConfig(model=str(gguf), **ON_CUDA)) as engine:
        assert not engine.model_info().slow_paths
    with InferenceEngine(EngineConfig(model=str(gguf), **ON_CUDA | {"dtype": "float32"})) as engine:
        assert (
            "weights of few bits are expanded: a GPU keeps levels of plain decoders"
            in engine.model_info().slow_paths[0]
        )
    with InferenceEngine(EngineConfig(model=str(make_model(LLAMA)), **ON_CUDA | {"dtype": "float32"})) as engine:
        assert not engine.model_info().slow_paths


@NEEDS_GPU
def test_less_memory_is_expected_of_levels(gguf: Path) -> None:
    kept = weights_of_model(EngineConfig(model=str(gguf), **ON_CUDA), "cuda").kept
    assert kept < 0.8 * weights_of_model(EngineConfig(model=str(gguf), **ON_CUDA | {"dtype": "float16"}), "cuda").kept


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_those_of_a_cpu(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By KL divergence on a real model: what is left is the rounding of bfloat16."""
    tokenizer = Tokenizer(resolve_model(BUNDLED))
    ids = tokenizer.encode("The weather in Berlin is fine, and a penstock leads water from a dam to a turbine. " * 8)
    tokens = [ids[start : start + 48] for start in range(0, 96, 6)]
    config = {"model": BUNDLED, "quantization": quantization}
    with closing(Reader(EngineConfig(**config | IN_FLOAT32), 48)) as reference:
        as_on_cuda(monkeypatch)
        with (
            closing(Reader(EngineConfig(**config | ON_CUDA), 48)) as model,
            closing(Reader(EngineConfig(model=BUNDLED, **ON_CUDA), 48)) as whole,
        ):
            found = compare(reference, model, tokens, lambda count: None)
            assert model.weight_bytes < 0.75 * whole.weight_bytes
    assert found.divergence < 2e-3
    assert found.same_best > 0.97


def test_another_dtype_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_cuda(monkeypatch)
    config = EngineConfig(model=BUNDLED, quantization="int8", **ON_CUDA | {"dtype": "float16"})
    with pytest.raises(ConfigurationError, match=r"int8.: takes bfloat16 on a GPU, not float16; set dtype"):
        InferenceEngine(config)
