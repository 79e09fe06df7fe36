"""Files of llama.cpp's own converter: the engine says what transformers said of the original (deploy/gguf_samples.py).

Their weights are in Q8_0 and have the original's numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from gguf_samples import LENGTH, PROMPTS, SAMPLES
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints.experts import whole_weights
from penstock.engine.checkpoints.gguf.file import Gguf, read_gguf
from penstock.engine.checkpoints.gguf.models import config_of, weights_of
from penstock.engine.checkpoints.gguf.weights import lazy_weights, level_readers
from penstock.engine.checkpoints.lazy import LazyWeight
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.models import count_parameters
from penstock.engine.planning.sizing import footprint
from penstock.schemas.errors import ModelLoadError

FOLDER = Path(__file__).parent / "samples"
GRANITES = ("granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoehybrid_dense")
COMPILED = {  # with levels and without
    *("ernie4_5", "exaone4", "gemma4", "gemma4_moe", "glm4", "lfm2", "lfm2_moe"),
    *("minimax_m2", "ministral3", "olmo3", "seed_oss"),
    *GRANITES,
}


def sample(name: str) -> Gguf:
    return read_gguf(FOLDER / f"{name}.gguf")


def tokens(path: Path, dtype: Literal["bfloat16", "float32"], chunk: int) -> list[list[int]]:
    config = EngineConfig(
        model=str(path),
        dtype=dtype,
        device="cpu",
        kv_cache_memory=ByteSize(16 << 20),
        prefill_chunk_size=chunk,
    )
    with InferenceEngine(config) as engine:
        if path.stem in COMPILED and {*cpu_flags().split()} >= KERNEL_FLAGS:
            assert engine.model_info().slow_paths == ()
        params = GenerationParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
        return [list(output.choices[0].token_ids) for output in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_of_the_converter_says_what_transformers_said_of_the_original(name: str) -> None:
    """Two prompts at once, the longer one in pieces; the tokenizer is the file's."""
    path = FOLDER / f"{name}.gguf"
    assert tokens(path, "float32", 16) == json.loads((FOLDER / f"{name}.json").read_text())
    config = EngineConfig(model=str(path), dtype="float32", device="cpu", kv_cache_memory=ByteSize(16 << 20))
    assert footprint(config).weights >= 4 * count_parameters(path)


def numbers(weights: Mapping[str, LazyWeight], module: str) -> torch.Tensor:
    """A module's, or an expert's that transformers has inputs by outputs in one tensor with others."""
    if (weight := weights.get(f"{module}.weight")) is not None:
        return weight[...]
    experts, number, kind = module.rsplit(".", 2)
    return weights[f"{experts}.{kind}"][...][int(number)].T


@pytest.mark.parametrize("name", SAMPLES)
def test_levels_stand_for_the_numbers_of_the_weights(name: str) -> None:
    """Those of every product, experts included; with them the engine answers alike for equal prompts in bfloat16."""
    gguf = sample(name)
    weights, readers = lazy_weights(gguf, torch.float32), level_readers(gguf)
    for module, read in readers.items():
        assert torch.equal(read().numbers, numbers(weights, module)), module
    products = {name.removesuffix(".weight") for name in weights if name.endswith(("_proj.weight", ".w1.weight"))}
    left = {module for module in products - readers.keys() if weights[f"{module}.weight"][...].shape[-1] % 32 == 0}
    expanded = {"kv_b_proj", "per_layer_model_projection", "weights_proj"} | ({"c_proj"} if name == "gpt2" else set())
    assert {module.rpartition(".")[2] for module in left} <= expanded
    assert all(len(answer) == LENGTH for answer in tokens(gguf.path, "bfloat16", 64))


def test_an_activation_without_its_numbers_is_refused() -> None:
    gguf = sample("apertus")
    for numbers in (None, [0.5]):
        broken = replace(gguf, metadata={**gguf.metadata, "xielu.beta": numbers})
        with pytest.raises(ModelLoadError, match=r"has no xielu\.beta for each layer; convert the model again"):
            lazy_weights(broken, torch.float32)


def test_the_product_of_a_latent_may_be_in_one_piece(tmp_path: Path) -> None:
    """As older files have it, with the lengths of whole heads."""
    gguf = sample("deepseek_v3")
    whole = lazy_weights(gguf, torch.float32)["model.layers.0.self_attn.kv_b_proj.weight"][...]
    keys, values = (gguf.tensors[f"blk.0.attn_{kind}_b.weight"] for kind in "kv")
    assert whole.shape == (keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1])
    content = whole.numpy().tobytes()
    (tmp_path / "weight").write_bytes(content)
    one = keys._replace(name="blk.0.attn_kv_b.weight", shape=(*whole.shape,), type="F32", path=tmp_path / "weight")
    one = one._replace(start=0, nbytes=len(content))
    others = {name: tensor for name, tensor in gguf.tensors.items() if name not in (keys.name, values.name)}
    old = {"attention.key_length": 40, "attention.value_length": 16, "attention.head_count_kv": 2}
    metadata = {name: value for name, value in gguf.metadata.items() if not name.endswith("_mla")}
    metadata |= {f"deepseek2.{name}": value for name, value in old.items()}
    older = replace(gguf, tensors=others | {one.name: one}, metadata=metadata)
    assert config_of(older) == config_of(gguf)
    assert torch.equal(lazy_weights(older, torch.float32)["model.layers.0.self_attn.kv_b_proj.weight"][...], whole)


