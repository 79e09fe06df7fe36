"""Sampling against a naive reference, one row at a time, and against mathematics."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import EngineRequest, GenerationParams, ModelInfo
from penstock.engine.choice import Choice
from penstock.engine.cpu.library import DrawParams, Kernels, NoKernels, load_kernels
from penstock.engine.sampler import Sampled, _invert, choose, sample, uniform
from penstock.engine.text.byte_tokenizer import ByteTokenizer
from penstock.schemas.errors import GenerationFailed

TOKENIZER = ByteTokenizer()
INFO = ModelInfo("bytes", "Echo", context_length=4096, vocabulary_size=259, eos_token_ids=(256,))
V = 40


@pytest.fixture(scope="module", params=["torch", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    """Both ways to draw."""
    if request.param == "torch":
        return None
    try:
        return load_kernels()
    except NoKernels as error:
        pytest.skip(str(error))


def row(params: GenerationParams, seed: int = 0, index: int = 0) -> Choice:
    request = EngineRequest("r", (1,), params, seed=seed, generated=((7,) * index,))
    return Choice(request, 0, TOKENIZER, INFO)


def tokens_of(results: list[Sampled | GenerationFailed]) -> list[int]:
    return [result.token for result in results if isinstance(result, Sampled)]


def random_logits(seed: int, rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def naive(logits: list[float], params: GenerationParams, at: float) -> int:
    """The definition, in plain Python: candidates as (probability, token), best first."""
    if params.temperature == 0:
        return max(range(V), key=lambda token: logits[token])
    weights = [math.exp(value / params.temperature) for value in logits]
    kept = sorted(((weight, token) for token, weight in enumerate(weights)), reverse=True)
    kept = [(weight, token) for weight, token in kept if weight >= params.min_p * kept[0][0]]
    kept = kept[: params.top_k]
    total = sum(weight for weight, _ in kept)
    nucleus: list[tuple[float, int]] = []
    for weight, token in kept:
        if sum(earlier for earlier, _ in nucleus) / total >= params.top_p:
            break
        nucleus.append((weight, token))
    total = sum(weight for weight, _ in nucleus)
    passed = 0.0
    for token, weight in sorted((token, weight) for weight, token in nucleus):
        passed += weight
        if passed / total > at:
            return token
    raise AssertionError("the probabilities do not add up")


PARAMS = st.builds(
    GenerationParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 10, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


# Derandomised: the reference computes in double precision, and could differ by chance once in a million draws.
@settings(derandomize=True)
@given(rows=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 10_000))
def test_every_row_equals_the_naive_reference_whatever_its_mates(
    kernels: Kernels | None, rows: list[GenerationParams], seed: int
) -> None:
    logits = random_logits(seed, len(rows))
    choices = [row(params, seed + index, index) for index, params in enumerate(rows)]
    expected = [
        naive(logits[index].tolist(), params, uniform(seed + index, 0, index)) for index, params in enumerate(rows)
    ]
    assert tokens_of(sample(logits, choices, kernels)) == expected


def test_draws_follow_the_distribution(kernels: Kernels | None) -> None:
    logits = random_logits(4, 1)
    count = 4000
    choices = [row(GenerationParams(), seed) for seed in range(count)]
    drawn = torch.tensor(tokens_of(sample(logits.expand(count, -1), choices, kernels)))
    expected = logits[0].softmax(-1)
    observed = torch.bincount(drawn, minlength=V) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((observed - expected).abs() <= 4 * deviation + 1 / count).all()


@pytest.mark.parametrize(("top_p", "nucleus"), [(0.5, {3}), (0.6, {3, 8}), (1.0, {3, 8})])
def test_the_nucleus_ends_as_soon_as_it_holds_enough(kernels: Kernels | None, top_p: float, nucleus: set[int]) -> None:
    logits = torch.full((50, V), -torch.inf)
    logits[:, [3, 8]] = 0.0
    choices = [row(GenerationParams(top_p=top_p), seed) for seed in range(50)]
    assert set(tokens_of(sample(logits, choices, kernels))) == nucleus


@given(seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 2**40), index=st.integers(0, 2**40))
def test_the_draw_is_a_function_of_its_index(seed: int, choice: int, index: int) -> None:
    here = uniform(seed, choice, index)
    assert 0 <= here < 1
    assert here == uniform(seed, choice, index)
    assert len({here, uniform(seed, choice + 1, index), uniform(seed, choice, index + 1)}) == 3


def test_draws_leave_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    sample(random_logits(1, 2), [row(GenerationParams()), row(GenerationParams(top_p=0.5))])
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("params", [GenerationParams(logit_bias={3: 5.0}, presence_penalty=1.0), GenerationParams()])
def test_the_logits_are_not_changed(kernels: Kernels | None, params: GenerationParams) -> None:
    logits = random_logits(1, 1)
    before = logits.clone()
    sample(logits, [row(params, index=3)], kernels)
    assert torch.equal(before, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), float("inf")])
def test_a_row_without_a_possible_token_fails_alone(kernels: Kernels | None, temperature: float, broken: float) -> None:
    logits = random_logits(2, 3)
    params = GenerationParams(temperature=temperature, top_p=0.9)
    healthy = tokens_of(sample(logits, [row(params) for _ in range(3)], kernels))
    logits[1] = broken
    first, middle, last = sample(logits, [row(params) for _ in range(3)], kernels)
    assert isinstance(middle, GenerationFailed)
    assert tokens_of([first, last]) == [healthy[0], healthy[2]]


def test_the_first_and_the_last_token_are_drawn_at_the_very_ends(kernels: Kernels | None) -> None:
    probabilities = torch.zeros(2, 192)
    probabilities[0, [0, 70, 90]] = torch.tensor([0.1, 0.2, 0.7])
    probabilities[1, [130, 131]] = 0.5
    for ends, expected in (((1 - 2**-53, 0.0), [90, 130]), ((0.0, 1 - 2**-53), [0, 131])):
        if kernels is None:
            assert _invert(probabilities, [*ends]).tolist() == expected
        else:
            drawn = [DrawParams(row, 1.0, 0.0, 0, 1.0, at) for row, at in enumerate(ends)]
            assert kernels.draw(probabilities.log(), drawn) == expected


# What follows uses vocabularies above 16,384, where draws and nuclei are looked for in parts of the row.
WIDE = 20_000
ANY = st.builds(
    GenerationParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e-300]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 300]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    min_tokens=st.sampled_from([0, 256]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
    logit_bias=st.dictionaries(st.integers(0, WIDE - 1), st.sampled_from([-100.0, 2.0]), max_size=3),
)
WIDE_INFO = ModelInfo("wide", "Echo", context_length=4096, vocabulary_size=WIDE, eos_token_ids=(256,))


def wide_row(params: GenerationParams, seed: int, history: int = 0, width: int = WIDE) -> Choice:
    """A choice whose prompt and output repeat tokens, some of them shared, and hold an id without a logit."""
    draw = random.Random(seed)
    prompt = (WIDE + 1, *(draw.randrange(min(width, 300)) for _ in range(history + 1)))
    tokens = tuple(draw.randrange(200) for _ in range(history))
    return Choice(EngineRequest("r", prompt, params, seed=seed, generated=(tokens,)), 0, TOKENIZER, WIDE_INFO)


def wide_logits(seed: int, rows: int, dtype: torch.dtype, width: int = WIDE, spread: float = 4) -> torch.Tensor:
    return (spread * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(ANY, min_size=2, max_size=5),
    seed=st.integers(0, 10_000),
    width=st.sampled_from([40, 4097, WIDE]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(
    kernels: Kernels | None, rows: list[GenerationParams], seed: int, width: int, dtype: torch.dtype
) -> None:
    logits = wide_logits(seed, len(rows), dtype, width)
    choices = [wide_row(params, seed + index, 7 * index, width) for index, params in enumerate(rows)]
    together = sample(logits, choices, kernels)
    alone = [sample(logits[index : index + 1], [choice], kernels) for index, choice in enumerate(choices)]
    assert [[result] for result in together] == alone
    assert sample(logits.flip(0), choices[::-1], kernels) == together[::-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [3, 4096, WIDE])
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype, width: int) -> None:
    logits = torch.randint(0, 3, (6, width), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[:, width // 2 :] += 1
    params = GenerationParams(temperature=0)
    expected = [values.index(max(values)) for values in logits.tolist()]
    assert tokens_of(sample(logits, [row(params) for _ in range(6)])) == expected == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [777, WIDE, 151_936])
def test_a_draw_inverts_the_exact_distribution(kernels: Kernels | None, dtype: torch.dtype, width: int) -> None:
    logits = wide_logits(5, 4, dtype, width, spread=2)
    cumulative = (logits.double() / 1.3).softmax(-1).cumsum(-1)
    for seed in range(40):
        choices = [row(GenerationParams(temperature=1.3), seed, index) for index in range(4)]
        for index, token in enumerate(tokens_of(sample(logits, choices, kernels))):
            at = uniform(seed, 0, index)
            below = 0.0 if token == 0 else cumulative[index, token - 1].item()
            assert below - 1e-5 <= at <= cumulative[index, token].item() + 1e-5


@settings(derandomize=True, deadline=None)
@given(
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99]),
    top_k=st.sampled_from([None, 1, 5, 256, 300]),
    min_p=st.sampled_from([0.0, 0.001, 0.2]),
    spread=st.sampled_from([0.5, 3.0, 6.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_what_is_kept_is_the_same_by_prefix_and_by_a_full_sort(
    top_p: float, top_k: int | None, min_p: float, spread: float, dtype: torch.dtype, seed: int
) -> None:
    from penstock.engine.sampler import _truncate

    width = 16_384 + 64
    params = GenerationParams(top_p=top_p, top_k=top_k, min_p=min_p)
    weights = wide_logits(seed, 1, dtype, width, spread).float().softmax(-1)
    ordered, order = weights[0].double().sort(descending=True, stable=True)
    kept = (ordered >= ordered[(top_k or width) - 1]) & (weights[0][order] >= weights.max() * min_p)
    total = ordered[kept].sum() if top_k or min_p else 1.0
    kept &= ordered.cumsum(0) - ordered < top_p * total
    assert _truncate(weights, [params])[0].nonzero()[:, 0].tolist() == sorted(order[kept].tolist())


@settings(derandomize=True, deadline=None)
@given(
    params=st.builds(
        GenerationParams,
        temperature=st.sampled_from([0.7, 1.0, 2.0]),
        top_p=st.sampled_from([0.05, 0.5, 0.9, 0.9999, 1.0]),
        top_k=st.sampled_from([None, 1, 5, 300, 10_000]),
        min_p=st.sampled_from([0.0, -0.0, 0.001, 0.2, 1.0]),
    ),
    spread=st.sampled_from([0.5, 3.0, 6.0]),
    width=st.sampled_from([63, 129, 16_385]),
    seed=st.integers(0, 1000),
)
def test_a_draw_inverts_what_is_left_of_the_distribution(
    kernels: Kernels | None, params: GenerationParams, spread: float, width: int, seed: int
) -> None:
    logits = wide_logits(seed, 1, torch.float32, width, spread)
    weights = (logits[0].double() / params.temperature).softmax(-1)
    ordered, order = weights.sort(descending=True, stable=True)
    kept = (ordered >= ordered[min(params.top_k or width, width) - 1]) & (ordered >= ordered[0] * params.min_p)
    kept &= ordered.cumsum(0) - ordered < params.top_p * ordered[kept].sum()
    left = torch.zeros_like(weights).index_put_((order[kept],), ordered[kept])
    sums = (left / left.sum()).cumsum(0)
    (token,) = tokens_of(sample(logits, [row(params, seed)], kernels))
    around = 1e-6 + ordered[kept][-1] / left.sum()  # at the edge of the nucleus rounding decides about one token
    assert sums[token] - left[token] / left.sum() - around <= uniform(seed, 0, 0) <= sums[token] + around
    assert left[token] > 0 or weights[token] >= ordered[kept][-1] * (1 - 1e-4)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(ANY, min_size=1, max_size=5), seed=st.integers(0, 10_000), width=st.sampled_from([40, 300, WIDE]))
def test_edits_equal_a_naive_reference(rows: list[GenerationParams], seed: int, width: int) -> None:
    from penstock.engine.sampler import _scores

    logits = wide_logits(seed, len(rows), torch.float32, width)
    choices = [wide_row(params, seed + index, 9 * index, width) for index, params in enumerate(rows)]
    expected = logits.double()
    for scores, choice, params in zip(expected, choices, rows, strict=True):
        for token, bias in params.logit_bias.items():
            scores[token : token + 1] += bias
        if choice.index < params.min_tokens:
            scores[[token for token in choice.end_token_ids if token < width]] = -torch.inf
        for token in {*choice.prompt, *choice.tokens} - {*range(width, WIDE + 2)}:
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
        for token in choice.tokens:
            scores[token : token + 1] -= params.frequency_penalty
        for token in {*choice.tokens}:
            scores[token : token + 1] -= params.presence_penalty
    edited = _scores(logits, list(range(len(rows))), choices)
    torch.testing.assert_close(edited[:, :width], expected.float())
    assert (edited[:, width:] == -torch.inf).all()


@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), float("inf")])
def test_a_broken_row_fails_alone_in_a_mixed_batch(kernels: Kernels | None, broken: float) -> None:
    kinds = [
        GenerationParams(temperature=0),
        GenerationParams(temperature=0, presence_penalty=1.0, logprobs=2),
        GenerationParams(logprobs=1),
        GenerationParams(top_p=0.9),
        GenerationParams(top_k=4, logit_bias={3: 1.0}),
    ]
    logits = wide_logits(3, 5, torch.bfloat16)
    choices = [wide_row(params, index, 5) for index, params in enumerate(kinds)]
    healthy = sample(logits, choices, kernels)
    for index in range(5):
        damaged = logits.clone()
        damaged[index, slice(None) if broken == -math.inf else 9_000] = broken  # but for -inf, one is enough
        results = sample(damaged, choices, kernels)
        assert isinstance(results[index], GenerationFailed)
        assert results[:index] + results[index + 1 :] == healthy[:index] + healthy[index + 1 :]


def test_known_maxima_change_nothing(kernels: Kernels | None) -> None:
    logits = wide_logits(6, 6, torch.float32)
    kinds = [GenerationParams(temperature=0), GenerationParams(), GenerationParams(top_p=0.5)]
    for more in ([], [GenerationParams(logprobs=1)], [GenerationParams(temperature=0, presence_penalty=1.0)]):
        choices = [wide_row(params, index, 5) for index, params in enumerate([*kinds, *more])]
        best = logits[: len(choices)].argmax(-1).tolist()
        chosen = choose(logits[: len(choices)], choices, kernels, best)
        expected = sample(logits[: len(choices)], choices)
        assert chosen.read() == expected
        assert chosen.tokens.tolist() == tokens_of(expected)


def test_which_equals_are_reported_does_not_depend_on_what_mates_ask_for() -> None:
    logits = torch.randint(0, 3, (2, 4096), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    few, many = (row(GenerationParams(temperature=0, logprobs=count)) for count in (2, 20))
    assert sample(logits, [few, many])[0] == sample(logits[:1], [few])[0]
