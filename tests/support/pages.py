"""The documentation as data: its pages, their code blocks and what these print, and the paths that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
_DEPLOY = [ROOT / "deploy" / name / "README.md" for name in ("compose", "examples", "kubernetes", "systemd")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *_DEPLOY, *DOCS]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```\n?", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """`output` is the block of text or JSON that follows at once: what running the code prints, `…` for what varies."""

    page: Path
    line: int
    language: str
    code: str
    output: str

    @property
    def place(self) -> str:
        return f"{named(self.page)}:{self.line}"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    """The code blocks of these languages, in order."""
    text = page.read_text("utf-8")
    found = list(_FENCE.finditer(text))
    made = []
    for one, following in zip(found, [*found, None][1:], strict=True):
        adjacent = following is not None and not text[one.end() : following.start()].strip()
        is_output = adjacent and following is not None and following[2] in ("", "json")
        code = re.sub(rf"^{one[1]}", "", one[3], flags=re.MULTILINE)
        line = text.count("\n", 0, one.start()) + 2
        made.append(Block(page, line, one[2], code, following[3] if is_output and following is not None else ""))
    return [block for block in made if block.language in languages]


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text("utf-8"))


def matches(output: str, expected: str) -> bool:
    """Whether the output is the expected one; `…` stands for anything, and white space does not count."""
    parts = ["".join(part.split()) for part in expected.split("…")]
    return re.fullmatch(".*?".join(map(re.escape, parts)), "".join(output.split()), re.DOTALL) is not None
