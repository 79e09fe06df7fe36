"""Models that rotate neighbouring numbers of a head: the decoder takes queries and keys in another order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gguf_files import write_gguf
from gguf_samples import PROMPTS
from pydantic import ByteSize
from tiny_model import make_tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints.rounded import Blocks, Rounded, absent
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.decoding.turning import by_halves, turned
from penstock.engine.paged.quantization.quantize import dequantized, quantizable
from penstock.engine.paged.quantization.rounding import to_int4

MakeModel = Callable[..., Path]
SHAPES = ["glm4", "glm", "ernie4_5", "helium"]
SAMPLES = Path(__file__).parents[2] / "checkpoints" / "samples"
HAS_KERNELS = {*cpu_flags().split()} >= KERNEL_FLAGS
GREEDY = GenerationParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = [3 + (7 * index + index * index) % 500 for index in range(40)]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The tiny model of a shape, whose biases are not zeros as those of new models are."""

    def make(shape: str, **sizes: object) -> Path:
        directory: Path = make_tiny_model(tmp_path_factory.mktemp(shape), shape, sizes=sizes)
        model = load(directory)
        random = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.data.copy_(torch.randn(weight.shape, generator=random) * 0.3)
        model.save_pretrained(directory)
        return directory

    return make


def load(directory: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model


def start(model: Path, dtype: Literal["float32", "bfloat16"], quantization: str | None = None) -> InferenceEngine:
    memory = ByteSize(16 << 20)
    return InferenceEngine(
        EngineConfig(model=str(model), dtype=dtype, device="cpu", quantization=quantization, kv_cache_memory=memory)
    )


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_one_compiled_call_and_says_what_transformers_says(
    shape: str, quantization: str | None, biased: MakeModel
) -> None:
    """Quantised ones what it says with the numbers that the levels stand for."""
    directory = biased(shape)
    model = load(directory)
    if quantization is not None:
        with torch.no_grad():
            for _, module, method in quantizable(model, quantization):
                module.weight.copy_(dequantized(module.weight, method))
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    with start(directory, "float32", quantization) as engine:
        assert engine.model_info().slow_paths == () or not HAS_KERNELS
        assert list(engine.generate(PROMPT, GREEDY).token_ids) == expected[0, len(PROMPT) :].tolist()
    with start(directory, "bfloat16", quantization) as engine:
        assert engine.model_info().slow_paths == () or not HAS_KERNELS


@pytest.mark.skipif(not HAS_KERNELS, reason="levels are kept where there are kernels")
@pytest.mark.parametrize("sample", ["glm4", "ernie4_5"])
def test_levels_make_the_log_probabilities_of_their_numbers(sample: str) -> None:
    check_levels(SAMPLES / f"{sample}.gguf")


@pytest.mark.skipif(not HAS_KERNELS, reason="levels are kept where there are kernels")
def test_so_do_blocks_that_are_packed_as_the_file_has_them(biased: MakeModel, tmp_path: Path) -> None:
    """Those of queries, keys and values with as many outputs as the kernels compute together."""
    directory = biased("ernie4_5", num_key_value_heads=4)
    write_gguf(directory, tmp_path / "model.gguf", "ernie4_5", lambda _, values: "Q8_0" if values.ndim == 2 else None)
    check_levels(tmp_path / "model.gguf")


def check_levels(path: Path) -> None:
    """In bfloat16 a file's weights stay levels; float32 has their numbers."""
    params = GREEDY.model_copy(update={"max_tokens": 1, "prompt_logprobs": 1})
    found: list[Tensor] = []
    for dtype in ("float32", "bfloat16"):
        with start(path, dtype) as engine:
            assert engine.model_info().slow_paths == ()
            told = engine.generate(PROMPTS[1], params).prompt_logprobs
            assert told is not None
            found.append(torch.tensor([entry.logprob for entry in told[1:]]))
    assert (found[0] - found[1]).abs().mean() < 0.05


def test_rows_are_exchanged_within_the_part_of_a_head_that_rotates() -> None:
    assert by_halves(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


class _Reader:
    """What a file has as levels, and as blocks."""

    def __init__(self, rounded: Rounded, parts: int) -> None:
        self._rounded, self._parts = rounded, parts

    def __call__(self) -> Rounded:
        return self._rounded

    def blocks(self) -> list[Blocks]:
        data = self._rounded.levels.view(torch.uint8)
        return [Blocks("Q8_0", part, data.shape[1]) for part in data.chunk(self._parts)]


def test_levels_blocks_and_biases_take_the_order_and_the_module_keeps_its_own() -> None:
    module, other = nn.Linear(64, 32), nn.Linear(64, 8)
    rounded, order = to_int4(module.weight.detach()), by_halves(2, 16, 8)
    bias = module.bias.detach().clone()
    module.weight = nn.Parameter(absent((32, 64), torch.bfloat16), requires_grad=False)
    vars(module)["rounded"] = _Reader(rounded, parts=1)
    (found, same) = turned([module, other], [order])
    read = vars(found)["rounded"]
    assert same is other and found.weight.untyped_storage().nbytes() <= 2, "it stays absent"
    assert torch.equal(found.bias, bias[order]) and torch.equal(module.bias, bias)
    assert torch.equal(read().numbers, rounded.numbers[order])
    assert torch.equal(read.blocks()[0].data, rounded.levels.view(torch.uint8)[order])
    vars(module)["rounded"] = _Reader(rounded, parts=2)
    assert vars(turned([module], [order])[0])["rounded"].blocks() == [], "rows of several blocks may not be exchanged"
