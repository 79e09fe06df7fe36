"""Keeps answers within their grammars: a logits processor of vLLM that asks the choices' own matchers. Imports vLLM."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from ..grammar.matcher import Matcher
from ..sampler import forbid

KEY = "penstock"  # of a request's name in `SamplingParams.extra_args`


class Grammars(LogitsProcessor):  # type: ignore[misc]
    """vLLM makes the object; `matchers`, by the names of requests, are those of one engine in this process.

    A matcher has accepted all tokens that came before: vLLM is stepped, and only then are its tokens added to choices.
    """

    matchers: ClassVar[dict[str, Matcher]]  # set by `of`

    @classmethod
    def of(cls, matchers: dict[str, Matcher]) -> type[Self]:
        """The class for an engine whose matchers these are."""
        return type(cls.__name__, (cls,), {"matchers": matchers})

    def __init__(self, *_: Any) -> None:
        self._rows: dict[int, Matcher] = {}  # by row of the batch

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, self._matcher_of)

    def _matcher_of(self, params: Any, *_: Any) -> Matcher | None:
        return self.matchers.get((params.extra_args or {}).get(KEY, ""))

    def apply(self, logits: Tensor) -> Tensor:
        forbid(logits, dict(sorted(self._rows.items())))
        return logits