@pytest.mark.parametrize(
    ("name", "changed", "fault"),
    [
        ("deepseek_v3", {"blk.0.attn_v_b.weight": None}, "has blk.0.attn_k_b.weight without blk.0.attn_v_b.weight"),
        ("deepseek_v3", {"blk.0.attn_k_b.weight": None}, "has blk.0.attn_v_b.weight without blk.0.attn_k_b.weight"),
        ("deepseek_v3", {"blk.0.attn_v_b.weight": (2, 16, 64)}, "do not go with 2 heads and a latent of 32 numbers"),
        ("granitemoeshared", {"blk.0.ffn_up_shexp.weight": None}, "blk.0.ffn_gate_shexp.weight without blk.0.ffn_up"),
        ("granitemoeshared", {"blk.0.ffn_gate_shexp.weight": None}, "blk.0.ffn_up_shexp.weight without blk.0.ffn_gate"),
        (
            "qwen2_fused",
            {"blk.0.attn_qkv.weight": (60, 32)},
            "has 60 rows, and not 64, for 2 heads of queries",
        ),
        ("lfm2", {"blk.0.shortconv.gate.weight": "blk.0.shortconv.in_proj.weight"}, "shortconv.gate.weight is unknown"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(
    name: str, changed: dict[str, tuple[int, ...] | str | None], fault: str
) -> None:
    """None leaves a tensor out, a name copies another one."""
    gguf = sample(name)
    tensors = dict(gguf.tensors)
    for tensor, change in changed.items():
        if change is None:
            del tensors[tensor]
        elif isinstance(change, str):
            tensors[tensor] = tensors[change]._replace(name=tensor)
        else:
            tensors[tensor] = tensors[tensor]._replace(shape=change)
    with pytest.raises(ModelLoadError, match=fault):
        weights_of(replace(gguf, tensors=tensors))


@pytest.mark.parametrize(
    ("name", "changed", "fault"),
    [
        ("granitemoehybrid", {"rope.scaling.finetuned": True}, "is a Bamba, which is not supported in GGUF"),
        ("granitemoehybrid", {"ssm.time_step_rank": 5}, "64 numbers of a Mamba-2 layer do not go with 5 heads"),
        ("granitemoehybrid", {"embedding_length": 48}, "ssm.inner_size is no multiple of embedding_length"),
        ("gemma4", {"feed_forward_length": [64, 96, 128, 128]}, "its layers differ in feed_forward_length"),
        ("gemma4", {"feed_forward_length": [64, 64]}, "has no gemma4.feed_forward_length for each of 4 layers"),
        ("gemma4", {"attention.head_count_kv": [1, 1, 2, 1]}, "layers of one kind differ in their heads"),
        ("ministral3", {"attention.temperature_length": 64}, "its temperature has a length of its own"),
        ("olmo3", {"attention.head_count_kv": [1, 2, 1, 1]}, "head_count_kv differs between layers"),
        ("deepseek_v2", {"expert_weights_norm": True}, "is a Mistral Large 3"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "is a Mistral Large 3"),
        ("lfm2", {"general.architecture": "grok"}, "has the architecture 'grok', which is not supported in GGUF"),
    ],
)
def test_settings_that_are_not_supported_are_refused(name: str, changed: dict[str, object], fault: str) -> None:
    gguf = sample(name)
    prefix = gguf.metadata["general.architecture"]
    change = {key if key.startswith("general.") else f"{prefix}.{key}": value for key, value in changed.items()}
    with pytest.raises(ModelLoadError, match=fault):
        config_of(replace(gguf, metadata=gguf.metadata | change))


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    gguf = sample("olmoe")
    tensors = dict(gguf.tensors)
    for layer in range(2):
        gate, up = (tensors.pop(f"blk.{layer}.ffn_{kind}_exps.weight") for kind in ("gate", "up"))
        content = b""
        for expert in range(gate.shape[0]):
            for part in (gate, up):
                size = part.nbytes // part.shape[0]
                content += part.path.read_bytes()[part.start + expert * size :][:size]
        (tmp_path / f"{layer}").write_bytes(content)
        shape = (gate.shape[0], 2 * gate.shape[1], gate.shape[2])
        name = f"blk.{layer}.ffn_gate_up_exps.weight"
        tensors[name] = gate._replace(name=name, shape=shape, path=tmp_path / f"{layer}", start=0, nbytes=len(content))
    fused, apart = (
        whole_weights(
            lazy_weights(one, torch.float32), {n: [*w.shape] for n, w in weights_of(one).items()}, torch.float32
        )
        for one in (replace(gguf, tensors=tensors), gguf)
    )
    assert fused.keys() == apart.keys()
    for name, weight in apart.items():
        assert torch.equal(fused[name][...], weight[...]), name


def test_weights_that_the_model_does_not_have_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out, they would change what it says: a bias of the attention's output, for example."""
    gguf = sample("exaone4")
    bias = gguf.tensors["blk.0.post_attention_norm.weight"]._replace(name="blk.0.attn_output.bias")
    more = replace(gguf, tensors=gguf.tensors | {bias.name: bias})
    for module in ("penstock.engine.loading", "penstock.engine.models"):
        monkeypatch.setattr(f"{module}.read_gguf", lambda path: more)
    with pytest.raises(ModelLoadError, match=r"a Exaone4ForCausalLM has not, such as .*self_attn.o_proj.bias"):
        tokens(gguf.path, "float32", 16)


def test_a_whole_head_rotates_where_transformers_would_rotate_a_part() -> None:
    gguf = sample("glm4")
    metadata = {name: value for name, value in gguf.metadata.items() if name != "glm4.rope.dimension_count"}
    assert config_of(gguf)["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert config_of(replace(gguf, metadata=metadata))["rope_parameters"]["partial_rotary_factor"] == 1
