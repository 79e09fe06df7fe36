"""Filters between infer and stream: the client reads what they say, once and in order, whoever dies."""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import asgi
import orjson
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from memory_pipeline import MODEL, Pipeline, validated
from raw_events import PATIENCE, Forgetful, check, dispatch, ended, job_named, publish, stored
from structlog.testing import capture_logs

from penstock.api.http.app import create_app
from penstock.config.settings import Settings
from penstock.schemas.errors import InvalidRequest, StartupError
from penstock.schemas.events import (
    Cancelled,
    Delta,
    Done,
    Event,
    Failed,
    FinishReason,
    Started,
    Token,
    TokenLogprob,
    ToolCallDelta,
)
from penstock.schemas.loops import TurnId
from penstock.schemas.wire import codec
from penstock.stages import Filter
from penstock.stages.cancellations import Cancellations
from penstock.stages.catalogue import find_filters
from penstock.stages.custom.filters import FilteredAnswer
from penstock.stages.stream import EventPublisher
from penstock.streams.port import Message

EXAMPLES = settings(max_examples=100, deadline=None, phases=[Phase.generate])  # a failure waits; once is enough
SAID = "a cat, two cats and a CAT: concat, cat"
MASKED = "a dog, two cats and a dog: concat, dog"


class Dogs(Filter):
    """Every cat is a dog: a word is whole where another character follows, or nothing."""

    name = "dogs"

    def __init__(self, answer: Started, choice: int) -> None:
        super().__init__(answer, choice)
        self._held = ""

    async def process(self, token: Token) -> Token:
        text = self._held + token.text
        found = re.search(r"\w*\Z", text)
        assert found is not None
        whole = len(text) if token.finish_reason else found.start()
        self._held = text[whole:]
        return replace(token, text=re.sub(r"\bcat\b", "dog", text[:whole], flags=re.IGNORECASE))


class Full(Filter):
    """A full stop ends the answer, a question mark is refused, an exclamation mark is a bug."""

    name = "full"

    async def process(self, token: Token) -> Token:
        if "?" in token.text:
            raise InvalidRequest("No questions.", code="content_policy")
        if "!" in token.text:
            raise KeyError(token.text)
        if "^" in token.text:
            sys.exit(3)
        if "~" in token.text:
            raise asyncio.CancelledError
        head, stop, _ = token.text.partition(".")
        return replace(token, text=head + stop, finish_reason="content_filter" if stop else token.finish_reason)


@pytest.fixture(scope="module")
def filtered() -> Iterator[Pipeline]:
    """No stream remembers a message id: what happens once does so by its fence alone."""
    with asyncio.Runner() as runner:
        names = ("validate", "queue", "batch", "infer", "dogs", "full", "stream")
        pipeline = runner.run(Pipeline.start(memory=Forgetful, filters=(Dogs, Full), pipeline=names))
        pipeline.runner = runner
        yield pipeline
        runner.run(pipeline.stop())


def ask(filtered: Pipeline, prompt: Any, **body: Any) -> list[Event]:
    return filtered.ask({"model": MODEL, "prompt": prompt, "max_tokens": 200, **body})


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Token) and event.choice == choice)


def test_a_word_is_replaced_across_tokens(filtered: Pipeline) -> None:
    *events, done = ask(filtered, SAID)
    assert text_of(events) == MASKED
    assert isinstance(done, Done)
    assert done.finish_reasons == ("stop",)
    assert done.usage.completion_tokens == len(SAID) + 1  # the model's own tokens, its end among them


def test_each_choice_has_a_filter_of_its_own(filtered: Pipeline) -> None:
    *events, done = ask(filtered, ["a c", "at. no more", "cat"])
    assert [text_of(events, choice) for choice in range(3)] == ["a c", "at.", "dog"]
    assert isinstance(done, Done)
    assert done.finish_reasons == ("stop", "content_filter", "stop")


def test_an_answer_that_was_replayed_in_any_order_is_told_once(filtered: Pipeline) -> None:
    """By copies of the stage stream that come and go, each of which gets what another has told already."""

    @EXAMPLES
    @given(st.sampled_from([SAID, "a cat. And more", "what?"]), st.lists(st.tuples(st.integers(0, 99), st.booleans())))
    def in_any_order(prompt: str, again: list[tuple[int, bool]]) -> None:
        async def scene() -> None:
            pipe, request = filtered.pipe, f"r-{uuid.uuid4().hex}"
            await publish(filtered, job_named(request, prompt=prompt, stream=True))
            before = await ended(filtered, request)
            outputs = await pipe.broker.replay("STREAM", pipe.outputs_of("default", request))
            pipe.trails.clear()  # it knows of nothing
            publisher = EventPublisher(pipe, 0, (Dogs, Full))
            for place, is_new in again:
                message = outputs[place % len(outputs)]
                publisher = EventPublisher(pipe, 0, (Dogs, Full)) if is_new else publisher
                await publisher.publish(codec.decode_outputs(message.data), message)
            assert await stored(filtered, request) == before

        filtered.runner.run(scene())

    in_any_order()


