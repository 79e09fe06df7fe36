"""Stages and filters of users' files: found, or refused with what to change."""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest

from penstock.config.loading import load_named
from penstock.config.settings import Settings
from penstock.schemas.errors import StartupError
from penstock.stages.catalogue import find_stage

FILE = """
from penstock.stages import JobStage

class Good(JobStage):
    name = "polite"
    async def process(self, job):
        return job

class Nameless(JobStage):
    async def process(self, job):
        return job

class Dotted(Good):
    name = "a.b"

class Taken(Good):
    name = "validate"

class Reserved(Good):
    name = "events"

class Empty(JobStage):
    name = "empty"
"""


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("Nameless", "Nameless has no name: give it a class attribute `name`"),
        ("Dotted", r"Dotted has the name 'a\.b': give it"),
        ("Taken", "Taken has the name 'validate': give it"),
        ("Reserved", "Reserved has the name 'events': give it"),
        ("Empty", "Empty does not define process"),
    ],
)
def test_a_stage_that_cannot_run_is_refused_at_the_start(tmp_path: Path, kind: str, fault: str) -> None:
    (tmp_path / "manners.py").write_text(FILE)
    with pytest.raises(StartupError, match=fault):
        find_stage(f"{tmp_path}/manners.py:{kind}")
    assert find_stage(f"{tmp_path}/manners.py:Good").name == "polite"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("def polite(:", r"invalid syntax \(manners\.py, line 1\)"),
        ("\nGood = good", r"NameError: name 'good' is not defined \(.*manners\.py, line 2\)"),
        ("raise SystemExit('set WORDS')", r"SystemExit: set WORDS \(.*manners\.py, line 1\)"),
    ],
)
def test_a_file_that_fails_is_told_with_the_line(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "manners.py").write_text(content)
    with pytest.raises(StartupError, match=rf"the stage .*manners\.py:Good cannot be loaded: {fault}"):
        find_stage(f"{tmp_path}/manners.py:Good")


def test_what_a_file_says_itself_is_told_as_it_is(tmp_path: Path) -> None:
    words = "raise StartupError('set WORDS')"
    (tmp_path / "manners.py").write_text(f"from penstock.schemas.errors import StartupError\n{words}")
    with pytest.raises(StartupError, match=r"^set WORDS$"):
        find_stage(f"{tmp_path}/manners.py:Good")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages with a stage of one name, one of which also has an entry point that is called otherwise."""
    (tmp_path / "installed_manners.py").write_text(FILE)
    for package, names in (("kind", ["polite", "friendly"]), ("rude", ["polite"])):
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        entries = "\n".join(f"{name} = installed_manners:Good" for name in names)
        (folder / "entry_points.txt").write_text(f"[penstock.stages]\n{entries}\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_of_two_packages_with_a_stage_of_one_name_none_is_taken() -> None:
    with pytest.raises(StartupError, match="kind and rude both have a stage called polite; uninstall one of them"):
        find_stage("polite")


@pytest.mark.usefixtures("installed")
def test_an_entry_point_has_the_name_of_its_stage() -> None:
    with pytest.raises(StartupError, match="the entry point friendly leads to a stage called 'polite': give both"):
        find_stage("friendly")


def test_a_file_with_the_name_of_a_module_replaces_none(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "queue.py").write_text(f"where = {folder!r}")
    names = [f"{tmp_path}/{folder}/queue.py:where" for folder in ("a", "b", "a")]
    assert [load_named(name) for name in names] == ["a", "b", "a"]
    assert sys.modules["queue"] is queue


def test_names_of_stages_differ_in_more_than_their_case() -> None:
    with pytest.raises(ValueError, match="a stage is listed twice"):  # their streams would be the same
        Settings(pipeline=("validate", "odd", "Odd", "queue", "batch", "infer", "stream"))
