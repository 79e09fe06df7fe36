"""`penstock bench chaos`: what it calls lost, doubled and different, and one run against real processes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import START_TIMEOUT, Start
from typer.testing import CliRunner

from penstock.__main__ import app
from penstock.api.bench.answers import ReceivedAnswer, ask, compare, difference, mixed_requests
from penstock.api.bench.load import Client, Event


def chunk(text: str = "", reason: str | None = None, *, name: str = "chatcmpl-1", choice: int = 0) -> bytes:
    entry = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}
    logprobs = {"content": [entry] if text else []}
    part = {"index": choice, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}
    return orjson.dumps({"id": name, "choices": [part]})


def usage(tokens: int) -> bytes:
    count = {"prompt_tokens": 7, "completion_tokens": tokens}
    return orjson.dumps({"id": "chatcmpl-1", "choices": [], "usage": count})


def answer(*messages: bytes) -> ReceivedAnswer:
    found = ReceivedAnswer()
    for message in messages:
        found.take(Event(b"", message), 0.0)
    return found


END = b"[DONE]"
A, B, C, USAGE = chunk("grüße\u2028"), chunk("an "), chunk("alle", "length"), usage(3)
RIGHT = (A, B, C, USAGE, END)


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (None, RIGHT),
        ("lost", ()),
        ("lost", (A, B)),
        ("lost", (A, B, C, USAGE)),
        ("lost", (A, b'{"error": {"code": "generation_failed", "message": "The request failed."}}')),
        ("doubled", (A, A, B, C, USAGE, END)),
        ("doubled", (A, B, A, B, C, USAGE, END)),
        ("doubled", (A, B, C, chunk("", "length"), USAGE, END)),
        ("doubled", (A, B, C, USAGE, USAGE, END)),
        ("doubled", (A, B, C, USAGE, END, END)),
        ("doubled", (A, chunk("an ", name="chatcmpl-2"), C, USAGE, END)),
        ("different", (A, C, USAGE, END)),
        ("different", (A, chunk("in "), C, USAGE, END)),
        ("different", (A, B, chunk("alle", "stop"), USAGE, END)),
        ("different", (A, B, C, chunk("mehr", choice=1), USAGE, END)),
        ("different", (A, B, C, usage(4), END)),
        ("different", (A, B, C, END)),
    ],
)
def test_every_fault_has_its_name(kind: str | None, messages: tuple[bytes, ...]) -> None:
    fault = compare(answer(*RIGHT), answer(*messages))
    assert (fault and fault.kind) == kind


@given(st.text("ab"), st.text("ab", min_size=1), st.text("ab"))
def test_a_part_said_twice_is_doubled_and_one_left_out_is_different(before: str, part: str, after: str) -> None:
    whole = before + part + after
    assert difference(whole, whole) is None
    doubled, cut = difference(whole, before + part + part + after), difference(whole, before + after)
    assert doubled is not None and doubled.kind == "doubled"
    assert cut is not None and cut.kind == "different"


async def test_a_client_resumes_behind_its_last_whole_message_and_waits_where_it_is_told_to() -> None:
    busy, ok = b"HTTP/1.1 503 Busy\r\nConnection: close\r\nRetry-After: 0\r\n", b"HTTP/1.1 200 OK\r\n"
    full = b'{"error": {"code": "full", "message": "later"}}'
    rest = b": ping\nid: 2\ndata: " + B + b"\n\ndata: " + C + b"\n\ndata: [DONE]\n\n"
    answers = [
        busy + b"Content-Length: %d\r\n\r\n" % len(full) + full,
        b"",
        ok + b"Content-Length: 10000\r\n\r\nid: 1\ndata: " + A + b"\n\nid: 2\ndata: " + B,
        ok + b"Content-Length: %d\r\n\r\n" % len(rest) + rest,
    ]
    asked: list[tuple[str | None, ...]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:-1])
        asked.append(tuple(headers.get(name) for name in ("host", "last-event-id", "idempotency-key")))
        writer.write(answers[len(asked) - 1])
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        clients = [Client(f"http://{host}:{port}") for host in ("127.0.0.1", "localhost")]
        found = await ask(clients, "/v1/chat/completions", {"stream": True}, "key", 0)
        for client in clients:
            client.close()
    one, two = f"127.0.0.1:{port}", f"localhost:{port}"
    assert asked == [(one, None, "key"), (one, None, "key"), (two, None, "key"), (one, "1", "key")]
    assert "".join(found.said["choice 0, text"]) == "grüße\u2028an alle" and found.ends == 1 and found.error is None
    assert found.detours == {"resumed": 1, "repeated": 1, "HTTP 503 full": 1}


def test_requests_are_mixed_and_the_same_again() -> None:
    found = mixed_requests(100, 80, 3, "echo")
    assert found == mixed_requests(100, 80, 3, "echo") != mixed_requests(100, 80, 4, "echo")
    bodies = [body for _, body in found]
    assert {path for path, _ in found} == {"/v1/chat/completions", "/v1/completions"}
    for name, values in {"priority": {"high", "normal", "low"}, "n": {1, 2}, "temperature": {0.0, 0.7, 1.0}}.items():
        assert {body[name] for body in bodies} == values
    assert {10, 80} >= {min(10, *(body["max_tokens"] for body in bodies)), 80}
    assert all(10 <= body["max_tokens"] <= 80 for body in bodies)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("butler: no such part; known: worker, validate", ["--victims", "worker,butler"]),
        ("--slow needs several brokers", ["--slow", "1"]),
        ("--cluster needs several brokers", ["--cluster", "deaf=3"]),
        ("--cluster quake: no such fault; known: partition, mute", ["--cluster", "quake=3", "--brokers", "3"]),
        (
            "deaf: no number of seconds; write deaf=SECONDS, such as deaf=60",
            ["--cluster", "mute=3,deaf", "--brokers", "3"],
        ),
        ("from 0 to 3,600 seconds", ["--cluster", "mute=-1", "--brokers", "3"]),
        ("--small-disk and --cluster full-disk=SECONDS go together", ["--cluster", "full-disk=9", "--brokers", "3"]),
        ("must be whole numbers", ["--stops", "6,x"]),
        ("needs --victims to choose from", ["--stops", "6", "--victims", ""]),
        ("needs a model that calls tools", ["--tools", "3", "--backend", "echo"]),
        ("do not go together", ["--tools", "3", "--names", "2"]),
        ("mmproj='none': name MODEL, too", ["--mmproj", "none", "--names", "2"]),
    ],
)
def test_what_cannot_be_asked_for_is_told(said: str, asked: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "chaos", *asked], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


def test_a_bad_model_is_told(tmp_path: Path, start: Start) -> None:
    process = start("bench", "chaos", str(tmp_path / "nothing"))
    assert process.wait() == 2
    assert re.search(r"worker [01] cannot run", process.output) and "nothing" in process.output


def run(start: Start, path: Path, *asked: str) -> dict[str, Any]:
    """The figures of a run in which nothing was wrong."""
    process = start("bench", "chaos", "--longest", "60", "--json", str(path), *asked)
    assert process.wait(3 * START_TIMEOUT) == 0, process.output
    found: dict[str, Any] = json.loads(path.read_bytes())
    assert [found[name] for name in ("lost", "doubled", "different", "faults", "raw")] == [0, 0, 0, [], []]
    assert all(strike["away"] is not None for strike in found["strikes"])
    return found


def test_nothing_is_lost_while_parts_are_killed_cut_off_stopped_and_all_gone(start: Start, tmp_path: Path) -> None:
    often = ("--victims", "worker,batch,stream,bridge", "--interval", "4", "--resets", "1", "--echo-rate", "50")
    few_seats = ("--max-batch-size", "16")  # at last all are taken at once, which a slow machine cannot with many
    once = ("--broker-restarts", "1", "--stops", "2", "--blackout", "1")
    found = run(start, tmp_path / "figures.json", "--requests", "12", "--concurrency", "4", *often, *few_seats, *once)
    assert found["requests"] >= 12
    faults = {strike["kind"].rpartition(" ")[0] for strike in found["strikes"]}
    assert faults == {"kill", "reset", "stop 2 s", "blackout"}
    assert "kill broker" in [strike["kind"] for strike in found["strikes"]]


def test_agents_do_everything_once_while_they_and_a_broker_are_killed(start: Start, tmp_path: Path) -> None:
    # A part needs several seconds to come back, and a step as long to be taken over: more kills would only prolong it.
    often = ("--victims", "tools", "--interval", "8", "--lease", "3")
    own = ("--tools", "3", "--max-batch-size", "4", "--concurrency", "1", *often)
    cluster = ("--brokers", "3", "--broker-restarts", "1", "--cluster", "partition=2,no-quorum=2")
    found = run(start, tmp_path / "figures.json", "--requests", "4", *own, *cluster)
    assert found["responses"] == 3
    assert {"kill broker", "partition broker", "no-quorum brokers"} < {strike["kind"] for strike in found["strikes"]}


def test_no_request_to_any_of_several_models_is_lost_while_their_agent_is_killed(start: Start, tmp_path: Path) -> None:
    few = ("--requests", "8", "--concurrency", "4", "--victims", "agent", "--interval", "6", "--least-residency", "0.5")
    found = run(start, tmp_path / "figures.json", "--names", "3", *few)
    assert found["model_loads"][0] >= 3
    assert {strike["kind"] for strike in found["strikes"]} <= {"kill agent"}
