"""What backends for embeddings and rankings share: batching the inputs of all requests into common passes."""

from __future__ import annotations

import base64
from bisect import insort
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from ...schemas.events import Delta
from ..backend import NoAdapters, NoPrefixes
from ..choice import Choice
from ..request import EmbeddingInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]  # [N, D]


class EmbeddingBackend(NoAdapters, NoPrefixes):
    """The common part of embedding backends: every step is one padded pass over waiting inputs.

    Requests take turns, each with its longest inputs first; inputs of the next requests fill the rest of a pass. Equal
    ones share a row, so that their scores are equal to the last digit.
    """

    room: int  # the most tokens of a pass, padding included; a longer input gets a pass of its own
    embedding_size: int  # numbers in a vector
    ranks = False  # its inputs are pairs of texts, and its vectors their scores, one number each
    num_running = 0  # rows of the current pass; set by `step`

    def __init__(self) -> None:
        self._turns: dict[str, list[Choice]] = {}  # by request, in order of their turns; the longest input last

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._turns.values()))

    def embed(self, prompts: list[tuple[int, ...]]) -> Vectors:
        """The vectors [N, D] of N prompts, from one padded pass; none depends on the other prompts."""
        raise NotImplementedError

    def add(self, choice: Choice) -> None:
        waiting = self._turns.setdefault(choice.request.id, [])
        insort(waiting, choice, key=lambda one: (len(one.prompt), one.prompt))

    def remove(self, choice: Choice) -> None:
        waiting = self._turns.get(choice.request.id, [])
        if choice in waiting:
            waiting.remove(choice)
        if not waiting:
            self._turns.pop(choice.request.id, None)

    def delay(self) -> float:
        return 0.0 if self._turns else inf

    def step(self) -> list[Delta]:
        taken: list[Choice] = []
        distinct: set[tuple[int, ...]] = set()
        longest = 0
        for request in list(self._turns):
            waiting = self._turns.pop(request)
            while waiting:
                longest = max(longest, len(waiting[-1].prompt))
                distinct.add(waiting[-1].prompt)
                if taken and len(distinct) * longest > self.room:
                    self._turns[request] = waiting  # behind the others
                    return self._run(taken)
                taken.append(waiting.pop())
        return self._run(taken)

    def _run(self, taken: list[Choice]) -> list[Delta]:
        self.num_running = len(taken)
        try:
            distinct = list(dict.fromkeys(choice.prompt for choice in taken))
            vectors = dict(zip(distinct, self.embed(distinct), strict=True))
        except Exception as error:
            if len(taken) == 1:
                return [taken[0].fail(error)]
            return [delta for choice in taken for delta in self._run([choice])]  # so that only the culprit fails
        finally:
            self.num_running = 0
        text = _score if self.ranks else _text
        return [replace(one.end("stop"), text=text(one, vectors[one.prompt])) for one in taken]


def _text(choice: Choice, vector: NDArray[np.float32]) -> str:
    """The vector in base64; a shortened one is normalised again (https://arxiv.org/abs/2205.13147)."""
    assert isinstance(choice.request, EmbeddingInput)
    if choice.request.dimensions is not None:
        vector = vector[: choice.request.dimensions]
        vector = vector / max(float((vector**2).sum()) ** 0.5, 1e-12)
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _score(choice: Choice, vector: NDArray[np.float32]) -> str:
    """The score in decimal digits, as many as tell it from every other float32."""
    return str(vector[0])
