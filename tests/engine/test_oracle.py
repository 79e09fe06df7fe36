"""transformers' own generation, one request at a time, is the oracle of everything that runs a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine import EngineRequest, GenerationParams, InferenceEngine
from penstock.schemas.events import Delta

SHAPES = ["llama", "qwen2", "gpt2", "mistral"]


def oracle(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def logits_after(model: Any, tokens: list[int]) -> torch.Tensor:
    """Raw logits of the next token, computed from nothing, [V]."""
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_equals_the_oracle(
    shape: str,
    engine_of: Callable[[str], InferenceEngine],
    reference_of: Callable[[str], Any],
    prompts: list[list[int]],
) -> None:
    outputs = engine_of(shape).generate(prompts, GenerationParams(temperature=0, max_tokens=32))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == oracle(reference_of(shape), prompt, 32)
        assert output.finish_reason == ("stop" if output.token_ids[-1] in (0, 2) else "length")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_single_request_equals_the_oracle(
    shape: str,
    engine_of: Callable[[str], InferenceEngine],
    reference_of: Callable[[str], Any],
    prompts: list[list[int]],
) -> None:
    output = engine_of(shape).generate(prompts[5], GenerationParams(temperature=0, max_tokens=48))
    assert list(output.token_ids) == oracle(reference_of(shape), prompts[5], 48)
    assert output.stats.prompt_tokens == len(prompts[5])
    assert output.stats.generated_tokens == len(output.token_ids)


async def test_the_stream_equals_the_whole(llama: InferenceEngine, prompts: list[list[int]]) -> None:
    params = GenerationParams(max_tokens=40, seed=3, n=2, stop=("e",), logprobs=1)
    whole = await llama.agenerate(prompts[3], params)
    for index, choice in enumerate(whole.choices):
        deltas = [delta async for delta in llama.generate_stream(prompts[3], params) if delta.choice == index]
        assert "".join(delta.text for delta in deltas) == choice.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == choice.token_ids
        assert tuple(entry for delta in deltas for entry in delta.logprobs or ()) == choice.logprobs
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [choice.finish_reason]
        assert [delta.index for delta in deltas] == [
            sum(len(earlier.token_ids) for earlier in deltas[:index]) for index in range(len(deltas))
        ]


def test_seeded_requests_do_not_depend_on_their_batch(llama: InferenceEngine, prompts: list[list[int]]) -> None:
    params = GenerationParams(temperature=1.3, top_p=0.95, top_k=100, max_tokens=32, seed=11)
    together = llama.generate(prompts, params)
    for prompt, output in zip(prompts[::5], together[::5], strict=True):
        assert llama.generate(prompt, params).token_ids == output.token_ids


def test_choices_differ_and_each_equals_itself_alone(llama: InferenceEngine, prompts: list[list[int]]) -> None:
    several = llama.generate(prompts[2], GenerationParams(n=4, seed=5, max_tokens=24))
    assert len(several.choices) == 4
    assert len({choice.token_ids for choice in several.choices}) == 4
    assert llama.generate(prompts[2], GenerationParams(seed=5, max_tokens=24)).token_ids == several.token_ids


def test_requests_without_a_seed_differ(llama: InferenceEngine, prompts: list[list[int]]) -> None:
    first, second = llama.generate([prompts[2], prompts[2]], GenerationParams(max_tokens=24))
    assert first.token_ids != second.token_ids


async def run(engine: InferenceEngine, request: EngineRequest) -> dict[int, list[Delta]]:
    """All deltas of a request by choice."""
    handle = engine.open(request)
    deltas: dict[int, list[Delta]] = {}
    while not handle.finished:
        for delta in await handle.take():
            deltas.setdefault(delta.choice, []).append(delta)
    return deltas


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("done", [(0, 0), (1, 9), (17, 24), (13, 5)])
async def test_a_successor_goes_on_where_the_first_holder_stopped(
    llama: InferenceEngine, prompts: list[list[int]], temperature: float, done: tuple[int, int]
) -> None:
    params = GenerationParams(temperature=temperature, max_tokens=24, n=2, repetition_penalty=1.2, ignore_eos=True)
    request = EngineRequest("whole", tuple(prompts[4]), params, seed=9, first_choice=6)
    whole = await run(llama, request)
    tokens = {choice: [t for delta in deltas for t in delta.token_ids] for choice, deltas in whole.items()}
    generated = tuple(tuple(tokens[choice][:count]) for choice, count in zip((6, 7), done, strict=True))
    rest = await run(
        llama, EngineRequest("rest", request.prompt, params, seed=9, epoch=2, first_choice=6, generated=generated)
    )
    for choice, count in zip((6, 7), done, strict=True):
        deltas = rest[choice]
        assert {delta.epoch for delta in deltas} == {2}
        assert deltas[0].index == count
        assert [t for delta in deltas for t in delta.token_ids] == tokens[choice][count:]
        assert deltas[-1].finish_reason == "length"


def test_logprobs_are_the_references(
    llama: InferenceEngine, reference_of: Callable[[str], Any], prompts: list[list[int]]
) -> None:
    params = GenerationParams(temperature=0.7, top_k=5, logit_bias={7: 3.0}, seed=1, max_tokens=8, logprobs=3)
    output = llama.generate(prompts[6], params)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for index, entry in enumerate(output.logprobs):
        raw = logits_after(reference_of("llama"), [*prompts[6], *output.token_ids[:index]]).log_softmax(-1)
        assert entry.token_id == output.token_ids[index]
        assert entry.logprob == pytest.approx(raw[entry.token_id].item(), abs=1e-4)
        assert [top.token_id for top in entry.top] == raw.topk(3).indices.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(raw.topk(3).values.tolist(), abs=1e-4)
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


@pytest.mark.parametrize(
    "params",
    [
        GenerationParams(temperature=0, max_tokens=16, logit_bias={5: 6.0, 9: 5.0}, repetition_penalty=1.5),
        GenerationParams(temperature=0, max_tokens=16, logit_bias={5: 6.0, 9: 5.0}, frequency_penalty=0.8),
        GenerationParams(temperature=0, max_tokens=16, logit_bias={5: 6.0, 9: 5.0}, presence_penalty=2.0),
        GenerationParams(temperature=0, max_tokens=16, presence_penalty=-2.0, frequency_penalty=-0.5),
        GenerationParams(temperature=0, max_tokens=16, repetition_penalty=0.4),
        GenerationParams(temperature=0, max_tokens=16, min_tokens=10, logit_bias={0: 5.0, 8: 9}, stop_token_ids=(8,)),
    ],
    ids=["repetition", "frequency", "presence", "rewards", "repeats", "min_tokens"],
)
def test_penalties_equal_a_naive_reference(
    params: GenerationParams, llama: InferenceEngine, reference_of: Callable[[str], Any], prompts: list[list[int]]
) -> None:
    prompt = prompts[4]
    ends = {0, 2, *params.stop_token_ids}
    expected: list[int] = []
    while len(expected) < params.max_tokens and not ends & set(expected):
        scores = logits_after(reference_of("llama"), prompt + expected).tolist()
        counts = Counter(expected)
        for token in range(len(scores)):
            scores[token] += params.logit_bias.get(token, 0.0)
            if token in ends and len(expected) < params.min_tokens:
                scores[token] = float("-inf")
            if token in prompt or token in expected:
                over = scores[token] > 0
                scores[token] *= 1 / params.repetition_penalty if over else params.repetition_penalty
            scores[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        expected.append(scores.index(max(scores)))
    assert list(llama.generate(prompt, params).token_ids) == expected
    assert expected != oracle(reference_of("llama"), prompt, len(expected))


def test_the_answer_is_cut_at_the_end_of_the_context(llama: InferenceEngine) -> None:
    prompt = [5 + index % 300 for index in range(2040)]
    output = llama.generate(prompt, GenerationParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(output.token_ids) == 8
    assert output.finish_reason == "length"
