"""What runs on CUDA, its graphs replaced by what obeys the same contract; without a GPU on the CPU, the attention's
kernels in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graph_runs import CONTEXT, DEVICE, NUM_BLOCKS, CudaLike, TorchAlone, ids, load, record, run
from lora import make_adapter
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams
from penstock.engine.adapters.files import read_adapter
from penstock.engine.choice import Choice
from penstock.engine.paged import backend as paged
from penstock.engine.paged.cuda import attention as paged_attention
from penstock.engine.paged.packing import Segment
from penstock.engine.paged.runner import Runner


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the interpreter a millisecond."""
    monkeypatch.setattr(paged_attention, "_PROGRAMS", 8)


@pytest.fixture(params=["mistral", "qwen3"])
def runners(request: pytest.FixtureRequest, model_directory: Callable[[str], Path]) -> tuple[Runner, Runner]:
    """The same model with torch's operations and with the kernels of CUDA, in float32."""
    directory = model_directory(request.param)
    return load(TorchAlone, directory), load(CudaLike, directory)


STEPS = [
    [(0, ids(70, 0), 0), (1, ids(20, 1), 0)],
    [(0, [7], 70), (1, ids(5, 2), 20), (2, [9], 0), (3, ids(5, 5), 0)],
    [(0, [8], 71), (1, [3], 25), (2, [4], 1), (3, [6], 5)],
    [(3, ids(30, 3), 0)],  # another request in the same blocks
    [(2, [5], 2), (0, [6], 72), (1, [11], 26)],
    [(3, [12], 30), (0, [13], 73)],
]


def test_the_kernels_compute_what_torch_does(runners: tuple[Runner, Runner]) -> None:
    ours, theirs = (run(runner, STEPS) for runner in runners)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_recorded_steps_equal_those_that_are_not(runners: tuple[Runner, Runner]) -> None:
    """Fewer rows than were recorded do not touch the blocks of requests that used the rows before."""
    runner = runners[1]
    plain = run(runner, STEPS)
    runner.allocate([NUM_BLOCKS] * len(runner.groups))
    capture = record(runner)
    recorded = run(runner, STEPS)
    assert capture.replays == 3, "the two steps with prompts are not for a graph"
    for one, other in zip(plain, recorded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_recorded_steps_are_forgotten_with_the_pools_that_they_use(runners: tuple[Runner, Runner]) -> None:
    runner = runners[1]
    plain = run(runner, STEPS)
    capture = record(runner)
    runner.allocate([NUM_BLOCKS] * len(runner.groups))
    for one, other in zip(plain, run(runner, STEPS), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert capture.replays == 0


def test_steps_with_adapters_are_not_recorded_ones(runners: tuple[Runner, Runner], tmp_path: Path) -> None:
    """They are computed beside the graphs, and `slow_adapters` says so."""
    runner = runners[1]
    assert runner.slow_adapters == ""
    capture = record(runner)
    assert "not recorded as CUDA graphs" in runner.slow_adapters
    targets = runner.adaptation.targets
    path = make_adapter(tmp_path, {name: (size.inputs, size.outputs) for name, size in targets.linear.items()})
    adapter = runner.load_adapter(read_adapter("one", path, targets))
    segment = Segment([5], 0, [[3]] * len(runner.groups), True)
    plain = runner.forward([segment]).logits.clone()
    assert capture.replays == 1
    changed = runner.forward([segment._replace(adapter=adapter)]).logits
    assert capture.replays == 1 and not torch.allclose(plain, changed)
    assert torch.equal(runner.forward([segment]).logits, plain) and capture.replays == 2


def test_recorded_steps_launched_ahead_change_no_answer(
    model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's logits lie where the last one's did, and its input is what the last one chose."""
    config = EngineConfig(
        model=str(model_directory("llama")),
        dtype="float32",
        device=DEVICE.type,
        kv_cache_memory=ByteSize(8 << 20),
        max_sequence_length=CONTEXT,
        compile_kernels=False,
        prefill_chunk_size=32,
    )

    def play(backend: paged.PagedBackend) -> list[Choice]:
        rows = []
        for number in range(4):
            params = GenerationParams(
                temperature=number % 2, max_tokens=3 + 2 * number, logprobs=1, stop_token_ids=tuple(ids(40, number))
            )
            request = EngineRequest(str(number), tuple(ids(5 * number + 1, number)), params, seed=number)
            rows.append(Choice(request, 0, backend.tokenizer, backend.info))
            told[id(rows[-1])] = []
            backend.add(rows[-1])
            for _ in range(2):
                step(backend, rows)
        while backend.delay() <= 0:
            step(backend, rows)
        return rows

    def step(backend: paged.PagedBackend, rows: list[Choice]) -> None:
        for delta in backend.step():
            told[id(rows[int(delta.request)])] += [entry.logprob for entry in delta.logprobs or ()]
        backend.check_integrity()

    told: dict[int, list[float | None]] = {}
    expected = play(paged.PagedBackend(config))
    monkeypatch.setattr(paged, "Runner", CudaLike)
    backend = paged.PagedBackend(config, ahead=True)
    capture = record(backend.runner)
    rows = play(backend)
    assert capture.replays > 5
    for one, other in zip(rows, expected, strict=True):
        assert (one.tokens, one.finish) == (other.tokens, other.finish)
        assert told[id(one)] == pytest.approx(told[id(other)], abs=1e-4) and len(one.tokens) == len(told[id(one)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_device_but_for_the_last_ones_tokens(model_directory: Callable[[str], Path]) -> None:
    backend = paged.PagedBackend(EngineConfig(model=str(model_directory("llama")), kv_cache_memory=ByteSize(1 << 28)))
    for number in range(4):
        params = GenerationParams(temperature=number % 2, top_p=0.9, logprobs=1, ignore_eos=True)
        request = EngineRequest(str(number), tuple(ids(20, number)), params, seed=number)
        backend.add(Choice(request, 0, backend.tokenizer, backend.info))
    for _ in range(4):  # in which graphs are recorded
        backend.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert [len(backend.step()) for _ in range(4)] == [4] * 4
    finally:
        torch.cuda.set_sync_debug_mode("default")
