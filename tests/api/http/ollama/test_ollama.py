"""Ollama's official client against `/api`: a real server, and streams of made-up events."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import ollama
import orjson
import pytest
from applications import Script
from asgi import ask
from serving import Served

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.events import (
    Accepted,
    Done,
    ErrorBody,
    Event,
    Failed,
    FinishReason,
    Queued,
    Token,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from penstock.schemas.ollama.bodies import ChatRequest, GenerateRequest
from penstock.schemas.ollama.paths import in_ollama
from penstock.schemas.openai.completions import parse_body, parse_request
from penstock.schemas.registry import ModelCard

HELLO: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "Hello 🙂"}]}


@pytest.fixture
def client(echo_server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=echo_server.url) as client:
        yield client


def test_a_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat(**HELLO)
    assert "Hello 🙂" in (whole.message.content or "")
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "echo")
    assert whole.eval_count and whole.prompt_eval_count
    assert whole.total_duration == (whole.prompt_eval_duration or 0) + (whole.eval_duration or 0) > 0
    *pieces, last = client.chat(**HELLO, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert not any(piece.done for piece in pieces)
    assert (last.done_reason, last.eval_count, last.message.content) == ("stop", whole.eval_count, "")


def test_answers_stream_unless_they_are_not_to(echo_server: Served) -> None:
    url = f"{echo_server.url}/api/chat"
    response = httpx.post(url, json=HELLO)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert len(list(response.iter_lines())) > 1
    assert httpx.post(url, json=HELLO | {"stream": False}).json()["done"] is True


def test_a_prompt_is_a_turn_or_stands_as_it_is(client: ollama.Client) -> None:
    turn = client.generate("echo", "Hello", system="Be kind.").response or ""
    raw = client.generate("echo", "Hello", raw=True).response
    assert "Be kind." in turn and raw == "Hello"
    assert "".join(piece.response or "" for piece in client.generate("echo", "Hello", raw=True, stream=True)) == raw


def test_options_act_and_others_are_named(client: ollama.Client, echo_server: Served) -> None:
    short = client.chat(**HELLO, options={"num_predict": 3, "temperature": 0.5, "top_k": 5, "seed": -1})
    assert (short.done_reason, short.eval_count) == ("length", 3)
    assert client.generate("echo", "Hello", raw=True, options={"stop": ["lo"], "num_predict": -1}).response == "Hel"
    body = HELLO | {"options": {"num_ctx": 8, "mirostat": 0, "nonsense": 1}, "stream": False, "other": 1}
    response = httpx.post(f"{echo_server.url}/api/chat", json=body)
    assert {*response.headers["penstock-ignored"].split(", ")} == {"other", "options.nonsense", "options.num_ctx"}


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"options": {"top_p": 7}}, 400, "options.top_p: "),
        ({"options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty: "),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat: is not supported here"),
        ({"options": {"typical_p": 0.5}}, 400, "options.typical_p: is not supported here"),
        ({"format": {"type": "nix"}}, 400, "format.type: "),
        ({"keep_alive": "soon"}, 400, "keep_alive: "),
        ({"think": "much"}, 400, "think: must be true, false, "),
        ({"think": True}, 400, '"echo" does not support thinking'),
        ({"think": "low"}, 400, '"echo" does not support thinking'),
        ({"format": "xml"}, 400, 'format: must be "json" or a JSON Schema'),
        ({"model": "nix"}, 404, "The model 'nix' is not served here."),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0]: before this tool's message"),
        ({"messages": [{"role": "user", "content": "x", "images": ["?"]}]}, 400, "takes text alone"),
        ({"messages": [], "keep_alive": 0}, 400, "stays loaded"),
        ({"tools": [{}]}, 400, "tools[0].function is missing"),
    ],
)
def test_refusals_name_what_the_client_sent(
    echo_server: Served, change: dict[str, Any], status: int, said: str
) -> None:
    response = httpx.post(f"{echo_server.url}/api/chat", json=HELLO | change)
    assert response.status_code == status
    assert response.json().keys() == {"error"} and said in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "expected"), [("/api/chat", "messages[0].images[1]: no."), ("/api/generate", "images[1]: no.")]
)
def test_images_are_named_as_the_client_sent_them(path: str, expected: str) -> None:
    param = "messages[0].content[1].image_url.url"
    assert in_ollama(f"{param}: no.", param, path) == expected


def test_refusals_of_embeddings_name_what_the_client_sent(echo_server: Served) -> None:
    for path, given, said in (
        ("embeddings", {"prompt": " "}, "prompt is blank"),
        ("embed", {"input": [""]}, "input is blank"),
        ("embed", {"input": 5}, "input: must"),
    ):
        response = httpx.post(f"{echo_server.url}/api/{path}", json={"model": "echo", "keep_alive": "5m"} | given)
        assert response.status_code == 400 and said in response.json()["error"]
    response = httpx.post(f"{echo_server.url}/api/embed", json={"model": "echo", "keep_alive": "5m", "input": "x"})
    assert response.headers["penstock-ignored"] == "keep_alive"


@pytest.mark.parametrize(
    ("path", "given", "answer"),
    [
        ("embed", {}, {"model": "echo:latest", "embeddings": []}),
        ("embed", {"input": ""}, {"model": "echo:latest", "embeddings": []}),
        ("embed", {"input": []}, {"model": "echo:latest", "embeddings": []}),
        ("embeddings", {"prompt": ""}, {"embedding": []}),
    ],
)
def test_a_request_to_embed_nothing_loads_the_model(
    echo_server: Served, path: str, given: dict[str, Any], answer: dict[str, Any]
) -> None:
    response = httpx.post(f"{echo_server.url}/api/{path}", json={"model": "echo:latest"} | given)
    assert (response.status_code, response.json()) == (200, answer)
    assert httpx.post(f"{echo_server.url}/api/{path}", json={"model": "nix"} | given).status_code == 404


def test_what_ollamas_own_client_sends_for_nothing(echo_server: Served) -> None:
    nothing = {"name": "", "system": "", "template": "", "options": None, "username": "", "password": ""}
    shown = httpx.post(f"{echo_server.url}/api/show", json={"model": "echo"} | nothing)
    assert "completion" in shown.json()["capabilities"] and "penstock-ignored" not in shown.headers
    pulled = httpx.post(f"{echo_server.url}/api/pull", json={"model": "", "stream": False, "name": "echo"})
    assert pulled.json() == {"status": "success"}
    refused = httpx.post(f"{echo_server.url}/api/show", json={"model": "echo", "system": "Be kind."})
    assert (refused.status_code, refused.json()["error"].split()[0]) == (400, "system")
    loaded = httpx.post(f"{echo_server.url}/api/chat", json={"model": "echo", "messages": None, "keep_alive": "5m"})
    assert (loaded.json()["done_reason"], loaded.headers["penstock-ignored"]) == ("load", "keep_alive")
    tool = {"type": "", "function": {"name": "a", "parameters": {"type": "object", "required": None}}}
    body = parse_body(ChatRequest, HELLO | {"tools": [tool]}).body()
    assert body["tools"] == [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]


def test_prompts_that_mean_something_else_are_refused(client: ollama.Client) -> None:
    for change in ({"context": [1]}, {"template": "{{ .Prompt }}"}, {"raw": True, "system": "x"}, {"suffix": "x"}):
        given: dict[str, Any] = change
        with pytest.raises(ollama.ResponseError) as refused:
            client.generate("echo", "Hello", **given)
        assert refused.value.status_code == 400 and next(iter(change)) in refused.value.error


def test_models_are_listed_shown_and_found_by_their_tags(client: ollama.Client, echo_server: Served) -> None:
    (model,) = client.list().models
    (loaded,) = client.ps().models
    assert model.model == loaded.model == "echo:latest"
    asked = {"model": "echo:latest", "messages": HELLO["messages"]}
    assert httpx.post(f"{echo_server.url}/v1/chat/completions", json=asked).status_code == 200
    assert httpx.get(f"{echo_server.url}/v1/models/echo:latest").json()["id"] == "echo"
    counted = httpx.post(f"{echo_server.url}/tokenize", json={"model": "echo:latest", "prompt": "Hello"})
    assert counted.json()["count"] == 5
    shown = client.show("echo:latest")
    assert shown.capabilities is not None and "completion" in shown.capabilities
    assert {"embedding", "insert", "vision"}.isdisjoint(shown.capabilities)
    facts = dict(shown.modelinfo or {})
    assert facts[f"{facts['general.architecture']}.context_length"] == loaded.context_length
    assert client.chat(**HELLO | {"model": "echo:latest"}).model == "echo:latest"
    assert client.generate("echo").done_reason == client.chat("echo").done_reason == "load"
    assert client.pull("echo").status == "success"
    assert [each.status for each in client.pull("echo", stream=True)] == ["success"]
    for missing in (client.pull, client.show):
        with pytest.raises(ollama.ResponseError, match="'nix' is not served here") as refused:
            missing("nix")
        assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="penstock models"):
        client.delete("echo")
    version = httpx.get(f"{echo_server.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what Copilot asks for


def test_a_talk_with_tools_reaches_the_model(tool_server: Served) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="weather", arguments={}))
    turns: list[Any] = [{"role": "user", "content": "Is it warm?"}, ollama.Message(role="assistant", tool_calls=[call])]
    turns.append({"role": "tool", "content": "20 °C"})
    with ollama.Client(host=tool_server.url) as client:
        (model,) = client.list().models
        assert "tools" in (client.show(model.model or "").capabilities or ())
        answer = client.chat(model.model or "", turns, tools=[tool], options={"num_predict": 4})
    assert answer.done and answer.eval_count


def test_calls_get_ids_and_results_find_them() -> None:
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": arguments}}

    turns = [
        {"role": "user", "content": "Look", "images": ["AAAA", "data:image/png;base64,BBBB"]},
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("a", x=1), call("b"), call("a", x=2)]},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
        {"role": "tool", "content": "of the other", "tool_name": "a"},
    ]
    body = parse_body(ChatRequest, {"model": "m", "messages": turns}).body()
    parse_request("/v1/chat/completions", body)  # raises where it is none
    user, assistant, *results = body["messages"]
    urls = [part["image_url"]["url"] for part in user["content"][:2]]
    assert urls == ["data:;base64,AAAA", "data:image/png;base64,BBBB"] and user["content"][2]["text"] == "Look"
    first, second, third = (each["id"] for each in assistant["tool_calls"])
    assert len({first, second, third}) == 3 and assistant["reasoning"] == "Hm."
    assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == ['{"x":1}', "{}", '{"x":2}']
    assert [each["tool_call_id"] for each in results] == [second, first, third]
    with pytest.raises(InvalidRequest, match=r"messages\[5\]: before .* a call of 'c'"):
        late = [*turns, {"role": "tool", "content": "x", "tool_name": "c"}]
        parse_body(ChatRequest, {"model": "m", "messages": late}).body()


def test_calls_of_one_id_and_roles_in_capitals() -> None:
    same = [{"id": "q", "function": {"name": "a"}}, {"id": "q", "function": {"name": "b", "arguments": None}}]
    turns = [{"role": "Assistant", "tool_calls": same}, {"role": "tool", "name": "b", "content": "x"}]
    assistant, result = parse_body(ChatRequest, {"model": "m", "messages": turns}).body()["messages"]
    assert [each["function"]["name"] for each in assistant["tool_calls"]] == ["a", "b"]
    assert (assistant["role"], result["tool_call_id"]) == ("assistant", "q")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"think": False}, {"reasoning_effort": "none"}),
        ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (
            {"think": "max"},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "xhigh"}},
        ),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"format": ""}, {}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"keep_alive": "5m", "priority": "high"}, {"keep_alive": 300.0, "priority": "high"}),
        ({"options": {"repeat_penalty": 1.1, "num_predict": 9}}, {"repetition_penalty": 1.1, "max_tokens": 9}),
        ({"options": {"num_predict": -2, "seed": -1}}, {}),
    ],
)
def test_parameters_keep_their_meaning(given: dict[str, Any], expected: dict[str, Any]) -> None:
    of_all = {"model": "m", "stream": True, "fit_max_tokens": True}
    chat = parse_body(ChatRequest, HELLO | {"model": "m"} | given).body()
    assert chat == of_all | expected | {"messages": HELLO["messages"]}
    prompt = parse_body(GenerateRequest, {"model": "m", "prompt": "Hello 🙂"} | given).body()
    assert prompt == chat
    parse_request("/v1/chat/completions", chat)


class Told:
    """The client's answers to events that the test makes up."""

    def __init__(self, script: Script) -> None:
        self.script = script

    @classmethod
    async def start(cls, **values: Any) -> Told:
        return cls(await Script.start(**values))

    async def lines(self, events: list[Event], path: str = "/api/chat", **change: Any) -> list[dict[str, Any]]:
        body = (HELLO if path == "/api/chat" else {"model": "echo", "prompt": "Hello"}) | change
        response = await self.script.answer(events, "POST", path, body)
        assert response.status == 200
        return [orjson.loads(line) for line in response.body.splitlines()]


