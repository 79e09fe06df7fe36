"""The compiled decoder is judged against float32: a right one is taken, however far roundings differ, no wrong one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo3Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from penstock.engine.cpu import variants
from penstock.engine.cpu.library import Kernels, load_kernels
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged import runner
from penstock.engine.paged.attention_hook import ATTENTION
from penstock.engine.paged.compiled import compiled_decoder
from penstock.engine.paged.compiled.compiled_decoder import CompiledDecoder
from penstock.engine.paged.decoding.mixtures import Routed
from penstock.engine.paged.decoding.precision import in_float32
from penstock.engine.paged.quantization.quantize import ProductMaker
from penstock.engine.paged.runner import Runner

GRANITES = (GraniteConfig, GraniteMoeConfig, GraniteMoeSharedConfig, GraniteMoeHybridConfig)
compiled = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")


BESIDE: dict[str, Any] = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64}
"""Of a Gemma 4 with experts beside each layer's own product."""


def make_model(dtype: torch.dtype = torch.bfloat16, spread: float = 0.02, kind: Any = LlamaConfig, **more: Any) -> Any:
    """Random; with a large `spread` its layers make every rounding larger, as those of real models do."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 170,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    shape |= {"num_experts_per_tok": 2, "num_local_experts": 8} if kind in (MixtralConfig, GptOssConfig) else {}
    shape |= {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True} if kind is Qwen3MoeConfig else {}
    shape |= {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0} if kind is Gemma2Config else {}
    if kind in (Qwen2MoeConfig, Qwen3_5MoeTextConfig):
        shape |= {"num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 48}
        shape |= {"moe_intermediate_size": 64}
    if kind in (Qwen3_5TextConfig, Qwen3_5MoeTextConfig):  # of its layers only the one with the index 3 attends
        shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        shape |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24}
    if kind in (Lfm2Config, Lfm2MoeConfig):
        shape |= {"layer_types": ["conv", "conv", "full_attention"] * 2}
    if kind is Lfm2MoeConfig:
        shape |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5}
    if kind in (
        Olmo3Config,
        Exaone4Config,
        SmolLM3Config,
    ):  # the second and the third have a layer that does not rotate
        shape |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if kind is Gemma4TextConfig:  # the layers 1 and 5 attend to all; 4 and 5 have no keys; those of 1 are values, too
        shape |= {
            "layer_types": [*["sliding_attention", "full_attention"], *["sliding_attention"] * 3, "full_attention"]
        }
        shape |= {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        shape |= {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 170, "num_kv_shared_layers": 2}
        shape |= {"use_double_wide_mlp": True, "final_logit_softcapping": 2.0}
    if kind in GRANITES:
        shape |= {"embedding_multiplier": 6.0, "residual_multiplier": 0.7, "logits_scaling": 0.5}
        shape |= {"attention_multiplier": 0.3}
    if kind in GRANITES[1:]:
        shape |= {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 80}
    if kind in (GraniteMoeHybridConfig, BambaConfig):  # only the layer with the index 3 attends
        shape |= {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 24}
        types = ["full_attention" if index == 3 else "linear_attention" for index in range(6)]
        shape |= {"layer_types": types} if kind is GraniteMoeHybridConfig else {"attn_layer_indices": [3]}
    config = kind(**shape | more, num_key_value_heads=2, num_hidden_layers=6, initializer_range=spread)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, attn_implementation=ATTENTION, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(("router.scale", "per_expert_scale")):
            nn.init.uniform_(parameter, 0.5, 2)
        elif name.endswith((".dt_bias", ".D")):
            nn.init.uniform_(parameter, -1.5, 1.5)
        elif "experts" in name or "sinks" in name or ".router." in name or name.endswith("gate.weight"):
            nn.init.normal_(parameter, std=spread)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            nn.init.uniform_(buffer, -0.5, 0.5)
        if name.endswith("layer_scalar"):
            nn.init.uniform_(buffer, 0.4, 0.8)
    return model


def run(model: Any, offered: Kernels | None, method: str | None = None) -> Runner:
    return Runner(model, 16, 256, ProductMaker(method, torch.device("cpu"), offered), offered)


KINDS = [
    *(LlamaConfig, MixtralConfig, Qwen3MoeConfig, GptOssConfig),
    *(GemmaConfig, Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, Qwen3_5TextConfig),
    *(Qwen3_5MoeTextConfig, Qwen2MoeConfig, Lfm2Config, Lfm2MoeConfig),
    *(Olmo3Config, Exaone4Config, SmolLM3Config),
    *(*GRANITES, BambaConfig),
]


@compiled
@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, None) for kind in KINDS), *zip(KINDS, cycle(["int8", "int4"]), strict=False)],
)
def test_a_model_that_makes_roundings_larger_is_compiled(kind: Any, method: str | None) -> None:
    spread = 0.3 if kind in (GptOssConfig, GemmaConfig, GraniteConfig) else 0.6  # those enlarge more
    made = run(make_model(spread=spread, kind=kind), load_kernels(), method)
    assert made.uncompiled == "" and made._compiled is not None


@compiled
@pytest.mark.parametrize("method", [None, "int8", "int4"])
def test_a_gemma_4_with_experts_is_compiled(method: str | None) -> None:
    made = run(make_model(spread=0.6, kind=Gemma4TextConfig, **BESIDE), load_kernels(), method)
    assert made.uncompiled == "" and made._compiled is not None


def breaking(break_: Callable[[CompiledDecoder], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runners break each compiled decoder before they try it."""

    class Broken(compiled_decoder.CompiledDecoder):
        def attach(self, *arguments: Any) -> None:
            super().attach(*arguments)
            break_(self)

    monkeypatch.setattr(runner, "CompiledDecoder", Broken)


