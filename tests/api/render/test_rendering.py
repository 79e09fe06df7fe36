"""What the renderer makes of events, held against the official client's own types."""

from __future__ import annotations

import base64
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject

from penstock.api.render.openai import Extras, Renderer, error_message, error_payload
from penstock.api.render.pooled import Embeddings
from penstock.schemas.events import Done, ErrorBody, FinishReason, Token, TokenLogprob, ToolCallDelta, TopLogprob, Usage
from penstock.schemas.jobs import Endpoint

EXAMPLES = settings(max_examples=100, deadline=None)
TYPES: dict[Endpoint, Any] = {"/v1/chat/completions": ChatCompletion, "/v1/completions": Completion}
REASONS: list[FinishReason] = ["stop", "length", "stop_sequence"]  # those that the client's types know

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
logprobs = st.builds(
    TokenLogprob,
    token=texts,
    token_id=st.integers(0, 1000),
    logprob=st.floats(-50, 0),
    bytes=st.lists(st.integers(0, 255), max_size=3).map(tuple),
    top=st.lists(
        st.builds(
            TopLogprob,
            token=texts,
            token_id=st.integers(0, 1000),
            logprob=st.floats(-50, 0),
            bytes=st.lists(st.integers(0, 255), max_size=3).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Token], Done]:
    """The events of a whole answer: some choices, each of some tokens, the last with its reason."""
    with_logprobs = draw(st.booleans())
    tokens: list[Token] = []
    reasons: list[FinishReason] = []
    for choice in range(draw(st.integers(1, 3))):
        pieces = draw(st.lists(texts, min_size=1, max_size=5))
        reasons.append(draw(st.sampled_from(REASONS)))
        for index, text in enumerate(pieces):
            last = index == len(pieces) - 1
            said = (draw(logprobs),) if with_logprobs else None
            tokens.append(Token("r", choice, index, (index,), text, said, reasons[-1] if last else None))
    return tokens, Done("r", tuple(reasons), Usage(3, len(tokens), 3 + len(tokens)))


@EXAMPLES
@given(answers(), st.sampled_from(sorted(TYPES)))
def test_every_response_has_what_the_client_reads(answer: tuple[list[Token], Done], endpoint: Endpoint) -> None:
    """P23: every response has id, object, created, model, choices, usage."""
    tokens, done = answer
    renderer = Renderer(endpoint, "id-1", "m", 1_800_000_000, streaming=False)
    body = orjson.loads(renderer.whole(tokens, done))
    assert {"id", "object", "created", "model", "choices", "usage"} <= body.keys()
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    read = TYPES[endpoint].model_validate(body, strict=True)
    for choice in read.choices:
        text = choice.message.content if endpoint == "/v1/chat/completions" else choice.text
        assert text == "".join(token.text for token in tokens if token.choice == choice.index)


@EXAMPLES
@given(answers(), st.booleans())
def test_chunks_add_up_to_the_whole(answer: tuple[list[Token], Done], include_usage: bool) -> None:
    tokens, done = answer
    extras = Extras(usage=include_usage)
    renderer = Renderer("/v1/chat/completions", "id-1", "m", 1, streaming=True, extras=extras)
    messages = [chunk for token in tokens for chunk in renderer.chunks(token)] + list(renderer.end(done))
    assert messages[-1] == b"data: [DONE]\n\n"
    chunks = [
        ChatCompletionChunk.model_validate(orjson.loads(message.removeprefix(b"data: ")), strict=True)
        for message in messages[:-1]
    ]
    for choice, reason in enumerate(done.finish_reasons):
        deltas = [part for chunk in chunks for part in chunk.choices if part.index == choice]
        said = "".join(token.text for token in tokens if token.choice == choice)
        assert "".join(part.delta.content or "" for part in deltas) == said
        assert [part.delta.role for part in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert [part.finish_reason for part in deltas if part.finish_reason] == [
            "length" if reason == "length" else "stop"
        ]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == int(include_usage)
    assert not include_usage or (chunks[-1].usage == usages[0] and chunks[-1].choices == [])


@EXAMPLES
@given(answers(), st.randoms(use_true_random=False))
def test_the_client_puts_choices_together_in_any_order(answer: tuple[list[Token], Done], order: Random) -> None:
    """OpenAI's own client looks a choice up by the place at which it first saw it."""
    tokens, done = answer
    choices = [token.choice for token in tokens]
    order.shuffle(choices)
    said = {choice: iter([token for token in tokens if token.choice == choice]) for choice in set(choices)}
    renderer = Renderer("/v1/chat/completions", "id-1", "m", 1, streaming=True)
    state = ChatCompletionStreamState()
    for choice in choices:
        for message in renderer.chunks(next(said[choice])):
            chunk = ChatCompletionChunk.model_validate(orjson.loads(message.removeprefix(b"data: ")), strict=True)
            list(state.handle_chunk(chunk))
    for index, answered in enumerate(state.current_completion_snapshot.choices):
        assert answered.index == index
        assert answered.message.content == "".join(token.text for token in tokens if token.choice == index)
        assert answered.message.role == "assistant"
    assert len(state.current_completion_snapshot.choices) == len(done.finish_reasons)


@pytest.mark.parametrize("said", ["content", "reasoning"])
def test_the_chunk_that_ends_a_choice_says_nothing_else(said: str) -> None:
    """As in OpenAI's streams: gpt-cli shows nothing of a chunk with a reason."""
    text, thought = ("", "Hm.") if said == "reasoning" else ("Hm.", "")
    logprobs = (TokenLogprob("Hm", 1, -0.5, (72, 109)), TokenLogprob(".", 2, -0.5, (46,)))
    token = Token("r", 0, 0, (1, 2), text, logprobs, "stop", reasoning=thought)
    renderer = Renderer("/v1/chat/completions", "id-1", "m", 1, streaming=True, extras=Extras(token_ids=True))
    first, last = (orjson.loads(chunk[6:])["choices"][0] for chunk in renderer.chunks(token))
    assert first["delta"][said] == "Hm." and first["logprobs"]
    assert (first["finish_reason"], first["token_ids"]) == (None, [1, 2])
    assert (last["finish_reason"], last["token_ids"], last["logprobs"]) == ("stop", [], None)
    assert last["delta"] == {}


@pytest.mark.parametrize("calls", [1, 2])
def test_the_client_hears_that_a_call_is_done_which_came_with_the_end(calls: int) -> None:
    """OpenAI's own client looks for the end of a choice before it looks at the calls in the same chunk."""
    called = tuple(ToolCallDelta(index, f'{{"a": {index}}}', f"call_{index}", "f") for index in range(calls))
    renderer = Renderer("/v1/chat/completions", "id-1", "m", 1, streaming=True)
    state = ChatCompletionStreamState()
    events: list[Any] = []
    for message in renderer.chunks(Token("r", 0, 0, (1, 2), "", finish_reason="tool_calls", tool_calls=called)):
        chunk = ChatCompletionChunk.model_validate(orjson.loads(message.removeprefix(b"data: ")), strict=True)
        events += state.handle_chunk(chunk)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name, event.arguments) for event in done] == [
        (call.index, "f", call.arguments) for call in called
    ]
    assert state.current_completion_snapshot.choices[0].finish_reason == "tool_calls"


