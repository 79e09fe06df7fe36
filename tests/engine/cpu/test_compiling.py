"""Kernels compiled at the first start: once for all that start together."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.engine.cpu.compiling import compiled, kept
from penstock.engine.cpu.variants import SOURCES

# Writes what it is asked for, and notes it.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo pretender 1; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo compiled > "$out"
echo "$out" >> "{log}"
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    script = tmp_path / "pretender"
    script.write_text(COMPILER.replace("{log}", str(tmp_path / "log")))
    script.chmod(0o700)
    return script


def test_of_many_that_start_together_one_compiles_and_says_so(
    tmp_path: Path, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(lambda _: compiled(str(compiler), cache, ["-O3"]), range(4))}
    (library,) = found
    assert library.read_text() == "compiled\n" and kept(str(compiler), cache, ["-O3"]) == library
    num_sources = sum(source.suffix == ".c" for source in SOURCES)
    assert len((tmp_path / "log").read_text().splitlines()) == num_sources + 1, "each source, and the library"
    assert [message.split(",")[0] for message in caplog.messages] == ["compiling the kernels for this CPU"]
    compiled(str(compiler), cache, ["-O3"])
    assert len(caplog.messages) == 1


def test_where_nothing_can_be_locked_it_compiles_all_the_same(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr("filelock.FileLock", no_locks)
    assert compiled(str(compiler), tmp_path / "cache", ["-O3"]).exists()
