"""Layers with a running state in the compiled kernels: against the plain decoder, and their bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from threads import torch_threads
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Qwen3_5TextConfig,
)

from penstock.config.directories import user_cache
from penstock.engine.cpu.compiling import compiled
from penstock.engine.cpu.library import Kernels, load_kernels
from penstock.engine.cpu.machine import ARCHITECTURE, KERNEL_FLAGS, cpu_flags
from penstock.engine.cpu.variants import VARIANTS
from penstock.engine.paged.attention_hook import ATTENTION
from penstock.engine.paged.packing import Segment
from penstock.engine.paged.quantization.quantize import ProductMaker
from penstock.engine.paged.runner import Runner
from penstock.engine.paged.state.slots import NO_STATE, StateUse

pytestmark = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")

DELTA_NETS: dict[str, Any] = {"num_keys": 2, "shared": 2, "key_size": 16, "value_size": 72, "taps": 4}
CONVOLUTIONS: dict[str, Any] = {"size": 88, "taps": 3, "has_bias": True, "has_experts": False}
MAMBA: dict[str, Any] = {"groups": 2, "shared": 2, "state": 24, "head": 72, "taps": 4, "kind": "dense"}
SIZES = [DELTA_NETS, CONVOLUTIONS, CONVOLUTIONS | {"has_experts": True}]
SIZES += [MAMBA, MAMBA | {"kind": "experts", "head": 32}, MAMBA | {"kind": "rotating", "head": 64}]
KINDS = ["delta nets", "convolutions", "experts", "mamba", "mamba experts", "mamba rotating"]
all_kinds = pytest.mark.parametrize("sizes", SIZES, ids=KINDS)
OTHERS = {one.name: one for one in VARIANTS if one.architecture == ARCHITECTURE and one.name in ("avx512", "avx2")}


@lru_cache
def kernels(name: str = "native") -> Kernels:
    if name not in OTHERS:
        return load_kernels()
    return Kernels(CDLL(str(compiled("cc", user_cache(), OTHERS[name].options))))


@pytest.fixture(params=["native", *OTHERS])
def processor(request: pytest.FixtureRequest) -> str:
    if request.param in OTHERS and not OTHERS[request.param].needs <= set(cpu_flags().split()):
        pytest.skip(f"the processor lacks what {request.param} has")
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def small_machine() -> Iterator[None]:
    with torch_threads(min(torch.get_num_threads(), 2)):
        yield


def make_runner(
    sizes: dict[str, Any], dtype: torch.dtype, offered: Kernels | None, method: str | None = None
) -> Runner:
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    config = short_convolutions(sizes) if "size" in sizes else mamba(sizes) if "state" in sizes else delta_nets(sizes)
    model = make(config, attn_implementation=ATTENTION, dtype=dtype).eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or "bias" in name:
            nn.init.uniform_(parameter, -0.5, 0.5)
        if "norm" in name and ("size" in sizes or "state" in sizes):
            parameter.data += 1
        if name.endswith((".dt_bias", ".D")):
            nn.init.uniform_(parameter, -1.5, 1.5)
        elif "experts" in name and "state" in sizes:
            nn.init.normal_(parameter, std=0.3)
    runner = Runner(model, 16, 256, ProductMaker(method, torch.device("cpu"), offered), offered)
    assert (runner._compiled is not None) is (offered is not None), runner.uncompiled
    runner.allocate([60])
    runner.states.allocate(60, 12, dtype)
    return runner


def delta_nets(sizes: dict[str, Any]) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=170,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=sizes["num_keys"],
        linear_num_value_heads=sizes["num_keys"] * sizes["shared"],
        linear_key_head_dim=sizes["key_size"],
        linear_value_head_dim=sizes["value_size"],
        linear_conv_kernel_dim=sizes["taps"],
        initializer_range=0.3,
    )


def short_convolutions(sizes: dict[str, Any]) -> Lfm2Config | Lfm2MoeConfig:
    given: dict[str, Any] = {
        "vocab_size": 170,
        "hidden_size": sizes["size"],
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": sizes["taps"],
        "conv_bias": sizes["has_bias"],
        "initializer_range": 0.3,
    }
    if not sizes["has_experts"]:
        return Lfm2Config(**given)
    given |= {"num_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5}
    return Lfm2MoeConfig(**given, moe_intermediate_size=48, num_dense_layers=1)


def width_of(sizes: dict[str, Any]) -> int:
    width: int = sizes["groups"] * sizes["shared"] * sizes["head"]
    return width


def mamba(sizes: dict[str, Any]) -> GraniteMoeHybridConfig | BambaConfig:
    """Dense Granites, their mixtures, and those whose attention rotates half of each head."""
    size, heads = width_of(sizes) // 2, sizes["groups"] * sizes["shared"]
    given: dict[str, Any] = {
        "vocab_size": 170,
        "hidden_size": size,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_n_heads": heads,
        "mamba_d_head": sizes["head"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_state": sizes["state"],
        "mamba_d_conv": sizes["taps"],
        "initializer_range": 0.3 * (64 / size) ** 0.5,  # so that large sizes do not enlarge roundings more
    }
    if sizes["kind"] == "rotating":
        return BambaConfig(**given, attn_layer_indices=[1, 3])
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2} if sizes["kind"] == "experts" else None
    given |= experts or {"num_local_experts": 0, "num_experts_per_tok": 0}
    given |= {"embedding_multiplier": 6.0, "residual_multiplier": 0.7, "logits_scaling": 0.5}
    given |= {"attention_multiplier": 4 / size, "shared_intermediate_size": 72}
    return GraniteMoeHybridConfig(**given, layer_types=["linear_attention", "full_attention"] * 2)


def made_up(length: int, salt: int) -> list[int]:
    return [(7 * salt + index * index) % 170 for index in range(length)]


def segment(row: int, start: int, end: int, use: StateUse) -> Segment:
    """Part of a row's tokens; each row has five blocks."""
    return Segment(made_up(end, row)[start:], start, [list(range(5 * row, 5 * row + 5))], True, state=use)


