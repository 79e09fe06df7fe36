"""The list of commands, made without importing what they need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from penstock.__main__ import COMMANDS, app
from penstock.api.terminal.lazy import CommandEntry

LARGE = ("torch", "numpy", "fastapi", "nats", "pydantic", "pydantic_core", "penstock.config.settings")
HELP = f"""
import sys
from penstock.__main__ import main
sys.argv[1:] = ["--help"]
try:
    main()
finally:
    print([name for name in {LARGE} if name in sys.modules])
"""
FRONT = """
import sys
from penstock.__main__ import COMMANDS
next(entry for entry in COMMANDS if entry.name == "front").load()
print([name for name in ("torch", "transformers", "rich", "httpx2") if name in sys.modules])
import rich.console
"""
STAGE = """
import sys
from penstock.__main__ import COMMANDS
from penstock.stages.catalogue import find_stage
next(entry for entry in COMMANDS if entry.name == "stage").load()
find_stage("queue")
others = ("fastapi", "penstock.engine", "penstock.api.bridge", "penstock.schemas.openai", "penstock.stages.validate")
print([name for name in others if name in sys.modules])
"""
WORKER = """
import sys
from penstock.__main__ import COMMANDS
next(entry for entry in COMMANDS if entry.name == "worker").load()
others = ("fastapi", "torch", "penstock.api.bridge", "penstock.schemas.openai.responses", "penstock.stages.batch")
print([name for name in others if name in sys.modules])
"""


def test_help_imports_nothing_large() -> None:
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True).stdout
    assert shown.endswith("[]\n")
    assert all(f"│ {entry.name} " in shown for entry in COMMANDS if entry.panel)
    assert "│ front " not in shown


def test_a_front_imports_neither_an_http_client_nor_what_draws_on_terminals() -> None:
    run = subprocess.run([sys.executable, "-c", FRONT], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


@pytest.mark.parametrize("script", [STAGE, WORKER], ids=["stage", "worker"])
def test_a_process_imports_only_what_it_runs(script: str) -> None:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_the_list_says_what_the_command_says(entry: CommandEntry) -> None:
    command = entry.load()
    assert command.help.splitlines()[0] == entry.help
    assert (command.name, command.hidden) == (entry.name, not entry.panel)


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_every_command_has_help_of_its_own(entry: CommandEntry) -> None:
    shown = CliRunner().invoke(app, [entry.name, "--help"])
    assert shown.exit_code == 0
    assert f"Usage: penstock {entry.name} " in shown.output


def test_an_unknown_command_is_told_what_is_near() -> None:
    refused = CliRunner().invoke(app, ["serv"])
    assert refused.exit_code == 2
    assert "No such command 'serv'. Did you mean 'serve'" in refused.output
