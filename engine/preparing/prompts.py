"""What callers of the library may pass as prompts, and the requests that they become."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, cast

from ...schemas.bounds import whole
from ...schemas.errors import InvalidRequest
from ...schemas.params import GenerationParams
from ..backend import Backend
from ..config import EngineConfig
from ..request import EngineRequest, resolve_seed
from ..text.tokenizer_port import encode_within
from ..vision.reading import ImageLimits
from ..vision.sight import NO_SIGHT, Sight, load_sight


@dataclass(frozen=True, slots=True)
class ImageText:
    """A prompt with images: `text` has `InferenceEngine.image_mark` where each of `images` stands, the bytes of a PNG,
    JPEG, WebP or GIF file."""

    text: str
    images: tuple[bytes, ...]


Prompt = str | Sequence[int] | ImageText
Many = list[str] | list[list[int]] | list[ImageText] | list[Prompt]


def is_list(prompts: Prompt | Many) -> bool:
    """Whether `prompts` is a list of prompts; a list of token ids is a single one."""
    return isinstance(prompts, list) and not (prompts and _is_id(prompts[0]))


def as_list(prompts: Prompt | Many) -> list[Prompt]:
    return list(cast("list[Prompt]", prompts)) if is_list(prompts) else [cast("Prompt", prompts)]


@contextmanager
def naming(index: int, count: int) -> Iterator[None]:
    """Say which of `count` prompts it is, if one of them is refused."""
    try:
        yield
    except InvalidRequest as error:
        if count == 1:
            raise
        param = "prompts" if error.param == "prompt" else error.param
        raise type(error)(f"prompts[{index}]: {error}", code=error.code, param=param) from None
    except TypeError as error:
        raise TypeError(f"prompts[{index}]: {error}" if count > 1 else str(error)) from None


def checked(config: EngineConfig, backend: Backend | None) -> EngineConfig:
    """Raise `TypeError` for what is no configuration or no backend, such as the name of one."""
    if not isinstance(config, EngineConfig):
        raise TypeError(f"config must be EngineConfig, not {_kind(config)}; write EngineConfig(model=…)")
    if backend is not None and (isinstance(backend, type) or not hasattr(backend, "step")):
        raise TypeError(f"backend must be a loaded Backend, not {_kind(backend)}; write EngineConfig(backend=…)")
    return config


def tokens_of(ids: Sequence[int]) -> list[int]:
    """Token ids, of NumPy or torch perhaps, as plain numbers. Raises `TypeError`."""
    if not isinstance(ids, _UNORDERED_OR_BYTES):
        with suppress(TypeError):
            return list(map(index, ids))
    raise TypeError(f"ids must be token ids, not {_kind(ids)}")


def sight_of(backend: Backend, config: EngineConfig) -> Sight:
    """What a loaded model sees. Raises `ModelLoadError`."""
    if not backend.info.sees:
        return NO_SIGHT
    return load_sight(config.model, backend.manifest.id, ImageLimits.of(config))


class Prompts:
    """Makes requests for one backend, whose model has this `sight`."""

    def __init__(self, backend: Backend, sight: Sight) -> None:
        self._backend, self._sight = backend, sight

    async def request(
        self, prompt: Prompt, params: GenerationParams, request_id: str | None = None, adapter: str | None = None
    ) -> EngineRequest:
        """A request with an id, random if it is None, and a seed. Raises `InvalidRequest`, `TypeError`."""
        _check(params)
        name, seed = request_id or uuid.uuid4().hex, resolve_seed(params)
        if not isinstance(prompt, ImageText):
            is_long = isinstance(prompt, str) and len(prompt) > _LONG
            ids = await asyncio.to_thread(self.ids, prompt) if is_long else self.ids(prompt)
            await asyncio.sleep(0)  # others in the event loop, between many prompts
            return EngineRequest(name, ids, params, seed, adapter=adapter)
        tokenizer, length = self._backend.tokenizer, self._backend.info.context_length
        found = await asyncio.to_thread(self._sight.tokenize, prompt.text, prompt.images, tokenizer, length)
        return EngineRequest(name, tuple(found.ids), params, seed, adapter=adapter, images=found.images)

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens of text, or token ids. Raises `InvalidRequest` for images, `TypeError` for what is no prompt."""
        if isinstance(prompt, ImageText):
            raise InvalidRequest("Images cannot be embedded; send text.", code="unsupported_capability")
        if isinstance(prompt, str):
            length = self._backend.info.context_length
            return tuple(encode_within(self._backend.tokenizer, whole(prompt), length, "prompt"))
        with suppress(TypeError):
            return tuple(tokens_of(prompt))
        raise TypeError(
            f"a prompt must be text, token ids or an ImageText, not {_kind(prompt)}; make one of messages by "
            "engine.tokenizer.encode_chat(messages, add_generation_prompt=True)"
        )


_LONG = 10_000  # characters; to tokenise more would block the caller's event loop for milliseconds
_UNORDERED_OR_BYTES = (bytes, bytearray, memoryview, Set, Mapping)  # whose parts are numbers, too


def _is_id(prompt: object) -> bool:
    """Whether it is a number, of NumPy perhaps, and no array of them."""
    return isinstance(prompt, SupportsIndex) and not getattr(prompt, "ndim", 0)


def _check(params: object) -> None:
    if not isinstance(params, GenerationParams):
        raise TypeError(f"params must be GenerationParams, not {_kind(params)}; write GenerationParams(max_tokens=…)")


def _kind(given: object) -> str:
    parts = {type(each).__name__ for each in given} if isinstance(given, list | tuple) else set()
    return f"{type(given).__name__}{' of ' if parts else ''}{' and '.join(sorted(parts))}"
