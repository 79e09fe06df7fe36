"""Layers that attend to another one's keys and values, in the compiled decoder: a token has its bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from penstock.engine.cpu.library import load_kernels
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.attention_hook import ATTENTION
from penstock.engine.paged.packing import Segment
from penstock.engine.paged.quantization.quantize import ProductMaker
from penstock.engine.paged.runner import Runner

pytestmark = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")
LENGTH = 45


def make_runner(method: str | None, dtype: torch.dtype, *, has_experts: bool) -> Runner:
    torch.manual_seed(0)
    kind: Any = Gemma4TextConfig
    config = kind(
        vocab_size=170,
        vocab_size_per_layer_input=170,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=16,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=24,
        use_double_wide_mlp=True,
        enable_moe_block=has_experts,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        initializer_range=0.2,
    )
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, attn_implementation=ATTENTION, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.2)
    kernels = load_kernels()
    runner = Runner(model, 16, 256, ProductMaker(method, torch.device("cpu"), kernels), kernels)
    assert runner.uncompiled == ""
    assert len(runner.specs) == 3  # what is stored
    runner.allocate([60] * len(runner.groups))
    return runner


def made_up(salt: int) -> list[int]:
    return [(7 * salt + index * index) % 170 for index in range(LENGTH)]


def segment(row: int, start: int, end: int, blocks: int, *, samples: bool = True) -> Segment:
    tables = [list(range(3 * blocks, 3 * blocks + 3))] * 2
    return Segment(made_up(row)[start:end], start, tables, samples)


def logits_of(runner: Runner, segments: list[Segment]) -> Tensor:
    """A copy, in the order of the segments."""
    logits, sampled, _ = runner.forward(segments)
    return logits[np.argsort(sampled)].clone()


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("method", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_alone_and_in_any_step(
    method: str | None, dtype: torch.dtype, *, has_experts: bool
) -> None:
    """Token by token, as a whole prompt beside others, and in pieces of which some want no logits."""
    runner = make_runner(method, dtype, has_experts=has_experts)
    alone = torch.cat([logits_of(runner, [segment(0, at, at + 1, 0)]) for at in range(LENGTH)])
    assert alone.std() > 0.01
    whole = logits_of(runner, [segment(1, 0, 30, 1), segment(0, 0, LENGTH, 2), segment(2, 0, 9, 3)])
    assert torch.equal(whole[1], alone[-1])
    runner.forward([segment(0, 0, 20, 4, samples=False), segment(1, 30, 31, 1)])
    both = logits_of(runner, [segment(2, 9, 10, 3), segment(0, 20, 33, 4), segment(1, 31, 40, 1)])
    assert torch.equal(both[1], alone[32])
    runner.forward([segment(0, 33, 40, 4, samples=False)])
    assert torch.equal(logits_of(runner, [segment(0, 40, LENGTH, 4)])[0], alone[-1])
