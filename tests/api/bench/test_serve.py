"""`penstock bench serve` against Penstock, and against a server that misbehaves as it is told to."""

from __future__ import annotations

import json
import signal
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving import Served, Start
from typer.testing import CliRunner, Result

from penstock.__main__ import app

WORDS_TOKENS, AROUND = 3, 5  # what the fake counts: so many a word, and so many around a prompt
FREE = 5  # requests before the first that counts, at a concurrency of 1


class Fake(ThreadingHTTPServer):
    """An OpenAI server. `faults` says what it does to its n-th request, from 1; the first FREE do not count."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.faults: dict[int, str] = {}
        self.models: tuple[int, bytes] = (200, b'{"data": [{"id": "first"}, {"id": "second"}]}')
        self.bodies: list[dict[str, Any]] = []
        self.usage: list[dict[str, int]] = []  # as reported, a request each
        self.hanging, self.released = threading.Event(), threading.Event()
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        status, body = self.server.models
        self._send(status, body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            fault = self.server.faults.get(len(self.server.bodies))
        if fault == "hang":
            self.server.hanging.set()
            self.server.released.wait()
            return
        if fault is not None and fault != "cut":
            message = f"{fault}, {self.headers['Authorization']}"
            self._send(503, json.dumps({"error": {"message": message, "type": "x", "code": "server_busy"}}).encode())
            return
        usage = {
            "prompt_tokens": AROUND + WORDS_TOKENS * len(body["prompt"].split()),
            "completion_tokens": body["max_tokens"],
        }
        chunks: list[dict[str, Any]] = [{"choices": [{"text": "one token"}]}, {"choices": [{"text": "the others"}]}]
        lines = [json.dumps(chunk) for chunk in [*chunks, {"choices": [], "usage": usage}]] + ["[DONE]"]
        if fault == "cut":
            lines = lines[:1]
        else:
            self.server.usage.append(usage)
        self._send(200, b"".join(f"data: {line}\n\n".encode() for line in lines))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def bench(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200", "OPENAI_API_KEY": ""}).invoke(app, ["bench", "serve", *map(str, arguments)])


def levels(result: Result) -> Any:
    return json.loads(result.stdout)["levels"]


@pytest.mark.parametrize("chat", [False, True])
def test_penstock_is_measured(echo_server: Served, tmp_path: Path, chat: bool) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    more = ["--chat"] if chat else []
    options = ["--concurrency=3,1", "--requests=4", "--input-tokens=200", "--output-tokens=16", *more]
    result = bench(f"{echo_server.url}/v1", *options, f"--json={report}", f"--plot={plot}")
    assert result.exit_code == 0, result.output
    assert "TTFT, ms" in result.stdout

    document = json.loads(report.read_text())
    assert document["benchmark"] == "serve"
    assert document["options"]["model"] == "echo"
    assert document["options"]["url"] == echo_server.url
    assert [level["concurrency"] for level in document["levels"]] == [1, 3]
    for level in document["levels"]:
        assert (level["requests"], level["completed"], level["failed"]) == (4, 4, 0)
        assert level["output_tokens"] == 4 * 16
        assert abs(level["input_tokens"] - 4 * 200) <= 4 * 5
        assert level["output_tokens_per_second"] == pytest.approx(4 * 16 / level["seconds"])
        assert 0 < level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"] <= level["e2e_ms"]["p99"]
        assert set(level["longest_gap_ms"]) == {"p50", "p90", "p99", "max"}

    picture = ElementTree.parse(plot)
    texts = " ".join("".join(picture.getroot().itertext()).split())
    assert "output tokens / s" in texts and "TTFT p50, ms" in texts and "TTFT p99, ms" in texts
    assert "█" in result.stdout  # the same bars
    for level in document["levels"]:
        assert f"{level['output_tokens_per_second']:,.1f}" in texts or level["output_tokens_per_second"] >= 1000
        assert f"{level['ttft_ms']['p50']:.1f}" in texts


def test_a_server_may_close_connections_without_saying_so(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's does after each stream."""

    class Closing(Handler):
        protocol_version = "HTTP/1.1"  # that of connections which are used again

        def do_POST(self) -> None:
            super().do_POST()
            self.close_connection = True

    monkeypatch.setattr(fake, "RequestHandlerClass", Closing)
    (level,) = levels(bench(fake.url, "--concurrency=2", "--requests=20", "--json=-"))
    assert (level["completed"], level["failed"]) == (20, 0)


def test_tokens_are_those_of_the_servers_usage(fake: Fake) -> None:
    result = bench(fake.url, "--concurrency=1,2", "--requests=3", "--input-tokens=65", "--json=-")
    found = levels(result)
    # four requests that measure a word; then warm-up and three that count, twice
    for level, usage in zip(found, (fake.usage[5:8], fake.usage[10:13]), strict=True):
        assert level["input_tokens"] == sum(one["prompt_tokens"] for one in usage) == 3 * 65
        assert level["output_tokens"] == sum(one["completion_tokens"] for one in usage) == 3 * 64
    assert len({body["prompt"] for body in fake.bodies[4:]}) == 9
    assert {body["model"] for body in fake.bodies} == {"first"}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in fake.bodies)


@pytest.mark.usefixtures("proxied")
def test_a_server_on_this_machine_is_asked_without_a_proxy(fake: Fake) -> None:
    assert bench(fake.url, "--concurrency=1", "--requests=1").exit_code == 0