def said(*tokens: Token, reason: FinishReason = "stop") -> list[Event]:
    numbered = [replace(token, index=index) for index, token in enumerate(tokens)]
    last = Token("", 0, len(tokens), (), "", finish_reason=reason)
    return [Accepted("", "echo", 7, 9), *numbered, last, Done("", (reason,), Usage(9, len(tokens), 9 + len(tokens)))]


def token(text: str = "", **others: Any) -> Token:
    return Token("", 0, 0, (1,), text, **others)


CALLING = (
    token(reasoning="Hm."),
    token("Look: "),
    token(tool_calls=(ToolCallDelta(0, "", "c1", "a"), ToolCallDelta(0, '{"x"'))),
    token(tool_calls=(ToolCallDelta(0, ":1}"), ToolCallDelta(1, "{}", "c2", "b"))),
)
CALLS = [
    {"id": "c1", "function": {"index": 0, "name": "a", "arguments": {"x": 1}}},
    {"id": "c2", "function": {"index": 1, "name": "b", "arguments": {}}},
]


async def test_thoughts_texts_and_whole_calls() -> None:
    told = await Told.start()
    *pieces, last = await told.lines(said(*CALLING, reason="tool_calls"))
    content = [{name: said for name, said in piece["message"].items() if name != "role"} for piece in pieces]
    assert content == [
        {"content": "", "thinking": "Hm."},
        {"content": "Look: "},
        {"content": "", "tool_calls": CALLS[:1]},
        {"content": "", "tool_calls": CALLS[1:]},
    ]
    assert (last["done"], last["done_reason"], last["eval_count"], last["prompt_eval_count"]) == (True, "stop", 4, 9)
    (whole,) = await told.lines(said(*CALLING, reason="tool_calls"), stream=False)
    message = {"role": "assistant", "content": "Look: ", "thinking": "Hm.", "tool_calls": CALLS}
    assert whole["message"] == message
    *pieces, _ = await told.lines(said(*CALLING[:2]), "/api/generate")
    assert [(piece["response"], piece.get("thinking")) for piece in pieces] == [("", "Hm."), ("Look: ", None)]
    (whole,) = await told.lines(said(*CALLING[:2]), "/api/generate", stream=False)
    assert (whole["response"], whole["thinking"]) == ("Look: ", "Hm.")


