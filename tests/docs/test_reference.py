"""What users look up is what the code does: the generated tables, the parameters, the headers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from pages import ROOT

from penstock.schemas.events import FinishReason
from penstock.schemas.openai.body import Body
from penstock.schemas.openai.completions import ChatRequest, CompletionRequest
from penstock.schemas.openai.responses.request import ResponsesRequest
from penstock.streams import port

PAGE = ROOT / "docs" / "reference.md"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "deploy" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_code(reference: ModuleType) -> None:
    text = PAGE.read_text("utf-8")
    assert reference.filled(text) == text, f"docs/reference.md is out of date: run `{reference.COMMAND}`"


def test_a_page_without_markers_is_refused(reference: ModuleType) -> None:
    with pytest.raises(ValueError, match="settings"):
        reference.filled("# Reference\n")


def words(page: Path, heading: str) -> set[str]:
    """What stands in backticks in the section of a page, `a.b` and its parts too."""
    text = page.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, f"{page.name} has no section {heading!r}"
    found = set(re.findall(r"`([^`]+)`", text))
    return found | {part for word in found for part in re.split(r"[.:= ]+", word)}


@pytest.mark.parametrize(
    ("kind", "heading"),
    [
        (ChatRequest, "Chat and text completions"),
        (CompletionRequest, "Chat and text completions"),
        (ResponsesRequest, "`/v1/responses`"),
    ],
)
def test_every_parameter_is_explained(kind: type[Body], heading: str) -> None:
    assert sorted(kind.field_names() - words(ROOT / "docs" / "http-api.md", heading)) == []


def test_every_finish_reason_is_named() -> None:
    page = (ROOT / "docs" / "nats.md").read_text("utf-8").partition("Finish reasons:")[2].partition("\n")[0]
    named = set(re.findall(r"`(\w+)`", page))
    assert named == set(FinishReason.__args__)  # type: ignore[attr-defined]


def test_every_header_of_a_message_is_named() -> None:
    headers = {value for name, value in vars(port).items() if name.isupper() and isinstance(value, str)}
    assert len(headers) > 5
    assert sorted(headers - words(PAGE, "NATS subjects")) == []


def test_every_log_event_that_operators_look_for_is_logged() -> None:
    quoted = set(re.findall(r"log(?: line)? `([^`]+)`", (ROOT / "docs" / "operations.md").read_text("utf-8")))
    events = set(re.findall(r"^\| (?:error|warning|info) \| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE))
    assert len(quoted) > 4
    assert quoted - events == set()


def test_every_code_that_a_page_names_is_in_the_table_of_errors() -> None:
    named = {
        code for page in PAGE.parent.glob("*.md") for code in re.findall(r"\b[45]\d\d `(\w+)`", page.read_text("utf-8"))
    }
    assert {"headers_too_large", "header_timeout", "too_many_connections"} <= named
    assert sorted(named - words(PAGE, "Errors")) == []
