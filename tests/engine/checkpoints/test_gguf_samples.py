"""Files of llama.cpp's own converter: the engine says what transformers said of the original (deploy/gguf_samples.py).

Their weights are in Q8_0 and have the original's numbers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_samples import LENGTH, PROMPTS, SAMPLES
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints.gguf.file import Gguf, read_gguf
from penstock.engine.checkpoints.gguf.models import config_of, weights_of
from penstock.engine.checkpoints.gguf.weights import lazy_weights, level_readers
from penstock.engine.loading import load_config
from penstock.engine.models import count_parameters
from penstock.engine.sizing import footprint
from penstock.schemas.errors import ModelLoadError

FOLDER = Path(__file__).parent / "samples"


def sample(name: str) -> Gguf:
    return read_gguf(FOLDER / f"{name}.gguf")


def tokens(path: Path, dtype: str, chunk: int) -> list[list[int]]:
    config = EngineConfig(
        model=str(path),
        dtype=dtype,
        device="cpu",
        kv_cache_memory=ByteSize(16 << 20),
        prefill_chunk_size=chunk,
        compile_kernels=dtype == "bfloat16",
    )
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
        return [list(output.choices[0].token_ids) for output in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_of_the_converter_says_what_transformers_said_of_the_original(name: str) -> None:
    """Two prompts at once, the longer one in pieces; the tokenizer is the file's."""
    path = FOLDER / f"{name}.gguf"
    assert tokens(path, "float32", 16) == json.loads((FOLDER / f"{name}.json").read_text())
    config = EngineConfig(model=str(path), dtype="float32", device="cpu")
    assert footprint(config, "cpu").weights.read >= 4 * count_parameters(path)


@pytest.mark.parametrize("name", SAMPLES)
def test_levels_stand_for_the_numbers_of_the_weights(name: str) -> None:
    """Those of every product, experts included; with them the engine answers alike for equal prompts in bfloat16."""
    gguf = sample(name)
    weights, readers = lazy_weights(gguf, torch.float32), level_readers(gguf)
    for module, read in readers.items():
        assert torch.equal(read().numbers, weights[f"{module}.weight"][...]), module
    products = {name.removesuffix(".weight") for name in weights if name.endswith(("_proj.weight", ".w1.weight"))}
    left = {module for module in products - readers.keys() if weights[f"{module}.weight"][...].shape[-1] % 32 == 0}
    assert {module.rpartition(".")[2] for module in left} <= {"kv_b_proj", "per_layer_model_projection"}
    assert all(len(answer) == LENGTH for answer in tokens(gguf.path, "bfloat16", 64))
