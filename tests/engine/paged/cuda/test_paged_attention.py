"""The kernels of CUDA against attention written out in float64: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.paged.attention import Rules
from penstock.engine.paged.cuda import attention as paged_attention
from penstock.engine.paged.cuda.attention import PagedAttention
from penstock.engine.paged.kv.kv_cache import LayerSpec
from penstock.engine.paged.packing import Ints, LayerGroup, Segment, pack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
HEADS, GROUP = 2, 3  # of keys; queries that share one
SEQUENCES = [(0, 1), (37, 1), (300, 1), (0, 40), (130, 70), (20, 5)]  # tokens cached, tokens of this step
IMAGE = range(9, 68)  # those tokens of the longest prompt that see each other


def ends_of(cached: int, count: int) -> Ints | None:
    ends = np.arange(cached, cached + count) + 1
    if count <= IMAGE.stop:
        return None
    ends[IMAGE.start : IMAGE.stop] = cached + IMAGE.stop
    return ends


def expected(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None, rules: Rules, ends: Ints | None
) -> Tensor:
    """[T, Hq, D], [L, H, D] twice → [T, Hq · D]; the queries are the sequence's last tokens."""
    keys, values = (one.double().repeat_interleave(GROUP, 1) for one in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * rules.scaling
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    own, key = torch.arange(len(keys) - len(query), len(keys))[:, None], torch.arange(len(keys))
    last = own if ends is None else torch.from_numpy(ends)[:, None] - 1
    hidden = (key > last) | (key <= own - (window or len(keys)))
    scores = scores.masked_fill(hidden.to(DEVICE), -torch.inf)
    if rules.sinks is not None:
        scores = torch.cat((scores, rules.sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values).flatten(1)


@pytest.mark.parametrize("programs", [512, 64, 1], ids=["all splits", "two splits", "one split"])
@pytest.mark.parametrize(
    ("size", "window", "softcap", "has_sinks", "is_mutual"),
    [
        (32, None, None, False, True),
        (20, 16, None, True, True),
        (16, 150, 2.0, False, True),
        (16, None, 2.0, True, True),
        (32, None, None, False, False),
    ],
)
def test_attention_by_block_table(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    is_mutual: bool,
    programs: int,
) -> None:
    """Where an image's tokens see each other in some groups of layers alone, those of the others are causal."""
    monkeypatch.setattr(paged_attention, "_PROGRAMS", programs)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    attention = PagedAttention(BLOCK, size, torch.float32, DEVICE)
    num_blocks = sum(-(-(cached + count) // BLOCK) for cached, count in SEQUENCES) + 1
    free = torch.randperm(num_blocks - 1, generator=generator).tolist()
    pool = attention.pool(LayerSpec(window, HEADS, size, size), num_blocks)
    rules = Rules(size**-0.5, softcap, numbers(HEADS * GROUP) if has_sinks else None)
    segments, known = [], []
    for cached, count in SEQUENCES:
        table = [free.pop() for _ in range(-(-(cached + count) // BLOCK))]
        keys_values = numbers(2, cached + count, HEADS, size)
        slots = torch.tensor([table[at // BLOCK] * BLOCK + at % BLOCK for at in range(cached)], device=DEVICE).long()
        pool.memory.flatten(1, 2)[:, slots] = keys_values[:, :cached]
        if window is not None:  # what no query sees may be gone
            table = [-1 if (at + 1) * BLOCK <= cached - window else block for at, block in enumerate(table)]
        segments.append(Segment(range(count), cached, [table], True, ends=ends_of(cached, count)))
        known.append(keys_values)
    step = pack(segments, [LayerGroup(window, HEADS, num_blocks, is_mutual)], BLOCK, DEVICE, attention.pack_group)
    query, new, want = [], [], []
    for index in step.sampled:
        cached, count = SEQUENCES[index]
        query.append(numbers(count, HEADS * GROUP, size))
        new.append(known[index][:, cached:])
        ends = ends_of(cached, count) if is_mutual else None
        want.append(expected(query[-1], known[index][0], known[index][1], window, rules, ends))
    keys_values = torch.cat(new, dim=1).transpose(1, 2).flatten(0, 1)  # [2 H, T, D], not contiguous
    mixed = attention.attend(step.groups[0], pool, torch.cat(query).transpose(0, 1), keys_values, rules)
    torch.testing.assert_close(mixed, torch.cat(want).float(), rtol=1e-4, atol=1e-5)


COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
sys.path.insert(0, sys.argv[1])
import kernels

P, I = "*" + sys.argv[3], "*i32"
FIXED = {"sinks": None, "softcap": None, "window": None, "heads": 8, "group": 4, "size": 128, "padded": 128}
TYPES = {"query": P, "keys": P, "values": P, "mixed": P, "parts": "*fp32", "lengths": I, "tables": I, "bounds": I}
TYPES |= {"tiles": I, "ends": I, "scaling": "fp32", "given": P, "pool": P, "slots": "*i64"}
FIXED |= {"block": 16, "splits": 32, "rows": 32, "columns": 32}
for kernel in (kernels.store, kernels.decode, kernels.combine, kernels.prefill):
    names = kernel.arg_names
    types = {name: "constexpr" if name in FIXED else TYPES.get(name, "i64") for name in names}
    fixed = {(names.index(name),): FIXED[name] for name in names if name in FIXED}
    compiled = compile(ASTSource(kernel, types, fixed), GPUTarget("cuda", int(sys.argv[2]), 32))
    assert compiled.asm["cubin"] and compiled.metadata.shared < 99 << 10
"""


@pytest.mark.parametrize(("capability", "numbers"), [("80", "bf16"), ("90", "bf16"), ("90", "fp32")])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability: str, numbers: str) -> None:
    folder = Path(paged_attention.__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    words = [sys.executable, "-c", COMPILE, str(folder), capability, numbers]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