def test_an_answer_that_is_a_call_has_no_text() -> None:
    """AI SDK makes a text part of every chunk whose content is not null, an empty one of "" too. The first token is the
    mark of a call, which is no text."""
    call = ToolCallDelta(0, '{"a"', "call_1", "f")
    tokens = [
        Token("r", 0, 0, (1,), "", None),
        Token("r", 0, 1, (2,), "", None, tool_calls=(call,)),
        Token("r", 0, 2, (3,), "", None, "tool_calls", tool_calls=(ToolCallDelta(0, ": 1}"),)),
    ]
    renderer = Renderer("/v1/chat/completions", "id-1", "m", 1_800_000_000, streaming=True)
    chunks = [orjson.loads(chunk[6:]) for token in tokens for chunk in renderer.chunks(token)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("content") for delta in deltas] == [None, None, None]
    assert deltas[0]["role"] == "assistant" and deltas[0]["tool_calls"][0]["id"] == "call_1"


def test_the_prompt_alone_has_no_token_of_an_answer() -> None:
    """The engine makes one, which the client did not ask for."""
    body = {"echo": True, "max_tokens": 0, "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    token, done = Token("r", 0, 0, (7,), "Once", finish_reason="length"), Done("r", ("length",), Usage(1, 0, 1))
    renderer = Renderer("/v1/completions", "id-1", "m", 1, streaming=True, extras=Extras.of(body))
    (chunk,) = [orjson.loads(chunk[6:]) for chunk in renderer.chunks(token)]
    assert chunk["choices"][0]["text"] == "Once"
    assert chunk["usage"]["completion_tokens"] == 0
    for answer in (chunk, orjson.loads(renderer.whole([token], done))):
        assert answer["choices"][0]["token_ids"] == []


def test_an_empty_answer_is_empty_text() -> None:
    renderer = Renderer("/v1/chat/completions", "id-1", "m", 1_800_000_000, streaming=True)
    tokens = [Token("r", 0, 0, (1,), "", None), Token("r", 0, 1, (2,), "", None, "stop")]
    (chunk,) = [orjson.loads(chunk[6:]) for token in tokens for chunk in renderer.chunks(token)]
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("endpoint", sorted(TYPES))
def test_an_answer_that_ran_out_of_time_says_so(endpoint: Endpoint) -> None:
    """By a reason that OpenAI has, too: some clients know no other."""
    token, done = Token("r", 0, 0, (1,), "x", finish_reason="deadline"), Done("r", ("deadline",), Usage(1, 1, 2))
    renderer = Renderer(endpoint, "id-1", "m", 1, streaming=True)
    *_, chunk = renderer.chunks(token)
    for body in (chunk.removeprefix(b"data: "), renderer.whole([token], done)):
        (choice,) = orjson.loads(body)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")


def comes_back(kind: Any, data: bytes) -> None:
    """P25: read into the official client's type and written again, it is what it was."""
    read = kind.model_validate_json(data)
    assert orjson.loads(read.model_dump_json(exclude_unset=True, by_alias=True)) == orjson.loads(data)


@EXAMPLES
@given(answers(), st.sampled_from(sorted(TYPES)))
def test_every_answer_comes_back_from_json(answer: tuple[list[Token], Done], endpoint: Endpoint) -> None:
    comes_back(TYPES[endpoint], Renderer(endpoint, "id-1", "m", 1, streaming=False).whole(*answer))


@EXAMPLES
@given(answers(), st.booleans())
def test_every_chunk_comes_back_from_json(answer: tuple[list[Token], Done], include_usage: bool) -> None:
    tokens, done = answer
    renderer = Renderer("/v1/chat/completions", "id-1", "m", 1, streaming=True, extras=Extras(usage=include_usage))
    for chunk in [chunk for token in tokens for chunk in renderer.chunks(token)] + list(renderer.end(done))[:-1]:
        comes_back(ChatCompletionChunk, chunk.removeprefix(b"data: "))


vectors = st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8), min_size=1, max_size=4)