def logits_of(runner: Runner, segments: list[Segment]) -> Tensor:
    """A copy, in the order of the segments."""
    logits, sampled, _ = runner.forward(segments)
    return logits[np.argsort(sampled)].clone()


def memory(runner: Runner, slots: list[int]) -> Tensor:
    return torch.cat([pool.memory[slots].float().flatten() for pool in runner.states.pools])


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-12))


FORMS = (
    st.fixed_dictionaries(
        {
            "size": st.sampled_from([8, 24, 64, 72, 136]),
            "taps": st.integers(2, 5),
            "has_bias": st.booleans(),
            "has_experts": st.booleans(),
        }
    )
    | st.fixed_dictionaries(
        {
            "groups": st.integers(1, 3),
            "shared": st.integers(1, 3),
            "state": st.sampled_from([8, 16, 24, 64]),
            "head": st.sampled_from([8, 24, 32, 64, 72, 128]),
            "taps": st.integers(2, 5),
            "kind": st.sampled_from(["dense", "experts", "rotating"]),
        }
    ).filter(lambda sizes: (width := width_of(sizes)) >= 64 and (sizes["kind"] != "rotating" or width % 16 == 0))
    | st.fixed_dictionaries(
        {
            "num_keys": st.integers(1, 3),
            "shared": st.integers(1, 3),
            "key_size": st.sampled_from([8, 16, 24, 64]),
            "value_size": st.sampled_from([8, 24, 64, 72, 128]),
            "taps": st.integers(2, 5),
        }
    )
)


