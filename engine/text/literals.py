"""A JSON or Python literal that arrives in pieces, written as JSON while it comes.

Models that mean JSON write Python now and then: single quotes, `True`, tuples, line breaks inside strings, escapes that
JSON does not have. All of that is put right on the way; what is already JSON stays as it is, white space included.
"""

from __future__ import annotations

import json
import re

_CLOSERS = {"{": "}", "[": "]", "(": ")", '"': '"', "'": "'"}
_WRITTEN = {"(": "[", ")": "]", "'": '"', "True": "true", "False": "false", "None": "null"}
_SCALAR = re.compile(r"True|False|None|true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PART = re.compile(r"[ \t\r\n:,]+|[\w.+-]+|.", re.DOTALL)
_STRING_PART = re.compile(r"""[^\\"'\x00-\x1f]+|\\(?:["\\/bfnrt']|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|.""", re.DOTALL)
# What stands at the end of a text and may go on.
_WORD = re.compile(r"[\w.+-]+")
_LONGEST_WORD = 400  # characters of a number, which are looked at again with each that comes
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?")


class Literal:
    """`done` when the value is complete, `broken` at the first thing that fits neither language.

    Commas and colons are taken wherever they stand: where they should not, the JSON is as invalid as the literal was.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []

    def take(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        """What `text` from `at` on adds to the JSON, and where it stopped.

        It stops before a word or an escape that might go on, unless the text has `ended`; the caller then offers the
        same characters again, and more.
        """
        pieces: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            quoted = self._closers[-1:] in (['"'], ["'"])
            if not ended and (_ESCAPE if quoted else _WORD).fullmatch(text, at):
                self.broken = len(text) - at > _LONGEST_WORD
                break
            found = (_STRING_PART if quoted else _PART).match(text, at)
            assert found is not None
            piece = self._in_string(found[0]) if quoted else self._between(found[0])
            if not self.broken:
                pieces.append(piece)
                at = found.end()
                self.done = not self._closers
        return "".join(pieces), at

    def _in_string(self, part: str) -> str:
        if part == self._closers[-1]:
            self._closers.pop()
            return '"'
        if len(part) > 1 and part[0] == "\\":
            return part.replace("\\'", "'").replace("\\x", "\\u00")
        return json.dumps(part, ensure_ascii=False)[1:-1]

    def _between(self, part: str) -> str:
        if part in _CLOSERS:
            self._closers.append(_CLOSERS[part])
        elif part == "".join(self._closers[-1:]):
            self._closers.pop()
        elif not (_SCALAR.fullmatch(part) or (self._closers and part[0] in " \t\r\n:,")):
            self.broken = True
        return _WRITTEN.get(part, part)


def as_json(text: str) -> str | None:
    """A whole literal as JSON; None if `text` is anything else."""
    literal = Literal()
    written, end = literal.take(text, 0, True)
    try:
        json.loads(written)
    except (ValueError, RecursionError):
        return None
    return written if literal.done and end == len(text) else None
