"""A request to the engine: one prompt, `n` choices, the seed already decided."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..schemas.errors import InvalidRequest, prompt_too_long
from ..schemas.params import GenerationParams
from .models import ModelInfo
from .vision.images import PromptImage

MAX_SCORED = 100_000  # log-probabilities of prompts in one answer, alternatives included: each takes about 80 bytes


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to be continued `params.n` times.

    `id` and `epoch` go into every delta. Choices are numbered from `first_choice`, so that several prompts can make up
    one request. The caller decides `seed` (`resolve_seed`): with a choice's number and a token's index it determines
    the draw, on any worker.

    `generated` holds, for each choice, the token ids that an earlier worker has delivered; it is empty if there are
    none. The engine resumes at the next index and returns only new tokens.

    Requests share cached prefixes only if they have the same `cache_salt`, such as a tenant's name, and the same
    `adapter`, the name of a loaded one or None. `priority` 0 is served first, then 1, and so on; within a priority, the
    requests of a salt that has had clearly more than an equal share of late give way to others. `images` are those of
    the prompt, in its order. The first `border` in an answer's text ends a delta, so that tokens before and behind it
    can be counted.
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
    adapter: str | None = None
    images: tuple[PromptImage, ...] = ()
    border: str = ""


@dataclass(frozen=True, slots=True)
class EmbeddingInput(EngineRequest):
    """One text to embed; the text of its only delta is the vector, base64 of little-endian float32.

    Inputs with the same id form one request and share its turns. `dimensions` shortens the vector; None keeps it whole.
    """

    dimensions: int | None = None


@dataclass(slots=True)
class Preemption:
    """The engine took a choice's memory away, and computes it again later. Times are in Unix seconds."""

    choice: int
    at: float
    resumed: float | None = None  # set by the scheduler, as long as it is None


def resolve_seed(params: GenerationParams) -> int:
    """The request's seed, or a random one of 63 bits; the caller must keep it as long as the request lives."""
    return secrets.randbits(63) if params.seed is None else params.seed


def check_request(request: EngineRequest, info: ModelInfo) -> None:
    """Raise `InvalidRequest` for a request that the model can never serve."""
    params = request.params
    if not request.prompt:
        raise InvalidRequest("The prompt is empty; send at least one token.", param="prompt")
    if len(request.prompt) >= info.context_length:
        raise prompt_too_long(len(request.prompt), info.context_length, param="prompt")
    if not -(2**63) <= request.seed < 2**63:
        raise InvalidRequest(f"The seed {request.seed} does not fit into 64 bits; choose a smaller one.", param="seed")
    own = request.prompt if info.image_token is None else {*request.prompt} - {info.image_token}
    check_ids(own, "prompt", info.vocabulary_size)
    check_ids(params.stop_token_ids, "stop_token_ids", info.vocabulary_size)
    check_ids(params.logit_bias, "logit_bias", info.vocabulary_size)
    check_ids(params.visible_token_ids, "visible_token_ids", info.vocabulary_size)
    for name in ("min_tokens", "ignore_eos", "stop_token_ids"):
        if params.grammar is not None and getattr(params, name):
            raise InvalidRequest(
                f"{name} cannot be combined with a grammar, which decides where the answer ends; leave it out.",
                param=name,
            )
    if request.generated and len(request.generated) != params.n:
        raise InvalidRequest(
            f"generated has {len(request.generated)} choices, but n is {params.n}; give {params.n}.", param="generated"
        )
    for tokens in request.generated:
        check_ids(tokens, "generated", info.vocabulary_size)


def check_ids(ids: Collection[int], name: str, vocabulary_size: int) -> None:
    """Raise `InvalidRequest`, with the param `name`, for token ids outside the vocabulary."""
    if outside := [token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < vocabulary_size]:
        raise InvalidRequest(
            f"{name}: token id {outside[0]} is outside the vocabulary of {vocabulary_size}.", param=name
        )


def check_input(
    ids: Sequence[int],
    path: str,
    *,
    context_length: int,
    vocabulary_size: int,
    what: str = "",
    advice: str = "shorten it",
) -> None:
    """Raise `InvalidRequest` for an input that the model can never embed; `what` begins the words of one too long."""
    if not ids:
        raise InvalidRequest(f"{path} is empty; send some text.", code="empty_prompt", param=path)
    if len(ids) > context_length:
        raise InvalidRequest(
            f"{what or f'{path} has'} {len(ids)} tokens, but this model's maximum context length is "
            f"{context_length} tokens; {advice}.",
            code="context_length_exceeded",
            param=path,
        )
    check_ids(ids, path, vocabulary_size)


def check_scores(params: GenerationParams, prompt_tokens: int) -> None:
    """Raises `InvalidRequest` where the log-probabilities of so many tokens of prompts are too many for an answer."""
    if params.prompt_logprobs is None:
        return
    most = MAX_SCORED // (params.n * (1 + params.prompt_logprobs))
    if prompt_tokens > most:
        raise InvalidRequest(
            f"With log-probabilities of the prompt and {params.prompt_logprobs} alternatives each, the prompts may "
            f"have {most:,} tokens for n = {params.n}; send fewer tokens, or ask for fewer alternatives.",
            param="prompt_logprobs",
        )
