"""Text to tokens and back, and the chats that become prompts. Knows no torch, and transformers only where it must."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.errors import InvalidRequest, ModelLoadError
from ...schemas.sources import looks_like_path
from ..checkpoints.files import read_json
from ..cpu.process import return_memory
from ..models import ranks, read_config, read_model_info, resolve_model
from .byte_tokenizer import ByteTokenizer
from .chat_templates import ChatTemplates
from .tokenizer_files import load_tokenizer_files
from .tokenizer_port import BORDER, PIECE, Piece, TokenizerLike

if TYPE_CHECKING:
    from tokenizers import Encoding

_LONG = 1 << 20  # characters of a text


def load_tokenizer(source: str, backend: str = "hf") -> TokenizerLike:
    """The tokenizer of the model `source` as `backend` will use it.

    With the echo backend a `source` that is no path needs no files: it gets bytes for tokens. Neither does "echo",
    which stands for no model, whatever the working directory holds.
    Raises `ModelLoadError`.
    """
    is_path = source != "echo" and (Path(source).expanduser().is_dir() or looks_like_path(source))
    if backend == "echo" and not is_path:
        return ByteTokenizer()
    directory = resolve_model(source)
    if backend != "sentence_transformers":
        return Tokenizer(directory)
    return (PairTokenizer if ranks(directory, read_config(directory)) else EmbeddingTokenizer)(directory)


class Tokenizer:
    """A Hugging Face tokenizer."""

    def __init__(self, path: Path) -> None:
        """Load from a model directory or a GGUF file. Raises `ModelLoadError`."""
        info = read_model_info(path, str(path), needs_context=False)
        loaded = load_tokenizer_files(path)
        facts = loaded.facts
        # The fast tokenizer's own decode: without transformers' clean-up of spaces, which looks across tokens.
        self.fast, self._slow = loaded.fast, loaded.slow
        self._byte_level = self.fast is not None and "ByteLevel" in repr(self.fast.decoder)
        own = () if facts.eos_token_id is None else (facts.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys(info.eos_token_ids + own))
        self.special_token_ids = frozenset(facts.special_ids)
        self.vocabulary_size = info.vocabulary_size
        self.vocabulary: Mapping[str, int] = (self.huggingface if self.fast is None else self.fast).get_vocab()
        self._templates = ChatTemplates(facts.chat_template or info.chat_template or None, facts.special_tokens)

    @property
    def chat_template(self) -> str:
        return self._templates.text

    @cached_property
    def huggingface(self) -> Any:
        """transformers' object, for another library that wants it; importing transformers takes a second."""
        if self._slow is not None:
            return self._slow
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=self.fast)  # type: ignore[no-untyped-call]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._slow is not None:
            return list(self._slow.encode(text, add_special_tokens=add_special_tokens))
        assert self.fast is not None
        # As a batch of one, for which the library lets other threads run, and without positions in the text.
        ids = self.fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if len(text) > _LONG:
            return_memory()  # the library took a hundred times the text's, in as many heaps as there are threads
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self.fast is not None:
            return self.fast.decode(ids, skip_special_tokens=skip_special_tokens)
        decoded = self.huggingface.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return decoded if isinstance(decoded, str) else "".join(decoded)

    def piece(self, token: int) -> Piece:
        """A token by itself, the space in front of a word kept; an id that the vocabulary leaves empty gives none."""
        symbol = self.huggingface.convert_ids_to_tokens(token) if self.fast is None else self.fast.id_to_token(token)
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

        if not self._templates:
            raise InvalidRequest(
                "this model has no chat template; send a finished prompt to /v1/completions", param="messages"
            )
        try:
            template = self._templates.select(tools is not None)
        except ValueError as error:
            raise InvalidRequest(f"this model cannot chat: {error}", param="messages") from error

        def render(objects_alone: bool) -> str:
            try:
                return self._templates.render(
                    template,
                    normalise(messages, template, objects_alone=objects_alone),
                    tools,
                    **{"add_generation_prompt": not template_kwargs.get("continue_final_message")} | template_kwargs,
                )
            except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
                raise InvalidRequest(f"the model's chat template refuses this: {error}", param="messages") from error

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
        if module.get("do_lower_case") and self.fast is not None:
            own = self.fast.normalizer
            self.fast.normalizer = Sequence([Lowercase(), *([] if own is None else [own])])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The model's own default prompt stands before every text."""
        return super().encode(self._prompt + text, add_special_tokens)


class PairTokenizer(EmbeddingTokenizer):
    """The tokenizer of a model that scores pairs of texts, a query and a document, as sentence-transformers'
    `CrossEncoder` writes them: for encoders between separators, for decoders by a chat template with a message of each.
    """

    def __init__(self, directory: Path) -> None:
        """Raises `ModelLoadError`."""
        super().__init__(directory)
        file = directory / "sentence_bert_config.json"
        own = read_json(file) if file.is_file() else {}
        self._is_chat = "message" in own["modality_config"] if "modality_config" in own else bool(self.chat_template)
        self._template_kwargs = (own.get("processing_kwargs") or {}).get("chat_template") or {}
        if self.fast is None:
            raise ModelLoadError(f"{directory} has no tokenizer.json, without which it cannot rank; convert it first")
        self._pairs = self.fast

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Without the model's prompt, which belongs to pairs alone."""
        return Tokenizer.encode(self, text, add_special_tokens)

    @cached_property
    def separator(self) -> int | None:
        """The token behind which the second text of a pair begins, for models that are told which text is which; None
        for others."""
        if self._is_chat:
            return None
        probe = self._pairs.encode("a", "b")
        return probe.ids[probe.type_ids.index(1) - 1] if 1 in probe.type_ids else None

    def pairs(self, query: str, documents: Iterable[str], most: int | None = None) -> Iterator[list[int]]:
        """The inputs of the query with each document, of whose tokens `most` only the first ones are read.

        Raises `InvalidRequest` for a query that the model cannot tell from the document.
        """
        if self._is_chat:
            for document in documents:
                if most is not None and len(places := self._beginning(document, most).offsets) > most:
                    document = document[: places[most - 1][1]]
                yield self._chat(query, document)
            return
        asked = self._encoding(self._prompt + query)
        if self.separator in asked.ids:
            name = self._pairs.id_to_token(self.separator)
            raise InvalidRequest(
                f"The query has {name} in it, which ends it for this model; leave it out.", param="query"
            )
        for document in documents:
            found = self._encoding(document) if most is None else self._beginning(document, most)
            if most is not None:
                found.truncate(most)
            yield self._pairs.post_process(asked, found).ids

    def _chat(self, query: str, document: str) -> list[int]:
        asked = [{"role": "system", "content": self._prompt}] if self._prompt else []
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return self.encode_chat(asked + pair, **{"add_generation_prompt": False} | self._template_kwargs)

    def _beginning(self, text: str, most: int) -> Encoding:
        """The tokens of as much of a text as has `most` of them, and of some more."""
        size = PIECE
        while len(found := self._encoding(text[:size])) <= most + BORDER and size < len(text):
            size *= 2
        return found

    def _encoding(self, text: str) -> Encoding:
        # As a batch of one, for which the library lets other threads run.
        return self._pairs.encode_batch([text], add_special_tokens=False)[0]


@cache
def _byte_of_symbol() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters; this table reads them (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
