"""What a model can see, as those need it who prepare its requests: the images of a chat, or why there may be none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...schemas.errors import InvalidRequest
from ...schemas.openai.chat import ChatMessage
from ...schemas.sources import is_gguf, looks_like_path, parts_of
from ..checkpoints.gguf.pairs import why_alone
from ..models import read_config, resolve_model
from ..text.tokenizer_port import TokenizerLike, encode_within
from .chat import Fetched, GivenImage, given_images, image_parts, marked
from .families.family import why_blind
from .processor import ImagePrompt, VisionProcessor
from .reading import ANY, ImageLimits, check_image

SEEING = ("paged",)  # backends
_BEGIN = 256  # characters, within which the first token of a text is


class Sight:
    """`processor` is None for a model that sees nothing, and `blind` says why, as the end of a sentence."""

    def __init__(
        self, processor: VisionProcessor | None = None, limits: ImageLimits = ANY, blind: str = "takes text alone"
    ) -> None:
        self.processor, self.limits, self._blind = processor, limits, blind

    def warm(self) -> None:
        """Load what the first image would wait for. Raises `ModelLoadError`."""
        if self.processor is not None:
            self.processor.sample()

    def look(self, messages: Sequence[ChatMessage], name: str, fetched: Fetched) -> list[GivenImage]:
        """The images of a chat with the model `name`. Raises `InvalidRequest` for some that cannot be used."""
        if self.processor is None:
            if parts := image_parts(messages):
                raise InvalidRequest(
                    f"{name} {self._blind}; leave the image out, or ask a model that sees.",
                    code="unsupported_capability",
                    param=parts[0][0],
                )
            return []
        return given_images(messages, self.limits, fetched)

    def mark(self, message: ChatMessage, values: dict[str, Any], tokenizer: TokenizerLike) -> dict[str, Any]:
        """What the chat template gets of a message: `values`, but with marks for its images."""
        if self.processor is None or not message.images:
            return values
        mark = self.processor.mark(tokenizer)
        return values | {"content": marked(values["content"], tokenizer.chat_template, mark)}

    def encode(
        self, text: str, given: Sequence[GivenImage], tokenizer: TokenizerLike, context_length: int
    ) -> ImagePrompt:
        """The tokens of a rendered chat. Raises `InvalidRequest`.

        transformers' processors of models that see let the tokenizer begin a chat, if its template does not, as those
        of LLaVA 1.5 and DeepSeek-VL; its tokenizers, which models of text have alone, never do.
        """
        adds = self.processor is not None and not _is_begun(text, tokenizer)
        text = (self.processor.opening if self.processor else "") + text
        if self.processor is None or not given:
            ids = encode_within(tokenizer, text, context_length, "messages", add_special_tokens=adds)
            return ImagePrompt(ids, ())
        return self.processor.insert(text, given, tokenizer, context_length=context_length, add_special_tokens=adds)

    def mark_of(self, tokenizer: TokenizerLike) -> str:
        """The text that stands for an image. Raises `InvalidRequest` for a model that sees none."""
        if self.processor is None:
            raise InvalidRequest(f"this model {self._blind}", code="unsupported_capability")
        return self.processor.mark(tokenizer)

    def tokenize(self, text: str, files: Sequence[bytes], tokenizer: TokenizerLike, context_length: int) -> ImagePrompt:
        """The tokens of a text with a mark for each of the images in `files`. Raises `InvalidRequest`."""
        self.mark_of(tokenizer)
        assert self.processor is not None
        given = [GivenImage(data, self.limits, f"images[{index}]") for index, data in enumerate(files)]
        for one in given:
            check_image(*one)
        return self.processor.insert(text, given, tokenizer, context_length=context_length, add_special_tokens=True)


def _is_begun(text: str, tokenizer: TokenizerLike) -> bool:
    """Whether a text has the token that the tokenizer puts before texts, or it puts none there."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    return whole == bare or tokenizer.encode(text[:_BEGIN], add_special_tokens=False)[:1] == whole[:1]


NO_SIGHT = Sight()


def load_sight(source: str, backend: str, limits: ImageLimits = ANY) -> Sight:
    """What the model `source` sees with this backend. Raises `ModelLoadError`."""
    is_path = Path(source).expanduser().is_dir() or looks_like_path(source)
    if backend == "echo" and not is_path:
        return Sight(limits=limits)
    if backend not in SEEING:
        sees = is_path and VisionProcessor.of(resolve_model(source)) is not None
        instead = f", and sees with {' or '.join(map(repr, SEEING))}" if sees else ""
        return Sight(limits=limits, blind=f"takes text alone with the backend {backend!r}{instead}")
    path = resolve_model(source)
    processor = VisionProcessor.of(path)
    blind = "" if processor else why_blind(read_config(path))
    if processor is None and parts_of(path) is None and is_gguf(path) and (why := why_alone(path)):
        blind += f": {why}"
    return Sight(processor, limits, blind)
