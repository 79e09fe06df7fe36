"""The official client over a matrix of parameters: strictly valid answers, and a stream says what the whole does."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Served

COMMON: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 2.0],
    "top_p": [0.3, 1.0],
    "max_tokens": [1, 17.0],
    "stop": ["e", ["ing", "zz"]],
    "n": [1, 3.0],
    "frequency_penalty": [-2, 1.5],
    "presence_penalty": [0.5],
    "logit_bias": [{"300": 5, "301": -100}],
    "user": ["somebody"],
}
CHAT: dict[str, list[Any]] = {
    "service_tier": ["auto", "priority", "flex"],
    "metadata": [{"team": "a"}],
    "logprobs": [True],
    "max_completion_tokens": [9],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "tool_choice": ["none", "auto", "required"],
    "parallel_tool_calls": [True, False],
    "store": [False],
}
TEXT: dict[str, list[Any]] = {"logprobs": [0, 3], "echo": [True, False]}
OURS: dict[str, list[Any]] = {
    "top_k": [1, 20],
    "min_p": [0.1],
    "repetition_penalty": [1.3],
    "priority": ["high", "normal", "low"],
    "ignore_eos": [True],
    "min_tokens": [2],
    "stop_token_ids": [[300]],
    "timeout": [60],
}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def drawn(table: dict[str, list[Any]], chance: random.Random, share: float) -> dict[str, Any]:
    return {name: chance.choice(values) for name, values in table.items() if chance.random() < share}


def bodies(chat: bool) -> list[dict[str, Any]]:
    """So many bodies that every value is in several, made the same way every time."""
    chance = random.Random(5)
    made = []
    for _ in range(30):
        body = {"max_tokens": 20, "seed": chance.randrange(1000), **drawn(COMMON, chance, 0.3)}
        body |= drawn(CHAT if chat else TEXT, chance, 0.3)
        ours = drawn(OURS, chance, 0.2)
        if "max_completion_tokens" in body:
            del body["max_tokens"]
        if "logprobs" in body and chat:
            body["top_logprobs"] = chance.choice([0, 5])
        if body.get("tool_choice"):
            body["tools"] = [TOOL]
        else:
            body.pop("parallel_tool_calls", None)
        if "service_tier" in body:
            ours.pop("priority", None)
        if body.get("echo") and "logprobs" in body:
            del body["echo"]
        if body.get("max_tokens") == 1:
            ours.pop("min_tokens", None)
        if body.get("tools") or body.get("response_format"):
            for name in ("ignore_eos", "min_tokens", "stop_token_ids"):
                ours.pop(name, None)
        made.append(body | {"extra_body": ours})
    return made


@pytest.fixture
def client(tool_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.mark.parametrize("body", bodies(chat=True))
def test_chat(client: openai.OpenAI, body: dict[str, Any]) -> None:
    given: Any = {"model": "tools", "messages": [{"role": "user", "content": "Tell me something."}], **body}
    whole = client.chat.completions.create(**given)
    assert len(whole.choices) == body.get("n", 1)
    assert whole.usage is not None and whole.usage.completion_tokens >= len(whole.choices)
    said: dict[int, str] = defaultdict(str)
    calls: dict[int, str] = defaultdict(str)
    reasons: dict[int, str | None] = {}
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                calls[choice.index] += (call.function.name or "") + (call.function.arguments or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            if body.get("logprobs") and choice.logprobs and choice.logprobs.content:
                assert len(choice.logprobs.content[0].top_logprobs) == body["top_logprobs"]
    for choice in whole.choices:
        assert (choice.message.content or "") == said[choice.index]
        made = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
        assert "".join(function.name + function.arguments for function in made) == calls[choice.index]
        assert choice.finish_reason == reasons[choice.index]
        assert (choice.logprobs is not None) == bool(body.get("logprobs"))


@pytest.mark.parametrize("body", bodies(chat=False))
def test_completions(client: openai.OpenAI, body: dict[str, Any]) -> None:
    prompts = ["The first", "And the second of them"]
    given: Any = {"model": "tools", "prompt": prompts, **body}
    whole = client.completions.create(**given)
    n = body.get("n", 1)
    assert len(whole.choices) == 2 * n
    said: dict[int, str] = defaultdict(str)
    # The client's type forgets that a text goes on with null, as OpenAI's own server says.
    with openai.OpenAI(base_url=str(client.base_url), api_key="none") as lenient:
        for chunk in lenient.completions.create(**given, stream=True):
            for choice in chunk.choices:
                said[choice.index] += choice.text
    for choice in whole.choices:
        assert choice.text == said[choice.index]
        assert not body.get("echo") or choice.text.startswith(prompts[choice.index // n])
        assert (choice.logprobs is not None) == ("logprobs" in body)