@settings(max_examples=20, deadline=None)
@given(FORMS, st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 1, 3])), min_size=1, max_size=5))
def test_steps(sizes: dict[str, Any], rows: list[tuple[int, int]]) -> None:
    """Both decoders say the same and leave the same states behind: those of prompts, within them, and of what follows
    either."""
    found = []
    count = len(rows)
    middle = [max(1, length // 2) for length, _ in rows]
    for offered in (kernels(), None):
        runner = make_runner(sizes, torch.float32, offered)
        first = [
            segment(row, 0, length, StateUse(NO_STATE, row, ((middle[row], count + row),) if length > 1 else ()))
            for row, (length, _) in enumerate(rows)
        ]
        second = [
            segment(row, length, length + more, StateUse(row, 2 * count + row))
            for row, (length, more) in enumerate(rows)
        ]
        again = [
            segment(row, middle[row], length, StateUse(count + row, 3 * count + row))
            for row, (length, _) in enumerate(rows)
            if length > 1
        ]
        logits = [logits_of(runner, step) for step in (first, second, again) if step]
        states = [memory(runner, list(range(slot * count, slot * count + count))) for slot in range(4)]
        found.append([*logits, *states])
    far = [distance(one, other) for one, other in zip(*found, strict=True)]
    assert max(far) < 1e-3, far


@settings(max_examples=10, deadline=None)
@given(FORMS)
@example(MAMBA | {"groups": 1, "shared": 1})  # a single head that may read little, and is normalised all the same
def test_roundings_of_any_form_are_no_fault(sizes: dict[str, Any]) -> None:
    """Few numbers, normalised by head, make them larger."""
    make_runner(sizes, torch.bfloat16, kernels())


@pytest.mark.parametrize(
    "processor, dtype, method",
    [
        *((name, dtype, None) for name in ("native", *OTHERS) for dtype in (torch.float32, torch.bfloat16)),
        *(("native", torch.bfloat16, method) for method in ("int8", "int4")),  # `test_kernels.py` has other products
    ],
    indirect=["processor"],
)
@all_kinds
def test_a_row_has_the_same_bits_in_any_company(
    sizes: dict[str, Any], processor: str, dtype: torch.dtype, method: str | None
) -> None:
    """Alone or beside others, on one thread or two, its prompt whole, in parts or token by token."""
    found = []
    for threads in (1, 2):
        with torch_threads(threads):
            runner = make_runner(sizes, dtype, kernels(processor), method)
            whole = logits_of(runner, [segment(0, 0, 21, StateUse(NO_STATE, 0, ((5, 1), (16, 2))))])
            others = [segment(row, 0, 3 * row, StateUse(NO_STATE, 10 + row)) for row in (1, 2, 3)]
            part = logits_of(runner, [others[0], segment(0, 0, 5, StateUse(NO_STATE, 3)), *others[1:]])[1:2]
            parts = [part, logits_of(runner, [segment(0, 5, 21, StateUse(3, 4))])]
            for index in range(21):
                own = segment(0, index, index + 1, StateUse(20 + index if index else NO_STATE, 21 + index))
                beside = [segment(1, 3, 4, StateUse(11, 50)), segment(2, 6, 9, StateUse(12, 51))]
                single = logits_of(runner, [own, *beside] if index % 2 else [own])[:1]
            assert torch.equal(parts[1], whole) and torch.equal(single, whole)
            for one, other in ((0, 4), (1, 3), (0, 41), (1, 25), (2, 36)):
                assert torch.equal(memory(runner, [one]), memory(runner, [other])), (one, other)
            found.append((whole, memory(runner, [0])))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@all_kinds
def test_a_slot_that_is_read_never_changes(sizes: dict[str, Any]) -> None:
    runner = make_runner(sizes, torch.float32, kernels())
    logits_of(runner, [segment(0, 0, 7, StateUse(NO_STATE, 0)), segment(1, 0, 1, StateUse(NO_STATE, 1))])
    before = memory(runner, [0, 1, 60])
    step = [segment(0, 7, 12, StateUse(0, 2, ((2, 3),))), segment(1, 1, 2, StateUse(1, 4))]
    first = logits_of(runner, step)
    assert torch.equal(memory(runner, [0, 1, 60]), before) and not before[-1].any()
    assert torch.equal(logits_of(runner, step), first)


@pytest.mark.parametrize(
    "use",
    [None, StateUse(0, 60), StateUse(61, 1), StateUse(1, 1), StateUse(0, -1), StateUse(0, 1, ((4, 2),))],
    ids=["none", "zero", "beyond", "same", "nowhere", "behind"],
)
@all_kinds
def test_a_state_without_a_slot_is_an_error(sizes: dict[str, Any], use: StateUse | None) -> None:
    runner = make_runner(sizes, torch.float32, kernels())
    with pytest.raises(IndexError, match="slot"):
        runner.forward([Segment([1, 2, 3], 0, [[0]], True, state=use)])
