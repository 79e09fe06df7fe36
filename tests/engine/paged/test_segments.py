"""Rows of a step as segments, and the logits of scored prompts told apart from those that tokens are drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine import EngineRequest, GenerationParams, ModelInfo
from penstock.engine.choice import Choice
from penstock.engine.paged.kv.blocks import Tables
from penstock.engine.paged.packing import Computed, Segment
from penstock.engine.paged.scheduling.rows import Row, Scheduled
from penstock.engine.paged.segments import split_scores, to_segment
from penstock.engine.text.byte_tokenizer import ByteTokenizer
from penstock.schemas.events import TokenLogprob

TOKENIZER = ByteTokenizer()
INFO = ModelInfo("bytes", "Echo", context_length=100, vocabulary_size=259, eos_token_ids=TOKENIZER.eos_token_ids)
SCORED: dict[str, Any] = {"prompt_logprobs": 2}


def row(prompt: bytes, generated: bytes = b"", computed: int = 0, **params: Any) -> Row:
    request = EngineRequest("r", tuple(prompt), GenerationParams(ignore_eos=True, **params), seed=0)
    one = Row(Choice(request, 0, TOKENIZER, INFO), 0, Tables(2))
    one.choice.tokens = list(generated)
    one.num_computed = computed
    return one


@pytest.mark.parametrize(
    ("computed", "count", "tokens"),
    [
        (0, 2, b"pr"),
        (1, 3, b"rom"),
        (3, 2, b"mp"),
        (0, 8, b"promptge"),
        (4, 3, b"ptg"),
        (5, 1, b"t"),
        (6, 1, b"g"),
        (7, 2, b"en"),
    ],
)
def test_a_segment_has_the_tokens_that_are_not_computed(computed: int, count: int, tokens: bytes) -> None:
    one = row(b"prompt", b"gen", computed)
    one.tables.blocks = [[4, 5], [6]]
    for samples in (False, True):
        segment = to_segment(Scheduled(one, count, samples), None)
        assert segment == Segment([*tokens], computed, [[4, 5], [6]], samples, False)


def test_a_token_that_is_not_read_yet_is_named_by_its_index() -> None:
    one = row(b"prompt", b"ge", 8)
    assert [to_segment(Scheduled(one, 1, True), index).tokens for index in (0, 3)] == [[-1], [-4]]


def test_all_logits_are_kept_of_a_prompt_that_is_to_be_scored_and_not_of_one_that_was() -> None:
    fresh, begun = row(b"ab", **SCORED), row(b"ab", b"c", 2, **SCORED)
    assert [to_segment(Scheduled(one, 1, True), None).scores for one in (fresh, begun)] == [True, False]


def scores_of(choice: Choice) -> list[TokenLogprob]:
    """What the first delta tells of the prompt."""
    delta = choice.append(0)
    assert delta is not None and delta.prompt_logprobs is not None
    return [*delta.prompt_logprobs]


def expected(logits: Tensor, token: int) -> tuple[Any, list[int]]:
    """A token's log-probability, and the two best."""
    logprobs = logits.log_softmax(-1)
    return pytest.approx(float(logprobs[token]), abs=1e-5), logprobs.topk(2).indices.tolist()


def test_a_whole_prompt_is_scored_and_its_last_logits_are_left() -> None:
    logits = torch.randn(5, 259, generator=torch.Generator().manual_seed(1))
    before, scored, after = row(b"x", computed=0), row(b"abc", **SCORED), row(b"y")
    scheduled = [Scheduled(before, 1, True), Scheduled(scored, 3, True), Scheduled(after, 1, True)]
    left, sampled, best = split_scores(scheduled, Computed(logits, [0, 1, 1, 1, 2], [10, 11, 12, 13, 14]))
    assert sampled == [0, 1, 2]
    assert best == [10, 13, 14]
    assert torch.equal(left, logits[[0, 3, 4]])
    first, *others = scores_of(scored.choice)
    assert (first.token_id, first.logprob) == (ord("a"), None)
    for told, of, token in zip(others, (1, 2), b"bc", strict=True):
        assert (told.token_id, (told.logprob, [one.token_id for one in told.top])) == (
            token,
            expected(logits[of], token),
        )


def test_a_prompt_in_pieces_is_scored_piece_by_piece_and_chosen_from_at_the_end() -> None:
    logits = torch.randn(5, 259, generator=torch.Generator().manual_seed(2))
    one = row(b"abcde", **SCORED)
    left, sampled, _ = split_scores([Scheduled(one, 2, False)], Computed(logits[:2], [0, 0]))
    assert (len(left), sampled) == (0, [])
    one.num_computed = 2
    left, sampled, _ = split_scores([Scheduled(one, 2, False)], Computed(logits[2:4], [0, 0]))
    assert (len(left), sampled) == (0, [])
    one.num_computed = 4
    left, sampled, _ = split_scores([Scheduled(one, 1, True)], Computed(logits[4:], [0]))
    assert torch.equal(left, logits[4:]) and sampled == [0]
    told = scores_of(one.choice)[1:]
    assert [each.token_id for each in told] == [*b"bcde"]
    assert [each.logprob for each in told] == [expected(logits[index], token)[0] for index, token in enumerate(b"bcde")]


def test_a_prompt_is_not_scored_twice() -> None:
    """One that is computed again, as it was preempted, has its scores already, and then one row of logits."""
    logits = torch.randn(3, 259, generator=torch.Generator().manual_seed(3))
    one = row(b"ab", **SCORED)
    split_scores([Scheduled(one, 2, True)], Computed(logits[:2], [0, 0]))
    left, sampled, _ = split_scores([Scheduled(one, 2, True)], Computed(logits[2:], [0]))
    assert torch.equal(left, logits[2:]) and sampled == [0]
    assert [each.logprob for each in scores_of(one.choice)] == [None, expected(logits[0], ord("b"))[0]]