def test_copies_and_workers_that_die_at_any_output_are_not_noticed(filtered: Pipeline) -> None:
    """Each epoch says a part of the answer, in deltas of any size; before any of them a new copy may take over."""

    @EXAMPLES
    @given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=20))
    def any_deaths(parts: list[tuple[int, bool, bool]]) -> None:
        async def scene() -> None:
            pipe = filtered.pipe
            job = validated(f"r-{uuid.uuid4().hex}", pipe).model_copy(update={"bridge": "other"})
            share, epoch, place = 0, 1, 0
            publisher = EventPublisher(pipe, share, (Dogs, Full))
            subject = f"{pipe.subjects.root}.stream.elsewhere.{job.tenant}.{job.id}"  # where no stage reads
            for size, worker_dies, copy_dies in [*parts, (len(SAID), False, False)]:
                end = min(len(SAID), place + size)
                outputs: list[Started | Delta] = []
                if worker_dies or not place:
                    epoch += bool(place)
                    outputs.append(Started(job.id, epoch, f"h{epoch}", job.tenant, job.bridge, 1, 5, None, "normal"))
                reason: FinishReason | None = "stop" if end == len(SAID) else None
                outputs.append(
                    Delta(job.id, epoch, 0, place, tuple(range(place, end)), SAID[place:end], finish_reason=reason)
                )
                await pipe.store(subject, codec.encode_outputs(outputs), uuid.uuid4().hex, codec.OUTPUTS)
                *_, message = await pipe.broker.replay("STREAM", subject)
                if copy_dies:
                    publisher = EventPublisher(pipe, share, (Dogs, Full))
                await publisher.publish(codec.decode_outputs(message.data), message)
                place = end
                if reason:
                    break
            events = await stored(filtered, job.id, bridge="other")
            assert check(events, accepted=False) == MASKED
            assert sum(len(event.token_ids) for event in events if isinstance(event, Token)) == len(SAID)

        filtered.runner.run(scene())

    any_deaths()


def test_a_filter_ends_an_answer_and_its_work(filtered: Pipeline) -> None:
    async def scene() -> None:
        filtered.backend._rate = 50.0
        request = f"r-{uuid.uuid4().hex}"
        await publish(filtered, job_named(request, prompt="The cat." + " and more" * 20, max_tokens=300, stream=True))
        events = await ended(filtered, request)
        filtered.backend._rate = 0.0
        assert check(events) == "The dog."
        done = events[-1]
        assert isinstance(done, Done)
        assert done.finish_reasons == ("content_filter",)
        told = sum(len(event.token_ids) for event in events if isinstance(event, Token))
        assert done.usage.completion_tokens == told  # what the model made behind the end is not counted
        said = await filtered.pipe.transcript("default", request)
        assert said.finish_reasons == ["cancelled"]
        assert len(said.token_ids[0]) < 180

    filtered.runner.run(scene())


def test_an_answer_that_a_filter_has_ended_stays_ended_when_another_worker_takes_over(filtered: Pipeline) -> None:
    async def scene() -> None:
        job = validated(f"r-{uuid.uuid4().hex}", filtered.pipe)
        prompt = "One. Two. Three"
        job = job.model_copy(update={"prompts": (tuple(prompt.encode()),)})
        started = Started(job.id, 1, "dead", job.tenant, job.bridge, 1, job.prompt_tokens)
        said = Delta(job.id, 1, 0, 0, tuple(prompt[:6].encode()), prompt[:6])
        outputs = codec.encode_outputs([started, said])
        subject = filtered.pipe.outputs_of(job.tenant, job.id)
        await filtered.pipe.store(subject, outputs, uuid.uuid4().hex, codec.OUTPUTS)
        await dispatch(filtered, job, 1)
        events = await ended(filtered, job.id)
        assert check(events, accepted=False) == "One."
        async with asyncio.timeout(PATIENCE):
            while not (await filtered.pipe.transcript(job.tenant, job.id)).finished:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert await stored(filtered, job.id) == events

    filtered.runner.run(scene())


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "A cat. No"}]}, ["finish_reason"]),
        ("messages", {"messages": [{"role": "user", "content": "A cat. No"}], "max_tokens": 99}, ["stop_reason"]),
        ("responses", {"input": "A cat. No"}, ["status", "incomplete_details"]),
    ],
)
def test_every_dialect_says_that_a_filter_has_ended_the_answer(
    filtered: Pipeline, path: str, body: dict[str, Any], said: list[str]
) -> None:
    pipe = filtered.pipe
    app = create_app(filtered.bridge, pipe.broker, pipe.registry, pipe.settings, "0")
    answer = filtered.runner.run(asgi.ask(app, "POST", f"/v1/{path}", {"model": MODEL, **body}))
    assert answer.status == 200, answer.body
    assert b"A dog." in answer.body and b"No" not in answer.body
    found = orjson.loads(answer.body)
    found = found["choices"][0] if "choices" in found else found
    assert [found[name] for name in said] in (
        ["content_filter"],
        ["refusal"],
        ["incomplete", {"reason": "content_filter"}],
    )
    if path == "responses":
        kept = filtered.runner.run(asgi.ask(app, "GET", f"/v1/responses/{found['id']}"))
        assert orjson.loads(kept.body) == found


