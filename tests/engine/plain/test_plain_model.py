"""Plain decoders made from files alone are transformers' own, number for number; what is not plain is left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.models import BUNDLED, read_config, read_shapes, resolve_model
from penstock.engine.plain.config import PlainConfig
from penstock.engine.plain.loading import load_plain
from penstock.engine.plain.model import PlainModel
from penstock.engine.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
}
BOUNDS = {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.125, "truncate": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
GPT_OSS = LOCAL_EXPERTS | {"head_dim": 16, "sliding_window": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama with heads of another size": ("Llama", {"head_dim": 16}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen 2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen 3": ("Qwen3", {"head_dim": 16}),
    "qwen 3 with biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "yarn": ("Qwen2", {"rope_parameters": YARN}),
    "yarn with its numbers": ("Llama", {"rope_parameters": YARN | BOUNDS}),
    "yarn that shortens": ("Llama", {"rope_parameters": YARN | {"factor": 0.5}}),
    "mixtral": ("Mixtral", LOCAL_EXPERTS),
    "mixtral with a window": ("Mixtral", LOCAL_EXPERTS | {"sliding_window": 5, "head_dim": 16}),
    "qwen 3 with experts": ("Qwen3Moe", EXPERTS),
    "qwen 3 with normed experts": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "attention_bias": True}),
    "gpt-oss": ("GptOss", GPT_OSS | {"rope_parameters": YARN | BOUNDS}),
    "gpt-oss without biases": ("GptOss", GPT_OSS | {"attention_bias": False, "swiglu_limit": 1.0, "swiglu_alpha": 1.0}),
}


def saved(path: Path, kind: str, values: dict[str, Any]) -> Any:
    """transformers' model with random weights, biases and norms included, which is saved at `path`."""
    library: Any = transformers
    torch.manual_seed(0)
    config = getattr(library, f"{kind}Config")(**SIZES | values)
    model = library.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.3)
    model.save_pretrained(path)
    return model


def attend(
    _: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention written out: [Hq, T, D] → [T, Hq · D]."""
    key, value = (each.repeat_interleave(len(query) // len(each), dim=0) for each in (key, value))
    behind = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])[None]
    seen = (behind >= 0) & (behind < (window or query.shape[1]))
    scores = (scaling * query @ key.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more score, whose value is zero
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:2], 1)), dim=-1)
    mixed = scores.softmax(-1)[..., : query.shape[1]] @ value
    return mixed.transpose(0, 1).flatten(1)


def loaded(path: Path, **values: Any) -> PlainModel | None:
    return load_plain(EngineConfig(model=str(path), **values), path, CPU, None, keep_levels=None)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    own = saved(tmp_path, *MODELS[name])
    plain = loaded(tmp_path, dtype="float32")
    assert plain is not None and plain.dtype == torch.float32
    ids = torch.arange(24) * 7919 % SIZES["vocab_size"]
    expected = own(ids[None], use_cache=False).logits[0]
    found = plain(ids, torch.arange(24), torch.arange(24), attend)
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(plain.model.rotary_emb.inv_freq, own.model.rotary_emb.inv_freq)
    names = {name for name, _ in own.named_modules()}
    assert {name for name, _ in plain.named_modules()} == names, "adapters and quantisation go by the names of modules"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [0]}),
        ("Qwen2Moe", EXPERTS),
        ("Llama", {"hidden_act": "gelu"}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Gemma", {}),
        ("Phi3", {"pad_token_id": 0}),
    ],
)
def test_what_is_not_plain_is_left_to_transformers(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path, kind, values)
    assert loaded(tmp_path) is None


@pytest.mark.parametrize(
    "missing", ["num_key_value_heads", "rope_parameters", "rms_norm_eps", "architectures", "model_type"]
)
def test_no_default_of_transformers_is_guessed(missing: str, tmp_path: Path) -> None:
    saved(tmp_path, "Llama", {})
    values = read_config(tmp_path)
    assert PlainConfig.of(values) is not None
    assert PlainConfig.of({name: value for name, value in values.items() if name != missing}) is None


def test_weights_that_do_not_fit_are_left_to_transformers_which_says_why(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", {})
    values, shapes = read_config(tmp_path), read_shapes(tmp_path)
    assert PlainModel.of(values, shapes) is not None
    for name in shapes:
        assert PlainModel.of(values, {other: shape for other, shape in shapes.items() if other != name}) is None
        assert PlainModel.of(values, shapes | {name: [*shapes[name], 1]}) is None
    assert PlainModel.of(values, shapes | {"model.layers.0.self_attn.q_proj.bias": [32]}) is None
    assert PlainModel.of(values, shapes | {"model.layers.0.self_attn.rotary_emb.inv_freq": [4]}) is not None


@settings(deadline=None)
@given(
    dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    own=st.sampled_from([None, "float32", "bfloat16", "float16"]),
)
def test_the_dtype_is_that_of_the_configuration_or_the_one_asked_for(
    model_directory: Callable[[str], Path], dtype: str, own: str | None
) -> None:
    """Without either, transformers looks into the weights."""
    path = model_directory("llama")
    file = path / "config.json"
    before = file.read_text()
    values = {name: value for name, value in json.loads(before).items() if name not in ("dtype", "torch_dtype")}
    try:
        file.write_text(json.dumps(values | ({"dtype": own} if own else {})))
        found = loaded(path, dtype=dtype)
    finally:
        file.write_text(before)
    chosen = own if dtype == "auto" else dtype
    assert (found and found.dtype) == (getattr(torch, chosen) if chosen else None)


def test_progress_is_told_for_each_weight(model_directory: Callable[[str], Path]) -> None:
    told: list[tuple[int, int]] = []
    path = model_directory("llama")
    load_plain(EngineConfig(model=str(path)), path, CPU, lambda *done: told.append(done), keep_levels=None)
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)] and len(told) > 5


def test_an_engine_of_a_plain_decoder_imports_no_transformers() -> None:
    code = (
        "import sys; from penstock.engine import EngineConfig, GenerationParams, InferenceEngine\n"
        "with InferenceEngine(EngineConfig(model='penstock-nano', backend='paged')) as engine:\n"
        "    engine.generate('What is Penstock?', GenerationParams(max_tokens=4))\n"
        "print(sorted({'transformers', 'torch._dynamo', 'sympy'} & {*sys.modules}))"
    )
    Tokenizer(resolve_model(BUNDLED))  # kept from now on: to make it takes transformers
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
