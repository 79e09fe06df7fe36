"""The documentation's code does what the pages show: it runs against one server, and prints what follows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from mcp_servers import Everything
from pages import PAGES, ROOT, Block, blocks, matches, named
from serving import START_TIMEOUT, Process, Served, until
from typer.testing import CliRunner

from penstock.__main__ import app

PROGRAMS = (("README.md", "docs/library.md"), ("docs/http-api.md", "docs/tools.md"))  # one for the blocks of two pages
# Excerpts of programs that tests of their own run; (): of none.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "docs/grpc.md": ("deploy/examples/grpc_client.py",),
    "docs/nats.md": ("deploy/examples/client.py", "deploy/examples/tenant.py"),
    "docs/stages.md": (),
    "docs/plug-ins.md": (),
}
URL, TOOLS_URL = "http://127.0.0.1:8000", "http://127.0.0.1:3001/mcp"
READ_ONLY = re.compile(
    r"penstock (submit|models( list| +#|$)|schema|key|config agreed|config apply --queue-limit 500 +#|dead list)"
)
SEPARATOR = "\x1e"
OTHER_MODELS = {"minilm", "judge"}  # of a server of its own: tests/api/http/test_embeddings.py, test_rerank.py


@pytest.fixture(scope="module")
def everything() -> Iterator[Everything]:
    server = Everything()
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def served(home: Path, everything: Everything) -> Iterator[Served]:
    """The server that docs/tools.md sets up."""
    page = ROOT / "docs" / "tools.md"
    (functions,) = (block.code for block in blocks(page, "python") if block.code.startswith("# tools.py\n"))
    (home / "tools.py").write_text(functions)
    (line,) = (line for block in blocks(page, "sh") for line in block.code.splitlines() if line.startswith("echo "))
    subprocess.run(["bash", "-c", line.replace(TOOLS_URL, everything.url)], cwd=home, check=True)
    arguments = "--mcp-config", "mcp.json", "--tool-functions", "tools.py:add", "--state-dir", str(home / "state")
    process = Process("serve", "--port", "0", *arguments, cwd=home)
    try:
        yield Served(process, home / "state")
    finally:
        process.end()


@pytest.fixture(scope="module")
def with_echo(served: Served, home: Path) -> Iterator[Served]:
    """The same, with the slow worker of docs/resuming.md besides."""
    process = Process(
        "worker", "--backend", "echo", "--echo-rate", "20", environment={"PENSTOCK_NATS_URL": served.nats_url}, cwd=home
    )
    try:
        until(lambda: not process.alive or "echo" in httpx2.get(f"{served.url}/v1/models").text)
        assert process.alive, process.output
        yield served
    finally:
        process.end()


def runnable(page: Path) -> list[Block]:
    """The shell's blocks that ask a server; that of embeddings has a model of its own."""
    return [
        block
        for block in blocks(page, "sh")
        if "curl " in block.code and not OTHER_MODELS & {*re.findall(r"\w+", block.code)}
    ]


def command_lines(page: Path) -> list[str]:
    lines = [line for block in blocks(page, "sh") for line in block.code.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if READ_ONLY.match(line)]


def shown(block: Block, printed: str) -> str:
    return f"{block.place} printed\n{printed}\nwhere the page has\n{block.output}"


COMMANDS = sorted({line for page in PAGES for line in command_lines(page)})


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_runs(line: str, served: Served, home: Path) -> None:
    port = served.url.rpartition(":")[2]
    environment = {"PENSTOCK_NATS_URL": served.nats_url, "PENSTOCK_PORT": port, "PENSTOCK_CONFIG": os.devnull}
    arguments = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)][1:]
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_there_are_commands_to_run() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("names", PROGRAMS, ids=" and ".join)
def test_the_python_of_pages_runs(names: tuple[str, ...], served: Served, everything: Everything, home: Path) -> None:
    found = [block for name in names for block in blocks(ROOT / name, "python")]
    text = f"\nprint({SEPARATOR!r}, end='', flush=True)\n".join(block.code for block in found)
    program = home / f"{Path(names[-1]).stem}_page.py"
    program.write_text(text.replace(URL, served.url).replace(TOOLS_URL, everything.url))
    result = subprocess.run(
        [sys.executable, program.name], cwd=home, capture_output=True, text=True, timeout=START_TIMEOUT
    )
    assert result.returncode == 0, result.stderr
    for block, printed in zip(found, result.stdout.split(SEPARATOR), strict=True):
        assert not block.output or matches(printed, block.output), shown(block, printed)


@pytest.mark.parametrize("block", [block for page in PAGES for block in runnable(page)], ids=lambda block: block.place)
def test_a_block_of_shell_runs(block: Block, with_echo: Served, home: Path) -> None:
    code = block.code.replace(URL, with_echo.url).replace("localhost:8000", with_echo.url.removeprefix("http://"))
    result = subprocess.run(
        ["bash", "-c", code], cwd=home, capture_output=True, text=True, timeout=START_TIMEOUT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not block.output or matches(result.stdout, block.output), shown(block, result.stdout)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_that_does_not_run_here_is_an_excerpt(page: Path) -> None:
    for block in blocks(page, "python"):
        if not any(named(page) in names for names in PROGRAMS):
            sources = ELSEWHERE[named(page)]
            programs = [[line.strip() for line in (ROOT / name).read_text("utf-8").splitlines()] for name in sources]
            code = [line.strip() for line in block.code.splitlines()]
            excerpt = any(set(code) <= set(lines) for lines in programs)
            assert excerpt or not sources, f"{block.place} is no excerpt of {sources}"
