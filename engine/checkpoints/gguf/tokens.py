"""The tokenizer of a GGUF file, made from its metadata: byte-level BPE or SentencePiece's BPE, and chat templates.

Source of the defaults: llama.cpp's `src/llama-vocab.cpp`. Needs no torch; transformers is imported when a tokenizer is
made.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ModelLoadError
from .file import Gguf
from .patterns import BEGINNING, COMPOSED, PATTERNS, WHOLE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of tokens
_ENDS = frozenset(  # texts of tokens that end an answer, as llama.cpp knows them
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "</s>"),
        *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<\uff5cend▁of▁sentence\uff5c>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "[EOT]", "[EOS]", "[e~["),
        *("<turn|>", "<|tool_response>"),  # Gemma 4's
        "<|observation|>",  # GLM's, behind the call of a tool
    }
)
_HARMONIES = {"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}
"""Of gpt-oss and Solar Open, whose answers are several messages, each with an end."""

_END_OF_MESSAGE, _END_OF_TURN, _TAG = "<|end|>", "<end_of_turn>", "</s>"


@lru_cache(maxsize=8)
def end_ids(gguf: Gguf) -> tuple[int, ...]:
    """The tokens that end an answer: those that the metadata names, and those known by their texts, for which all texts
    are read."""
    named = [gguf.metadata.get(f"{_KEY}{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = gguf.metadata.get(f"{_KEY}token_type") or []
    texts = gguf.strings(f"{_KEY}tokens")
    pairs = enumerate(zip(texts, kinds, strict=False))
    known = [index for index, (text, kind) in pairs if kind in (_CONTROL, _USER_DEFINED) and text in _ENDS]
    ends = dict.fromkeys([index for index in named if isinstance(index, int)] + known)
    spelled = {texts[index] for index in known}
    if any(spelled >= harmony for harmony in _HARMONIES):
        ends.pop(texts.index(_END_OF_MESSAGE) if _END_OF_MESSAGE in texts else -1, None)
    if {_END_OF_TURN, _TAG} <= spelled and kinds[tag := texts.index(_TAG)] != _CONTROL:  # Gemma's is one of HTML
        ends.pop(tag, None)
    return tuple(ends)


def load_gguf_tokenizer(gguf: Gguf) -> PreTrainedTokenizerFast:
    """The tokenizer with its special tokens and chat templates. Raises `ModelLoadError`."""
    import transformers

    tokens = gguf.strings(f"{_KEY}tokens")
    kind = gguf.metadata.get(f"{_KEY}model")
    if not tokens or kind not in _KINDS:
        fault = f"has a tokenizer of the kind {kind!r}" if tokens else "has no tokenizer"
        raise ModelLoadError(f"{gguf.path} {fault}; use a file whose tokenizer is of the kind {' or '.join(_KINDS)}")
    special = {name: _text(gguf, tokens, key) for name, key in _SPECIAL.items()}
    try:
        tokenizer = _KINDS[kind](gguf, tokens)
        _add_tokens(tokenizer, tokens, gguf.metadata.get(f"{_KEY}token_type") or [])
        _frame(tokenizer, gguf, special)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelLoadError(f"{gguf.path} has no usable tokenizer: {error}; convert the model again") from error
    library: Any = transformers  # most of it is not typed
    made: PreTrainedTokenizerFast = library.PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(tokenizer),
        clean_up_tokenization_spaces=False,
        chat_template=_chat_template(gguf),
        **{name: text for name, text in special.items() if text is not None},
    )
    return made


class _Uncopied:
    """Spares a tokenizer the deep copy that transformers would make of it, which takes seconds for a large one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._tokenizer


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _text(gguf: Gguf, tokens: list[str], key: str) -> str | None:
    default = {"bos": 1, "eos": 2, "unknown": 0}.get(key) if gguf.metadata[f"{_KEY}model"] == "llama" else None
    index = gguf.metadata.get(f"{_KEY}{key}_token_id", default)
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _byte_level(gguf: Gguf, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = gguf.metadata.get(f"{_KEY}pre")
    if kind not in PATTERNS:
        raise ModelLoadError(
            f"{gguf.path} has the pre-tokenizer {kind!r}, which is not supported; supported: {', '.join(PATTERNS)}. "
            "Use the model's safetensors files instead"
        )
    pairs = [_pair(merge) for merge in gguf.strings(f"{_KEY}merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind in WHOLE))
    if kind in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[kind]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    space = merge.find(" ", 1)
    return merge[:space], merge[space + 1 :]


def _sentencepiece(gguf: Gguf, tokens: list[str]) -> Tokenizer:
    scores = gguf.metadata.get(f"{_KEY}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{gguf.path} has no score for each token of its tokenizer; convert the model again")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = sorted(_merges(vocabulary, scores), key=lambda merge: merge[0], reverse=True)
    pairs = [(left, right) for _, left, right in merges]
    return _with_spaces(gguf, tokens, pairs, gguf.metadata.get(f"{_KEY}add_space_prefix", True))


def _gemma4(gguf: Gguf, tokens: list[str]) -> Tokenizer:
    """Like SentencePiece's, with merges of its own."""
    pairs = [_pair(merge) for merge in gguf.strings(f"{_KEY}merges")]
    if not pairs:
        raise ModelLoadError(f"{gguf.path} has no merges of its tokenizer; convert the model again")
    return _with_spaces(gguf, tokens, pairs, gguf.metadata.get(f"{_KEY}add_space_prefix", False))


def _with_spaces(gguf: Gguf, tokens: list[str], pairs: list[tuple[str, str]], prefixed: bool) -> Tokenizer:
    """One whose tokens have spaces in them, and bytes for what they cannot spell."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    kinds = gguf.metadata.get(f"{_KEY}token_type") or []
    unknown = next((token for token, kind in zip(tokens, kinds, strict=False) if kind == _UNKNOWN), None)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prepend: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> Iterator[tuple[tuple[float, int, int], str, str]]:
    """Every way to put two tokens together to a third, with its rank: the highest score of the third comes first."""
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield (scores[index], -vocabulary[left], -vocabulary[right]), left, right


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Have the tokens that are no words found whole in any text."""
    from tokenizers import AddedToken

    found = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(found)


def _frame(tokenizer: Tokenizer, gguf: Gguf, special: dict[str, str | None]) -> None:
    """Have texts begin and end with the tokens for that, if the file wants it."""
    from tokenizers import processors

    beginning = gguf.metadata[f"{_KEY}model"] == "llama" or gguf.metadata.get(f"{_KEY}pre") in BEGINNING
    is_gemma4 = gguf.metadata[f"{_KEY}model"] == "gemma4"  # whose early files say that texts begin without it
    begins = special["bos_token"] if is_gemma4 or gguf.metadata.get(f"{_KEY}add_bos_token", beginning) else None
    ends = special["eos_token"] if gguf.metadata.get(f"{_KEY}add_eos_token", False) else None
    around = [text for text in (begins, ends) if text is not None]
    if around:
        first, last = [begins] if begins else [], [ends] if ends else []
        tokenizer.post_processor = processors.Sequence(
            [
                processors.TemplateProcessing(
                    single=[*first, "$A", *last],
                    pair=[*first, "$A", *last, *first, "$B", *last],
                    special_tokens=[(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(around)],
                )
            ]
        )


def _chat_template(gguf: Gguf) -> str | dict[str, str] | None:
    """The file's template, or all of them by name if it has several."""
    template = gguf.metadata.get("tokenizer.chat_template")
    names = gguf.strings("tokenizer.chat_templates") if "tokenizer.chat_templates" in gguf.metadata else []
    others = {name: gguf.metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    found = {name: text for name, text in {"default": template, **others}.items() if isinstance(text, str)}
    if not found:
        return None
    return found if len(found) > 1 else next(iter(found.values()))


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
