"""The official client against the whole server: the same tokens as transformers' own `generate`, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from openai.types import CompletionUsage
from serving import Served
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [" ".join(f"word{place}" for place in range(length)) for length in range(1, 17)]


class Oracle:
    """Greedy decoding by transformers alone."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def completion(self, prompt: str, max_tokens: int) -> str:
        return self._generate(self.tokenizer(prompt, return_tensors="pt"), max_tokens)

    def chat(self, content: str, max_tokens: int) -> str:
        messages = [{"role": "user", "content": content}]
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return self._generate(inputs, max_tokens)

    def _generate(self, inputs: Any, max_tokens: int) -> str:
        output = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        answer = output[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(answer, skip_special_tokens=True))


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture
def client(model_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{model_server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_chat_equals_transformers_streaming_and_not(client: openai.OpenAI, oracle: Oracle) -> None:
    expected = oracle.chat("Tell me a story.", 32)
    messages: Any = [{"role": "user", "content": "Tell me a story."}]
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=32)
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    text = ""
    usages: list[CompletionUsage | None] = []
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usages.append(chunk.usage)
    assert text == expected
    assert usages[-1] is not None and usages[-1].prompt_tokens_details is not None
    assert usages[-1].prompt_tokens_details.cached_tokens, "the second time the prompt is known"
    counts = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert usages[-1].model_dump(include=counts) == whole.usage.model_dump(include=counts)
    assert not any(usages[:-1])


def test_sixteen_at_once_of_different_lengths_equal_transformers(client: openai.OpenAI, oracle: Oracle) -> None:
    # The client's own type of a completion chunk has no null finish reason, which OpenAI itself sends.
    lenient = client.copy(_extra_kwargs={"_strict_response_validation": False})

    def ask(prompt: str) -> str:
        stream = lenient.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=24, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, PROMPTS))
    assert answers == [oracle.completion(prompt, 24) for prompt in PROMPTS]


def test_several_prompts_and_choices_come_back_in_order(client: openai.OpenAI, oracle: Oracle) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPTS[:3], temperature=0, max_tokens=8, n=2)
    expected = [oracle.completion(prompt, 8) for prompt in PROMPTS[:3] for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, oracle: Oracle) -> None:
    ids = oracle.tokenizer(PROMPTS[4])["input_ids"]
    answer = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=8)
    assert answer.choices[0].text == oracle.completion(PROMPTS[4], 8)


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.completions.create(model="tiny", prompt="once", seed=seed, max_tokens=24, n=2)
        return [choice.text for choice in answer.choices]

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert len(set(ask(1))) == 2


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, oracle: Oracle) -> None:
    whole = oracle.completion("stop", 32)
    stop = whole[len(whole) // 2 :][:2]
    answer = client.completions.create(model="tiny", prompt="stop", temperature=0, max_tokens=32, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_come_with_every_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(rival.logprob for rival in entry.top_logprobs))


def test_max_completion_tokens_and_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}],
        max_completion_tokens=5,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 5


def test_the_chat_template_takes_variables_but_no_replacement(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    refused: list[dict[str, Any]] = [
        {"chat_template": "{{ 1 / 0 }}"},
        {"messages": []},
        {"tokenize": True},
        {"self": 1},
    ]
    for kwargs in refused:
        with pytest.raises(openai.BadRequestError, match="not for the chat template"):
            client.chat.completions.create(model="tiny", messages=messages, extra_body={"chat_template_kwargs": kwargs})
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert answer.usage is not None


def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_every_stream_keeps_the_rules_of_the_wire(model_server: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 3, "max_tokens": 8}
    raw = httpx2.post(f"{model_server.url}/v1/chat/completions", json=body).text
    messages = raw.removesuffix("\n\n").split("\n\n")
    assert messages[-1] == "data: [DONE]"
    assert all(message.startswith("data: ") and "\n" not in message for message in messages)
    assert raw.count('"role":"assistant"') == 3
    assert raw.count('"finish_reason":"') == 3
