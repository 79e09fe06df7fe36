"""Text to tokens and back, and the one place where chat templates are rendered. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...schemas.errors import InvalidRequest, ModelLoadError
from ...schemas.sources import is_gguf, looks_like_path
from ..checkpoints.files import read_json
from ..checkpoints.gguf import read_gguf
from ..checkpoints.gguf_tokens import load_gguf_tokenizer
from ..models import read_model_info, resolve_model
from .byte_tokenizer import ByteTokenizer
from .tokenizer_port import Piece, TokenizerLike


def load_tokenizer(source: str, backend: str = "hf") -> TokenizerLike:
    """The tokenizer of the model `source` as `backend` will use it.

    With the echo backend a `source` that is no path needs no files: it gets bytes for tokens. Neither does "echo",
    which stands for no model, whatever the working directory holds.
    Raises `ModelLoadError`.
    """
    is_path = source != "echo" and (Path(source).expanduser().is_dir() or looks_like_path(source))
    if backend == "echo" and not is_path:
        return ByteTokenizer()
    kind = EmbeddingTokenizer if backend == "sentence_transformers" else Tokenizer
    return kind(resolve_model(source))


class Tokenizer:
    """A Hugging Face tokenizer."""

    def __init__(self, path: Path) -> None:
        """Load from a model directory or a GGUF file. Raises `ModelLoadError`."""
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        info = read_model_info(path, str(path))
        tokenizer: PreTrainedTokenizerBase
        try:
            tokenizer = load_gguf_tokenizer(read_gguf(path)) if is_gguf(path) else AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ModelLoadError(f"{path} has no usable tokenizer: {error}") from error
        # Switches truncation and padding off where the files have them on; later, with another thread decoding at the
        # same moment, the tokenizer would refuse to be changed.
        tokenizer.encode("")
        self._tokenizer = tokenizer
        # The fast tokenizer's own decode: without transformers' clean-up of spaces, which looks across tokens.
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = self._fast is not None and "ByteLevel" in repr(self._fast.decoder)
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.eos_token_ids = tuple(dict.fromkeys(info.eos_token_ids + own))
        added = tokenizer.added_tokens_decoder
        self.special_token_ids = frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
        self.vocabulary_size = info.vocabulary_size
        self.vocabulary: Mapping[str, int] = tokenizer.get_vocab()
        template = tokenizer.chat_template
        self.chat_template = "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def huggingface(self) -> Any:
        """The library's own object, for another library that wants it."""
        return self._tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._fast is not None:
            text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        decoded = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return decoded if isinstance(decoded, str) else "".join(decoded)

    def piece(self, token: int) -> Piece:
        """A token by itself, the space in front of a word kept; an id that the vocabulary leaves empty gives none."""
        symbol = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(symbol, str):
            return Piece("", ())
        if symbol.startswith("<0x") and len(symbol) == 6:  # SentencePiece's name of a byte
            raw = bytes([int(symbol[3:5], 16)])
            return Piece(raw.decode("utf-8", errors="replace"), tuple(raw))
        text = self.decode([token]) if self._byte_level else symbol.replace("\u2581", " ")
        if "\ufffd" in text and self._byte_level:
            bytes_of = _byte_of_symbol()
            return Piece(text, tuple(bytes_of[character] for character in symbol if character in bytes_of))
        return Piece(text, tuple(text.encode()))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt that the model's own template makes of `messages`, ready for the model's answer.

        `template_kwargs` go to the template. Raises `InvalidRequest` where there is no template, or with what the
        template itself has against the messages.
        """
        from jinja2 import TemplateError

        from .chat_messages import close_thinking, has_other_arguments, normalise

        if self._tokenizer.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; send a finished prompt to /v1/completions", param="messages"
            )
        definitions: list[Any] | None = None if tools is None else [dict(tool) for tool in tools]
        template = str(self._tokenizer.get_chat_template(tools=definitions))

        def render(objects_alone: bool) -> str:
            try:
                rendered = self._tokenizer.apply_chat_template(
                    normalise(messages, template, objects_alone=objects_alone),
                    tools=definitions,
                    tokenize=False,
                    **{"add_generation_prompt": not template_kwargs.get("continue_final_message")} | template_kwargs,
                )
            except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
                raise InvalidRequest(f"the model's chat template refuses this: {error}", param="messages") from error
            return str(rendered)

        try:
            text = render(objects_alone=False)
        except InvalidRequest:
            if not has_other_arguments(messages):
                raise
            text = render(objects_alone=True)  # a template may read nothing but objects
        if template_kwargs.get("enable_thinking") is False and "enable_thinking" not in template:
            return close_thinking(text, self.vocabulary)
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """`render_chat` in tokens. The template writes every special token itself, so none is added."""
        return self.encode(self.render_chat(messages, tools, **template_kwargs), add_special_tokens=False)


class EmbeddingTokenizer(Tokenizer):
    """The tokenizer of a model that embeds texts, with what sentence-transformers does to a text before."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from tokenizers.normalizers import Lowercase, Sequence

        config, module = (
            read_json(path) if (path := directory / name).is_file() else {}
            for name in ("config_sentence_transformers.json", "sentence_bert_config.json")
        )
        self._prompt = (config.get("prompts") or {}).get(config.get("default_prompt_name")) or ""
        if module.get("do_lower_case") and self._fast is not None:
            own = self._fast.normalizer
            self._fast.normalizer = Sequence([Lowercase(), *([] if own is None else [own])])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The model's own default prompt stands before every text."""
        return super().encode(self._prompt + text, add_special_tokens)


@cache
def _byte_of_symbol() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters; this table reads them (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
