"""JSON merge patches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.wire.merge_patch import Document, merge_patch, patched

leaves = st.integers(0, 3) | st.sampled_from(["", "x"]) | st.lists(st.integers(0, 3), max_size=2)
documents = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), leaves, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), leaves | inner, max_size=4),
)


@given(documents, documents)
def test_a_patch_turns_one_document_into_the_next(before: Document, after: Document) -> None:
    assert patched(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}


def test_as_in_the_standard() -> None:
    before: Document = {
        "title": "Goodbye!",
        "author": {"given": "John", "family": "Doe"},
        "tags": ["a"],
        "content": "x",
    }
    patch: Document = {"title": "Hello!", "phone": "+01", "author": {"family": None}, "tags": ["b"]}
    after = {"title": "Hello!", "author": {"given": "John"}, "tags": ["b"], "content": "x", "phone": "+01"}
    assert patched(before, patch) == after
    assert merge_patch(before, after) == patch
