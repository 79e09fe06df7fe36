"""How many threads compute a step, on a machine whose cores are wanted by others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import torch_threads

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.cpu.machine import available_cores
from penstock.engine.paged.compiled.crew import Crew

WORK = 0.006  # seconds of one core that a step takes
SHAPES = "qwen2", "gemma3_text", "gpt_oss", "qwen3_moe", "lfm2", "qwen3_5_text", "bamba"
NUMBERS = [*product(("float32", "bfloat16"), (None, "int8", "int4"))]
CASES = [(shape, *NUMBERS[place % 6]) for place, shape in enumerate(SHAPES * 2)]  # each structure in two, all of these


class Machine:
    """Steps of `WORK` on so many cores, of which others keep `busy` ones."""

    def __init__(self, cores: int, busy: int) -> None:
        self.cores = cores
        self.busy = busy
        self.now = 0.0
        self.crew = Crew(cores, lambda: self.now)
        self.spent: dict[int, float] = {}  # seconds by number of threads

    def run(self, seconds: float) -> dict[int, float]:
        """Returns for how many of these seconds how many threads computed."""
        self.spent, until = {}, self.now + seconds
        while self.now < until:
            threads = self.crew.threads
            alone = WORK / threads
            held_up = threads > self.cores - self.busy
            took = 10 * alone if held_up else alone
            self.now += took
            self.spent[threads] = self.spent.get(threads, 0.0) + took
            self.crew.tell(took, (took - alone) * (threads - 1))
        return self.spent


def test_all_cores_compute_while_nobody_else_wants_them() -> None:
    machine = Machine(cores=2, busy=0)
    assert machine.run(10).keys() == {2}


def test_a_core_that_another_program_keeps_busy_is_left_to_it() -> None:
    machine = Machine(cores=2, busy=1)
    assert machine.run(20)[1] > 0.9 * 20
    machine.busy = 0
    machine.run(5)
    assert machine.crew.threads == 2
    assert machine.run(10).keys() == {2}


def test_of_many_cores_only_the_busy_ones_are_left() -> None:
    machine = Machine(cores=16, busy=3)
    machine.run(5)
    spent = machine.run(20)
    assert spent[13] > 0.9 * 20
    assert min(spent) == 13
    machine.busy = 0
    machine.run(5)
    assert machine.crew.threads == 16


@given(st.integers(1, 8), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=300))
def test_there_is_always_one_and_never_more_than_there_may_be(most: int, steps: list[tuple[float, float]]) -> None:
    now = 0.0
    crew = Crew(most, lambda: now)
    for seconds, share in steps:
        crew.tell(seconds, share * seconds * crew.threads)
        now += seconds
        assert 1 <= crew.threads <= most


@pytest.mark.parametrize(("shape", "dtype", "quantization"), CASES)
def test_the_number_of_threads_changes_no_bit(
    shape: str, dtype: str, quantization: str | None, model_directory: Callable[[str], Path]
) -> None:
    params = GenerationParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True, logprobs=3)
    prompts, answers = ["A short one.", "One that is longer. " * 12], []
    for threads in (1, 2, 3):
        with torch_threads(threads):
            config = EngineConfig(
                model=str(model_directory(shape)),
                dtype=dtype,  # type: ignore[arg-type]
                quantization=quantization,
                device="cpu",
                kv_cache_memory="8MiB",
            )
            with InferenceEngine(config) as engine:
                answers.append([(one.token_ids, one.logprobs) for one in engine.generate(prompts, params)])
    assert answers[1:] == answers[:1] * 2


def test_threads_that_wait_for_each_other_become_fewer(model_directory: Callable[[str], Path]) -> None:
    """Sixteen on each core hardly ever run together."""
    with torch_threads(16 * available_cores()):
        config = EngineConfig(model=str(model_directory("qwen2")), device="cpu", kv_cache_memory="8MiB")
        with InferenceEngine(config) as engine:
            engine.generate("Words", GenerationParams(max_tokens=100, ignore_eos=True))
            assert engine._backend.runner._compiled._crews[0].threads < 16 * available_cores()  # type: ignore[attr-defined]
