"""What embedding backends share: checking inputs, and batching those of all requests into common passes.

Knows no torch: the validate stage checks inputs here too.
"""

from __future__ import annotations

import base64
from bisect import insort
from collections.abc import Sequence as Row
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from ...schemas.errors import InvalidRequest
from ...schemas.events import Delta
from ...schemas.openai.embeddings import MAX_INPUTS, MAX_TOKENS, EmbeddingRequest
from ..backend import NoPrefixes
from ..request import EngineRequest
from ..sequence import Sequence
from ..text.tokenizer_port import TokenizerLike, encode_within

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]  # [N, D]


class Embedding(NamedTuple):
    """One input's vector, float32 [D], and its number of tokens."""

    vector: NDArray[np.float32]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingInput(EngineRequest):
    """One text to embed; the text of its only delta is the vector, base64 of little-endian float32.

    Inputs with the same id form one request and share its turns. `dimensions` shortens the vector; None keeps it whole.
    """

    dimensions: int | None = None


def prepare_inputs(
    request: EmbeddingRequest, tokenizer: TokenizerLike, *, context_length: int, name: str
) -> list[list[int]]:
    """The token ids of every input; `name` is the model's, for error messages. Raises `InvalidRequest`."""
    inputs = request.prompts
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"input has {len(inputs)} entries; send at most {MAX_INPUTS} a request.", param="input")
    prompts = []
    for index, text in enumerate(inputs):
        path = "input" if len(inputs) == 1 else f"input[{index}]"
        if not text or (isinstance(text, str) and not text.strip()):
            raise InvalidRequest(f"{path} is blank; send some text.", code="empty_prompt", param=path)
        prompts.append(encode_within(tokenizer, text, context_length, path) if isinstance(text, str) else text)
        check_input(prompts[-1], path, context_length=context_length, vocabulary_size=tokenizer.vocabulary_size)
    if (total := sum(map(len, prompts))) > MAX_TOKENS:
        raise InvalidRequest(
            f"The inputs have {total} tokens together; send {name} at most {MAX_TOKENS} a request.", param="input"
        )
    return prompts


def check_input(ids: Row[int], path: str, *, context_length: int, vocabulary_size: int) -> None:
    """Raise `InvalidRequest` for an input that the model can never embed."""
    if not ids:
        raise InvalidRequest(f"{path} is empty; send some text.", code="empty_prompt", param=path)
    if len(ids) > context_length:
        raise InvalidRequest(
            f"{path} has {len(ids)} tokens, but the context length of this model is {context_length} tokens.",
            code="context_length_exceeded",
            param=path,
        )
    if outside := [token for token in (min(ids), max(ids)) if not 0 <= token < vocabulary_size]:
        raise InvalidRequest(
            f"{path}: token id {outside[0]} is outside the model's vocabulary of {vocabulary_size}.", param=path
        )


class EmbeddingBackend(NoPrefixes):
    """The common part of embedding backends: every step is one padded pass over waiting inputs.

    Requests take turns, each with its longest inputs first; inputs of the next requests fill the rest of a pass.
    """

    room: int  # the most tokens of a pass, padding included; a longer input gets a pass of its own
    embedding_size: int  # numbers in a vector
    num_running = 0  # rows of the current pass; set by `step`

    def __init__(self) -> None:
        self._turns: dict[str, list[Sequence]] = {}  # by request, in order of their turns; the longest input last

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._turns.values()))

    def embed(self, prompts: list[Row[int]]) -> Vectors:
        """The vectors [N, D] of N prompts, from one padded pass; none depends on the other prompts."""
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        waiting = self._turns.setdefault(sequence.request.id, [])
        insort(waiting, sequence, key=lambda one: len(one.prompt))

    def remove(self, sequence: Sequence) -> None:
        waiting = self._turns.get(sequence.request.id, [])
        if sequence in waiting:
            waiting.remove(sequence)
        if not waiting:
            self._turns.pop(sequence.request.id, None)

    def delay(self) -> float:
        return 0.0 if self._turns else inf

    def step(self) -> list[Delta]:
        taken: list[Sequence] = []
        longest = 0
        for request in list(self._turns):
            waiting = self._turns.pop(request)
            while waiting:
                longest = max(longest, len(waiting[-1].prompt))
                if taken and (len(taken) + 1) * longest > self.room:
                    self._turns[request] = waiting  # behind the others
                    return self._run(taken)
                taken.append(waiting.pop())
        return self._run(taken)

    def _run(self, taken: list[Sequence]) -> list[Delta]:
        self.num_running = len(taken)
        try:
            vectors = self.embed([sequence.prompt for sequence in taken])
        except Exception as error:
            if len(taken) == 1:
                return [taken[0].fail(error)]
            return [delta for sequence in taken for delta in self._run([sequence])]  # so that only the culprit fails
        finally:
            self.num_running = 0
        return [replace(one.end("stop"), text=_text(one, vector)) for one, vector in zip(taken, vectors, strict=True)]


def _text(sequence: Sequence, vector: NDArray[np.float32]) -> str:
    """The vector in base64; a shortened one is normalised again (https://arxiv.org/abs/2205.13147)."""
    assert isinstance(sequence.request, EmbeddingInput)
    if sequence.request.dimensions is not None:
        vector = vector[: sequence.request.dimensions]
        vector = vector / max(float((vector**2).sum()) ** 0.5, 1e-12)
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