async def test_logprobs_come_with_their_tokens() -> None:
    logprob = TokenLogprob("Hi", 5, -0.5, (72, 105), (TopLogprob("Hi", 5, -0.5, (72, 105)),))
    told = await Told.start()
    events = said(token("Hi", logprobs=(logprob,)))
    likely = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    first, _ = await told.lines(events, logprobs=True, top_logprobs=1)
    (whole,) = await told.lines(events, logprobs=True, top_logprobs=1, stream=False)
    assert first["logprobs"] == whole["logprobs"] == [likely | {"top_logprobs": [likely]}]


async def test_failures_before_and_in_a_stream() -> None:
    told = await Told.start()
    failed = Failed("", ErrorBody(503, "It is so.", "x", retry_after=3.0))
    for streaming in (True, False):
        response = await told.script.answer([failed], "POST", "/api/chat", HELLO | {"stream": streaming})
        assert (response.status, orjson.loads(response.body)) == (503, {"error": "It is so."})
        assert response.headers["retry-after"] == "3"
    *_, last = await told.lines([*said(*CALLING)[:3], failed])
    assert last == {"error": "It is so."}
    broken = token(tool_calls=(ToolCallDelta(0, "nonsense", "c1", "a"), ToolCallDelta(1, "{}", "c2", "b")))
    (fault,) = await told.lines(said(broken, token("and more")))
    assert "arguments that are not a JSON object" in fault["error"]


