"""Sessions of two turns with a tool, recorded from real programs with their texts shortened, against the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from asgi import Response, messages
from desk import Desk, within_time
from office import call
from responses_rules import check_response, check_responses

RECORDED = {path.stem: orjson.loads(path.read_bytes()) for path in (Path(__file__).parent / "recorded").glob("*.json")}
SESSIONS = [(client, session) for client, recorded in RECORDED.items() for session in range(len(recorded["sessions"]))]


def turn(desk: Desk, recorded: dict[str, Any], turn: dict[str, Any]) -> Response:
    return desk.ask(recorded["path"], turn["body"], turn["says"], recorded["headers"])


@pytest.mark.parametrize(("client", "session"), SESSIONS)
def test_a_session_is_served(desk: Desk, client: str, session: int) -> None:
    recorded = RECORDED[client]
    first, second = recorded["sessions"][session]
    calling = turn(desk, recorded, first)
    assert (calling.status, calling.headers.get("penstock-ignored", "")) == (200, first["ignored"]), calling.body
    name, arguments, place = called(calling)
    assert name in first["says"] and orjson.loads(arguments)
    assert place == ("multi_agent_v1" if name == "close_agent" else None)
    answered = turn(desk, recorded, second)
    assert (answered.status, answered.headers.get("penstock-ignored", "")) == (200, second["ignored"]), answered.body
    assert "The tool said hi." in said(answered)
    before = desk.model.asked[-1]
    assert name in before and "<tool_response>" in before and "web_search" not in before


def called(response: Response) -> tuple[str, str, str | None]:
    """Name, arguments and namespace of the one call in a stream."""
    if b"response.created" in response.body:
        (item,) = [item for item in check_responses(response.body)["output"] if item["type"] == "function_call"]
        return item["name"], item["arguments"], item.get("namespace")
    data = [message.data for message in messages(response.body)]
    (block,) = [one["content_block"] for one in data if one.get("content_block", {}).get("type") == "tool_use"]
    return (
        block["name"],
        "".join(one["delta"].get("partial_json", "") for one in data if "index" in one and "delta" in one),
        None,
    )


def said(response: Response) -> str:
    data = [message.data for message in messages(response.body)]
    texts = [one["delta"] for one in data if one["type"] in ("content_block_delta", "response.output_text.delta")]
    return "".join(text if isinstance(text, str) else text.get("text", "") for text in texts)


def message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text, **more}


FORECAST = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
# What the public Open Responses suite asks over HTTP, but for images, files and compaction.
SUITE: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [message("user", "Say hello in exactly 3 words.")]},
    "streaming-response": {"input": [message("user", "Count from 1 to 5.")], "stream": True},
    "system-prompt": {"input": [message("system", "You are a pirate."), message("user", "Say hello.")]},
    "assistant-phase": {
        "input": [
            message("assistant", "I should answer with the saved number.", phase="commentary"),
            message("assistant", "The number is four.", phase="final_answer"),
            message("user", "Repeat only the number."),
        ]
    },
    "multi-turn": {
        "input": [message("user", "I am Alice."), message("assistant", "Hello!"), message("user", "Who am I?")]
    },
    "tool-calling": {"input": [message("user", "What's the weather like?")], "tools": [FORECAST]},
    "forced call": {"input": "?", "tools": [FORECAST], "tool_choice": {"type": "function", "name": "get_weather"}},
}


@pytest.mark.parametrize("name", SUITE)
def test_what_the_public_suite_asks_is_answered_after_its_schema(desk: Desk, name: str) -> None:
    body = {"model": "echo", **SUITE[name]}
    kind = "function_call" if "tools" in body else "message"
    says = call("get_weather", location="Bern") if kind == "function_call" else "So."
    answer = desk.ask("/v1/responses", body, says)
    assert answer.status == 200, answer.body
    response = check_responses(answer.body) if body.get("stream") else orjson.loads(answer.body)
    check_response(response)
    assert (response["status"], [item["type"] for item in response["output"]]) == ("completed", [kind])
    if kind == "function_call":
        (item,) = response["output"]
        following = {"type": "function_call_output", "call_id": item["call_id"], "output": "20 °C"}
        body = {"model": "echo", "input": [following], "previous_response_id": response["id"], "tools": [FORECAST]}
        answer = desk.ask("/v1/responses", body, "Warm.")
        check_response(orjson.loads(answer.body))


async def weather(location: str) -> str:
    """Weather of a city."""
    return f"20 °C in {location}"


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_anthropics_sdk_goes_on_without_a_thread(desk: Desk, stream: bool) -> None:
    desk.model.texts = [call("weather", location="Bern"), "It is warm."]

    async def run() -> list[str | None]:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(desk.app))
        async with anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="none", max_retries=0, http_client=http
        ) as client:
            runner = client.beta.messages.tool_runner(
                model="echo",
                max_tokens=500,
                tools=[anthropic.beta_async_tool(weather)],
                messages=[{"role": "user", "content": "Is it warm in Bern?"}],
                stream=stream,
            )
            return [await _reason(turn) async for turn in runner]

    assert desk.run(within_time(run())) == ["tool_use", "end_turn"]
    assert "20 °C in Bern" in desk.model.asked[-1]


async def _reason(turn: Any) -> str | None:
    message = turn if isinstance(turn, anthropic.types.beta.BetaMessage) else await turn.get_final_message()
    reason: str | None = message.stop_reason
    return reason
