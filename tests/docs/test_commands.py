"""Every command in the documentation is one that Penstock has, with options that it takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import PAGES, ROOT, blocks, named, without_blocks
from typer.core import TyperGroup

from penstock.__main__ import app
from penstock.config.settings import Settings
from penstock.schemas.events import Started, Token
from penstock.stages import Filter, JobStage
from penstock.streams.nats.administration.deployment import layout

OTHER_VARIABLES = {"PENSTOCK_API_KEY", "PENSTOCK_CONFIG", "PENSTOCK_TEST_DEVICE"}  # of clients, of files, of tests
COMMAND = typer.main.get_command(app)
USAGE_ERROR: Any = typer.BadParameter.__base__  # of the click that this Typer has


def commands(page: Path) -> Iterator[str]:
    """What starts with `penstock`, in the shell's blocks and inline."""
    for block in blocks(page, "sh", "bash"):
        for line in re.sub(r"\\\n\s*", "", block.code).splitlines():
            for part in re.split(r"(?:^|\s)#\s|\||&+(?=\s|$)|;", line):
                if found := re.match(r"\s*(?:\w+=\S*\s+)*(?:python -m )?(penstock .*|penstock$)", part):
                    yield found[1].strip()
    for code in re.findall(r"`([^`]+)`", without_blocks(page)):
        for part in re.split(r"\||&+(?=\s|$)", code):
            if found := re.match(r"\s*(?:\w+=\S*\s+)*(penstock (?!ready ).+)", part):
                yield found[1]


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and its arguments."""
    command: Any = COMMAND
    while isinstance(command, TyperGroup) and words and (found := child(command, words[0])) is not None:
        command, words = found, words[1:]
    return command, words


@cache
def child(group: TyperGroup, name: str) -> Any:
    """A command of a group; making one with all settings as options takes a while."""
    return group.get_command(typer.Context(group), name)


def fault(line: str) -> str:
    """What is wrong with a command line; empty if nothing is."""
    words = shlex.split(re.sub(r"[][]", "", line))[1:]  # without the brackets of what may be left out
    command, arguments = resolve(words)
    if isinstance(command, TyperGroup) and arguments and not arguments[0].startswith("--"):
        return f"there is no command {arguments[0]}"
    if "…" in arguments:  # more of the same, or options left out
        arguments.remove("…")
    context = typer.Context(command)
    options = [argument for argument in arguments if argument not in ("--help", "--version")]
    try:
        _, left, _ = command.make_parser(context).parse_args(options)
    except USAGE_ERROR as error:
        return str(error.format_message())
    return f"{left[0]} is one argument too many" if left and not isinstance(command, TyperGroup) else ""


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_parses(page: Path) -> None:
    lines = sorted(set(commands(page)))
    assert {line: found for line in lines if (found := fault(line))} == {}


def test_there_are_commands() -> None:
    assert len({line for page in PAGES for line in commands(page)}) > 50


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("penstock server", "there is no command server"),
        ("penstock serve MODEL --max-batches 3", "No such option: --max-batches"),
        ("penstock serve MODEL penstock worker MODEL", "too many"),
        ("penstock bench pipelines", "there is no command pipelines"),
        ("penstock serve --port", "requires an argument"),
    ],
)
def test_a_command_that_is_not_there_is_found(line: str, found: str) -> None:
    assert found in fault(line)


def flags(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            yield from flags(each)


def test_every_flag_and_variable_exists() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    known = {"--help", *flags(COMMAND)}
    named = {
        flag
        for code in re.findall(r"`([^`\n]+)`", text)
        if (code.startswith(("-", "penstock ")))
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)
    }
    assert named and named - known == set()
    variables = {f"PENSTOCK_{name.upper()}" for name in Settings.model_fields} | OTHER_VARIABLES
    streams = {f"PENSTOCK_{stream.name}" for stream in layout(Settings()).streams}
    assigned = set(re.findall(r"\b(PENSTOCK_[A-Z_]+)=", text)) | set(re.findall(r"`(PENSTOCK_[A-Z_]+[A-Z])`", text))
    assert assigned and assigned - variables - streams == set()


async def test_the_stage_and_the_filter_do_as_the_page_says() -> None:
    found: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "stages.md", "python"):
        exec(block.code, found)
    assert issubclass(found["Polite"], JobStage)
    brief: Filter = found["Brief"](Started("r", 1, "h", "default", "b", 1, 5), 0)
    whole, end = Token("r", 0, 0, (1,), "One"), Token("r", 0, 1, (2,), "?\nTwo")
    assert await brief.process(whole) == whole
    assert await brief.process(end) == replace(end, text="?", finish_reason="stop")
