"""Every kind of layer that the kernels of CUDA know: norms, gates, shared keys, mixtures, running states.

Without a GPU they run in Triton's interpreter, and graphs are what obeys the same contract.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_runs import CONTEXT, DEVICE, CudaLike, TorchAlone, ids, load, record, run
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model
from torch import Tensor

from penstock.engine.paged import runner as runners
from penstock.engine.paged.cuda import attention as paged_attention
from penstock.engine.paged.decoding import cuda_experts, cuda_layers
from penstock.engine.paged.decoding.cuda_experts import GroupedExperts, group_experts
from penstock.engine.paged.runner import Runner
from penstock.engine.paged.state import layer as state_layers
from penstock.engine.paged.state import short_convolution
from penstock.engine.paged.state.delta_net import DeltaNet
from penstock.engine.paged.state.layer import StateLayer
from penstock.engine.paged.state.mamba import Mamba
from penstock.engine.paged.state.slots import NO_STATE, StateUse
from penstock.engine.paged.state.step import StateStep, pack_states

FAMILIES = [
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "gpt_oss",
    "granitemoehybrid",
    "lfm2_moe",
    "ministral3",
    "olmo2",
    "qwen3_5_moe_text",
    "smollm3",
]
STEPS = [
    [(0, ids(19, 0), 0), (1, ids(3, 1), 0)],
    [(0, [7], 19), (1, ids(2, 2), 3), (2, [9], 0)],
    [(0, [8], 20), (1, [3], 5), (2, [4], 1)],
    [(2, [5], 2), (0, [6], 21)],
]


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program costs the interpreter a millisecond."""
    monkeypatch.setattr(paged_attention, "_PROGRAMS", 8)


def load_kernels(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The model as it is on a GPU."""
    monkeypatch.setattr(runners, "take_experts", lambda model, *_, **__: group_experts(model))
    monkeypatch.setattr(state_layers, "has_triton", lambda _: True)
    runner = load(CudaLike, directory)
    assert runner._decoder is not None
    runner._decoder._through = cuda_layers.through
    return runner


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, in gates that are shut
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_and_graphs_compute_what_torch_does(
    family: str, model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(load(TorchAlone, model_directory(family)), STEPS)
    runner = load_kernels(model_directory(family), monkeypatch)
    capture = record(runner)
    for one, other in zip(run(runner, STEPS), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    assert capture.replays == 2, "the two steps with prompts are not for a graph"


def test_a_mixture_beside_a_product_is_gated_by_gelu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's, whose experts are no power of 2 here, and whose layers multiply the stream at their end."""
    plain = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    experts = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40}
    make_tiny_model(tmp_path, "gemma4_text", sizes=plain | experts)
    weights = load_file(tmp_path / "model.safetensors")
    scalars = {name: torch.full_like(one, 0.7) for name, one in weights.items() if name.endswith("layer_scalar")}
    save_file(weights | scalars, tmp_path / "model.safetensors", {"format": "pt"})
    assert scalars
    expected = run(load(TorchAlone, tmp_path), STEPS[:2])
    found = run(load_kernels(tmp_path, monkeypatch), STEPS[:2])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def layer_of(directory: Path) -> StateLayer:
    runner = load(TorchAlone, directory)
    runner.states.allocate(8, 4, torch.float32)
    assert runner._decoder is not None
    return next(one.state for one in runner._decoder.layers if one.state is not None)


@pytest.fixture(params=["qwen3_5_text", "granitemoehybrid", "lfm2"])
def layer(request: pytest.FixtureRequest, model_directory: Callable[[str], Path]) -> StateLayer:
    return layer_of(model_directory(request.param))


def made_of(layer: StateLayer, count: int) -> list[Tensor]:
    """What the projections of so many tokens might be."""
    size = layer.taps.shape[1]
    if isinstance(layer, DeltaNet):
        sizes = [size, layer.num_values * layer.value_size, layer.num_values, layer.num_values]
    elif isinstance(layer, Mamba):
        sizes = [layer.num_heads * layer.head_size + size + layer.num_heads]
    else:
        assert isinstance(layer, short_convolution.ShortConvolution)
        sizes = [3 * size]
    return [torch.randn(count, each, device=DEVICE) for each in sizes]


def step_of(uses: list[StateUse], counts: list[int]) -> StateStep:
    step = pack_states(uses, counts, 8, DEVICE)
    assert step is not None
    return step


