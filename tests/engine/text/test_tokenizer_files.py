"""What transformers makes of tokenizer files is kept, and does the same; what cannot be kept is made each time."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.engine.models import BUNDLED, resolve_model
from penstock.engine.text import tokenizer_files
from penstock.engine.text.tokenizer_files import load_tokenizer_files, load_with_transformers
from penstock.schemas.errors import ModelLoadError

TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from([" ", "  ", "\n", "<|im_start|>", "<|im_end|>", "the", "é", "中", "🙂", "12", "<0x41>"]),
    max_size=12,
).map("".join)


@functools.cache
def own_of(path: Path) -> Any:
    return load_with_transformers(path)


@pytest.fixture
def model(model_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_directory("llama"), tmp_path / "model"))


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.json"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_a_kept_tokenizer_cuts_every_text_as_transformers_does(
    model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, text: str, special: bool
) -> None:
    cache = tmp_path_factory.getbasetemp() / "kept"
    for path in (model_directory("llama"), resolve_model(BUNDLED)):
        load_tokenizer_files(path, cache)
        again = load_tokenizer_files(path, cache)
        assert again.slow is None and again.fast is not None
        own = own_of(path)
        ids = own.encode(text, add_special_tokens=special)
        assert again.fast.encode(text, add_special_tokens=special).ids == ids
        assert again.fast.decode(ids, skip_special_tokens=special) == own.backend_tokenizer.decode(
            ids, skip_special_tokens=special
        )


def test_what_was_kept_is_what_was_made(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made, again = load_tokenizer_files(model, cache), load_tokenizer_files(model, cache)
    assert made.facts == again.facts
    own = AutoTokenizer.from_pretrained(model)
    assert again.facts.special_tokens == own.special_tokens_map
    assert again.facts.chat_template == own.chat_template
    assert again.facts.eos_token_id == own.eos_token_id
    assert len(kept(cache)) == 1


def test_a_gguf_file_is_kept_too(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "llama")
    made, again = load_tokenizer_files(file, tmp_path / "cache"), load_tokenizer_files(file, tmp_path / "cache")
    assert made.facts == again.facts and again.slow is None
    assert len(kept(tmp_path / "cache")) == 1


def test_a_later_process_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.engine.text.tokenizer_files import load_tokenizer_files;"
        "from penstock.engine.models import BUNDLED, resolve_model;"
        "load_tokenizer_files(resolve_model(BUNDLED), Path(sys.argv[1]));"
        "print({'transformers', 'torch'} & {*sys.modules})"
    )
    for expected in ("'transformers'", "set()"):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert expected in done.stdout


@pytest.mark.parametrize("change", ["template", "special"])
def test_other_files_are_another_tokenizer(model: Path, tmp_path: Path, change: str) -> None:
    before = load_tokenizer_files(model, tmp_path / "cache").facts
    if change == "template":
        (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    else:
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|im_start|>"}))
    assert load_tokenizer_files(model, tmp_path / "cache").facts != before


@pytest.mark.parametrize("damage", [b"", b"x", b"{}\n{}"])
def test_a_damaged_file_is_made_anew(
    model: Path, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    made = load_tokenizer_files(model, cache).facts
    (file,) = kept(cache)
    whole = file.read_bytes()
    file.write_bytes(damage or whole[:-1])
    assert load_tokenizer_files(model, cache).facts == made
    assert file.read_bytes() == whole
    assert "is damaged; the tokenizer is made anew" in caplog.text


def test_a_cache_that_cannot_be_written_costs_only_time(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()
    assert load_tokenizer_files(model, tmp_path / "file").fast is not None
    assert "set XDG_CACHE_HOME to a writable directory" in caplog.text


def test_those_that_were_not_used_for_longest_make_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "_MOST", 2)
    cache = tmp_path / "cache"
    for number in range(3):
        (model / "chat_template.jinja").write_text(f"{number}")
        load_tokenizer_files(model, cache)
    assert len(kept(cache)) == 2


def test_a_model_without_a_tokenizer_is_refused_with_its_path(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(ModelLoadError, match="has no usable tokenizer"):
        load_tokenizer_files(model, tmp_path / "cache")
    assert kept(tmp_path / "cache") == []


def test_a_tokenizer_whose_files_are_not_the_whole_of_it_is_not_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here transformers' class does something of its own with every text."""
    own = load_with_transformers(model)

    class Loud(type(own)):  # type: ignore[misc]
        def _encode_plus(self, text: str, *args: object, **kwargs: object) -> object:
            return super()._encode_plus(text.upper(), *args, **kwargs)

    monkeypatch.setattr(tokenizer_files, "load_with_transformers", lambda path: Loud.from_pretrained(path))
    loaded = load_tokenizer_files(model, tmp_path / "cache")
    assert loaded.slow is not None and kept(tmp_path / "cache") == []
    assert loaded.slow.encode("abc") == own.encode("ABC")