@EXAMPLES
@given(vectors)
def test_every_vector_comes_back_from_json(rows: list[list[float]]) -> None:
    tokens = [
        Token("r", place, 0, (), base64.b64encode(np.array(row, "<f4").tobytes()).decode(), None, "stop")
        for place, row in enumerate(rows)
    ]
    reasons: list[FinishReason] = ["stop" for _ in rows]
    done = Done("r", tuple(reasons), Usage(3, 0, 3))
    whole = Embeddings("r", "m", encoded=False).whole(tokens, done)
    comes_back(CreateEmbeddingResponse, whole)
    found = [each.embedding for each in CreateEmbeddingResponse.model_validate_json(whole).data]
    assert [[float(np.float32(number)) for number in row] for row in found] == rows
    # In base64, as its client asks for it, a vector is text that it decodes itself.
    encoded = orjson.loads(Embeddings("r", "m", encoded=True).whole(tokens, done))["data"]
    assert [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in encoded] == rows


errors = st.builds(
    ErrorBody,
    status=st.sampled_from([400, 408, 429, 500, 503]),
    message=texts,
    type=st.sampled_from(["invalid_request_error", "server_error"]),
    code=st.none() | texts,
    param=st.none() | texts,
    retry_after=st.none() | st.floats(0, 60),
)


@EXAMPLES
@given(errors)
def test_every_error_comes_back_from_json(error: ErrorBody) -> None:
    payload = error_payload(error)
    data = orjson.dumps(payload["error"])
    comes_back(ErrorObject, data)
    read = ErrorObject.model_validate_json(data)
    assert (read.message, read.type, read.code, read.param) == (error.message, error.type, error.code, error.param)
    assert orjson.loads(error_message(error).removeprefix(b"data: ")) == payload
