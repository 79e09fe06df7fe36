"""`penstock models` against a running server: what an operator does with models, and what the commands say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import serving
from typer.testing import CliRunner, Result

from penstock.__main__ import app

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a command of `penstock models` at a server of two echo models, with the operator's key."""
    root = tmp_path_factory.mktemp("models")
    file = root / "models.toml"
    file.write_text(
        '[models.one]\nsource = "no-files-1"\nbackend = "echo"\naliases = ["first"]\n'
        '[models.two]\nsource = "no-files-2"\nbackend = "echo"\n'
    )
    keys = ("--api-keys", "one=sk-user-here,two=sk-admin-here admin")
    with serving(root / "state", "--models", str(file), "--heartbeat-interval", "0.3", *keys) as served:

        def command(*arguments: str, key: str = "sk-admin-here") -> Result:
            return CliRunner().invoke(app, ["models", *arguments, "--url", served.url, "--api-key", key])

        yield command


def rows(run: Run) -> dict[str, list[str]]:
    lines = [line.split() for line in run("list").stdout.splitlines()[1:]]
    return {line[0]: line[1:] for line in lines}


def test_models_are_looked_after_from_the_command_line(run: Run, tmp_path: Path) -> None:
    assert rows(run) == {name: ["unloaded", "0", "1", "131072"] for name in ("one", "two")}
    assert run("load", "first").stdout == "one is loaded\n"
    assert rows(run)["one"][0] == "ready"
    swapped = run("swap", "first", "--to", "no-files-3")
    assert swapped.stdout == "one is swapped: requests go to revision 2\n", swapped.output
    shown = json.loads(run("show", "first").stdout)
    assert (shown["id"], shown["aliases"], shown["state"], shown["revision"]) == ("one", ["first"], "ready", 2)
    assert run("unload", "one").stdout == "one is unloaded\n"

    assert (
        run("add", "three", "no-files-4", "--set", "backend=echo", "--set", "pin=true").stdout == "three is offered\n"
    )
    assert run("load", "three").stdout == "three is loaded\n"
    assert run("remove", "two").stdout == "two is removed\n"
    while {*rows(run)} != {"one", "three"}:  # until the agent has withdrawn it
        pass

    failed = run("swap", "three", "--to", "sick", key="sk-user-here")
    assert failed.exit_code == 2 and "use one with the word admin" in failed.stderr
    absent = run("swap", "three", "--to", "./absent")
    assert absent.exit_code == 2 and "no such directory or file: absent" in absent.stderr
    for command in (("load", "thre"), ("swap", "thre", "--to", "x"), ("remove", "thre"), ("show", "thre")):
        unknown = run(*command)
        assert unknown.exit_code == 2 and "three" in unknown.stderr, unknown.output
    taken = run("add", "one", "x")
    assert taken.exit_code == 2 and "already a model's name" in taken.stderr
    wrong = run("add", "four", "x", "--set", "backend=echo", "--set", "keep_alve=5m", "--set", "dtype=odd")
    assert wrong.exit_code == 2 and "did you mean keep_alive?" in wrong.stderr and "dtype" in wrong.stderr
    assert "KEY=VALUE" in run("add", "four", "x", "--set", "pin").stderr


def test_what_cannot_be_loaded_is_said(run: Run, tmp_path: Path) -> None:
    failed = run("add", "four", str(tmp_path / "vanished"))
    assert failed.exit_code == 1 and "four was added, but cannot be loaded: " in failed.stderr
    assert "no such directory" in run("list").stdout and rows(run)["four"][0] == "failed"
    assert "no such directory" in json.loads(run("show", "four").stdout)["last_error"]

    hidden = "/" + "x" * 300  # where nobody may look, neither the command nor the server
    failed = run("add", "five", hidden)
    assert failed.exit_code == 1 and "cannot be read: File name too long; check the path" in failed.stderr
    assert run("add", "six", hidden, "--set", "backend=echo").stdout == "six is offered\n", "it needs no files"
    assert run("remove", "six").stdout == "six is removed\n"


def test_the_fastest_backend_is_measured(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    added = run("add", "tiny", str(tiny_model), "--set", "dtype=float32", "--measure")
    assert added.exit_code == 0 and added.stdout.endswith("tiny is offered\n"), added.output
    times = {backend: float(seconds) for backend, seconds in re.findall(r"^(\w+) +([\d.]+) s\s*$", added.stdout, re.M)}
    assert {"paged", "hf"} <= {*times} and [*times.values()] == sorted(times.values())
    assert re.search("^sentence_transformers +it makes no text", added.stdout, re.M)
    assert json.loads(run("show", "tiny").stdout)["backend"] == next(iter(times))
    assert run("load", "tiny").stdout == "tiny is loaded\n"

    chosen = run("add", "other", str(tiny_model), "--set", "backend=hf", "--measure")
    assert chosen.exit_code == 2 and "leave out --set backend, or --measure" in chosen.stderr
    (tmp_path / "config.json").write_text("{}")
    refused = run("add", "other", str(tmp_path), "--measure")
    assert refused.exit_code == 1 and "no backend runs it here" in refused.stderr
    assert "other" not in rows(run)