def test_a_turn_of_a_response_can_be_stopped_for_itself() -> None:
    cancellations, heard = Cancellations(), []
    response = f"resp_{uuid.uuid4().hex}"
    turns = [str(TurnId(response, turn)) for turn in (1, 2)]

    async def scene() -> None:
        with (
            cancellations.calling("default", turns[0], lambda: heard.append(1)),
            cancellations.calling("default", turns[1], lambda: heard.append(2)),
        ):
            cancellations._hear(Message(f"penstock.control.cancel.default.{turns[0]}", b"", {}, 0))
            assert heard == [1]
            assert [cancellations.include("default", name) for name in (response, *turns)] == [False, True, False]
            cancellations._hear(Message(f"penstock.control.cancel.default.{response}", b"", {}, 0))
            assert heard == [1, 1, 2]

    asyncio.run(scene())


def test_a_filter_refuses(filtered: Pipeline) -> None:
    failed = ask(filtered, "a cat?")[-1]
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.code, failed.error.message) == (400, "content_policy", "No questions.")


def test_a_bug_in_a_filter_ends_the_request_and_tells_nothing_of_it(
    filtered: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ask(filtered, "a secret!")[-1]
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.message) == (500, "The filter full failed.")
    out = capsys.readouterr().out
    assert "KeyError" in out and "test_filters.py:" in out
    assert "secret" not in out


@pytest.mark.parametrize("prompt", ["a^b", "a~b"])
def test_a_filter_that_would_end_its_process_ends_the_request(filtered: Pipeline, prompt: str) -> None:
    failed = ask(filtered, prompt)[-1]
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.message) == (500, "The filter full failed.")
    assert isinstance(ask(filtered, "a.")[-1], Done)


def test_vectors_pass_no_filter(filtered: Pipeline) -> None:
    async def scene() -> None:
        job = validated(f"r-{uuid.uuid4().hex}", filtered.pipe)
        started = Started(job.id, 1, "h", job.tenant, job.bridge, 1, 1, None, "normal", "/v1/embeddings", "m")
        outputs = codec.encode_outputs([started, Delta(job.id, 1, 0, 0, (), "cat!", finish_reason="stop")])
        await filtered.pipe.store(
            filtered.pipe.outputs_of(job.tenant, job.id), outputs, uuid.uuid4().hex, codec.OUTPUTS
        )
        assert check(await ended(filtered, job.id), accepted=False) == "cat!"

    filtered.runner.run(scene())


def token(index: int, text: str, **change: Any) -> Token:
    logprob = TokenLogprob(text, index, -1.0, tuple(text.encode()))
    return replace(Token("r", 0, index, (index,), text, logprobs=(logprob,)), **change)


async def told(kind: type[Filter], *events: Event, choices: int = 1, limit: float = 60.0) -> list[Event]:
    answer = FilteredAnswer([kind], Started("r", 1, "h", "default", "b", choices, 5), limit)
    return [one for event in events for one in await answer.read(event)]


class Quiet(Filter):
    """Thoughts and calls are nobody's business, nor is the number 3."""

    name = "quiet"

    async def process(self, token: Token) -> Token:
        return replace(token, reasoning="", tool_calls=(), text=token.text.replace("3", "*"), token_ids=(), index=77)


async def test_what_was_changed_cannot_be_read_from_ids_and_log_probabilities() -> None:
    one, three, four = [token(place, str(place)) for place in (1, 3, 4)]
    hidden = [replace(three, text="*", token_ids=(-1,), logprobs=None), replace(four, token_ids=(-1,), logprobs=None)]
    assert await told(Quiet, one, three, four) == [one, *hidden]


