"""The plug-ins of one choice at work. Whatever one does wrong becomes an error with its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...schemas.errors import GenerationFailed
from .port import CleanUp, LogitsProcessor, StoppingCriterion

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class ChoicePlugIns:
    """Each plug-in has the name by which the request asked for it; they work in the request's order.

    All methods raise `GenerationFailed`.
    """

    def __init__(
        self,
        processors: Sequence[tuple[str, LogitsProcessor]],
        criteria: Sequence[tuple[str, StoppingCriterion]],
        clean_ups: Sequence[tuple[str, CleanUp]],
    ) -> None:
        self.processes = bool(processors)
        self.fault: GenerationFailed | None = None  # of a processor in the newest step; set by the sampler
        self._processors, self._criteria, self._clean_ups = processors, criteria, clean_ups
        self._text = ""  # of the answer so far, for criteria; set by `stopped_by`

    def accept(self, token: int) -> None:
        for name, processor in self._processors:
            _guarded("logits processor", name, partial(processor.accept, token))

    def process(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        """The scores [V] that all processors make of `scores`, which stay as they are."""
        impossible, inf = scores.isneginf(), float("inf")
        changed = scores
        for name, processor in self._processors:
            before = changed
            changed = _guarded("logits processor", name, partial(processor.process, tokens, before.clone()))
            if not hasattr(changed, "shape") or changed.shape != scores.shape:
                found = getattr(changed, "shape", type(changed).__name__)
                raise _failed("logits processor", name, f"it returned {found}, not scores of {tuple(scores.shape)}")
            changed = changed.to(scores).masked_fill(impossible, -inf)
            if not (changed < inf).all() and bool((before < inf).all()):
                raise _failed("logits processor", name, "it returned scores that are no numbers, or endless")
            if bool(changed.isneginf().all()) and not bool(before.isneginf().all()):
                raise _failed("logits processor", name, "it forbids every token that is still possible")
        return changed

    def clean(self, text: str) -> str:
        for name, clean_up in self._clean_ups:
            if text:
                text = _text(name, partial(clean_up.push, text))
        return text

    def flush(self) -> str:
        """What the clean-ups have held back: that of one goes through those after it."""
        left = ""
        for name, clean_up in self._clean_ups:
            if left:
                left = _text(name, partial(clean_up.push, left))
            left += _text(name, clean_up.flush)
        return left

    def stopped_by(self, tokens: Sequence[int], text: str) -> str | None:
        """The criterion that ends the answer with its last token, whose `text` comes now; each is asked."""
        if not self._criteria:
            return None
        self._text += text
        found = [
            name
            for name, criterion in self._criteria
            if _guarded("stopping criterion", name, partial(criterion.stops, tokens, self._text))
        ]
        return found[0] if found else None


def _text(name: str, call: Callable[[], str]) -> str:
    text = _guarded("clean-up", name, call)
    if not isinstance(text, str):
        raise _failed("clean-up", name, f"it returned {type(text).__name__}, not a text")
    return text


def _guarded(kind: str, name: str, call: Callable[[], Result]) -> Result:
    try:
        return call()
    except Exception as error:
        _log.warning("%s %r failed", kind, name, exc_info=error)
        raise _failed(kind, name, type(error).__name__) from error


def _failed(kind: str, name: str, reason: str) -> GenerationFailed:
    return GenerationFailed(f"The {kind} {name!r} failed on this request ({reason}); leave it out, or have it mended.")