async def test_what_waits_is_kept_alive_with_empty_pieces() -> None:
    script = await Script.start(keepalive_interval=0.001)
    asking = asyncio.create_task(ask(script.app, "POST", "/api/chat", HELLO, leave_after=2))
    await script.tell([Accepted("", "echo", 7, 9), Queued("", 4)], await script.job())
    first = orjson.loads((await asking).body.splitlines()[0])
    assert (first["message"], first["done"]) == ({"role": "assistant", "content": ""}, False)


async def test_a_vector_of_each_input() -> None:
    told = await Told.start()
    numbers = base64.b64encode(bytes(7) + b"\x3f").decode()
    tokens = [Token("", choice, 0, (), numbers, finish_reason="stop") for choice in (1, 0)]
    events: list[Event] = [Accepted("", "echo", 7, 9), *tokens, Done("", ("stop",), Usage(9, 0, 9))]
    response = await told.script.answer(events, "POST", "/api/embed", {"model": "echo", "input": ["a", "b"]})
    answer = orjson.loads(response.body)
    assert answer["embeddings"] == [[0.0, 0.5], [0.0, 0.5]] and answer["prompt_eval_count"] == 9
    response = await told.script.answer(
        events[:2] + events[3:], "POST", "/api/embeddings", {"model": "e", "prompt": "x"}
    )
    assert orjson.loads(response.body) == {"embedding": [0.0, 0.5]}