async def test_thoughts_and_calls_can_be_withheld_and_still_count() -> None:
    thought = token(0, "", reasoning="hm")
    call = token(1, "", tool_calls=(ToolCallDelta(0, "{}", "c", "f"),), finish_reason="tool_calls")
    first, second = await told(Quiet, thought, call)
    assert (first, second) == (
        Token("r", 0, 0, (-1,), ""),
        Token("r", 0, 1, (-1,), "", finish_reason="tool_calls"),
    )


async def test_the_end_of_one_choice_is_not_the_end_of_the_answer() -> None:
    cut = token(0, "One. Two")
    other = replace(token(0, "x"), choice=1)
    late = token(1, "late")
    last = replace(token(1, "y", finish_reason="length"), choice=1)
    events = await told(Full, cut, other, late, last, choices=2)
    assert text_of(events) == "One."
    assert text_of(events, 1) == "xy"
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reasons == ("content_filter", "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 3)


async def test_a_client_that_leaves_is_told_so_though_a_choice_was_cut() -> None:
    cut, left = token(0, "One. Two"), replace(token(0, "", finish_reason="cancelled"), choice=1)
    assert isinstance((await told(Full, cut, left, choices=2))[-1], Cancelled)


def pipeline_of(*filters: str) -> tuple[str, ...]:
    return ("validate", "queue", "batch", "infer", *filters, "stream")


def test_filters_stand_between_infer_and_stream() -> None:
    chosen = Settings(pipeline=pipeline_of("mask", "full"))
    assert (chosen.job_stages, chosen.filters) == (("queue",), ("mask", "full"))
    for wrong in (("validate", "queue", "batch", "mask", "infer", "stream"), (*pipeline_of(), "mask")):
        with pytest.raises(ValueError, match="filters between infer and stream"):
            Settings(pipeline=wrong)


def test_a_process_needs_all_filters_of_the_pipeline_in_its_order() -> None:
    assert find_filters(("full", "dogs"), [Dogs, Full]) == (Full, Dogs)
    with pytest.raises(StartupError, match="full is not here: name its file too"):
        find_filters(("full", "dogs"), [Dogs])
    with pytest.raises(StartupError, match="quiet is no filter of the pipeline"):
        find_filters(("full",), [Full, Quiet])


async def test_a_filter_that_does_not_return_ends_the_answer_with_an_error() -> None:
    class Hanging(Filter):
        """Waits for what never comes where the text is a question, and takes its own time-outs for bugs."""

        name = "hanging"

        async def process(self, token: Token) -> Token:
            if "?" in token.text:
                await asyncio.Event().wait()
            if "!" in token.text:
                raise TimeoutError
            return token

    said, failed = await told(Hanging, token(0, "So"), token(1, "what?"), limit=0.01)
    assert said == token(0, "So")
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.message) == (500, "The filter hanging did not return for 0.01 s.")
    (failed,) = await told(Hanging, token(0, "!"))
    assert isinstance(failed, Failed) and failed.error.message == "The filter hanging failed."


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"text": 5}, "whose text is a int, not a str"),
        ({"reasoning": None}, "whose reasoning is a NoneType, not a str"),
        ({"text": "\ud800"}, "whose text has half of a surrogate pair"),
        ({"tool_calls": None}, "whose tool_calls are no tuple of ToolCallDelta"),
        ({"tool_calls": (ToolCallDelta(0, "\ud800"),)}, "whose tool_calls has half of a surrogate pair"),
        ({"finish_reason": "banana"}, 'whose finish_reason is unknown: use "stop" or "content_filter"'),
    ],
    ids=str,
)
async def test_a_filter_that_returns_what_no_client_can_be_told_has_failed(changes: dict[str, Any], fault: str) -> None:
    class Odd(Filter):
        name = "odd"

        async def process(self, token: Token) -> Token:
            return replace(token, **changes)

    with capture_logs() as logs:
        (failed,) = await told(Odd, token(0, "So"))
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.message) == (500, "The filter odd failed.")
    assert [entry["reason"] for entry in logs] == [f"process returned a token {fault}"]


async def test_a_filter_that_changes_the_piece_in_its_place_hides_what_it_was_and_ends_the_answer() -> None:
    class InPlace(Filter):
        name = "in-place"

        async def process(self, token: Token) -> Token:
            token.text = "*" * len(token.text)
            token.finish_reason = "stop"
            return token

    said, done = await told(InPlace, token(0, "secret"))
    assert isinstance(said, Token) and isinstance(done, Done)
    assert (said.text, said.token_ids, said.logprobs) == ("******", (-1,), None)