@torch.inference_mode()
def test_pieces_are_those_of_torch_and_states_the_same_bits_in_any(layer: StateLayer) -> None:
    """A sequence in one piece, in pieces with a state kept between them, and token by token."""
    made = made_of(layer, 7)
    whole = step_of([StateUse(NO_STATE, 0)], [7])
    expected = layer.read(made, whole)
    wanted = [memory[0].clone() for memory in layer.memory]
    layer.has_kernels = True
    found = [layer.read(made, whole), layer.read(made, step_of([StateUse(NO_STATE, 1, ((2, 2), (5, 3)))], [7]))]
    parts, slot = [], NO_STATE
    for at in range(7):
        use = StateUse(slot, 4 + at % 2)
        parts.append(layer.read([each[at : at + 1] for each in made], step_of([use], [1])))
        slot = use.target
    for one in (*found, torch.cat(parts)):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    for memory, right in zip(layer.memory, wanted, strict=True):
        torch.testing.assert_close(memory[0], right, rtol=1e-4, atol=1e-4)
        assert torch.equal(memory[1], memory[0]) and torch.equal(memory[slot], memory[0])
        assert not memory[8].any(), "the slot that is always zero"
    after = step_of([StateUse(NO_STATE, 6)], [2])
    layer.read([each[:2] for each in made], after)
    assert all(torch.equal(memory[6], memory[2]) for memory in layer.memory), "what was kept after two tokens"


@torch.inference_mode()
def test_a_small_step_leaves_what_it_should(model_directory: Callable[[str], Path]) -> None:
    """Of a state of zeros, where nothing larger hides it."""
    layer = layer_of(model_directory("granitemoehybrid"))
    assert isinstance(layer, Mamba)
    made = made_of(layer, 1)
    made[0][:, -layer.num_heads :] = -12 - layer.dt_bias
    for slot, layer.has_kernels in enumerate((False, True)):
        layer.read(made, step_of([StateUse(NO_STATE, slot)], [1]))
    states = layer.memory[1]
    assert states[0].any()
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("sorted_by", ["a kernel", "torch"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
@torch.inference_mode()
def test_experts_compute_what_transformers_does(
    family: str, sorted_by: str, model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of rows, also where all choose one expert."""
    from transformers import AutoModelForCausalLM

    if sorted_by == "torch":
        monkeypatch.setattr(cuda_experts, "_MOST_PLACED", 0)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(model_directory(family)) for _ in range(2))
    for model in (theirs, ours):
        model.to(device=DEVICE)  # type: ignore[call-arg]  # as transformers wraps it
    grouped = group_experts(ours)
    own: Any = [
        module for module in theirs.modules() if hasattr(module, "down_proj") and hasattr(module, "num_experts")
    ]
    assert len(grouped) == len(own) == theirs.config.num_hidden_layers
    experts, count = own[0], own[0].num_experts
    for rows in (1, 5, 70):
        x = torch.randn(rows, theirs.config.hidden_size, device=DEVICE)
        for spread in (count, 2):
            chosen = torch.rand(rows, spread, device=DEVICE).topk(2).indices
            shares = torch.rand(rows, 2, device=DEVICE)
            torch.testing.assert_close(grouped[0](x, chosen, shares), experts(x, chosen, shares), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["other numbers", "no such kernel"])
def test_experts_that_the_kernels_do_not_compute_stay_those_of_transformers(
    fault: str,
    model_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import AutoModelForCausalLM

    forward = GroupedExperts.forward

    def broken(own: GroupedExperts, *given: Tensor) -> Tensor:
        if fault == "no such kernel":
            raise ValueError(fault)
        return 1.1 * forward(own, *given)

    model = AutoModelForCausalLM.from_pretrained(model_directory("qwen3_moe"))
    expected = model(torch.tensor([[5, 6, 7]])).logits
    monkeypatch.setattr(GroupedExperts, "forward", broken)
    assert group_experts(model) == []
    assert "experts run in transformers' functions" in caplog.text
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, expected)


def test_experts_with_more_behind_their_products_stay_those_of_transformers(
    model_directory: Callable[[str], Path],
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory("nemotron_h"))
    assert group_experts(model) == [] and not any(isinstance(one, GroupedExperts) for one in model.modules())


def test_a_context_ends_within_the_recorded_tables() -> None:
    assert max(start + len(tokens) for step in STEPS for _, tokens, start in step) < CONTEXT
