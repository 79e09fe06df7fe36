"""Every link leads somewhere, and every path that a page names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, PAGES, ROOT, named, without_blocks

_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`|`(\w+\.(?:py|c|h|md|toml))`")
_ROOMS = tuple(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def paths(page: Path) -> set[str]:
    """What a page names as paths from the root; a bare file name belongs to the folder named before it in its line."""
    found = set()
    for line in without_blocks(page).splitlines():
        folder = ""
        for whole, bare in _PATH.findall(line):
            if whole.split("/")[0] in _ROOMS:
                found.add(whole)
                folder = whole.rpartition("/")[0]
            elif bare and folder and not (ROOT / bare).exists():
                found.add(f"{folder}/{bare}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_path_is_there(page: Path) -> None:
    assert sorted(path for path in paths(page) if not (ROOT / path).exists()) == []


def test_paths_are_found() -> None:
    assert len(paths(ROOT / "docs" / "architecture.md")) > 20
    assert len(paths(ROOT / "docs" / "engine.md")) > 20


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert [page.name for page in DOCS if f"docs/{page.name}" not in text] == []


def test_every_name_is_in_its_file() -> None:
    """The table of where to find things: a name is in one of the files that stand in its row."""
    table = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("| to find | read |\n|---|---|\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    assert len(rows) > 4
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        sources = "\n".join((ROOT / path).read_text("utf-8") for path in quoted if "/" in path)
        names = [part for name in quoted if "/" not in name for part in name.split(".")]
        assert [name for name in names if not re.search(rf"\b{name}\b", sources)] == [], row
