"""Tokenizers made from metadata: they agree with the original ones, and with SentencePiece's own rule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import add_tokenizer, write_gguf
from tokenizers.pre_tokenizers import ByteLevel

from penstock.engine import Tokenizer
from penstock.engine.checkpoints.gguf.file import read_gguf
from penstock.engine.checkpoints.gguf.tokens import end_ids, load_gguf_tokenizer
from penstock.schemas.errors import ModelLoadError

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two spaces, a tab\t, and\n\n\nnewlines \r\n",
    "It's 12345 o'clock; WE'LL see.",
    "Größe naïve 東京 🚀👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nfoo<|im_end|>",
    "def f(x):\n    return x ** 2  # comment",
    "a" * 50,
)
WORDS = ["▁the", "▁then", "th", "he", "▁t", "en", "▁", "t", "h", "e", "n", "a", "▁a", "aa", "aaa", "an"]


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sentencepiece(path: Path, **keys: Any) -> Path:
    """A file with a small vocabulary of SentencePiece's kind: three special tokens, 256 bytes, words with scores."""
    writer: Any = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<|end|>", "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 3, 4]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(WORDS))] + [0.0, 0.0])
    writer.add_token_types(kinds)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer)
    return path


def pieces(text: str) -> list[str]:
    """SentencePiece's rule: merge the neighbours whose union has the best score, the leftmost first."""
    parts = list(text)
    while True:
        unions = [(WORDS.index(a + b), at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in WORDS]
        if not unions:
            return parts
        _, at = min(unions)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_byte_level_tokenizer_is_the_original(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    directory, path = model_directory("llama"), tmp_path / "a.gguf"
    write_gguf(directory, path, "llama")
    ours, theirs = Tokenizer(path), Tokenizer(directory)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == text == theirs.decode(ids)
    assert (ours.eos_token_ids, ours.special_token_ids) == ((0, 2), theirs.special_token_ids)
    assert ours.vocabulary == theirs.vocabulary
    assert ours.chat_template == theirs.chat_template
    messages = [{"role": "user", "content": "hi"}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)
    assert [ours.piece(token) for token in range(300)] == [theirs.piece(token) for token in range(300)]


@pytest.mark.parametrize("text", ["then the", "aaaaaa then", "tthheenn", "a anana  the", "", "then\nthé"])
def test_sentencepieces_rule_is_followed(text: str, tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(read_gguf(sentencepiece(tmp_path / "a.gguf")))
    expected = []
    for piece in pieces(("▁" + text.replace(" ", "▁")) if text else ""):
        expected += [259 + WORDS.index(piece)] if piece in WORDS else [3 + byte for byte in piece.encode()]
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text) == [1, *expected]
    assert tokenizer.decode(expected) == text


def test_the_file_says_how_texts_begin_and_end(tmp_path: Path) -> None:
    keys = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    tokenizer = load_gguf_tokenizer(read_gguf(sentencepiece(tmp_path / "a.gguf", **keys)))
    assert tokenizer.encode("the") == [259 + WORDS.index(piece) for piece in ("th", "e")] + [2]
    assert tokenizer.encode("<tool>the<|end|>")[:1] == [259 + len(WORDS) + 1]


def test_the_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """Those that are named come first, then control tokens that are known by their text."""
    found = read_gguf(sentencepiece(tmp_path / "a.gguf", eos_token_id=1, eot_token_id=260))
    assert end_ids(found) == (1, 260, 2, 259 + len(WORDS))


@pytest.mark.parametrize(
    ("texts", "kinds", "expected"),
    [
        (("<|user|>", "<|observation|>"), (3, 3), {1}),  # GLM's, behind the call of a tool
        (("<|end|>", "<|flush|>", "<|calls|>"), (3, 3, 3), {1, 2}),  # Solar Open's answers have several messages
        (("<end_of_turn>", "</s>"), (3, 4), {0}),  # in Gemma's vocabulary that is a tag of HTML
        (("<end_of_turn>", "</s>"), (3, 3), {0, 1}),
    ],
)
def test_which_texts_end_an_answer(
    texts: tuple[str, ...], kinds: tuple[int, ...], expected: set[int], tmp_path: Path
) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(texts))
    writer.add_token_types(list(kinds))
    finish(writer)
    assert {*end_ids(read_gguf(tmp_path / "a.gguf"))} == expected


@pytest.mark.parametrize("named", [{}, {"eot_token_id": 261}])
def test_an_answer_of_several_messages_does_not_end_with_the_first(named: dict[str, int], tmp_path: Path) -> None:
    """gpt-oss: <|end|> is the end of a thought, <|return|> or <|call|> that of the answer."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *("<|endoftext|>", "<|start|>", "<|return|>", "<|call|>")]
    writer: Any = gguf.GGUFWriter(tmp_path / "a.gguf", "gpt-oss")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, "<|message|>", "<|end|>"])
    writer.add_token_types([1] * 256 + [3] * 6)
    for key, value in {"eos_token_id": 258, **named}.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer)
    assert end_ids(read_gguf(tmp_path / "a.gguf")) == (258, 256, 259)


def test_several_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    found = read_gguf(sentencepiece(tmp_path / "a.gguf", chat_template=templates))
    assert load_gguf_tokenizer(found).chat_template == {"default": "D", "tool_use": "T"}


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda writer: None, "has no tokenizer; use a file whose tokenizer"),
        (
            lambda writer: (writer.add_tokenizer_model("bert"), writer.add_token_list(["a"])),
            "has a tokenizer of the kind 'bert'; use",
        ),
        (
            lambda writer: (writer.add_tokenizer_model("llama"), writer.add_token_list(["a"])),
            "has no score for each token",
        ),
        (
            lambda writer: (writer.add_tokenizer_model("gpt2"), writer.add_token_list(["a"])),
            "has the pre-tokenizer None, which is not supported",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused(make: Any, fault: str, tmp_path: Path) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    make(writer)
    finish(writer)
    with pytest.raises(ModelLoadError, match=fault):
        load_gguf_tokenizer(read_gguf(tmp_path / "a.gguf"))


OF_THREE = ("llama-bpe", "gpt-4o", "lfm2", "deepseek-v3", "kimi-k2", "afmoe", "tiny_aya")
OF_ONE = ("smollm", "qwen2", "qwen35", "tekken", "deepseek-llm", "deepseek-coder", "seed-coder", "exaone-moe")


@pytest.mark.parametrize("kind", [*OF_THREE, *OF_ONE])
def test_texts_are_split_before_they_are_merged(
    kind: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing is lost, and digits are split as each kind splits them."""
    tokenizer = with_splits(kind, model_directory, tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = text.replace("e\u0301", "é") if kind.startswith("qwen") else text
        assert tokenizer.decode(ids) == expected
    assert max(map(len, words(tokenizer, "12345"))) == (3 if kind in OF_THREE else 1)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("kimi-k2", "HelloWorld 東京ab it's", ["Hello", "World", " ", "東京", "ab", " it's"]),
        ("deepseek-v3", "x=foo(東京かな)", ["x", "=foo", "(", "東京かな", ")"]),
        ("deepseek-coder", "a b.c\n", ["a", " b", ".", "c", "\n"]),
        ("afmoe", "12345 1234567", ["12", "345", " ", "1", "234", "567"]),
        ("tiny_aya", "12345", ["12", "345"]),
        ("seed-coder", "ok!\nno", ["ok", "!", "\n", "no"]),
        ("falcon", "a+b ok12345", ["a", "+", "b", " ok", "123", "45"]),
        ("bloom", "ok, go 12", ["ok", ",", " go", " 12"]),
        ("laguna", "ok!\n\n12", ["ok", "!", "\n\n", "1", "2"]),
        ("jais-2", "a       b 1234", ["a", "    ", "  ", " b", " ", "123", "4"]),
        ("exaone-moe", "two words, 12", ["two words", ",", " ", "1", "2"]),
    ],
)
def test_where_a_text_is_split(
    kind: str, text: str, expected: list[str], model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """By the patterns of the models' own tokenizers; bytes are written as these write them."""
    found = words(with_splits(kind, model_directory, tmp_path), text)
    assert found == [spell(word) for word in expected]


def test_gemma4s_tokens_have_spaces_and_merges_of_their_own(tmp_path: Path) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma4")
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁then\n"]
    more = ["th", "▁th", "▁the", "\n\n", "<turn|>", "<|tool_call>"]
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list([*pieces, *more])
    writer.add_token_scores([-1000.0] * len([*pieces, *more]))
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * 6, *[1] * 4, 3, 4])
    writer.add_token_merges(["t h", "▁ th", "▁th e", "\n \n"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)  # which early files say, and is not true
    finish(writer)
    file = read_gguf(tmp_path / "a.gguf")
    tokenizer = load_gguf_tokenizer(file)
    text = " then\n\nthé<turn|>"
    ids = tokenizer.encode(text)
    names = [tokenizer.convert_ids_to_tokens(one) for one in ids]
    assert names == ["<bos>", "▁the", "n", "\n\n", "th", "<0xC3>", "<0xA9>", "<turn|>"]
    assert tokenizer.decode(ids[1:]) == text
    assert end_ids(file) == (1, len(pieces) + 4)


def with_splits(kind: str, model_directory: Callable[[str], Path], tmp_path: Path) -> Any:
    path = tmp_path / "a.gguf"
    writer: Any = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, model_directory("llama"), kind)
    finish(writer)
    return load_gguf_tokenizer(read_gguf(path))


def words(tokenizer: Any, text: str) -> list[str]:
    return [part for part, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def spell(word: str) -> str:
    """The word in the signs that byte-level tokenizers have for bytes."""
    return "".join(part for part, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word))
