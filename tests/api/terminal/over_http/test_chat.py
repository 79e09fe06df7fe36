"""`penstock chat` as people use it: in a terminal of its own, and between pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import orjson
import psutil
import pytest
from serving import Process, Served
from terminals import Terminal
from typer.testing import CliRunner, Result

from penstock.__main__ import app
from penstock.api.terminal.over_http.chat_client import ask

ASKED = [{"role": "user", "content": "word " * 2000}]
LONG = "All of it, and once. " * 8


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that says 30 characters a second."""
    state_dir = tmp_path_factory.mktemp("slow") / "state"
    process = Process("serve", "--backend", "echo", "--echo-rate", "30", "--port", "0", "--state-dir", str(state_dir))
    try:
        yield Served(process, state_dir)
    finally:
        process.end()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "chat", *arguments]


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"XDG_STATE_HOME": str(home), "TERM": "xterm", "COLUMNS": "100"}


def piped(*arguments: str, given: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=given)


Sit = Callable[..., Terminal]


@pytest.fixture
def sit(tmp_path: Path) -> Iterator[Sit]:
    terminals: list[Terminal] = []

    def start(served: Served, *arguments: str) -> Terminal:
        terminals.append(Terminal(command("--url", f"{served.url}/v1", *arguments), environment(tmp_path)))
        terminals[-1].until("> ")
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.end()


def test_a_conversation(echo_server: Served, sit: Sit, tmp_path: Path) -> None:
    terminal = sit(echo_server)
    terminal.type("Say **bold** things.\r")
    assert terminal.until("tok/s").count("**bold**") == 1, "as it was typed; the answer is rendered"
    terminal.until("> ")
    terminal.type('"""\r')
    terminal.type("two\r\rlines\r")
    terminal.type('"""\r')
    assert "bold" in terminal.until("tok/s"), "a question brings what came before"
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
    history = tmp_path / "penstock" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().startswith("Say **bold** things.\n")


def test_commands(other: Other, tmp_path: Path) -> None:
    other.answers = [(200, {}, sse({"content": "Yes."})) for _ in range(3)]
    terminal = Terminal(command("--url", other.url, "--model", "second", "--system", "Be kind."), environment(tmp_path))
    try:
        terminal.until("> ")
        for typed, shown in [
            ("/help", "/reset"),
            ("/nonsense", "/reset"),
            ("first", "Yes."),
            ("next", "Yes."),
            ("/reset", "new conversation"),
            ("last", "Yes."),
        ]:
            terminal.type(f"{typed}\r")
            terminal.until(shown)
            terminal.until("> ")
    finally:
        terminal.end()
    system, yes = {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "Yes."}
    first, following, last = ({"role": "user", "content": text} for text in ("first", "next", "last"))
    assert [body["messages"] for _, body in other.asked] == [
        [system, first],
        [system, first, yes, following],
        [system, last],
    ]
    assert {body["model"] for _, body in other.asked} == {"second"}


def test_ctrl_c_stops_the_answer_and_not_the_program(slow: Served, sit: Sit) -> None:
    terminal = sit(slow)
    terminal.type(f"Begin. {'word ' * 400}\r")
    terminal.until("Begin.")
    terminal.until("Begin.")  # in the answer
    terminal.type("\x03")
    assert "stopped" in terminal.until("> ")
    terminal.type("/reset\r")
    terminal.until("> ")
    terminal.type("And now?\r")
    terminal.until("tok/s")
    terminal.until("> ")
    terminal.type("never mind")
    terminal.until("never mind")
    terminal.interrupt()
    terminal.until("Ctrl-D ends")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.wait() == 0


def test_a_stopped_answer_costs_the_server_nothing_more(slow: Served) -> None:
    with httpx2.Client(base_url=f"{slow.url}/v1") as client:
        stream = ask(client, {"model": "echo", "messages": ASKED, "stream": True})
        chunk = next(piece for piece in stream if isinstance(piece, dict))
        stream.close()
    events = httpx2.get(f"{slow.url}/v1/streams/{chunk['id']}", timeout=60).text
    assert '"type":"cancelled"' in events


