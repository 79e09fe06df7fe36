"""What clients of vLLM, lm-eval, guidellm and Ollama send beyond OpenAI's own parameters does what it says there."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from applications import Applications
from asgi import Response, ask, messages

TEXT: dict[str, Any] = {"model": "echo", "prompt": "hello", "temperature": 0}
CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}
HELLO = [104, 101, 108, 108, 111]


def post(applications: Applications, path: str, body: dict[str, Any]) -> Response:
    response = applications.run(ask(applications.apps[0], "POST", path, body))
    assert response.status == 200, response.body
    return response


def whole(applications: Applications, path: str, **changes: Any) -> dict[str, Any]:
    answer: dict[str, Any] = orjson.loads(post(applications, path, PATHS[path] | changes).body)
    return answer


def chunks(applications: Applications, path: str, **changes: Any) -> list[dict[str, Any]]:
    sent = messages(post(applications, path, PATHS[path] | changes | {"stream": True}).body)
    return [message.data for message in sent if isinstance(message.data, dict)]


@pytest.mark.parametrize("path", PATHS)
def test_every_chunk_tells_the_usage_so_far(applications: Applications, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    sent = chunks(applications, path, stream_options=options, return_token_ids=True)
    *parts, last = sent
    told = 0
    for part in parts:
        told += sum(len(choice["token_ids"]) for choice in part["choices"])
        usage = part["usage"]
        assert usage["completion_tokens"] == told
        assert usage["total_tokens"] == usage["prompt_tokens"] + told
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], told)
    assert last["usage"]["prompt_tokens"] == parts[0]["usage"]["prompt_tokens"] > 0
    assert all(
        part["usage"] is None for part in chunks(applications, path, stream_options={"include_usage": True})[:-1]
    )
    assert not any("usage" in part for part in chunks(applications, path))


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_are_told_to_who_asks(applications: Applications, path: str) -> None:
    answer = whole(applications, path, return_token_ids=True)
    (choice,) = answer["choices"]
    prompt = answer["prompt_token_ids"] if path.endswith("chat/completions") else choice["prompt_token_ids"]
    assert prompt[-5:] == HELLO if path == "/v1/completions" else prompt
    assert choice["token_ids"] == [token for token in prompt if token < 256] + [256]
    sent = chunks(applications, path, return_token_ids=True)
    parts = [part["choices"][0] for part in sent]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    heads = [part.get("prompt_token_ids") for part in (sent if path.endswith("chat/completions") else parts)]
    assert heads == [prompt] + [None] * (len(heads) - 1)
    assert "token_ids" not in whole(applications, path)["choices"][0]


def test_every_choice_tells_its_own_prompt(applications: Applications) -> None:
    choices = whole(applications, "/v1/completions", prompt=["a", "b"], n=2, return_token_ids=True)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97], [97], [98], [98]]


@pytest.mark.parametrize("path", PATHS)
def test_what_ended_an_answer_is_told(applications: Applications, path: str) -> None:
    assert whole(applications, path, stop=["zz", "lo"])["choices"][0]["stop_reason"] == "lo"
    assert whole(applications, path, stop_token_ids=[111])["choices"][0]["stop_reason"] == 111
    assert "stop_reason" not in whole(applications, path)["choices"][0]
    assert chunks(applications, path, stop=["zz", "lo"])[-1]["choices"][0]["stop_reason"] == "lo"


def test_an_echo_begins_with_the_prompts_logprobs(applications: Applications) -> None:
    """As lm-eval's local-completions asks."""
    asked = {"prompt": [HELLO], "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    (choice,) = whole(applications, "/v1/completions", **asked)["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "helloh" and told["tokens"] == [*"helloh"]
    assert told["token_logprobs"] == [None, 0, 0, 0, 0, 0]
    assert told["top_logprobs"] == [None, {}, {}, {}, {}, {}] and told["text_offset"] == [0, 1, 2, 3, 4, 5]
    (part, *_) = chunks(applications, "/v1/completions", **asked)
    assert part["choices"][0]["logprobs"]["tokens"][:5] == [*"hello"]


def test_an_echo_may_be_all(applications: Applications) -> None:
    answer = whole(applications, "/v1/completions", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert choice["logprobs"]["tokens"] == [*"hello"]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 5)
    plain = whole(applications, "/v1/completions", echo=True, max_tokens=0)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("hello", None)


@pytest.mark.parametrize("path", PATHS)
def test_the_prompts_logprobs_are_told_as_vllm_tells_them(applications: Applications, path: str) -> None:
    answer = whole(applications, path, prompt_logprobs=2, return_token_ids=True)
    (choice,) = answer["choices"]
    place = answer if path == "/v1/chat/completions" else choice
    first, *others = place["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    for token, entry in zip(place["prompt_token_ids"][1:], others, strict=True):
        (told,) = entry.items()
        assert told[0] == str(token) and told[1]["rank"] == 1 and told[1]["logprob"] == 0
    assert [entry["111"]["decoded_token"] for entry in others if "111" in entry] == ["o"]
    assert not any("prompt_logprobs" in part for part in (whole(applications, path), choice if place is answer else {}))


def test_generate_needs_no_model_and_has_stop_sequences(applications: Applications) -> None:
    answer = orjson.loads(post(applications, "/generate", {"prompt": "hello", "stop_sequences": ["lo", "x"]}).body)
    (choice,) = answer["choices"]
    assert (answer["model"], choice["text"]) == ("echo", "hel")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop_sequence", "lo")


def test_messages_tell_which_stop_sequence_was_met(applications: Applications) -> None:
    body = CHAT | {"max_tokens": 50, "stop_sequences": ["zz", "lo"]}
    answer = orjson.loads(post(applications, "/v1/messages", body).body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "lo")
    sent = [message.data for message in messages(post(applications, "/v1/messages", body | {"stream": True}).body)]
    assert sent[-2]["delta"]["stop_sequence"] == "lo"


@pytest.mark.parametrize("path", PATHS)
def test_words_that_change_nothing_here_are_named(applications: Applications, path: str) -> None:
    """As Open WebUI's advanced parameters send them."""
    extra = {"num_ctx": 4096, "mirostat": 1, "mirostat_eta": 0.1, "tfs_z": 1.0, "think": False, "keep_alive": "5m"}
    response = post(applications, path, PATHS[path] | extra | {"repeat_penalty": 1.1, "top_k": -1})
    assert response.headers["penstock-ignored"] == ", ".join(extra)
