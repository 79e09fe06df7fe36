"""A filter of your own: words that nobody shall read are masked in every answer, and a phrase ends it.

export PENSTOCK_PIPELINE=validate,queue,batch,infer,mask,stream
penstock serve MODEL &
MASKED_WORDS=mellon,sesame LAST_WORD=Amen penstock stage deploy/examples/mask.py:Mask
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from penstock.schemas.errors import StartupError
from penstock.schemas.events import Started
from penstock.stages import Filter, Token

WORDS = [word.strip() for word in os.environ.get("MASKED_WORDS", "").split(",") if word.strip()]
if not WORDS:
    raise StartupError("name the words to mask, with commas between, in MASKED_WORDS")
MASKED = re.compile(rf"\b({'|'.join(map(re.escape, WORDS))})\b", re.IGNORECASE)
UNFINISHED = re.compile(r"\w*\Z")
LAST_WORD = re.compile(rf"\b{re.escape(os.environ['LAST_WORD'])}\b") if "LAST_WORD" in os.environ else None


class Mask(Filter):
    """Whole words, in any case. A word is held back until it is whole: its end may come with another token."""

    name = "mask"

    def __init__(self, answer: Started, choice: int) -> None:
        super().__init__(answer, choice)
        self._held = ""

    async def process(self, token: Token) -> Token:
        text = self._held + token.text
        whole = len(text) if token.finish_reason else len(text) - len(UNFINISHED.findall(text)[0])
        self._held = text[whole:]
        said = MASKED.sub("*****", text[:whole])
        if LAST_WORD and (last := LAST_WORD.search(said)):
            return replace(token, text=said[: last.end()], finish_reason="stop")
        return replace(token, text=said)
