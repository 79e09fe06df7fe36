"""What the engine is asked: one prompt, `n` choices, everything random already decided."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from ..schemas.errors import InvalidRequest
from ..schemas.params import GenerationParams
from .models import ModelInfo


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to be continued `params.n` times.

    `id` and `epoch` go into every delta. Choices are numbered from `first_choice`, so that several prompts can make up
    one request. `seed` is decided before the engine sees it (`resolve_seed`): together with a choice's number and a
    token's index it fixes the draw, whoever makes it.

    `generated` holds, for each choice, token ids that an earlier holder of the request has already delivered (none at
    all: nothing was). They count as sent: the engine goes on with the next index, and only what is new appears.

    Cached prefixes are shared only between requests with the same `cache_salt`: a tenant's name, say. `priority` 0 is
    served first, then 1, and so on.
    """

    id: str
    prompt: tuple[int, ...]
    params: GenerationParams
    seed: int
    epoch: int = 1
    first_choice: int = 0
    generated: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""
    priority: int = 0


def resolve_seed(params: GenerationParams) -> int:
    """The request's own seed, or a random one of 63 bits; the caller keeps it for as long as the request lives."""
    return secrets.randbits(63) if params.seed is None else params.seed


def check_request(request: EngineRequest, info: ModelInfo) -> None:
    """Raise `InvalidRequest` for what the model can never serve; nothing has run yet."""
    params = request.params
    if not request.prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if len(request.prompt) >= info.context_length:
        raise InvalidRequest(
            f"the prompt has {len(request.prompt)} tokens, and the context of this model holds {info.context_length}, "
            "answer included",
            code="context_length_exceeded",
            param="prompt",
        )
    if not -(2**63) <= request.seed < 2**63:
        raise InvalidRequest(f"the seed {request.seed} does not fit into 64 bits", param="seed")
    _check_ids(request.prompt, "prompt", info)
    _check_ids(params.stop_token_ids, "stop_token_ids", info)
    _check_ids(params.logit_bias, "logit_bias", info)
    _check_ids(params.visible_token_ids, "visible_token_ids", info)
    for name in ("min_tokens", "ignore_eos", "stop_token_ids"):
        if params.grammar is not None and getattr(params, name):
            raise InvalidRequest(
                f"{name} cannot be combined with a grammar, which says itself where the answer ends", param=name
            )
    if request.generated and len(request.generated) != params.n:
        raise InvalidRequest(f"generated speaks of {len(request.generated)} choices, n={params.n}", param="generated")
    for tokens in request.generated:
        _check_ids(tokens, "generated", info)


def _check_ids(ids: Iterable[int], name: str, info: ModelInfo) -> None:
    outside = next((token for token in ids if not 0 <= token < info.vocabulary_size), None)
    if outside is not None:
        raise InvalidRequest(
            f"{name}: token id {outside} is outside the model's vocabulary of {info.vocabulary_size}", param=name
        )
