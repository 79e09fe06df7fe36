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
