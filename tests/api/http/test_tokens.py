"""`/tokenize` and `/detokenize`: what they count is what a request then costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from applications import Applications, Script
from asgi import Response, ask

from penstock.api.http.preparers import Preparers
from penstock.engine.text.byte_tokenizer import END_OF_TEXT
from penstock.schemas.errors import Overloaded
from penstock.schemas.registry import ModelCard
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.stores.named_files import NamedFileStore
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import topology

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Grüß dich!"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def post(applications: Applications, path: str, body: dict[str, Any]) -> Response:
    return applications.run(ask(applications.apps[0], "POST", path, body))


def answer(applications: Applications, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = post(applications, path, body)
    assert response.status == 200, response.body
    found: dict[str, Any] = orjson.loads(response.body)
    return found


def test_a_prompt_becomes_tokens_and_text_again(applications: Applications) -> None:
    found = answer(applications, "/tokenize", {"model": "echo", "prompt": "Grüß dich!"})
    assert found == {"tokens": list("Grüß dich!".encode()), "count": 12, "max_model_len": 512, "token_strs": None}
    assert answer(applications, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": "Grüß dich!"}


def test_special_tokens_are_shown(applications: Applications) -> None:
    assert answer(applications, "/detokenize", {"tokens": [97, END_OF_TEXT]}) == {"prompt": "a<|endoftext|>"}


def test_tokens_may_be_had_as_text(applications: Applications) -> None:
    found = answer(applications, "/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert found["token_strs"] == ["a", "b"]


def test_nothing_has_no_tokens(applications: Applications) -> None:
    assert answer(applications, "/tokenize", {"prompt": ""})["tokens"] == []
    assert answer(applications, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_a_prompt_above_the_context_is_counted(applications: Applications) -> None:
    assert answer(applications, "/tokenize", {"prompt": "x" * 1000})["count"] == 1000
    assert answer(applications, "/tokenize", {"messages": [{"role": "user", "content": "x" * 1000}]})["count"] > 1000


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Gr"}], "continue_final_message": True},
    ],
)
def test_messages_count_as_a_request_of_them_does(applications: Applications, more: dict[str, Any]) -> None:
    body = {"model": "echo", "messages": MESSAGES} | more
    counted = post(applications, "/tokenize", body)
    asked = post(applications, "/v1/chat/completions", body | {"max_tokens": 1})
    assert counted.status == asked.status
    if asked.status == 200:
        assert orjson.loads(counted.body)["count"] == orjson.loads(asked.body)["usage"]["prompt_tokens"]
    else:
        assert counted.error == asked.error


@pytest.fixture
async def registry() -> Registry:
    broker = MemoryBroker()
    await broker.ensure(*topology("penstock", []))
    return Registry(broker, interval=1.0)


def preparers_of(registry: Registry) -> Preparers:
    return Preparers(registry, NamedFileStore(MemoryBroker(), 0))


def card(name: str, source: str = "echo") -> ModelCard:
    return ModelCard(name=name, source=source, backend="echo", context_length=8, created=1)


async def test_a_model_may_be_left_out_only_where_there_is_one(registry: Registry) -> None:
    preparers = preparers_of(registry)
    with pytest.raises(Exception, match="Served: none yet"):
        await preparers.card(None)
    registry.models["a"] = card("a")
    assert (await preparers.card(None)).name == "a"
    registry.models["b"] = card("b")
    assert (await preparers.card("b")).name == "b"
    with pytest.raises(Exception, match="Served: a, b"):
        await preparers.card(None)


async def test_a_tokenizer_is_loaded_once(registry: Registry) -> None:
    preparers = preparers_of(registry)
    first = await preparers.of(card("a", "s0"))
    assert await preparers.of(card("another name", "s0")) is first
    assert await preparers.of(card("a", "s1")) is not first


async def test_a_tokenizer_that_cannot_be_loaded_here_is_503_and_tried_again(
    registry: Registry, tmp_path: Path
) -> None:
    preparers = preparers_of(registry)
    broken = card("m", str(tmp_path / "nowhere"))
    for _ in range(2):
        with pytest.raises(Overloaded) as raised:
            await preparers.of(broken)
        assert raised.value.code == "tokenizer_unavailable" and str(tmp_path) not in str(raised.value)


async def test_requests_at_the_same_time_share_one_loading(registry: Registry) -> None:
    preparers = preparers_of(registry)
    first, second = await asyncio.gather(preparers.of(card("a")), preparers.of(card("a")))
    assert first is second


async def test_a_real_tokenizer_goes_there_and_back(tiny_model: Path) -> None:
    script = await Script.start()
    script.registry.models["tiny"] = ModelCard(
        name="tiny", source=str(tiny_model), backend="paged", context_length=8, created=1
    )

    async def post(path: str, body: dict[str, Any]) -> Any:
        return orjson.loads((await ask(script.app, "POST", path, {"model": "tiny"} | body)).body)

    text = "The answer is 42 — naïve."
    found = await post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["count"] < len(text) and "".join(found["token_strs"]).startswith("The answer")
    assert await post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": text}
    with_turn = await post("/tokenize", {"messages": MESSAGES})
    without = await post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert with_turn["tokens"][: without["count"]] == without["tokens"] != with_turn["tokens"]


async def test_each_revision_has_its_own_tokenizer_and_former_ones_are_forgotten(registry: Registry) -> None:
    preparers = preparers_of(registry)
    first = await preparers.of(card("a", "s0"))
    swapped = card("a", "s0").model_copy(update={"revision": 2})
    second = await preparers.of(swapped)
    assert second is not first, "other files may lie in the same directory"
    assert await preparers.of(swapped) is second
    assert await preparers.of(card("a", "s0")) is not first, "nobody needs it any more"
