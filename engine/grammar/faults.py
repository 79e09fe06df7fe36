"""What a client is told of a grammar that cannot be used."""

from __future__ import annotations

import re

from ...schemas.errors import InvalidRequest

_MAX_REASON_LENGTH = 200
_CLEARER = (  # what xgrammar's messages leave out or do not explain
    (r"but got$", "but the grammar ends there"),
    (r"Expect element,", 'Expect a text "…", a class […], the name of a rule or a group (…),'),
    (r"Expect rule name$", "Expect the name of a rule, or the end"),
    (r"(Invalid escape sequence)(\\.*)?$", r"\1 \2; write \\\\ for a backslash"),
    ("Unexpected character: \ufffd", "Unexpected character: one beyond ASCII"),
    (r"(Unexpected character: .*)$", r'\1; texts stand in "…", and classes of characters in […]'),
    (r"sequence ;", "sequence;"),
)


def refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_grammar", param="response_format")


def reason(error: Exception) -> str:
    """xgrammar's message without its time stamp, source line and condition, and complete."""
    # xgrammar takes characters beyond ASCII apart, and quotes a part of one.
    text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*\) is false: )?", "", text).strip()
    for found, better in _CLEARER:
        text = re.sub(found, better, text)
    text = text or type(error).__name__
    return text if len(text) <= _MAX_REASON_LENGTH else text[: _MAX_REASON_LENGTH - 1] + "…"
