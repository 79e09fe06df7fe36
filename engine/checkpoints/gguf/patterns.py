"""How each kind of byte-level tokenizer in GGUF splits a text into words before it looks for tokens in them.

Source: the original tokenizers, whose patterns llama.cpp's `src/llama-vocab.cpp` names by the kind. Needs no torch.
"""

from __future__ import annotations

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS_GPT2 = (r"\p{N}", *_GPT2)
_LLAMA3 = (_WORDS + r"|\p{N}{1,3}" + _REST,)
_QWEN2 = (_WORDS + r"|\p{N}" + _REST,)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES,
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}%s]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(ending: str, without: str = "") -> str:
    """Words that end where small letters are followed by a capital one."""
    upper, lower, start = _UPPER % without, _LOWER % without, r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"


_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_TEKKEN = (_cased("") + r"|\p{N}" + _CASED_REST,)
_GPT4O = (_cased(_ENDING) + r"|\p{N}{1,3}" + _CASED_REST,)
_KIMI = (r"\p{Han}+|" + _cased(_ENDING, r"&&[^\p{Han}]") + r"|\p{N}{1,3}" + _REST,)
_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3_WORDS = _SIGNS + r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_AND_HANGUL,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_AFMOE = (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3_WORDS)  # thousands are apart from the right
_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O)
_SEED = (_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES,)
_EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, "[0-9][0-9][0-9]")
_BLOOM = (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)
_LAGUNA = (r"[^\n]+|\n+", *_QWEN2)
_RUNS = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))  # of spaces
_JAIS2 = (_WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _RUNS + r"|\s",)
PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    "mellum2": _DIGITS_GPT2,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "lfm2", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "megrez"), _QWEN2),
    **dict.fromkeys(("solar-open", "grok-2"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "kimi-k2": _KIMI,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "afmoe": _AFMOE,
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA),
    "seed-coder": _SEED,
    "exaone-moe": _EXAONE,
    "falcon": _FALCON,
    "bloom": _BLOOM,
    "laguna": _LAGUNA,
    "jais-2": _JAIS2,
}
"""The patterns of each kind, one after the other."""

_LIKE_LLAMA3 = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
WHOLE = _LIKE_LLAMA3 | {"tekken", "glm4", "glm5"}
"""Kinds whose words are tokens, if the vocabulary has them, whatever the merges say."""

BEGINNING = _LIKE_LLAMA3 | {"tekken"}
"""Kinds whose texts begin with the token for that, unless the file says otherwise."""

COMPOSED = {"qwen2", "qwen35"}
"""Kinds that bring texts into Unicode's composed form, as the models' own tokenizers do."""
