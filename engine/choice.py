"""One choice of a request while it runs: the part that all backends share, from a sampled token to a delta."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schemas.errors import GenerationFailed, Refusal
from ..schemas.events import Delta, ErrorBody, FinishReason, TokenLogprob, TopLogprob
from .adapters.loaded import Adapter
from .grammar.matcher import Matcher
from .models import ModelInfo
from .plug_ins.running import ChoicePlugIns
from .request import EngineRequest, Preemption
from .text.detokenizer import Detokenizer
from .text.stops import StopMatcher
from .text.tokenizer_port import TokenizerLike

if TYPE_CHECKING:  # it imports numpy, which light processes do without
    from .vision.layout import ImageLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenLogprob:
    """The log-probability of a chosen token in the raw distribution, and the best tokens as (id, log-probability).

    `rank` is one more than the number of tokens that are more likely; only tokens of prompts need it.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class Choice:
    """The state of one choice.

    A backend reads `prompt`, `tokens` and `finish`, samples within `matcher`, and calls `append`; it also sets
    `cached_tokens`, `pending`, `is_waiting` and `num_computed`. A delta carries a token together with its text: while
    some of the text may be the start of a stop string, both are held back. Stop strings are matched only from the token
    on that reaches `min_tokens`; earlier text cannot be part of one.

    If the request asks for the prompt's log-probabilities, a backend passes them to `score` before the first `append`.
    """

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        tokenizer: TokenizerLike,
        info: ModelInfo,
        matcher: Matcher | None = None,
        adapter: Adapter | None = None,
        plug_ins: ChoicePlugIns | None = None,
    ) -> None:
        """The choice `index` of `request`, counted from 0, advanced by the tokens that `request.generated` has for it.

        `matcher` is the choice's own, at the start of the request's grammar; so are `plug_ins`, before any token.
        `adapter` is the one that the request names. Raises `GenerationFailed` if a plug-in fails on those tokens.
        """
        params = request.params
        self.request = request
        self.number = request.first_choice + index
        self.prompt = request.prompt
        self.matcher = matcher
        self.adapter = adapter
        self.plug_ins = plug_ins
        self.tokens: list[int] = []  # every token chosen so far; set by `_advance`
        self.finish: FinishReason | None = None  # why no token will follow; set by `_advance`, `end`, `fail`
        self.cached_tokens = 0  # prompt tokens found in the prefix cache; set by the backend
        self.pending = 0  # tokens chosen on the device that the host has not read yet; set by the backend
        self.is_waiting = True  # for its turn or for room; set by the backend
        self.num_computed = 0  # tokens computed so far, recomputed ones included; set by a backend with chunked prefill
        self.layout: ImageLayout | None = None  # of the images in the prompt; set by a backend that sees them
        self.preemptions: list[Preemption] = []  # of all choices of the request; set by the driver to its handle's
        self.end_token_ids = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else tokenizer.eos_token_ids
        )
        self._limit = min(params.max_tokens, info.context_length - len(request.prompt))
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, request.prompt, params.visible_token_ids, spaces=params.spaces_between_special_tokens
        )
        self._scores: list[TokenLogprob] = []  # of the prompt's tokens; set by `score`
        if params.prompt_logprobs is not None:
            first = tokenizer.piece(self.prompt[0])
            self._scores.append(TokenLogprob(first.text, self.prompt[0], None, first.bytes))
        self._stops = StopMatcher(params.stop)
        self._stopped_by: str | None = None  # the stopping criterion that ended the choice; set by `_advance`
        self._length = 0  # characters of clean text so far; set by `_add_text`
        self._text = ""  # clean text not yet in a delta; set by `_add_text` and `_take`
        self._unsent: deque[tuple[int, TokenLogprob | None]] = deque()  # tokens not yet in a delta: end in the text, …
        for token in request.generated[index] if request.generated else ():
            self._advance(token, None)
        self._text = ""
        self._unsent.clear()

    @property
    def index(self) -> int:
        """The index of the next token to choose."""
        return len(self.tokens) + self.pending

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are chosen."""
        return self.finish is not None or len(self.tokens) + self.pending >= self._limit

    @property
    def num_left(self) -> int:
        """The most tokens that may still be chosen."""
        return self._limit - self.index

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the prompt are complete, or not needed."""
        is_asked = self.request.params.prompt_logprobs is not None
        return not is_asked or bool(self.tokens) or len(self._scores) == len(self.prompt)

    def score(self, start: int, logprobs: Sequence[ChosenLogprob]) -> None:
        """Add the log-probabilities of the prompt from token `start` on: first 1, then where the last call ended."""
        tokens = self.prompt[start : start + len(logprobs)]
        self._scores[start:] = [self._describe(*one) for one in zip(tokens, logprobs, strict=True)]

    def append(self, token: int, logprob: ChosenLogprob | None = None) -> Delta | None:
        """Add the next token; returns the delta that is ready to send, if any. May set `finish`."""
        self._advance(token, None if logprob is None else self._describe(token, logprob))
        if self.finish is not None:
            return self._take(len(self._unsent))
        shown = self._length - self._stops.held
        ready = 0
        for end, _ in self._unsent:
            if end > shown:
                break
            ready += 1
        return self._take(ready) if ready else None

    def end(self, reason: FinishReason) -> Delta:
        """Finish the choice for `reason`; returns the last delta, with all that was held back."""
        if self.finish is None:
            try:
                self._add_text(self._flush())
            except Refusal as error:
                return self.fail(error)
        self.finish = reason
        return self._take(len(self._unsent))

    def fail(self, cause: Exception) -> Delta:
        """Finish with an error, even if decoding is what failed; returns the last delta.

        The client sees the message of a `Refusal`; other causes go to the log.
        """
        if not isinstance(cause, Refusal):
            _log.error("request %s failed", self.request.id, exc_info=cause)
            cause = GenerationFailed(f"the engine failed on this request ({type(cause).__name__}); send it again")
        self.finish = "error"
        return self._take(len(self._unsent), ErrorBody.of(cause))

    def _advance(self, token: int, logprob: TokenLogprob | None) -> None:
        ended = token in self.end_token_ids
        if self.matcher is not None and not ended:
            self.matcher.accept(token)
        text = "" if ended else self._detokenizer.push(token)
        ended = ended or (self.matcher is not None and self.matcher.is_over)
        self.tokens.append(token)
        if self.plug_ins is not None:
            self.plug_ins.accept(token)
            text = self.plug_ins.clean(text)
            criterion = self.plug_ins.stopped_by(self.tokens, text)
            if criterion is not None and not ended and len(self.tokens) >= self.request.params.min_tokens:
                self._stopped_by, ended = criterion, True
        full = len(self.tokens) >= self._limit
        if ended or full:
            text += self._flush()
        cut = self._add_text(text)
        self._unsent.append((self._length, logprob))
        if cut:
            self.finish = "stop_sequence"
        elif ended:
            self.finish = "stop"
        elif full:
            self.finish = "length"

    def _flush(self) -> str:
        """The clean text that is left at the end."""
        text = self._detokenizer.flush()
        return text if self.plug_ins is None else self.plug_ins.clean(text) + self.plug_ins.flush()

    def _add_text(self, text: str) -> bool:
        """Add clean text; returns whether a stop string cut it."""
        self._text += text
        self._length += len(text)
        if not self.request.params.stop or len(self.tokens) < self.request.params.min_tokens:
            return False
        cut = self._stops.push(text)
        if cut is None:
            return False
        self._text = self._text[: max(len(self._text) - cut, 0)]
        self._length -= cut
        return True

    def _take(self, count: int, error: ErrorBody | None = None) -> Delta:
        """Make a delta of the first `count` unsent tokens and their text."""
        index = len(self.tokens) - len(self._unsent)
        taken = [self._unsent.popleft() for _ in range(count)]
        text, self._text = self._text, ""
        if self._unsent:  # the rest belongs to tokens that are still held back
            kept = self._length - taken[-1][0]
            text, self._text = text[: len(text) - kept], text[len(text) - kept :]
        logprobs = None
        if self.request.params.logprobs is not None:
            logprobs = tuple(logprob for _, logprob in taken if logprob is not None)
        return Delta(
            request=self.request.id,
            epoch=self.request.epoch,
            choice=self.number,
            index=index,
            token_ids=tuple(self.tokens[index : index + count]),
            text=text,
            logprobs=logprobs,
            finish_reason=self.finish,
            stop_reason=self._stop_reason() if self.finish is not None else None,
            cached_tokens=self.cached_tokens if self.finish is not None else 0,
            error=error,
            prompt_logprobs=tuple(self._scores) if index == 0 and self._scores else None,
        )

    def _stop_reason(self) -> str | int | None:
        """The request's stop string, stopping criterion or stop token that ended the choice."""
        if self.finish == "stop_sequence":
            return self._stops.found
        if self.finish == "stop" and self._stopped_by is not None:
            return self._stopped_by
        last = self.tokens[-1] if self.tokens else None
        return last if self.finish == "stop" and last in self.request.params.stop_token_ids else None

    def _describe(self, token: int, chosen: ChosenLogprob) -> TokenLogprob:
        piece = self._tokenizer.piece(token)
        top = tuple(
            TopLogprob(rival.text, token_id, logprob, rival.bytes)
            for token_id, logprob in chosen.top
            for rival in [self._tokenizer.piece(token_id)]
        )
        return TokenLogprob(piece.text, token, chosen.logprob, piece.bytes, top, chosen.rank)
