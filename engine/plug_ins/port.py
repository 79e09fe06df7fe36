"""What a generation plug-in is. A package derives a class from one of the three kinds below.

An instance works for one choice of one request. When a worker dies, the next one makes a new instance, and gives it the
tokens that there are already, in order: so its state may depend on its arguments, the prompt and these tokens, and on
nothing else, no clock and no chance. It runs in the worker's thread, where a slow one delays everybody. Whatever it
raises fails its own request. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..text.tokenizer_port import TokenizerLike

if TYPE_CHECKING:
    from torch import Tensor

INTERFACE = 1
"""The version of the classes of this module. It changes whenever a plug-in of before would no longer work."""


@dataclass(frozen=True, slots=True)
class Context:
    """The choice that a plug-in works for."""

    tokenizer: TokenizerLike
    prompt: tuple[int, ...]


class PlugIn(ABC):
    """Clients give the arguments that a subclass's `__init__` takes by name after the context.

    It raises `ValueError`, whose message the client gets, for those that it cannot use.
    """

    interface: ClassVar[int]  # the version of this module that a subclass was written for: `INTERFACE`, as a number

    def __init__(self, context: Context) -> None:
        self.context = context


class LogitsProcessor(PlugIn):
    """Changes the scores from which tokens are drawn.

    It comes after logit bias, grammar, `min_tokens` and penalties, and before temperature, `min_p`, `top_k` and
    `top_p`; what these have forbidden stays so. Log-probabilities are the model's own.
    """

    def accept(self, token: int) -> None:
        """Take note of the next token of the answer: called once for each, in order."""

    @abstractmethod
    def process(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        """The new scores, a tensor like `scores`: float32, [V], on the model's device; -inf forbids a token.

        `tokens` are those of the answer so far. It may be called several times for the same tokens.
        """


class StoppingCriterion(PlugIn):
    """Ends an answer behind one of its tokens, with the finish reason "stop" and its own name as stop reason."""

    @abstractmethod
    def stops(self, tokens: Sequence[int], text: str) -> bool:
        """Whether the last of `tokens` ends the answer: called once for each, in order.

        `text` is the answer so far. Before `min_tokens` the result does not count.
        """


class CleanUp(PlugIn):
    """Changes the text of an answer, before stop strings are looked for in it. Tokens stay what they are."""

    @abstractmethod
    def push(self, text: str) -> str:
        """Take the next piece of the text, and return what is certain by now."""

    def flush(self) -> str:
        """What is still held back at the end."""
        return ""
