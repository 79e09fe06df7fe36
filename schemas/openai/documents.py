"""How the model is shown documents and results of searches: as text between tags, which say where it comes from."""

from __future__ import annotations


def document(text: str, *, source: str | None = None, context: str | None = None) -> str:
    """A document whose file or title is `source`; `context` is what the client says about it."""
    return _tagged("document", text, source=source, context=context)


def search_result(text: str, *, source: str, title: str) -> str:
    return _tagged("search_result", text, source=source, title=title)


def _tagged(tag: str, text: str, **about: str | None) -> str:
    lines = [f"<{name}>{value}</{name}>" for name, value in about.items() if value]
    return "\n".join([f"<{tag}>", *lines, "<content>", text.strip("\n"), "</content>", f"</{tag}>"])
