"""What a choice asks for, in vLLM's words. Needs no vLLM.

vLLM samples as `engine/sampler.py` does, but for its draws: bias, min_tokens, then penalties (repetition over prompt
and output, the others over output), then temperature, min_p, top-k and top-p; log-probabilities are those of the raw
logits. Stop strings and text are left to `Choice`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ...schemas.errors import GenerationFailed, InvalidRequest
from ..choice import Choice, ChosenLogprob

_COLDEST = 0.01  # vLLM raises lower temperatures to it


def sampling_of(choice: Choice) -> dict[str, Any]:
    """The fields of vLLM's `SamplingParams` for the rest of a choice; its prompt holds the tokens that there are.

    Raises `InvalidRequest` and `GenerationFailed` for what vLLM would do otherwise than asked.
    """
    params, begun = choice.request.params, len(choice.tokens)
    if 0 < params.temperature < _COLDEST:
        raise InvalidRequest(
            f"The backend 'vllm' has no temperature between 0 and {_COLDEST}; use 0, which is greedy, or a higher one.",
            code="unsupported_parameter",
            param="temperature",
        )
    if begun and (params.frequency_penalty or params.presence_penalty):
        raise GenerationFailed(
            "The worker of this request has ended, and the backend 'vllm' does not continue answers with "
            "frequency_penalty or presence_penalty; send the request again."
        )
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or 0,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "logit_bias": params.logit_bias or None,
        "seed": _seed(choice.request.seed, choice.number, begun),
        "max_tokens": choice.num_left,
        "min_tokens": min(max(params.min_tokens - begun, 0), choice.num_left),
        "stop_token_ids": sorted(choice.end_token_ids),
        "ignore_eos": True,  # the model's own are among those above, unless the request ignores them
        "logprobs": params.logprobs,
        "prompt_logprobs": None if choice.is_scored else params.prompt_logprobs,
        "detokenize": False,
    }


def chosen(token: int, found: Mapping[int, Any], count: int, is_ranked: bool = False) -> ChosenLogprob:
    """The log-probability of `token` and the `count` best, from vLLM's `Logprob` of each, its own among them."""
    best = sorted(found.items(), key=lambda entry: -entry[1].logprob)[:count]
    own = found[token]
    return ChosenLogprob(own.logprob, tuple((id, one.logprob) for id, one in best), own.rank if is_ranked else None)


def scores(tokens: Sequence[int], found: Sequence[Mapping[int, Any] | None], count: int) -> list[ChosenLogprob]:
    """The log-probabilities of a prompt's tokens from the second on."""
    rows = zip(tokens[1:], found[1:], strict=True)
    return [chosen(token, row, count, is_ranked=True) for token, row in rows if row is not None]


def _seed(seed: int, choice: int, begun: int) -> int:
    """63 bits that differ for each choice, and for a choice that begins anew after some tokens."""
    digest = blake2b(struct.pack("<qqq", seed, choice, begun), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
