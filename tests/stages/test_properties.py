"""The pipeline's properties, over the in-memory broker: what a client sees, whatever it sends."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pipeline import MODEL, FragileEcho, Pipeline

from penstock.schemas.events import FINAL, Accepted, Delta, Done, Event, Failed, Token

EXAMPLES = settings(max_examples=100, deadline=None)

# Text that the echo model gives back as it is: whatever is not one of its special tokens.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda text: text.strip() and "<|" not in text  # no special token, which clean text leaves out
)


def final(events: list[Event]) -> Event:
    """The one final event, which is the last."""
    assert [event for event in events if isinstance(event, FINAL)] == events[-1:]
    return events[-1]


def tokens(events: list[Event]) -> list[Token]:
    return [event for event in events if isinstance(event, Token)]


def test_p1_valid_requests_are_accepted_with_ids_of_their_own(pipeline: Pipeline) -> None:
    """P1: a valid request is accepted and gets a unique id."""
    ids: set[str] = set()

    @EXAMPLES
    @given(prompt=texts, temperature=st.floats(0, 2), n=st.integers(1, 3))
    def check(prompt: str, temperature: float, n: int) -> None:
        events = pipeline.ask({"model": MODEL, "prompt": prompt, "temperature": temperature, "n": n})
        assert [event.request for event in events if isinstance(event, Accepted)] == [events[0].request]
        assert events[0].request not in ids
        ids.add(events[0].request)
        assert isinstance(final(events), Done)

    check()


FAULTS: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": 2.5},
    {"temperature": "hot"},
    {"top_p": -0.1},
    {"top_p": 1.5},
    {"n": 0},
    {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"stop": [""]},
    {"seed": "x"},
    {"logit_bias": {"x": 1}},
    {"presence_penalty": 3},
    {"priority": "urgent"},
    {"prompt": ""},
    {"prompt": " \n"},
    {"prompt": []},
    {"prompt": 5},
    {"prompt": None},
    {"model": ""},
    {"model": 7},
    {"nonsense": True},
    {"stream_options": {"include_usage": True}},
    {"tools": [{"type": "function"}]},
]


def test_p2_faulty_requests_are_refused_with_message_type_and_code(pipeline: Pipeline) -> None:
    """P2: malformed JSON, a missing field or an out-of-range value gets 400 with `message`, `type`, `code`."""
    bodies = st.one_of(
        st.sampled_from(FAULTS).map(lambda fault: {"model": MODEL, "prompt": "hello"} | fault),
        st.just({"model": MODEL}),
    )

    @EXAMPLES
    @given(body=bodies)
    def check(body: dict[str, Any]) -> None:
        events = pipeline.ask(body)
        assert len(events) == 1
        assert isinstance(events[0], Failed)
        error = events[0].error
        assert error.status == 400
        assert error.message and error.type == "invalid_request_error" and error.code

    @EXAMPLES
    @given(data=st.binary(max_size=50))
    def check_bytes(data: bytes) -> None:
        subject = pipeline.pipe.subjects.jobs("normal", "default")
        event = pipeline.runner.run(pipeline.raw(subject, data, uuid.uuid4().hex))
        assert isinstance(event, Failed)
        assert (event.error.status, event.error.code) == (400, "malformed_job")

    check()
    check_bytes()


def test_p3_prompts_longer_than_the_context_are_refused_with_both_numbers(pipeline: Pipeline) -> None:
    """P3: more prompt tokens than the context gets 400, saying so with both numbers."""

    @EXAMPLES
    @given(length=st.integers(512, 2000))
    def check(length: int) -> None:
        event = final(pipeline.ask({"model": MODEL, "prompt": "x" * length}))
        assert isinstance(event, Failed)
        assert event.error.status == 400
        assert event.error.code == "context_length_exceeded"
        assert str(length) in event.error.message
        assert "512" in event.error.message

    check()


def test_p13_token_events_carry_text_index_and_logprobs(pipeline: Pipeline) -> None:
    """P13: a token event carries the token text, its index and, where asked, its logprob."""

    @EXAMPLES
    @given(prompt=texts, logprobs=st.none() | st.integers(0, 3), n=st.integers(1, 3))
    def check(prompt: str, logprobs: int | None, n: int) -> None:
        events = tokens(pipeline.ask({"model": MODEL, "prompt": prompt, "logprobs": logprobs, "n": n}))
        for choice in range(n):
            said = [event for event in events if event.choice == choice]
            assert "".join(event.text for event in said) == prompt
            place = 0
            for event in said:
                assert event.index == place
                place += len(event.token_ids)
                assert (event.logprobs is None) == (logprobs is None)
                assert event.logprobs is None or len(event.logprobs) == len(event.token_ids)

    check()


def test_p14_the_last_event_carries_reasons_and_usage(pipeline: Pipeline) -> None:
    """P14: the last event carries the finish reason and the three usage counts."""

    @EXAMPLES
    @given(prompt=texts, limit=st.integers(1, 60), n=st.integers(1, 3))
    def check(prompt: str, limit: int, n: int) -> None:
        events = pipeline.ask({"model": MODEL, "prompt": prompt, "max_tokens": limit, "n": n})
        done = final(events)
        assert isinstance(done, Done)
        length = len(prompt.encode())
        assert done.finish_reasons == (("stop",) if limit > length else ("length",)) * n
        assert done.usage.prompt_tokens == length
        assert done.usage.completion_tokens == n * min(limit, length + 1)
        assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens

    check()


def test_p15_an_error_during_generation_reaches_the_client(pipeline: Pipeline) -> None:
    """P15: an error during generation reaches the client as an event with message and code before the stream closes."""

    @EXAMPLES
    @given(prompt=texts, after=st.integers(0, 5))
    def check(prompt: str, after: int) -> None:
        pipeline.backend.fails_after = after
        failed = final(pipeline.ask({"model": MODEL, "prompt": prompt, "ignore_eos": True, "max_tokens": 50}))
        assert isinstance(failed, Failed)
        assert failed.error.status == 500
        assert failed.error.message and failed.error.code == "generation_failed"

    check()


class Culprits(FragileEcho):
    """Fails each request whose prompt begins with a bell, after as many tokens as its second byte says."""

    def step(self) -> list[Delta]:
        deltas = super().step()
        for sequence in list(self._running):
            if sequence.prompt[0] == ord("\a") and len(sequence.tokens) >= sequence.prompt[1] - ord("0"):
                self.remove(sequence)
                deltas.append(sequence.fail(RuntimeError("broken on purpose")))
        return deltas


def test_p22_failures_leave_batch_mates_alone() -> None:
    """P22: one request's failure leaves its batch mates alone, whoever fails, how many, and when."""
    culprit = st.integers(0, 5).map(lambda after: f"\a{after} fails")
    mate = texts.filter(lambda text: not text.startswith("\a"))

    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start(kind=Culprits, max_batch_size=8, batch_window=0.002))

        @EXAMPLES
        @given(st.lists(st.booleans(), min_size=2, max_size=8), st.data())
        def check(fails: list[bool], data: st.DataObject) -> None:
            prompts = [data.draw(culprit if is_culprit else mate) for is_culprit in fails]

            async def scene() -> list[list[Event]]:
                bodies = [{"model": MODEL, "prompt": prompt, "max_tokens": 200} for prompt in prompts]
                return await asyncio.gather(*map(pipeline.events, bodies))

            for prompt, is_culprit, events in zip(prompts, fails, runner.run(scene()), strict=True):
                end = final(events)
                if is_culprit:
                    assert isinstance(end, Failed) and end.error.code == "generation_failed"
                else:
                    assert isinstance(end, Done) and end.finish_reasons == ("stop",)
                    assert "".join(token.text for token in tokens(events)) == prompt

        try:
            check()
        finally:
            runner.run(pipeline.stop())
