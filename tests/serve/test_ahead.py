"""`penstock serve` starts its worker before it knows its settings: that is the one that serves, or it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Process, Start, until

LONG = "x" * 100_000  # of an environment variable; Linux takes 131,072 bytes
OWN = ("--port", "0", "--state-dir", "state")


GRAMMAR = """
import os, sys
from penstock.api.serve.ahead import await_environment
reading, writing = os.pipe()
os.write(writing, b"{}")
os.close(writing)
os.environ["PENSTOCK_ENVIRONMENT_FD"] = str(reading)
await_environment(lambda: None)
from penstock.engine.grammar.checker import SIMPLE
from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.text.tokenizer import load_tokenizer
GrammarCompiler(load_tokenizer(sys.argv[1], "paged")).compile(SIMPLE)
print([name for name in ("torch", "transformers", "xgrammar") if name in sys.modules])
"""


def children(server: Process, word: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.pid).children(recursive=True):
        try:
            if word in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def first_worker(server: Process) -> psutil.Process:
    return until(lambda: children(server, "penstock worker"))[0]


def answer(server: Process) -> httpx.Response:
    url = server.wait_for(r"penstock ready (http://\S+)")[1]
    body = {"model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "prompt": "a", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_it_serves_with_the_settings_that_are_read_later(start: Start, tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('served_model_name = "mine"\nmax_sequence_length = 300\n')
    server = start("serve", *OWN, environment={"ANOTHER": LONG, "AND_ANOTHER": LONG, "NOTIFY_SOCKET": "@nobody"})
    ahead = first_worker(server)
    assert "NOTIFY_SOCKET" not in ahead.environ()  # which is for the server alone
    assert answer(server).status_code == 200
    (worker,), (broker,) = children(server, "penstock worker"), children(server, "nats-server")
    assert worker.pid == ahead.pid and worker.create_time() < broker.create_time()
    url = server.wait_for(r"penstock ready (http://\S+)")[1]
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("mine", 300)
    server.send(signal.SIGINT)
    assert server.wait() == 0
    assert not psutil.pid_exists(worker.pid)


def test_its_first_grammar_imports_no_transformers(tiny_model: Path) -> None:
    run = subprocess.run([sys.executable, "-c", GRAMMAR, str(tiny_model)], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("['torch', 'xgrammar']\n", 0), run.stderr


@pytest.mark.parametrize("setting", ['backend = "echo"', 'nats_url = "127.0.0.1:1"'])
def test_it_is_ended_where_another_one_is_needed(start: Start, tmp_path: Path, setting: str) -> None:
    (tmp_path / "penstock.toml").write_text(f"{setting}\n")
    server = start("serve", *OWN)
    ahead = first_worker(server)
    until(lambda: not psutil.pid_exists(ahead.pid))
    if "nats_url" not in setting:
        assert answer(server).status_code == 200
        (worker,) = children(server, "penstock worker")
        assert not any("libtorch" in file.path for file in worker.memory_maps()), "which echoing does not need"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("serve", "--backend", "echo"), {}),
        (("serve", "--backend=echo"), {}),
        (("serve",), {"PENSTOCK_BACKEND": "echo"}),
    ],
)
def test_none_is_started_in_vain_where_the_command_says_so(
    start: Start, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    server = start(*arguments, *OWN, environment=environment)
    (broker,) = until(lambda: children(server, "nats-server"))
    assert answer(server).status_code == 200
    (worker,) = children(server, "penstock worker")
    assert worker.create_time() > broker.create_time()


def test_one_that_dies_before_it_is_needed_is_started_again(start: Start) -> None:
    server = start("serve", *OWN)
    ahead = first_worker(server)
    ahead.send_signal(signal.SIGKILL)
    assert answer(server).status_code == 200
    (worker,) = children(server, "penstock worker")
    assert worker.pid != ahead.pid


@pytest.mark.parametrize("fault", [("--port", "99999"), ("--max-batch-size", "0")])
def test_none_stays_behind_a_server_that_cannot_start(start: Start, fault: tuple[str, str]) -> None:
    server = start("serve", *OWN, *fault)
    ahead = first_worker(server)
    assert server.wait() == 2
    until(lambda: not psutil.pid_exists(ahead.pid))
    assert "Traceback" not in server.output


def test_none_stays_behind_a_server_that_is_killed(start: Start) -> None:
    server = start("serve", *OWN)
    ahead = first_worker(server)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(ahead.pid))
