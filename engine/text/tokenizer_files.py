"""What transformers makes of a model's tokenizer files, kept so that the next process need not import it.

The import takes seconds, and the conversion of some files more; the result is one file for the library `tokenizers`.
A file is named after all that it depends on: the versions of both libraries and the contents of the model's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.directories import user_cache
from ...schemas.errors import ModelLoadError
from ...schemas.sources import is_gguf
from ..checkpoints.gguf import tokens as gguf_tokens
from ..checkpoints.gguf.file import read_gguf
from ..models import keep

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_FORM = 1  # of the files; another form has another name
_MOST = 64  # files that are kept; those that were not used for longest go first
_SUFFIXES = frozenset({".json", ".model", ".txt", ".jinja", ".tiktoken", ".bpe"})
_MORE_TEMPLATES = "additional_chat_templates"  # the folder in which transformers looks for them
_SAMPLES = (
    "The quick  brown fox, l'été à 12:34,\n\tsaid “naïve” 東京は晴れ 🙂🏽 \r\n\n{'x': [1, 2.50]} <0x41></s><|im_end|>",
    " leading",
    "trailing ",
    "",
)
_OWN = ("encode", "_encode_plus", "_decode", "convert_ids_to_tokens", "apply_chat_template", "get_chat_template")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What Penstock knows of a tokenizer beside how it cuts texts."""

    eos_token_id: int | None
    special_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    """By transformers' names, which are variables of chat templates: "bos_token" and so on."""
    chat_template: str | Mapping[str, str] | None
    encodes_special_tokens: bool
    """Whether a special token's name in a text is ordinary text."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """`fast` cuts texts; where a model has none of that kind, `slow`, transformers' own object, does."""

    facts: TokenizerFacts
    fast: Tokenizer | None
    slow: PreTrainedTokenizerBase | None = None


def load_with_transformers(path: Path) -> PreTrainedTokenizerBase:
    """transformers' own tokenizer of a model directory or a GGUF file. Raises `ModelLoadError`."""
    from transformers import AutoTokenizer

    try:
        if is_gguf(path):
            return gguf_tokens.load_gguf_tokenizer(read_gguf(path))
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        return found
    except KeyError as error:
        raise ModelLoadError(f"{path} has no usable tokenizer: {error} is missing in it; download it again") from error
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"{path} has no usable tokenizer: {error}") from error


def load_tokenizer_files(path: Path, cache: Path | None = None) -> LoadedTokenizer:
    """The tokenizer of a model directory or a GGUF file, from `cache` if it is there, and kept there if not.

    Without `cache` that is the folder "tokenizers" in the user's cache. Raises `ModelLoadError`.
    """
    file = (cache or user_cache() / "tokenizers") / f"{_key(path)}.json"
    if (kept := _read(file)) is not None:
        return kept
    own = load_with_transformers(path)
    # Switches truncation and padding off where the files have them on; later, with another thread decoding at the
    # same moment, the tokenizer would refuse to be changed.
    own.encode("")
    fast: Tokenizer | None = getattr(own, "backend_tokenizer", None)
    facts = _facts(own)
    if fast is None:
        return LoadedTokenizer(facts, None, own)
    text = fast.to_str()
    if not _is_whole(own, text):
        return LoadedTokenizer(facts, fast, own)
    try:
        content = f"{json.dumps(asdict(facts))}\n{text}".encode()
        keep(file, hashlib.sha256(content).hexdigest().encode() + b"\n" + content, _MOST)
    except OSError as error:
        _log.info("tokenizer of %s not kept: %s; set XDG_CACHE_HOME to a writable directory", path, error)
    return LoadedTokenizer(facts, fast)


def _facts(own: PreTrainedTokenizerBase) -> TokenizerFacts:
    added = own.added_tokens_decoder
    template: str | dict[str, str] | None = own.chat_template
    return TokenizerFacts(
        None if own.eos_token_id is None else int(own.eos_token_id),
        tuple(sorted({int(i) for i in own.all_special_ids} | {i for i, token in added.items() if token.special})),
        {name: str(text) for name, text in own.special_tokens_map.items()},
        template,
        bool(getattr(own, "split_special_tokens", False)),
    )


def _is_whole(own: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the library `tokenizers` alone does with `text` what transformers' object does."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    kind = type(own)
    if not isinstance(own, PreTrainedTokenizerFast):
        return False
    if any(getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in _OWN):
        return False
    again = Tokenizer.from_str(text)
    if again.get_vocab() != own.get_vocab():
        return False
    again.encode_special_tokens = bool(getattr(own, "split_special_tokens", False))
    return all(
        again.encode(sample, add_special_tokens=special).ids == own.encode(sample, add_special_tokens=special)
        for sample in _SAMPLES
        for special in (False, True)
    )


_version = cache(metadata.version)  # which reads and parses a file at each call


def _key(path: Path) -> str:
    """Named after all that a tokenizer is made of."""
    digest = hashlib.sha256(f"{_FORM} {_version('transformers')} {_version('tokenizers')}".encode())
    for name, content in _contents(path):
        digest.update(f"\n{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _contents(path: Path) -> Iterable[tuple[str, bytes]]:
    try:
        if is_gguf(path):
            gguf = read_gguf(path)
            with gguf.path.open("rb") as data:
                yield "header", data.read(min((tensor.start for tensor in gguf.tensors.values()), default=-1))
            yield "made by", Path(gguf_tokens.__file__).read_bytes()
            return
        for file in sorted([*path.iterdir(), *(path / _MORE_TEMPLATES).glob("*")]):
            if file.suffix in _SUFFIXES and not file.name.endswith(".safetensors.index.json") and file.is_file():
                yield file.relative_to(path).as_posix(), file.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; check its permissions") from error


def _read(file: Path) -> LoadedTokenizer | None:
    from tokenizers import Tokenizer

    try:
        sum_, _, rest = file.read_bytes().partition(b"\n")
    except OSError:
        return None  # there is none, or none that may be read: it is made anew
    if hashlib.sha256(rest).hexdigest().encode() != sum_:
        _log.warning("%s is damaged; the tokenizer is made anew", file)
        return None
    first, _, text = rest.partition(b"\n")
    values: dict[str, Any] = json.loads(first)
    facts = TokenizerFacts(**values | {"special_ids": tuple(values["special_ids"])})
    fast = Tokenizer.from_buffer(text)
    fast.encode_special_tokens = facts.encodes_special_tokens
    with contextlib.suppress(OSError):  # a cache of somebody else's is good for reading
        os.utime(file)
    return LoadedTokenizer(facts, fast)
