"""The longest result that a model is shown."""

from __future__ import annotations

MAX_TEXT = 256 * 1024  # bytes of UTF-8


def cut(text: str) -> str:
    """The first `MAX_TEXT` bytes of a text, followed by a sentence that says so where it was longer."""
    encoded = text.encode(errors="replace")  # half a surrogate pair cannot be encoded
    if len(encoded) <= MAX_TEXT:
        return encoded.decode()
    kept = encoded[:MAX_TEXT].decode(errors="ignore")
    return f"{kept}\n[The result was cut here: these are the first {MAX_TEXT} of {len(encoded)} bytes.]"
