"""`penstock top`: what it shows, what its keys do, and all of it in a terminal at a real server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rich.console import Console
from serving import Served, serving
from terminals import Terminal
from typer.testing import CliRunner

from penstock.__main__ import app
from penstock.api.terminal.over_http.top_screen import SORTS, TopScreen


def row(id: str, state: str, created: float, tokens: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": id, "tenant": "acme", "model": "m", "state": state, "created": created, "tokens": tokens} | more


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": {"version": "1.2.3", "connected": True, "now": 1000.0},
        "pipeline": {
            "validate": {"index": 0, "copies": 1, "rate": 2.5, "waiting": 3},
            "infer": {"index": 1, "copies": 0, "rate": 0, "active": 7},
        },
        "counts": {"running": 1},
        "models": {},
        "workers": {"w1": {"state": "live", "model": "m", "capacity": 4, "active": 2, "kv_cache": 0.5}},
        "letters": {"1": {}},
        "figures": {"ttft_p50": 0.25, "kv_cache": 0.5},
        "requests": {f"{each['tenant']}/{each['id']}": each for each in rows},
    }


ROWS = (
    row("old", "running", 900.0, 5, worker="w1"),
    row("new", "waiting", 999.5, position=2),
    row("gone", "completed", 950.0, 9, took=3.0, takeovers=1),
)


@pytest.fixture
def screen() -> TopScreen:
    screen = TopScreen()
    screen.show(document(*ROWS))
    return screen


def text(screen: TopScreen, height: int = 40) -> str:
    console = Console(width=140, height=height)
    with console.capture() as captured:
        console.print(screen.render(140, height))
    return captured.get()


def shown(screen: TopScreen) -> list[str]:
    """The ids of the requests on the screen, from the top."""
    return [word for line in text(screen).splitlines() if (word := line.split(" ")[0]) in ("old", "new", "gone")]


def press(screen: TopScreen, *keys: str) -> list[dict[str, Any] | None]:
    return [screen.press(key) for key in keys]


def test_everything_is_on_one_screen(screen: TopScreen) -> None:
    seen = text(screen)
    for part in (
        "live",
        "validate 3 2.5/s ▸ infer 7",
        "first token 250 ms",
        "w1",
        "━━━━━····· 2/4",
        "50%",
        "dead letters 1",
    ):
        assert part in seen, part
    assert shown(screen) == ["old", "new"]  # the oldest first
    assert "100.0 s" in seen and "500 ms" in seen
    screen.show(screen.document | {"is_stale": True})
    assert "reconnecting" in text(screen)
    screen.show({"server": {"connected": False}})
    assert "waits for its message broker" in text(screen)


def test_sort_reverse_filter_and_ended(screen: TopScreen) -> None:
    press(screen, "e")
    assert shown(screen) == ["old", "gone", "new"]
    press(screen, "s")
    assert shown(screen) == ["gone", "old", "new"]  # by tokens
    press(screen, "r")
    assert shown(screen) == ["new", "old", "gone"]
    press(screen, *"s" * (len(SORTS) - 1), "r")
    assert shown(screen) == ["old", "gone", "new"]
    press(screen, "/", *"qwaitx", "backspace", "backspace", *"it")
    assert screen.typing and "qwaiit" in text(screen)
    press(screen, "escape", "/", *"wait", "enter")
    assert not screen.typing and shown(screen) == ["new"]
    press(screen, "escape")
    assert len(shown(screen)) == 3


def test_a_request_is_cancelled_after_a_question(screen: TopScreen) -> None:
    assert press(screen, "c", "y") == [None, None]
    assert press(screen, "down", "down", "c") == [None, None, None]
    assert "Cancel new?" in text(screen)
    assert press(screen, "n", "c", "y") == [None, None, ROWS[1]]
    assert press(screen, "up", "c", "y")[-1] == ROWS[0]
    press(screen, "e", "s", "up")  # gone, by tokens
    assert press(screen, "c", "y") == [None, None]


def test_a_long_list_keeps_the_chosen_one_in_sight() -> None:
    screen = TopScreen()
    screen.show(document(*(row(f"r{number}", "running", float(number)) for number in range(50))))
    press(screen, *["down"] * 41)
    seen = text(screen, height=20)
    assert "r40" in seen and "r0 " not in seen and len(seen.splitlines()) <= 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = "--api-keys", "acme=sk-acme-of-all,op=sk-operator-key admin"
    with serving(tmp_path_factory.mktemp("top") / "state", "--backend", "echo", "--echo-rate", "10", *keys) as served:
        yield served


def test_it_watches_a_server_in_a_terminal_and_cancels(served: Served, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "top", "--url", served.url]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PENSTOCK_API_KEY": "sk-operator-key"}
    terminal = Terminal(command, environment)
    try:
        terminal.until("live")
        body = {"model": "echo", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer sk-acme-of-all"}
        with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60) as response:
            name = response.headers["x-request-id"]
            terminal.until(name[:20])
            terminal.type("j")
            terminal.type("c")
            terminal.until("y cancels it")
            terminal.type("y")
            terminal.until("is cancelled")
            assert "cancelled" in response.read().decode()
        terminal.type("q")
        assert terminal.wait() == 0
    finally:
        terminal.end()


def test_it_prints_one_screen_into_a_pipe_and_says_what_is_wrong(served: Served) -> None:
    run = CliRunner().invoke
    printed = run(app, ["top", "--url", served.url, "--api-key", "sk-operator-key"])
    assert printed.exit_code == 0 and "validate" in printed.stdout, printed.output
    refused = run(app, ["top", "--url", served.url, "--api-key", "sk-acme-of-all"])
    assert refused.exit_code == 2 and "use one with the word admin" in refused.stderr
    away = run(app, ["top", "--url", "http://127.0.0.1:9"])
    assert away.exit_code == 2 and "penstock serve MODEL" in away.stderr
