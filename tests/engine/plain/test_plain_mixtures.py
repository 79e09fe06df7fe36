"""Mixtures made from files alone are those of transformers, number for number, whatever their files look like."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_cases import CASES, PROMPTS, AutoConfig, save_model
from gguf_files import write_gguf
from packed_files import FORMATS, write

from penstock.engine.checkpoints.experts import whole_shapes
from penstock.engine.checkpoints.rounded import TakesLevels, is_absent
from penstock.engine.config import EngineConfig
from penstock.engine.loading import load_causal_lm
from penstock.engine.models import read_config, read_model_info, read_shapes
from penstock.engine.plain.config import PlainConfig
from penstock.engine.plain.loading import load_plain
from penstock.engine.plain.model import PlainModel
from penstock.engine.text.tokenizer import load_tokenizer

CPU = torch.device("cpu")
FAMILIES = {case.model_type: case for case in CASES if case.model_type in ("mixtral", "qwen3_moe", "gpt_oss")}

PUBLISHED: list[dict[str, Any]] = [
    {
        **{"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "num_hidden_layers": 32},
        **{"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral", "vocab_size": 32000},
        **{"num_attention_heads": 32, "num_experts_per_tok": 2, "num_key_value_heads": 8, "num_local_experts": 8},
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "tie_word_embeddings": False},
    },
    {
        **{
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
        },
        **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960},
        **{"max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768},
        **{"norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8},
        **{"num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None},
        **{"rope_theta": 1e6, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False},
        **{"vocab_size": 151936},
    },
    {
        **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64},
        **{"hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880},
        **{"layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072},
        **{"model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24},
        **{"num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"rope_type": "yarn", "truncate": False},
        },
        **{"sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088},
    },
]


@pytest.fixture
def make(tmp_path: Path, model_directory: Callable[[str], Path]) -> Callable[[str, str], Path]:
    """Write a tiny random model of a family in some form; of safetensors each expert is packed by itself."""

    def make(family: str, form: str) -> Path:
        case, directory = FAMILIES[family], tmp_path / family
        save_model(case, directory)
        for file in model_directory("llama").glob("token*"):
            shutil.copy(file, directory)
        if form.startswith("gguf"):
            write_gguf(directory, directory / "model.gguf", case.architecture, kinds[form], metadata=case.metadata)
            return directory / "model.gguf"
        if form in FORMATS:
            write(directory, tmp_path / form, FORMATS[form], lambda name: ".experts." in name or "_proj" in name)
            return tmp_path / form
        return directory

    kinds: dict[str, Any] = {
        "gguf": lambda name, values: None,
        "gguf in bfloat16": lambda name, values: "BF16" if values.ndim > 1 else None,
        "gguf in levels": lambda name, values: "Q8_0" if values.ndim > 1 and not is_router(name) else None,
    }
    return make


def is_router(name: str) -> bool:
    return name.endswith((".gate.weight", ".router.weight"))


def loaded(path: Path, dtype: Any = "float32", keep_levels: TakesLevels | None = None) -> PlainModel | None:
    return load_plain(EngineConfig(model=str(path), dtype=dtype), path, CPU, None, keep_levels=keep_levels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family, form",
    [
        *((family, form) for family in FAMILIES for form in ("safetensors", "gguf", "gguf in levels")),
        *((family, form) for family in ("mixtral", "qwen3_moe") for form in ("gptq-4", "fp8", "modelopt-nvfp4")),
        ("qwen3_moe", "gguf in bfloat16"),
    ],
)
def test_every_weight_is_that_of_transformers(
    family: str, form: str, dtype: Any, make: Callable[[str, str], Path]
) -> None:
    path = make(family, form)
    plain = loaded(path, dtype)
    architecture = read_model_info(path, str(path)).architecture
    config = EngineConfig(model=str(path), dtype=dtype)
    theirs = load_causal_lm(config, path, architecture, CPU, None, None)
    assert plain is not None and plain.dtype == theirs.dtype == getattr(torch, dtype)
    own, expected = dict(plain.named_parameters()), dict(theirs.named_parameters())
    assert own.keys() == expected.keys()
    assert [name for name, weight in own.items() if not torch.equal(weight, expected[name])] == []
    rotary: Any = theirs.model.rotary_emb
    assert torch.equal(plain.model.rotary_emb.inv_freq, rotary.inv_freq)
    assert plain.config.num_experts_per_tok == theirs.config.num_experts_per_tok


@pytest.mark.parametrize("family", FAMILIES)
def test_levels_have_no_numbers(family: str, make: Callable[[str, str], Path]) -> None:
    """In bfloat16, with kernels that take them."""
    plain = loaded(make(family, "gguf in levels"), "bfloat16", keep_levels=lambda dtype, inputs: True)
    assert plain is not None
    absent = {name for name, weight in plain.named_parameters() if is_absent(weight)}
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            assert f"model.layers.{layer}.mlp.experts.{name}" in absent
            readers = vars(plain.get_submodule(f"model.layers.{layer}.mlp.experts"))["rounded"][name]
            assert len(readers) == 4


@pytest.mark.parametrize("values", PUBLISHED, ids=lambda values: values["model_type"])
def test_what_is_published_is_plain(values: dict[str, Any]) -> None:
    plain, theirs = PlainConfig.of(values), AutoConfig.for_model(**values)
    assert plain is not None and plain.mixture is not None
    inner = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert plain.mixture[:3] == (theirs.num_local_experts, theirs.num_experts_per_tok, inner)
    assert plain.mixture.is_normed == getattr(theirs, "norm_topk_prob", True)
    if plain.mixture.clamp is not None:
        assert plain.mixture.clamp == (theirs.swiglu_alpha, theirs.swiglu_limit)
    assert plain.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "family, missing",
    [
        *((family, name) for family in FAMILIES for name in ("num_local_experts", "num_experts_per_tok")),
        *(("mixtral", "sliding_window"), ("qwen3_moe", "moe_intermediate_size"), ("qwen3_moe", "norm_topk_prob")),
        *(("gpt_oss", name) for name in ("sliding_window", "layer_types", "head_dim", "attention_bias")),
    ],
)
def test_no_default_of_transformers_is_guessed(family: str, missing: str, make: Callable[[str, str], Path]) -> None:
    values = read_config(make(family, "safetensors"))
    assert PlainConfig.of(values) is not None
    assert PlainConfig.of({name: value for name, value in values.items() if name != missing}) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_do_not_fit_are_left_to_transformers_which_says_why(
    family: str, make: Callable[[str, str], Path]
) -> None:
    path = make(family, "safetensors")
    values, shapes = read_config(path), read_shapes(path)
    assert loaded(path) is not None
    for name in shapes:
        for changed in (
            dict[str, list[int]](),
            {name: [*shapes[name], 1]},
            {name: [size + 1 for size in shapes[name]]},
        ):
            others: dict[str, list[int]] = {other: shape for other, shape in shapes.items() if other != name}
            assert PlainModel.of(values, whole_shapes(others | changed)) is None, (name, changed)


def test_mixtures_are_plain_on_a_cpu_alone(make: Callable[[str, str], Path]) -> None:
    """On a GPU transformers multiplies all experts at once."""
    path = make("mixtral", "safetensors")
    assert load_plain(EngineConfig(model=str(path)), path, torch.device("cuda"), None, keep_levels=None) is None


def test_an_engine_of_a_mixture_imports_no_transformers(make: Callable[[str, str], Path]) -> None:
    paths = [str(make(family, form)) for family in FAMILIES for form in ("safetensors", "gguf in levels")]
    code = (
        "import sys; from penstock.engine import EngineConfig, GenerationParams, InferenceEngine\n"
        f"for path in {paths}:\n"
        "    with InferenceEngine(EngineConfig(model=path, dtype='bfloat16', kv_cache_memory=1 << 24)) as engine:\n"
        f"        engine.generate({PROMPTS}, GenerationParams(max_tokens=4))\n"
        "print(sorted({'transformers', 'torch._dynamo', 'sympy'} & {*sys.modules}))"
    )
    for path in paths:
        load_tokenizer(path)  # kept from now on: to make it takes transformers
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
