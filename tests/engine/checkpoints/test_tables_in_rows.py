"""Large embeddings stay in the blocks of their GGUF file: their rows become numbers when they are looked up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_samples import PROMPTS
from pydantic import ByteSize
from torch import Tensor, nn

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints import widths
from penstock.engine.checkpoints.gguf.types import BLOCKS
from penstock.engine.checkpoints.gguf.weights import dequantize
from penstock.engine.checkpoints.rounded import Blocks, is_absent
from penstock.engine.checkpoints.widths import READABLE_ROWS
from penstock.engine.cpu.library import load_kernels
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.decoding.precision import in_float32
from penstock.engine.paged.decoding.rows import ROWS
from penstock.engine.paged.quantization.blocks import rows_of
from penstock.engine.planning.sizing import weights_of_model

pytestmark = pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
FOLDER = Path(__file__).parent / "samples"
PARAMS = GenerationParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=1)


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(path), dtype="bfloat16", device="cpu", kv_cache_memory=ByteSize(16 << 20), prefill_chunk_size=16
    )


def answers(engine: InferenceEngine) -> list[Any]:
    """Tokens and their log-probabilities, of a prompt in pieces among them."""
    outputs = engine.generate(PROMPTS, PARAMS)
    return [[(one.token_id, one.logprob) for one in output.logprobs or ()] for output in outputs]


def tables(engine: InferenceEngine) -> list[Any]:
    backend: Any = engine._driver.backend
    return [module for module in backend.runner._model.modules() if ROWS in vars(module)]


@pytest.mark.parametrize(
    ("name", "number"),
    [("gemma4", 2), ("gemma3n", 2), ("granitemoehybrid", 1), ("glm4", 1), ("cohere", 1), ("ministral3", 1)],
)
def test_an_answer_has_the_same_bits(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled, tied to the head, for each layer; in the compiled decoder and in others' modules."""
    config = config_of(FOLDER / f"{name}.gguf")
    with InferenceEngine(config) as engine:
        assert not tables(engine)
        expected, slow = answers(engine), engine.model_info().slow_paths
    whole = weights_of_model(config, "cpu").kept
    monkeypatch.setattr(widths, "LARGE_TABLE", 1)
    with InferenceEngine(config) as engine:
        found = tables(engine)
        assert len(found) == number and all(is_absent(module.weight) for module in found)
        assert answers(engine) == expected and engine.model_info().slow_paths == slow
        numbers = sum(module.weight.numel() for module in found)
        saved = 2 * numbers - sum(vars(module)[ROWS].nbytes for module in found)
    assert whole - weights_of_model(config, "cpu").kept == pytest.approx(saved, rel=0.1)


def test_small_ones_are_expanded() -> None:
    """Reading rows would be seen in each step of a small model."""
    with InferenceEngine(config_of(FOLDER / "gemma4.gguf")) as engine:
        assert not tables(engine)


def test_a_file_may_be_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "LARGE_TABLE", 1)
    shutil.copy(FOLDER / "gemma4.gguf", path := tmp_path / "model.gguf")
    with InferenceEngine(config_of(path)) as engine:
        expected = answers(engine)
        path.write_bytes(b"")
        assert answers(engine) == expected


@pytest.mark.parametrize("kind", sorted(READABLE_ROWS))
def test_rows_have_the_numbers_of_their_blocks(kind: str) -> None:
    """In any order, some of them twice."""
    weights, size = BLOCKS[kind]
    content = torch.randint(0, 256, (300, 512 // weights * size), dtype=torch.uint8, generator=torch.manual_seed(0))
    ids = torch.tensor([[7, 299, 0], [7, 1, 298]])
    read = rows_of(Blocks(kind, content, 512), load_kernels())
    expected = dequantize(content[ids.flatten()].flatten(), kind, torch.bfloat16).view(2, 3, 512)
    assert torch.equal(read(ids).nan_to_num(1), expected.nan_to_num(1))
    assert read(ids[:0]).shape == (0, 3, 512)
    for unknown in (-1, 300):
        with pytest.raises(IndexError, match="vocabulary of 300"):
            read(torch.tensor([0, unknown]))


class Watched(nn.Embedding):
    """Notes how large its weight is while it looks up."""

    def forward(self, input: Tensor) -> Tensor:
        self.seen = self.weight.shape, self.weight.dtype
        return super().forward(input)


@torch.inference_mode()
def test_no_more_rows_are_widened_than_are_looked_up() -> None:
    """The embedding of a large model would take gigabytes in float32, and seconds."""
    table = Watched(1000, 8, padding_idx=999, dtype=torch.bfloat16)
    ids = torch.tensor([[5, 999, 5], [0, 5, 3]])
    with in_float32(nn.Sequential(table)):
        found = table(ids)
        assert table.seen == ((4, 8), torch.float32)
        assert torch.equal(table(input=ids), found), "given by name"
    assert torch.equal(found, table.weight.float()[ids]) and table.padding_idx == 999
    assert table(ids).dtype == torch.bfloat16 and table.seen == ((1000, 8), torch.bfloat16)