def test_what_the_server_does_not_know_can_be_left_out(fake: Fake) -> None:
    assert bench(fake.url, "--concurrency=1", "--no-ignore-eos").exit_code == 0
    assert not any("ignore_eos" in body for body in fake.bodies)


def test_failures_are_counted_apart(fake: Fake) -> None:
    fake.faults = {FREE + 1: "busy", FREE + 2: "busier", FREE + 3: "cut"}
    result = bench(fake.url, "--concurrency=1", "--requests=5", "--json=-")
    (level,) = levels(result)
    assert result.exit_code == 0
    assert (level["completed"], level["failed"], level["output_tokens"]) == (2, 3, 2 * 64)
    assert [(failure["kind"], failure["count"]) for failure in level["failures"]] == [
        ("HTTP 503 server_busy", 2),
        ("the stream ended without [DONE]", 1),
    ]
    assert "2 requests failed at concurrency 1, the first with: HTTP 503 server_busy: busy" in result.stderr
    assert level["requests_per_second"] == pytest.approx(2 / level["seconds"])


def test_no_completed_request_is_a_failure_without_figures(fake: Fake, tmp_path: Path) -> None:
    fake.faults = dict.fromkeys(range(FREE + 1, FREE + 9), "cut")
    result = bench(fake.url, "--concurrency=1", "--json=-", f"--plot={tmp_path}/plot.svg")
    assert result.exit_code == 1
    assert levels(result)[0]["ttft_ms"] == dict.fromkeys(("p50", "p90", "p99", "max"))
    assert "<svg" in (tmp_path / "plot.svg").read_text()  # of a throughput of 0, and of times that there are not


def test_a_server_that_hangs_times_out(fake: Fake) -> None:
    fake.faults = {FREE + 1: "hang"}
    result = bench(fake.url, "--concurrency=1", "--requests=2", "--timeout=2", "--json=-")
    (level,) = levels(result)
    assert (level["completed"], level["failed"]) == (1, 1)
    assert "no end of the answer in 2 s" in result.stderr


def test_the_key_is_sent_and_never_told(fake: Fake, start: Start, tmp_path: Path) -> None:
    fake.faults = {FREE + 1: "refused"}  # with the header in its message
    report = tmp_path / "report.json"
    options = ["--concurrency=1", "--requests=1", "--api-key=sk-secret", f"--json={report}"]
    ran = start("bench", "serve", fake.url, *options)
    assert ran.wait() == 1
    assert "refused, Bearer ***" in ran.output
    assert "sk-secret" not in ran.output + report.read_text()


def test_ctrl_c_leaves_what_is_complete(fake: Fake, start: Start, tmp_path: Path) -> None:
    fake.faults = {FREE + 3: "hang"}
    report = tmp_path / "report.json"
    options = ["--concurrency=1,8", "--requests=4", f"--json={report}"]
    running = start("bench", "serve", fake.url, *options)
    assert fake.hanging.wait(60)
    running.send(signal.SIGINT)
    assert running.wait() == 130
    assert "2 of 4" in running.output
    document = json.loads(report.read_text())
    assert document["interrupted"] is True
    assert [(level["concurrency"], level["completed"]) for level in document["levels"]] == [(1, 2)]


@pytest.mark.parametrize(
    ("models", "error"),
    [
        ((404, b"<html>"), "404 Not Found"),
        ((200, b"<html>"), "not a list of models"),
        ((401, b"{}"), "wants a key (HTTP 401); set OPENAI_API_KEY"),
        ((200, b'{"data": []}'), "serves no model"),
        ((200, b'{"data": [{"id": "a"}, {"id": "b"}]}'), "no model 'first' at"),
        ((200, b'{"data": [{"id": "a"}, {"id": "b"}]}'), "--model can be: a, b"),
    ],
)
def test_what_cannot_be_measured_is_told_before_the_load(fake: Fake, models: tuple[int, bytes], error: str) -> None:
    fake.models = models
    result = bench(fake.url, "--model=first")
    assert result.exit_code == 1
    assert error in result.stderr
    assert not fake.bodies


def test_nothing_there_is_told() -> None:
    result = bench("127.0.0.1:1")
    assert result.exit_code == 1
    assert "http://127.0.0.1:1: nothing listens there; start one there or name another URL" in result.stderr


def test_a_server_that_refuses_ignore_eos_is_told(fake: Fake) -> None:
    fake.faults = {1: "unknown parameter ignore_eos"}
    result = bench(fake.url)
    assert result.exit_code == 1
    assert "unknown parameter ignore_eos" in result.stderr
    assert "--no-ignore-eos" in result.stderr


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--concurrency=1,x", "whole numbers above 0"),
        ("--concurrency=0", "whole numbers above 0"),
        ("--json=/nowhere/x.json", "'--json': '/nowhere/x.json': No such file or directory"),
        ("--plot=/nowhere/x.svg", "'--plot': '/nowhere/x.svg': No such file or directory"),
        ("--plot=x.pdf", "ends in .svg"),
    ],
)
def test_wrong_options_are_told_before_the_load(
    fake: Fake, option: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = bench(fake.url, option)
    assert result.exit_code == 2
    assert error in result.stderr
    assert not fake.bodies
