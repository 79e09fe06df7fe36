"""What the engine returns: finished generations and statistics."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from ..schemas.events import Delta, ErrorBody, FinishReason, TokenLogprob
from .handle import RequestHandle
from .request import EngineRequest
from .text.tokenizer_port import TokenizerLike

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counts in tokens, times in seconds. `generated_tokens` counts all choices, `cached_tokens` one prompt.

    `time_to_first_token` is None if no token was generated.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    time_to_first_token: float | None
    total_time: float

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.total_time if self.total_time > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One answer. `raw_text` decodes all of `token_ids`; `text` leaves out special tokens and stop strings.

    `logprobs` has one entry a token, and `prompt_logprobs` one a token of the prompt, if the request asked for them.
    `error` is set with finish reason "error".
    """

    token_ids: tuple[int, ...]
    text: str
    raw_text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    error: ErrorBody | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The `params.n` answers to one prompt. The properties are those of the first.

    `fallback` is the backend that made them, if it is not the first.
    """

    choices: tuple[ChoiceOutput, ...]
    stats: GenerationStats
    fallback: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def raw_text(self) -> str:
        return self.choices[0].raw_text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].prompt_logprobs

    @property
    def error(self) -> ErrorBody | None:
        return self.choices[0].error


class Embedding(NamedTuple):
    """One input's vector, float32 [D], and its number of tokens."""

    vector: NDArray[np.float32]
    prompt_tokens: int

    @classmethod
    def of(cls, text: str, prompt_tokens: int) -> Self:
        """That of an input whose delta has this text."""
        import numpy as np

        return cls(np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32), prompt_tokens)


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Guesses since the start: how often a step checked some for a choice, their tokens, and those that were right.

    `off` says why none are made; empty if they are.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    off: str = ""


@dataclass(frozen=True, slots=True)
class SpillStats:
    """The prefix cache on disk: `num_bytes` in its directory, and blocks since the start: written, read into memory,
    dropped because too many waited to be written, and damaged ones that were removed.

    `off` says why the disk is not used any more; empty if it is, or if no directory is set.
    """

    num_bytes: int = 0
    num_written: int = 0
    num_found: int = 0
    num_dropped: int = 0
    num_damaged: int = 0
    off: str = ""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The key-value cache: `memory` in bytes, room for `num_tokens`, of which running requests hold `usage`, 0 to 1.

    The counts from `num_queried_tokens` on are since the start: tokens looked up in the prefix cache, tokens found,
    cached blocks evicted, requests preempted; `speculation` counts the tokens guessed, `spill` the blocks on disk.
    """

    memory: int
    num_tokens: int
    usage: float
    num_blocks: int
    num_cached_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_preemptions: int
    speculation: SpeculationStats = SpeculationStats()
    spill: SpillStats = SpillStats()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was built; `num_running` and `num_waiting` are choices at this moment.

    `cache` is None for a backend without a key-value cache of its own. `adapter_memory` is in bytes: it counts an
    adapter until the last request that uses it has ended.
    """

    num_running: int
    num_waiting: int
    num_requests: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_steps: int
    cache: CacheStats | None = None
    adapter_memory: int = 0

    def plus(self, other: EngineStats) -> EngineStats:
        """The sums of both, with this one's cache."""
        names = ("running", "waiting", "requests", "prompt_tokens", "generated_tokens", "steps")
        sums = {f"num_{name}": getattr(self, f"num_{name}") + getattr(other, f"num_{name}") for name in names}
        return replace(self, **sums, adapter_memory=self.adapter_memory + other.adapter_memory)


class OutputBuilder:
    """Collects the deltas of one request. The caller passes the times, in seconds on its own clock."""

    def __init__(self, request: EngineRequest, started: float, fallback: str | None = None) -> None:
        self._request = request
        self._fallback = fallback
        self._started = started
        self._first: float | None = None  # when the first token came; set by `add`
        self._deltas: dict[int, list[Delta]] = {request.first_choice + index: [] for index in range(request.params.n)}

    def add(self, deltas: Sequence[Delta], now: float) -> None:
        for delta in deltas:
            self._deltas[delta.choice].append(delta)
            if self._first is None and delta.token_ids:
                self._first = now

    def build(self, tokenizer: TokenizerLike, now: float) -> GenerationOutput:
        """The output, once every choice has finished."""
        choices = tuple(_choice(deltas, tokenizer) for deltas in self._deltas.values())
        stats = GenerationStats(
            prompt_tokens=len(self._request.prompt),
            cached_tokens=max(deltas[-1].cached_tokens for deltas in self._deltas.values()),
            generated_tokens=sum(len(choice.token_ids) for choice in choices),
            time_to_first_token=None if self._first is None else self._first - self._started,
            total_time=now - self._started,
        )
        return GenerationOutput(choices, stats, self._fallback)


async def collected(handle: RequestHandle, tokenizer: TokenizerLike, clock: Callable[[], float]) -> GenerationOutput:
    """The output of a request that begins now; `clock` is in seconds."""
    builder = OutputBuilder(handle.request, clock(), handle.fallback)
    while not handle.finished:
        builder.add(await handle.take(), clock())
    return builder.build(tokenizer, clock())


def _choice(deltas: list[Delta], tokenizer: TokenizerLike) -> ChoiceOutput:
    last = deltas[-1]
    if last.finish_reason is None:
        raise ValueError(f"choice {last.choice} has not finished; add all its deltas first")
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    return ChoiceOutput(
        token_ids=token_ids,
        text="".join(delta.text for delta in deltas),
        raw_text=tokenizer.decode(token_ids),
        finish_reason=last.finish_reason,
        logprobs=None if last.logprobs is None else tuple(x for delta in deltas for x in delta.logprobs or ()),
        error=last.error,
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
