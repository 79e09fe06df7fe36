"""JSON merge patches (RFC 7386): what turns one document into the next. No document holds a null."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def merge_patch(before: Document, after: Document) -> Document:
    """The patch that turns `before` into `after`."""
    patch: Document = dict.fromkeys(before.keys() - after.keys())
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if changed := merge_patch(old, value):
                patch[key] = changed
        elif value != old:
            patch[key] = value
    return patch


def patched(document: Document, patch: Document) -> Document:
    """The document with the patch applied."""
    merged = dict(document)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            old = merged.get(key)
            merged[key] = patched(old if isinstance(old, dict) else {}, value)
        else:
            merged[key] = value
    return merged
