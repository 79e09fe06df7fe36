"""Keeps tabs out of the strings of JSON within a larger grammar, where other parts may have them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ...schemas.params import Grammar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_counts = re.compile(r'"m(?:in|ax)Length"').search


class Tabs(NamedTuple):
    """xgrammar allows them in strings of bounded length, and no line feeds, which text and white space may have, too.

    Both are masks of tokens: those with a tab anywhere, and those that begin with a line feed.
    """

    having: NDArray[np.int32]
    feeds: NDArray[np.int32]

    def remove(self, mask: NDArray[np.int32]) -> None:
        """Clear them where no line feed may come, unless nothing else may."""
        if not (mask & self.feeds).any() and (others := mask & ~self.having).any():
            mask[:] = others


def may_be_counted(grammar: Grammar) -> bool:
    """Whether a grammar has strings of bounded length among other parts."""
    return grammar.kind == "structural_tag" and _counts(grammar.text) is not None
