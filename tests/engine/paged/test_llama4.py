"""Llama 4 where it differs from other models. Its tokens in all schedules: `test_paged_oracle.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import greedy_answers
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.decoding.experts import PackedExperts
from penstock.schemas.errors import ConfigurationError

COUNT = 12
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TOLD = GREEDY.model_copy(update={"logprobs": 1})
PROMPTS = [[3 + (7 * length + index * index) % 500 for index in range(length)] for length in (1, 19, 50)]

Directory = Callable[[str], Path]


def config(directory: Path, **values: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
    return EngineConfig(model=str(directory), backend="paged", **fields | values)


@pytest.fixture
def in_chunks(model_directory: Directory, tmp_path: Path) -> Path:
    """One that attends within chunks of 70 tokens, and scales queries from the 64th token on."""
    shutil.copytree(model_directory("llama4_text"), tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings |= {"attention_chunk_size": 70, "floor_scale": 64, "attn_scale": 5.0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    return tmp_path / "model"


def test_a_context_ends_where_tokens_would_be_attended_to_otherwise(in_chunks: Path) -> None:
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(in_chunks, dtype=torch.float32, attn_implementation="eager")
    wanted = greedy_answers(model, PROMPTS, COUNT)
    with InferenceEngine(config(in_chunks)) as engine:
        assert engine.model_info().context_length == 63
        together = engine.generate(PROMPTS, TOLD)  # 70 rows in a step, of which none is scaled
        assert [output.token_ids for output in together] == wanted
    with InferenceEngine(config(in_chunks)) as engine:
        alone = [engine.generate(prompt, TOLD) for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)
    told = r"max_sequence_length=64: beyond 63 tokens this model attends within chunks.*at most 63, or use --backend hf"
    with pytest.raises(ConfigurationError, match=told):
        InferenceEngine(config(in_chunks, max_sequence_length=64)).close()


@pytest.mark.parametrize("changes", [{}, {"quantization": "int8"}, {"dtype": "float32"}], ids=str)
def test_only_the_chosen_experts_compute(changes: dict[str, Any], model_directory: Directory) -> None:
    backend = PagedBackend(config(model_directory("llama4_text"), **{"dtype": "bfloat16"} | changes))
    try:
        packed = [module for module in backend.runner._model.modules() if isinstance(module, PackedExperts)]
        assert len(packed) == 2
        assert all(4 * one.num_active_weights == one.num_weights for one in packed)
    finally:
        backend.close()


def test_a_checkpoint_that_also_sees_is_served_for_text(model_directory: Directory, tmp_path: Path) -> None:
    """As published ones are."""
    import transformers

    library: Any = transformers
    text = json.loads((model_directory("llama4_text") / "config.json").read_text())
    tower = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 64}
    tower |= {"projector_input_dim": 64, "projector_output_dim": 64}
    settings = library.Llama4Config(text_config=text, vision_config=tower)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.Llama4ForConditionalGeneration._from_config(settings, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for file in model_directory("llama").glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    wanted = greedy_answers(model, PROMPTS, COUNT)
    with InferenceEngine(config(tmp_path)) as engine:
        assert not engine.model_info().sees
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == wanted
