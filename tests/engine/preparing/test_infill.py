"""Completions between a prompt and a suffix, in the forms that models of code are trained on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing

from penstock.engine.preparing.prepare import Prepared, Preparer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.completions import CompletionRequest, parse_request

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"


def with_tokens(tiny_model: Path, folder: Path, *names: str) -> Tokenizer:
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(folder)
    tokenizer.huggingface.add_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.huggingface.save_pretrained(folder)
    tokenizer = Tokenizer(folder)
    tokenizer.vocabulary_size = len(tokenizer.vocabulary)
    return tokenizer


def prepared(tokenizer: Tokenizer, context_length: int = 1000, **body: Any) -> Prepared:
    request = parse_request("/v1/completions", {"model": "m", **body})
    assert isinstance(request, CompletionRequest)
    return Preparer(tokenizer).prepare(request, context_length=context_length, name="m", seed=7)


@pytest.mark.parametrize(
    ("marks", "form"),
    [
        (QWEN, "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>{}<fim_suffix>{}<fim_middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>"),  # noqa: RUF001
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "<[fim-suffix]>{1}<[fim-prefix]>{0}<[fim-middle]>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{1}[PREFIX]{0}"),
    ],
)
def test_the_model_reads_both_texts_in_its_own_form(
    tiny_model: Path, tmp_path: Path, marks: tuple[str, ...], form: str
) -> None:
    tokenizer = with_tokens(tiny_model, tmp_path, *marks, "<|endoftext|>", "<|file_sep|>")
    asked = prepared(tokenizer, prompt=BEFORE, suffix=AFTER, stop_token_ids=[3])
    assert asked.prompts == [tokenizer.encode(form.format(BEFORE, AFTER))]
    ends = [tokenizer.vocabulary[name] for name in (*marks, "<|endoftext|>", "<|file_sep|>")]
    assert asked.params.stop_token_ids == (3, *ends), "the answer ends where the gap does"
    assert prepared(tokenizer, prompt=BEFORE, suffix=AFTER, ignore_eos=True).params.stop_token_ids == ()
    several = prepared(tokenizer, prompt=[BEFORE, ""], suffix=AFTER)
    assert several.prompts == [tokenizer.encode(form.format(before, AFTER)) for before in (BEFORE, "")]
    ids = tokenizer.encode(BEFORE, add_special_tokens=False)
    assert prepared(tokenizer, prompt=ids, suffix=AFTER).prompts == asked.prompts
    for nothing in ("", None):
        plain = prepared(tokenizer, prompt=BEFORE, suffix=nothing)
        assert plain.prompts == [tokenizer.encode(BEFORE)] and plain.params.stop_token_ids == ()


def test_what_begins_every_prompt_stands_before_the_markers_and_no_space_behind_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    names = ["<unk>", "<s>", "[PREFIX]", "[SUFFIX]", "\u2581", *map(chr, range(33, 127))]
    fast = tokenizers.Tokenizer(BPE({name: id for id, name in enumerate(names)}, [], unk_token="<unk>"))
    fast.pre_tokenizer = Metaspace(prepend_scheme="first")
    fast.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast.add_special_tokens([AddedToken(name, special=True) for name in names[:4]])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [names[id] for id in tokenizer.encode("ab")] == ["<s>", "\u2581", "a", "b"], "a space before a text alone"
    (ids,) = prepared(tokenizer, prompt="a b", suffix="c").prompts
    assert [names[id] for id in ids] == ["<s>", "[SUFFIX]", "c", "[PREFIX]", "a", "\u2581", "b"]
    (ids,) = prepared(tokenizer, prompt="a", suffix=" c", add_special_tokens=False).prompts
    assert [names[id] for id in ids] == ["[SUFFIX]", "\u2581", "c", "[PREFIX]", "a"]


@pytest.mark.parametrize(
    ("body", "param", "fault"),
    [
        ({"prompt": "a" * 600, "suffix": "b" * 600}, "prompt", "1"),
        ({"prompt": "a", "suffix": "b" * 200_000}, "suffix", "more than"),
        ({"prompt": "a", "suffix": 3}, "suffix", "string"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "echo", "cannot be combined with suffix"),
        ({"prompt": [99_999], "suffix": "b"}, "prompt", "99999"),
    ],
)
def test_what_cannot_be_filled_is_refused(
    tiny_model: Path, tmp_path: Path, body: dict[str, Any], param: str, fault: str
) -> None:
    tokenizer = with_tokens(tiny_model, tmp_path, *QWEN)
    with pytest.raises(InvalidRequest, match=fault) as caught:
        prepared(tokenizer, **body)
    assert caught.value.param == param


def test_a_model_without_markers_refuses_a_suffix(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequest, match="no markers for the gap") as caught:
        prepared(Tokenizer(tiny_model), prompt="a", suffix="b")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")
