"""The `options` of Ollama's requests: those that act, and those that say how Ollama is to use its machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator

from ..openai.body import Body
from ..openai.completions import Stop

_PARAMETERS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}  # called otherwise in chats
ACT = {"temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"}
ACT |= _PARAMETERS.keys()


def _unlimited(value: int | None) -> int | None:
    return None if value is not None and value <= 0 else value  # -1: as many as it takes, -2: until the context is full


def _random(value: int | None) -> int | None:
    return None if value == -1 else value


def _neutral(value: float | None) -> float | None:
    if value not in (None, 1):
        raise ValueError("is not supported here; leave it out, or send 1")
    return value


def _off(value: int | None) -> int | None:
    if value:
        raise ValueError("is not supported here; leave it out, or send 0")
    return value


class Options(Body):
    """From `numa` on, they have no effect: the server decides these for all requests, or, as `num_ctx`, takes what the
    model has."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Annotated[int | None, AfterValidator(_random)] = None
    stop: Stop | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    num_predict: Annotated[int | None, AfterValidator(_unlimited)] = None
    # Refused where they would change the answer.
    typical_p: Annotated[float | None, AfterValidator(_neutral)] = None
    tfs_z: Annotated[float | None, AfterValidator(_neutral)] = None
    mirostat: Annotated[int | None, AfterValidator(_off)] = None
    # Accepted without effect.
    numa: Any = None
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None
    num_thread: Any = None
    repeat_last_n: Any = None  # penalties count the whole prompt and answer
    penalize_newline: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Those that act, by their names in OpenAI's requests."""
        given = self.model_dump(include=ACT, exclude_none=True)
        return {_PARAMETERS.get(name, name): value for name, value in given.items()}

    @property
    def without_effect(self) -> Iterator[str]:
        for name, field in type(self).model_fields.items():
            if field.annotation is Any and getattr(self, name) is not None:
                yield f"options.{name}"


def called_here(parameter: str) -> str:
    """What Ollama calls a parameter of OpenAI's requests."""
    return next((theirs for theirs, ours in _PARAMETERS.items() if ours == parameter), parameter)