def scale(name: str, factor: float) -> Callable[[CompiledDecoder], None]:
    def change(decoder: CompiledDecoder) -> None:
        setattr(decoder._layers[3], name, factor * getattr(decoder._layers[3], name))

    return change


def swap(decoder: CompiledDecoder) -> None:
    layer = decoder._layers[3]
    layer.gate, layer.up = layer.up, layer.gate


def lose_head_norm(decoder: CompiledDecoder) -> None:
    decoder._layers[3].head_norm = None


def mistake_norm(decoder: CompiledDecoder) -> None:
    decoder._layers[3].mlp_norm = decoder._layers[3].attention_norm


def mistake_last_norm(decoder: CompiledDecoder) -> None:
    decoder._model.norm = decoder._layers[0].attention_norm


@compiled
@pytest.mark.parametrize("spread", [0.02, 0.6])
@pytest.mark.parametrize(
    "break_, part",
    [
        (scale("scaling", 1.5), "layer 3"),
        (mistake_norm, "layer 3"),
        (swap, "layer 3"),
        (lose_head_norm, "layer 3"),
        (mistake_last_norm, "the head"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_in_one_part_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], part: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=spread, kind=Qwen3Config), load_kernels())
    assert made._compiled is None
    assert f"from float32 in {part}, more than" in made.uncompiled


def forget_the_scale(decoder: CompiledDecoder) -> None:
    decoder._model.scale = 1


def lose_norm_after(decoder: CompiledDecoder) -> None:
    decoder._layers[3].mlp_after = None


def take_another_gate(decoder: CompiledDecoder) -> None:
    decoder._layers[3].has_gelu = False


def lose_cap_of_scores(decoder: CompiledDecoder) -> None:
    decoder._layers[3].softcap = 0


def lose_cap_of_logits(decoder: CompiledDecoder) -> None:
    decoder._model.softcap = 0