@pytest.mark.parametrize("arguments", [("Hello, **you**.",), ()], ids=["prompt", "stdin"])
def test_piped_it_prints_the_answer_and_nothing_else(echo_server: Served, arguments: tuple[str, ...]) -> None:
    given = "" if arguments else "Hello, **you**.\n"
    done = piped("--url", echo_server.url, *arguments, given=given)
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hello, **you**."}]}
    answer = httpx2.post(f"{echo_server.url}/v1/chat/completions", json=body).json()
    assert done.stdout.removesuffix("\n") == answer["choices"][0]["message"]["content"].removesuffix("\n")
    assert (done.stderr, done.exit_code) == ("", 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--url", "http://127.0.0.1:9", "Hello"), "penstock serve"),
        (("--model", "other", "Hello"), "does not serve other; choose one of: echo"),
        (("  ",), "blank"),
    ],
    ids=["nobody there", "no such model", "refused"],
)
def test_what_goes_wrong_is_told_with_what_to_do(echo_server: Served, arguments: tuple[str, ...], says: str) -> None:
    done = piped("--url", echo_server.url, *arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ") and says in done.stderr
    assert done.stdout.strip() == ""


def kill_front(served: Served) -> None:
    family = psutil.Process(served.process.pid).children(recursive=True)
    (front,) = [child for child in family if "front" in child.cmdline()]
    os.kill(front.pid, signal.SIGKILL)
    psutil.wait_procs([front], timeout=30)


def test_an_answer_goes_on_after_the_front_was_killed(slow: Served, tmp_path: Path) -> None:
    child = subprocess.Popen(
        command("--url", slow.url, LONG), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment(tmp_path)
    )
    assert child.stdout is not None
    with child, child.stdout:
        begun = child.stdout.read(40)
        kill_front(slow)
        rest = child.stdout.read()
    assert child.returncode == 0
    assert (begun + rest).decode().count(LONG) == 1
    assert (begun + rest).decode().strip().removesuffix("assistant").strip().endswith(LONG.strip())


class Other(ThreadingHTTPServer):
    """Another server of OpenAI's API: it answers from a list, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.asked: list[tuple[dict[str, str], Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Other

    def do_GET(self) -> None:
        if self.headers["Authorization"] in (None, "Bearer sk-1"):
            self._send(200, {}, b'{"data": [{"id": "first", "max_model_len": 4096}, {"id": "second"}]}')
        else:
            self._send(401, {}, b'{"error": {"message": "Incorrect API key."}}')

    def do_POST(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((dict(self.headers), body))
        self._send(*self.server.answers.pop(0))

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        kind = "text/event-stream" if body.startswith(b"data: ") else "application/json"
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[Other]:
    with Other() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sse(*deltas: dict[str, Any], ended: bool = True) -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    messages = b"".join(b"data: " + orjson.dumps(chunk) + b"\r\n\r\n" for chunk in chunks)
    messages += b"retry: 1000\r\n\r\n"  # a message without data
    return messages + (b"data: [DONE]\r\n\r\n" if ended else b"")


def test_thoughts_and_calls_are_shown_and_calls_remembered(other: Other, tmp_path: Path) -> None:
    pieces = [("t1", "weather", '{"city": '), (None, None, '"Bern"}')]
    calls = [
        {"tool_calls": [{"index": 0, "id": id, "function": {"name": name, "arguments": text}}]}
        for id, name, text in pieces
    ]
    other.answers = [
        (200, {}, sse({"reasoning": "Well, "}, {"reasoning_content": "hm."}, {"content": "I look.\u2028"}, *calls)),
        (200, {}, sse({"content": "Warm."})),
    ]
    terminal = Terminal(command("--url", other.url), environment(tmp_path))
    try:
        terminal.until("> ")
        terminal.type("Is it warm in Bern?\r")
        terminal.until("Well, hm.")
        terminal.until("I look.")
        terminal.until('→ weather({"city": "Bern"})')
        terminal.until("> ")
        terminal.type("And?\r")
        terminal.until("Warm.")
    finally:
        terminal.end()
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    assert other.asked[1][1]["messages"] == [
        {"role": "user", "content": "Is it warm in Bern?"},
        {"role": "assistant", "content": "I look.\u2028", "tool_calls": [call]},
        {"role": "user", "content": "And?"},
    ]


def test_a_key_is_sent_and_asked_for(other: Other) -> None:
    other.answers = [(401, {}, b"who are you")]
    done = piped("--url", other.url, "--api-key", "sk-1", "Hello")
    assert "--api-key" in done.stderr and done.exit_code == 1
    assert other.asked[0][0]["Authorization"] == "Bearer sk-1"


def test_models_are_listed_with_the_key(other: Other) -> None:
    command, key = ["models", "--url", other.url], {"PENSTOCK_API_KEY": "sk-2"}
    done = CliRunner().invoke(app, [*command, "--api-key", "sk-1"], env=key)
    assert [line.split() for line in done.stdout.splitlines()[1:]] == [["first", "4096"], ["second"]]
    done = CliRunner().invoke(app, command, env=key)
    assert done.exit_code == 2
    assert "Incorrect API key. Give a key with --api-key, or in PENSTOCK_API_KEY." in done.stderr


def test_a_broken_answer_without_ids_is_an_error(other: Other) -> None:
    other.answers = [(200, {}, sse({"content": "Half"}, ended=False))]
    done = piped("--url", other.url, "Hello")
    assert (done.stdout, done.exit_code, len(other.asked)) == ("Half", 1, 1)
    assert "ended early" in done.stderr


def test_what_was_said_before_the_end_came_is_remembered(other: Other, tmp_path: Path) -> None:
    other.answers = [(200, {}, sse({"content": "Half"}, ended=False)), (200, {}, sse({"content": "Whole."}))]
    terminal = Terminal(command("--url", other.url), environment(tmp_path))
    try:
        terminal.until("> ")
        terminal.type("first\r")
        terminal.until("ended early")
        terminal.until("> ")
        terminal.type("second\r")
        terminal.until("Whole.")
    finally:
        terminal.end()
    assert [turn["content"] for turn in other.asked[1][1]["messages"]] == ["first", "Half", "second"]
