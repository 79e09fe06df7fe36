"""Commands where the output is full, the encoding is narrow, the home cannot be written or does not exist, or proxies
are named: words, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from serving import Served
from terminals import Terminal
from typer.testing import CliRunner

from penstock.__main__ import app
from penstock.config.directories import user_cache, user_state

NARROW = {"PYTHONIOENCODING": "ascii"}
FULL = Path("/dev/full")


def run(
    *arguments: str | bytes,
    given: bytes = b"",
    output: Any = subprocess.PIPE,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "penstock", *arguments]
    own = os.environ | dict(environment)
    return subprocess.run(command, input=given, stdout=output, stderr=subprocess.PIPE, env=own, timeout=60, check=False)


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", ["schema", "--version", "--help"])
def test_a_full_disk_is_said_in_a_line(command: str) -> None:
    with FULL.open("w") as output:
        ended = run(command, output=output)
    assert ended.returncode == 1
    assert ended.stderr.decode() == "error: The output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("start", ["start", "in_a_group"])
def test_where_no_more_threads_can_be_started_the_limits_are_named(start: str) -> None:
    """The log had a traceback without words, again and again: what exceptions say stays out of it."""
    code = f"""
import asyncio
import threading
from penstock import __main__
threading.stack_size(1 << 47)  # more than there is of addresses

def start():
    threading.Thread(target=print).start()

def in_a_group():
    async def main():
        async with asyncio.TaskGroup():
            start()

    asyncio.run(main())

__main__.app = lambda prog_name: {start}()
__main__.main()
"""
    ended = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(b"error: no more threads can be started here; raise the limit of processes")


def test_where_no_process_can_be_started_serve_says_so_in_a_line(tmp_path: Path) -> None:
    """Its first one, the worker that it starts before anything else, ended it with a traceback."""
    code = """
import sys
from penstock import __main__
sys.executable = "/none/python"
__main__.main()
"""
    more = "serve", "--nats-server", "/none/nats-server", "--port", "0", "--state-dir", str(tmp_path)
    ended = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == b"error: /none/nats-server is not an executable file; correct --nats-server\n"


@pytest.mark.parametrize("command", [("serve", "--help"), ("chat", "--help"), ("schema",)])
def test_a_narrow_encoding_loses_characters_alone(command: tuple[str, ...]) -> None:
    ended = run(*command, environment=NARROW)
    assert (ended.returncode, ended.stderr) == (0, b"") and len(ended.stdout) > 200


@pytest.mark.parametrize(
    ("arguments", "given", "environment", "said"),
    [
        ((b"caf\xe9 \xc3\xbc",), b"", {}, "caf\ufffd ü"),
        (("Gr\u00fc\u00dfe \U0001f642",), b"", {}, "Grüße 🙂"),
        (("Gr\u00fc\u00dfe \U0001f642",), b"", NARROW, "Gr??e ?"),
        ((), b"caf\xe9 \xc3\xbc", {}, "caf\ufffd ü"),
    ],
    ids=["bytes", "text", "narrow", "input"],
)
def test_a_chat_takes_and_shows_what_it_can(
    echo_server: Served, arguments: tuple[str | bytes, ...], given: bytes, environment: dict[str, str], said: str
) -> None:
    ended = run("chat", "--url", echo_server.url, *arguments, given=given, environment=environment)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert said in ended.stdout.decode()


@pytest.fixture
def homeless(echo_server: Served) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "penstock", "chat", "--url", echo_server.url]
    terminal = Terminal(
        command, os.environ | {"PENSTOCK_STATE_DIR": "/dev/null/state", "TERM": "xterm", "COLUMNS": "200"}
    )
    yield terminal
    terminal.end()


def test_a_conversation_needs_no_history(homeless: Terminal) -> None:
    assert "without a history" in homeless.until("cannot be written (Not a directory)")
    homeless.type("Hello there\n")
    homeless.until("user")
    homeless.until("Hello there")


@pytest.mark.usefixtures("proxied")
@pytest.mark.parametrize("command", [("chat", "Hello there"), ("models",)])
def test_this_machine_is_asked_without_a_proxy(echo_server: Served, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*command, "--url", echo_server.url])
    assert done.exit_code == 0 and ("Hello there" in done.output or "echo" in done.output)


@pytest.mark.usefixtures("proxied")
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://192.0.2.1", "a proxy that the environment names cannot be used: SOCKS needs `pip install socksio`"),
        ("http://[::1", "http://[::1/v1 is not a URL"),
    ],
)
def test_what_is_wrong_with_a_proxy_or_a_url_is_said_in_a_line(url: str, said: str) -> None:
    done = CliRunner().invoke(app, ["models", "--url", url])
    assert done.exit_code == 2 and done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["models", "top"])
def test_a_proxy_that_does_not_answer_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said that the server refused."""
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    done = CliRunner().invoke(app, [command, "--url", "http://192.0.2.1"])
    assert done.exit_code == 2 and "Connection refused, by the proxy that HTTP_PROXY names)" in done.stderr
    assert "secret" not in done.output


@pytest.mark.usefixtures("proxied")
def test_a_model_of_the_hub_names_the_proxy_that_cannot_be_used() -> None:
    done = CliRunner().invoke(app, ["quantize", "some/model", "out"])
    assert done.exit_code == 2 and done.stderr.startswith(
        "error: some/model cannot be looked for on Hugging Face: a proxy"
    )


def test_a_user_without_a_home_has_the_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As container runtimes say for a number that no image knows."""
    for variable in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    assert (user_state(), user_cache()) == (Path("/.local/state/penstock"), Path("/.cache/penstock"))


def test_a_relative_directory_is_no_directory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert user_cache() == Path("/home/ann/.cache/penstock")