@compiled
@pytest.mark.parametrize("method", [None, "int8"])
@pytest.mark.parametrize(
    "break_, part",
    [
        (forget_the_scale, "the model"),
        (lose_norm_after, "layer 3"),
        (take_another_gate, "layer 3"),
        (lose_cap_of_scores, "layer 3"),
        (lose_cap_of_logits, "the head"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_in_a_model_like_gemma_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], part: str, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(
        make_model(spread=0.2, kind=Gemma2Config), load_kernels(), method
    )  # with others both gates are much alike
    assert made._compiled is None
    assert f"from float32 in {part}, more than" in made.uncompiled


def change_input(name: str, value: float) -> Callable[[CompiledDecoder], None]:
    return lambda decoder: setattr(decoder._layers[3].input, name, value)


def change_inputs(name: str, value: float) -> Callable[[CompiledDecoder], None]:
    def change(decoder: CompiledDecoder) -> None:
        assert decoder.inputs is not None
        setattr(decoder.inputs._inputs, name, value)

    return change


def lose_norm_of_values(decoder: CompiledDecoder) -> None:
    decoder._layers[3].norms_values = False


def attend_to_others(decoder: CompiledDecoder) -> None:
    decoder._layers[4].pool = decoder._layers[2].pool


def normalise_values_as_keys(decoder: CompiledDecoder) -> None:
    layer = decoder._layers[1]
    weights = decoder._numbers(torch.full((layer.num_q_heads + 2, layer.head_dim), 0.8))
    layer.head_norm = weights


@compiled
@pytest.mark.parametrize("method", [None, "int8"])
@pytest.mark.parametrize(
    "break_, part",
    [
        (change_inputs("scale", 2), "the inputs of all layers"),
        (change_inputs("sum_scale", 1), "the inputs of all layers"),
        (change_input("start", 0), "layer 3"),
        (change_input("norm", 0), "layer 3"),
        (scale("scalar", 1.5), "layer 3"),
        (lose_norm_of_values, "layer 3"),
        (attend_to_others, "layer 4"),
        (normalise_values_as_keys, "layer 1"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_in_a_layer_like_gemma_4s_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], part: str, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.2, kind=Gemma4TextConfig), load_kernels(), method)
    assert made._compiled is None
    assert f"from float32 in {part}, more than" in made.uncompiled


def forget_factors(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.factors = None


def take_another_gate_in_experts(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.has_gelu = False


def exchange_norms(one: str, other: str) -> Callable[[CompiledDecoder], None]:
    return lambda decoder: setattr(decoder._beside[3], one, getattr(decoder._beside[3], other))


@compiled
@pytest.mark.parametrize(
    "break_, part",
    [
        (forget_factors, "the choice of experts in layer 3"),
        (exchange_norms("router_norm", "norm"), "the choice of experts in layer 3"),
        (take_another_gate_in_experts, "layer 3"),
        (exchange_norms("norm", "after"), "layer 3"),
        (exchange_norms("after", "product_after"), "layer 3"),
        (exchange_norms("product_after", "after"), "layer 3"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_in_experts_beside_a_product_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.2, kind=Gemma4TextConfig, **BESIDE), load_kernels())
    assert made._compiled is None
    assert f"from float32 in {part}, more than" in made.uncompiled


def test_tokens_without_inputs_for_the_layers_are_not_compiled() -> None:
    """A table with fewer tokens than the vocabulary: their numbers would be read behind it."""
    model = make_model(kind=Gemma4TextConfig)
    table = model.model.embed_tokens_per_layer
    table.weight = nn.Parameter(table.weight[:-1], requires_grad=False)
    made = run(model, load_kernels())
    assert made._compiled is None and "does not support the shapes" in made.uncompiled


def normalise_heads_apart(decoder: CompiledDecoder) -> None:
    decoder._layers[3].norms_rows = False


def lose_norm_of_attention(decoder: CompiledDecoder) -> None:
    decoder._layers[3].attention_after = None


def normalise_before(decoder: CompiledDecoder) -> None:
    decoder._layers[3].mlp_norm = decoder._layers[3].mlp_after


def rotate_all(decoder: CompiledDecoder) -> None:
    decoder._layers[3].rotated = decoder._layers[2].rotated


@compiled
@pytest.mark.parametrize(
    "break_, kind",
    [
        (normalise_heads_apart, Olmo3Config),
        (lose_norm_of_attention, Olmo3Config),
        (normalise_before, Olmo3Config),
        (lose_norm_of_attention, Exaone4Config),
        (rotate_all, Exaone4Config),
        (rotate_all, SmolLM3Config),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_in_a_layer_with_norms_behind_it_or_without_positions_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.2, kind=kind), load_kernels())
    assert made._compiled is None
    assert "from float32 in layer 3, more than" in made.uncompiled


def take_other_inputs(decoder: CompiledDecoder) -> None:
    decoder.remembering[1].convolution.taps = decoder.remembering[2].convolution.taps


def forget_to_shift(decoder: CompiledDecoder) -> None:
    delta: Any = decoder.remembering[1].delta
    delta.shift = delta.fading


def exchange_rates(decoder: CompiledDecoder) -> None:
    delta: Any = decoder.remembering[1].delta
    delta.rates, delta.decays = type(delta.rates).from_buffer_copy(delta.decays), delta.rates


def read_others(part: str, name: str) -> Callable[[CompiledDecoder], None]:
    """Read what another layer keeps, whenever there is new memory."""

    def change(decoder: CompiledDecoder) -> None:
        attach = decoder._attach_states

        def attach_others() -> None:
            attach()
            own, other = (getattr(decoder.remembering[index], part) for index in (1, 2))
            setattr(own, name, getattr(other, name))

        decoder._attach_states = attach_others  # type: ignore[method-assign]

    return change


def rotate_less(decoder: CompiledDecoder) -> None:
    decoder._layers[3].rotated //= 2


@compiled
@pytest.mark.parametrize(
    "break_, part",
    [
        (take_other_inputs, "layer 1"),
        (forget_to_shift, "layer 1"),
        (exchange_rates, "layer 1"),
        (read_others("delta", "states"), "layer 1"),
        (read_others("convolution", "inputs"), "layer 1"),
        (rotate_less, "layer 3"),
        (scale("scaling", 0.3), "layer 3"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_in_a_hybrid_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.6, kind=Qwen3_5TextConfig), load_kernels())
    assert made._compiled is None
    assert f"from float32 in {part}, more than" in made.uncompiled


@compiled
@pytest.mark.parametrize("break_", [take_other_inputs, read_others("convolution", "inputs")])
def test_what_is_wrong_in_a_short_convolution_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.6, kind=Lfm2Config), load_kernels())
    assert made._compiled is None
    assert "from float32 in layer 1, more than" in made.uncompiled


def mistake(*names: str) -> Callable[[CompiledDecoder], None]:
    """Exchange two pointers of a Mamba-2 layer."""

    def change(decoder: CompiledDecoder) -> None:
        own: Any = decoder.remembering[1].mamba
        first, second = (getattr(own, name) for name in names)
        setattr(own, names[0], second)
        setattr(own, names[1], first)

    return change


def change_mamba(name: str, value: float) -> Callable[[CompiledDecoder], None]:
    def change(decoder: CompiledDecoder) -> None:
        setattr(decoder.remembering[1].mamba, name, value)

    return change


def rescale_logits(decoder: CompiledDecoder) -> None:
    decoder._model.logit_scale = 1


def rescale_experts(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.factor = 1


@compiled
@pytest.mark.parametrize("method", [None, "int8"])
@pytest.mark.parametrize(
    "break_",
    [
        take_other_inputs,
        mistake("shift", "direct"),
        mistake("rates", "direct"),
        change_mamba("num_groups", 1),
        change_mamba("norm_size", 128),
        change_mamba("most", 0.1),
        change_mamba("least", 2.5),
        read_others("mamba", "states"),
        read_others("convolution", "inputs"),
    ],
)
def test_what_is_wrong_in_a_layer_of_mamba_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.3, kind=BambaConfig), load_kernels(), method)
    assert made._compiled is None
    assert "from float32 in layer 1, more than" in made.uncompiled


@compiled
@pytest.mark.parametrize("method", [None, "int8"])
@pytest.mark.parametrize(
    "break_, part",
    [
        (scale("residual", 1 / 0.7), "the choice of experts in layer 3"),  # what chooses them reads the sum
        (rescale_experts, "layer 3"),
        (forget_the_scale, "the model"),
        (rescale_logits, "the head"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_multiplier_of_granite_that_is_wrong_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], part: str, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.3, kind=GraniteMoeHybridConfig), load_kernels(), method)
    assert made._compiled is None
    assert f"from float32 in {part}, more than" in made.uncompiled


def routed(decoder: CompiledDecoder, layer: int) -> Routed:
    found = decoder.routed[layer]
    assert found is not None
    return found


def exchange_experts(decoder: CompiledDecoder) -> None:
    inner = routed(decoder, 3).experts._inner
    inner[1], inner[2] = type(inner[1]).from_buffer_copy(inner[2]), type(inner[1]).from_buffer_copy(inner[1])


def forget_the_share(decoder: CompiledDecoder) -> None:
    decoder._layers[3].share = decoder._layers[2].share


def forget_the_shared_expert(decoder: CompiledDecoder) -> None:
    decoder._layers[3].share.inputs = 0


@compiled
@pytest.mark.parametrize("break_", [forget_the_share, forget_the_shared_expert])
def test_what_is_wrong_in_a_shared_expert_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.2, kind=Qwen3_5MoeTextConfig), load_kernels(), "int8")
    assert made._compiled is None
    assert "from float32 in layer 3, more than" in made.uncompiled


def forget_the_sum(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.is_normed = False


def take_another_router(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.router = routed(decoder, 2).mixture.router


@compiled
@pytest.mark.parametrize(
    "break_, part, spread",
    [
        (exchange_experts, "layer 3", 0.02),
        (exchange_experts, "layer 3", 0.6),
        (forget_the_sum, "the choice of experts in layer 3", 0.02),  # with a larger spread few experts have all shares
        (take_another_router, "the choice of experts in layer 3", 0.02),
        (take_another_router, "the choice of experts in layer 3", 0.6),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_in_a_mixture_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], part: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice of experts that rounding alone would make, another one of equals, is no fault: nothing else is named."""
    breaking(break_, monkeypatch)
    made = run(make_model(spread=spread, kind=Qwen3MoeConfig), load_kernels(), "int8")
    assert made._compiled is None
    assert f"from float32 in {part}, more than" in made.uncompiled


def forget_preferences(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.preferences = None


def take_the_softmax(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.has_sigmoids = False


def forget_to_scale(decoder: CompiledDecoder) -> None:
    routed(decoder, 3).mixture.scale = 1


@compiled
@pytest.mark.parametrize("break_", [forget_preferences, take_the_softmax, forget_to_scale, forget_the_sum])
def test_what_is_wrong_in_the_choice_of_experts_by_sigmoids_is_refused_and_named(
    break_: Callable[[CompiledDecoder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(break_, monkeypatch)
    made = run(make_model(spread=0.2, kind=Lfm2MoeConfig), load_kernels(), "int8")
    assert made._compiled is None
    assert "from float32 in the choice of experts in layer 3, more than" in made.uncompiled


@compiled
@pytest.mark.parametrize(
    "head_dim, right, wrong, reason",
    [
        (16, "token->position + 1};", "token->position};", "layer 0"),
        (
            16,
            "(_mm512_loadu_ps(scores[i]), scale, below)",
            "(_mm512_loadu_ps(scores[i]), _mm512_set1_ps(LOG2_E), below)",
            "computes tokens together",
        ),
        (64, "token->position + 1};", "token->position};", "layer 0"),
        (
            64,
            "fmsub_ps(score, scale, most)",
            "fmsub_ps(score, _mm512_set1_ps(LOG2_E), most)",
            "computes tokens together",
        ),
    ],
    ids=[
        "the last key of each query is forgotten",
        "tokens that attend together do not scale",
        "the last key of each query is forgotten by tiles",
        "tokens that attend together on tiles do not scale",
    ],
)
def test_a_wrong_kernel_is_refused(
    head_dim: int, right: str, wrong: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if head_dim % 32 == 0 and not load_kernels().has_tiles:
        pytest.skip("needs a processor with AMX")
    sources = []
    for source in variants.SOURCES:
        sources.append(tmp_path / source.relative_to(variants.SOURCE))
        sources[-1].parent.mkdir(parents=True, exist_ok=True)
        sources[-1].write_text(source.read_text().replace(right, wrong))
    assert sum(right in source.read_text() for source in variants.SOURCES) == 1
    monkeypatch.setattr(variants, "SOURCES", tuple(sources))
    quick = ["-Dalways_inline=unused", *("-O0" if option == "-O3" else option for option in variants.OPTIONS)]
    monkeypatch.setattr("penstock.engine.cpu.compiling.OPTIONS", quick)
    made = run(make_model(head_dim=head_dim), load_kernels(cache=tmp_path))
    assert made._compiled is None and reason in made.uncompiled


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_float32_without_a_copy(tied: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, vocab_size=50, num_hidden_layers=2, num_attention_heads=2
    )
    config.tie_word_embeddings = tied
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.bfloat16).eval()
    exact = make(config, dtype=torch.float32).eval()
    exact.load_state_dict(model.state_dict())
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    ids = torch.tensor([[1, 7, 30]])
    with torch.inference_mode(), in_float32(model):
        assert torch.equal(model(ids).logits, exact(ids).logits)
        with pytest.raises(IndexError):
            model(torch.tensor([[50]]))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        assert model(ids).logits.dtype == torch.bfloat16
