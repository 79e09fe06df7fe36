"""Guesses the next tokens of a text from the last place where it went on from the same tokens. Never sees a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

LONG, SHORT = 4, 2  # tokens that a place must share with the end of the text
_BITS = 24  # of a token in a key
_LONG_KEY, _SHORT_KEY = (1 << LONG * _BITS) - 1, (1 << SHORT * _BITS) - 1
_MOST_PROMPT = 16_384  # tokens of a prompt that are searched, the last ones


class Repeats:
    """One text, which grows, and the place in it that its end repeats.

    A place is kept as long as the text goes on as it does; then the newest place that shares the last four tokens is
    taken, or the last two. `run` is how many tokens place and end have shared so far; 0 without a place.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self.run = 0  # set by `extend`
        self._tokens: list[int] = []
        self._key = _LONG_KEY  # the last four tokens; before the first, ones that do not exist
        self._source = 0  # the index of the token that followed the place
        self._long: dict[int, int] = {}  # keys of four tokens -> the index behind the newest of them
        self._short: dict[int, int] = {}
        self.extend(prompt)

    @classmethod
    def of(cls, prompt: tuple[int, ...]) -> Repeats:
        return cls(islice(prompt, max(len(prompt) - _MOST_PROMPT, 0), None))

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        text, long, short = self._tokens, self._long, self._short
        for token in tokens:
            follows = self.run and text[self._source] == token
            text.append(token)
            self._key = key = (self._key << _BITS | token) & _LONG_KEY
            if follows:
                self._source += 1
                self.run += 1
            else:
                source, self.run = long.get(key), LONG
                if source is None:
                    source, self.run = short.get(key & _SHORT_KEY), SHORT
                if source is None:
                    source, self.run = 0, 0
                self._source = source
            long[key] = short[key & _SHORT_KEY] = len(text)

    def propose(self, count: int) -> list[int]:
        """The `count` tokens that follow if the text goes on repeating; none without a place."""
        if not self.run:
            return []
        found = self._tokens[self._source : self._source + count]
        period = len(self._tokens) - self._source
        while len(found) < count:  # the place reaches to the end of the text: what was found repeats as well
            found.append(found[-period])
        return found
