"""Adapters in the compiled decoder: the merged model's logits, and for each row the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import config, linear_sizes, matrices, merged, write_adapter
from threads import torch_threads
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.engine.adapters.files import read_adapter
from penstock.engine.adapters.loaded import Adapter
from penstock.engine.cpu.library import Kernels, load_kernels
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.attention_hook import ATTENTION
from penstock.engine.paged.packing import Segment
from penstock.engine.paged.quantization.quantize import ProductMaker
from penstock.engine.paged.runner import Runner

pytestmark = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")

CPU = torch.device("cpu")
# Heads of 22 numbers, so that keys and values begin inside a vector and inside a block of outputs.
SHAPE = LlamaConfig(
    vocab_size=300,
    hidden_size=104,
    intermediate_size=150,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=22,
    max_position_embeddings=256,
    initializer_range=0.2,
)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.1}  # distances relative to the reference's norm
# A rank below a vector's width, one above, and one for each module.
RANKS: dict[str, dict[str, int] | int] = {"low": 3, "high": 40, "own": {"q_proj": 17, "v_proj": 5, "down_proj": 33}}


@pytest.fixture(scope="module", autouse=True)
def small_machine() -> Iterator[None]:
    with torch_threads(min(torch.get_num_threads(), 2)):
        yield


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels()


def make_model(dtype: torch.dtype) -> Any:
    make: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make(SHAPE, dtype=torch.float32, attn_implementation=ATTENTION)
    return model.eval().to(dtype)


def make_runner(dtype: torch.dtype, kernels: Kernels | None, model: Any = None) -> Runner:
    model = make_model(dtype) if model is None else model
    runner = Runner(model, 16, 256, ProductMaker(None, CPU, kernels), kernels)
    assert (runner._compiled is not None) is (kernels is not None)
    runner.allocate([40])
    return runner


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, sizes = tmp_path_factory.mktemp("adapters"), linear_sizes(make_model(torch.float32))
    found = {}
    for seed, (name, rank) in enumerate(RANKS.items()):
        own, settings = sizes, config(rank if isinstance(rank, int) else 1)
        if isinstance(rank, dict):
            own = {module: size for module, size in sizes.items() if module.rpartition(".")[2] in rank}
            ranks = {module: rank[module.rpartition(".")[2]] for module in own}
            settings |= {"rank_pattern": rank, "alpha_pattern": {end: 2 * one for end, one in rank.items()}}
            tensors = matrices(own, seed=seed, ranks=ranks)
        else:
            tensors = matrices(own, rank, seed)
        # bfloat16 holds these exactly, so that both dtypes compute with the same numbers.
        rounded = {module: tensor.bfloat16() for module, tensor in tensors.items()}
        found[name] = write_adapter(root / name, rounded, settings)
    return found


def load(runner: Runner, paths: dict[str, Path]) -> dict[str | None, Adapter | None]:
    targets = runner.adaptation.targets
    return {None: None} | {name: runner.load_adapter(read_adapter(name, paths[name], targets)) for name in paths}


# Adapter and length of prompt of each row; runs of one adapter are longer than the kernels' own and not adjacent.
ROWS = [("low", 1), (None, 1), ("high", 9), ("low", 1), ("own", 2), (None, 7), ("low", 20), ("high", 1), ("own", 1)]


def prompt(index: int, length: int) -> list[int]:
    return [(7 * index + 31 * at * at + at) % 300 for at in range(length)]


def segments(adapters: dict[str | None, Adapter | None], chosen: Sequence[int]) -> tuple[list[Segment], list[Segment]]:
    """A step of prompts and one of the next tokens, for the rows `chosen` of ROWS."""
    first, second = [], []
    for index in chosen:
        name, length = ROWS[index]
        table, adapter = [[4 * index, 4 * index + 1]], adapters[name]
        first.append(Segment(prompt(index, length), 0, table, True, adapter=adapter))
        second.append(Segment([index + 5], length, table, True, adapter=adapter))
    return first, second


def run(runner: Runner, steps: Sequence[Sequence[Segment]]) -> list[Tensor]:
    """The logits of each step, in the order of its segments."""
    found = []
    for step in steps:
        computed = runner.forward(step)
        order = torch.tensor(computed.sampled).argsort()
        found.append(computed.logits[order].clone())
    return found


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_logits_are_those_of_the_merged_model(
    kernels: Kernels, paths: dict[str, Path], dtype: torch.dtype, compiled: bool
) -> None:
    runner = make_runner(dtype, kernels if compiled else None)
    adapters = load(runner, paths)
    mixed = run(runner, segments(adapters, range(len(ROWS))))
    for name in adapters:
        base = make_model(dtype).float()  # a runner takes its model over; the numbers are the same in both dtypes
        reference = make_runner(torch.float32, None, base if name is None else merged(base, paths[name]))
        chosen = [index for index, (own, _) in enumerate(ROWS) if own == name]
        plain: dict[str | None, Adapter | None] = dict.fromkeys([*RANKS, None])
        for one, other in zip(mixed, run(reference, segments(plain, chosen)), strict=True):
            assert distance(one[chosen], other) < BOUNDS[dtype], name


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    kernels: Kernels, paths: dict[str, Path], dtype: torch.dtype
) -> None:
    runner = make_runner(dtype, kernels)
    adapters = load(runner, paths)
    together = run(runner, segments(adapters, range(len(ROWS))))
    for index in range(len(ROWS)):
        for one, other in zip(together, run(runner, segments(adapters, [index])), strict=True):
            assert torch.equal(one[index], other[0]), ROWS[index]


def test_rows_of_the_base_are_untouched(kernels: Kernels, paths: dict[str, Path]) -> None:
    """Bit by bit as in a runner that never saw an adapter."""
    runner, fresh = make_runner(torch.float32, kernels), make_runner(torch.float32, kernels)
    mixed = run(runner, segments(load(runner, paths), range(len(ROWS))))
    chosen = [index for index, (name, _) in enumerate(ROWS) if name is None]
    for one, other in zip(mixed, run(fresh, segments({None: None}, chosen)), strict=True):
        assert torch.equal(one[chosen], other)


def test_an_adapter_of_a_higher_rank_comes_later(kernels: Kernels, paths: dict[str, Path]) -> None:
    """The kernels' room grows, and what was loaded before goes on."""
    runner = make_runner(torch.float32, kernels)
    targets = runner.adaptation.targets
    low = runner.load_adapter(read_adapter("low", paths["low"], targets))
    step = segments({"low": low}, [0])
    before = run(runner, step)
    high = runner.load_adapter(read_adapter("high", paths["high"], targets))
    assert runner._compiled is not None and runner._compiled._low.shape[-1] == 48
    run(runner, segments({"high": high}, [2]))
    assert all(torch.equal(one, other) for one, other in zip(before, run(runner, step), strict=True))
