"""Runners of tiny models as they are on CUDA, its graphs replaced by what obeys the same contract: without a GPU the
kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine.paged.attention_hook import ATTENTION
from penstock.engine.paged.cuda.graphs import DecodeGraphs, Results
from penstock.engine.paged.cuda.inputs import Shape
from penstock.engine.paged.packing import Segment
from penstock.engine.paged.quantization.quantize import ProductMaker
from penstock.engine.paged.runner import Runner
from penstock.engine.paged.state.slots import NO_STATE, StateUse
from penstock.engine.sampler import best_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT = 160
NUM_BLOCKS, NUM_CHOICES = 48, 4


class TorchAlone(Runner):
    """A runner without Triton's kernels, wherever it runs."""

    on_triton = False


class CudaLike(Runner):
    """A runner that believes in CUDA."""

    on_triton = True


def load(kind: type[Runner], directory: Path) -> Runner:
    """A model in float32, with room for its choices."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=ATTENTION)
    model.to(device=DEVICE)  # type: ignore[call-arg]  # as transformers wraps it
    runner = kind(model, 16, 256, ProductMaker(None, torch.device("cuda")))
    runner.allocate([NUM_BLOCKS] * len(runner.groups))
    runner.states.allocate(2 * NUM_CHOICES, NUM_CHOICES, torch.float32)
    return runner


def run(runner: Runner, steps: list[list[tuple[int, list[int], int]]]) -> list[Tensor]:
    """Play steps of (choice, tokens, start) on a runner, each choice in 160 tokens of blocks of its own, of all but the
    first backwards; every segment's logits, in order."""
    num_blocks = -(-CONTEXT // runner.block_size)
    held: dict[int, int] = {}  # where the state of a choice is
    found = []
    for number, step in enumerate(steps):
        segments = []
        for choice, tokens, start in step:
            table = list(range(choice * num_blocks, (choice + 1) * num_blocks))[:: -1 if choice else 1]
            use = None
            if runner.states:
                source = NO_STATE if start == 0 else held[choice]
                held[choice] = 2 * choice + number % 2
                use = StateUse(source, held[choice])
            segments.append(Segment(tokens, start, [table] * len(runner.groups), True, state=use))
        logits, sampled, _ = runner.forward(segments)
        found += [logits[list(sampled).index(index)].clone() for index in range(len(step))]
    return found


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Capture:
    """Records a step as a graph would be: its inputs and its result stay where they are."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, function: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        logits, best = (one.clone() for one in function())

        def replay() -> None:
            self.replays += 1
            for held, made in zip((logits, best), function(), strict=True):
                held.copy_(made)

        return replay, (logits, best)


@torch.inference_mode()
def record(runner: Runner) -> Capture:
    """Decode up to four rows by graphs from now on."""
    capture = Capture()
    slots = runner.states.num_slots if runner.states else None
    shape = Shape(runner._packed_groups, runner.block_size, CONTEXT // runner.block_size, slots, 4, DEVICE)
    runner._graphs = DecodeGraphs(runner._forward, best_tokens, shape, capture)
    return capture