async def test_keys_are_asked_for_in_ollamas_form() -> None:
    script = await Script.start(api_keys=("team=sk-right",))
    response = await ask(script.app, "POST", "/api/chat", HELLO, {"authorization": "Bearer sk-wrong"})
    assert response.status == 401 and isinstance(orjson.loads(response.body)["error"], str)


@pytest.mark.parametrize("header", ["Penstock-Resumable", "Last-Event-ID", "Penstock-Events"])
async def test_headers_of_other_paths_are_refused(header: str) -> None:
    script = await Script.start()
    response = await ask(script.app, "POST", "/api/chat", HELLO, {header: "true"})
    assert response.status == 400 and header.lower() in orjson.loads(response.body)["error"]


async def test_a_chat_without_messages_loads_and_unloads() -> None:
    script = await Script.start()
    done: list[tuple[str, str]] = []

    async def load(_: Any, name: str) -> None:
        done.append(("load", name))

    async def unload(_: Any, name: str) -> None:
        done.append(("unload", name))

    card = ModelCard(name="m", source="m", backend="echo", context_length=9, created=7, catalogued=True)
    script.registry.models = {"m": card}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.api.http.models.states.ModelRoutes.load_named", load)
        patch.setattr("penstock.api.http.models.states.ModelRoutes.unload_named", unload)
        for keep_alive in ("5m", 0):
            response = await ask(script.app, "POST", "/api/chat", {"model": "m", "keep_alive": keep_alive})
            assert orjson.loads(response.body)["done_reason"] == done[-1][0]
    assert done == [("load", "m"), ("unload", "m")]


async def test_defaults_are_shown_as_a_modelfile_has_them() -> None:
    script = await Script.start()
    defaults = {"repetition_penalty": 1.1, "stop": ["a", '"']}
    card = ModelCard(
        name="m", source="m", backend="sentence_transformers", context_length=9, created=7, defaults=defaults
    )
    script.registry.models = {"m": card}
    shown = orjson.loads((await ask(script.app, "POST", "/api/show", {"model": "m"})).body)
    assert shown["parameters"].splitlines() == ["repeat_penalty 1.1", 'stop "a"', 'stop "\\""']
