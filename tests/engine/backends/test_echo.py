"""The backend without a model."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.choice import Choice
from penstock.engine.text.byte_tokenizer import ByteTokenizer


def test_the_answer_is_the_prompt(echo: InferenceEngine) -> None:
    output = echo.generate("Grüße, 世界", GenerationParams())
    assert (output.text, output.finish_reason) == ("Grüße, 世界", "stop")
    assert output.raw_text == "Grüße, 世界<|endoftext|>"


def test_a_directory_called_echo_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo").mkdir()
    monkeypatch.chdir(tmp_path)
    with InferenceEngine(EngineConfig(model="echo", backend="echo")) as engine:
        assert engine.generate("hello", GenerationParams()).text == "hello"


def test_it_repeats_where_the_end_token_is_ignored_or_too_early(echo: InferenceEngine) -> None:
    assert echo.generate("ab", GenerationParams(ignore_eos=True, max_tokens=5)).text == "ababa"
    assert echo.generate("ab", GenerationParams(min_tokens=3)).text == "aba"


def test_special_tokens_of_a_chat_are_not_repeated(echo: InferenceEngine) -> None:
    prompt = echo.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert echo.generate(prompt, GenerationParams()).text == "user\nhi\nassistant\n"


def test_stop_strings_and_logprobs(echo: InferenceEngine) -> None:
    output = echo.generate("hello world", GenerationParams(stop=("o w",), logprobs=2))
    assert (output.text, output.finish_reason) == ("hell", "stop_sequence")
    assert output.logprobs is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in output.logprobs[:2]] == [
        ("h", 0.0, (104,)),
        ("e", 0.0, (101,)),
    ]


def test_it_uses_the_tokenizer_of_a_model_directory(model_directory: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(model_directory("llama")), backend="echo")
    with InferenceEngine(config) as engine:
        assert engine.generate("the prompt", GenerationParams()).text == "the prompt"
        assert engine.model_info().vocabulary_size == 512
        assert engine.model_info().context_length == 2048


def test_the_rate_is_kept_for_each_choice() -> None:
    now = [100.0]
    backend = EchoBackend(EngineConfig(model="echo", backend="echo", echo_rate=10.0), clock=lambda: now[0])
    assert backend.delay() == inf
    rows = []
    for _ in range(2):
        request = EngineRequest("r", tuple(b"abcdef"), GenerationParams(), seed=0)
        rows.append(Choice(request, 0, ByteTokenizer(), backend.info))
        backend.add(rows[-1])
        assert backend.delay() == 0
        backend.step()
        now[0] += 0.05
    assert [len(row.tokens) for row in rows] == [1, 1]
    now[0] = 100.1
    backend.step()
    assert [len(row.tokens) for row in rows] == [2, 1]
    assert backend.delay() == pytest.approx(0.05)
    backend.step()
    assert [len(row.tokens) for row in rows] == [2, 1]


def test_a_successor_keeps_the_rate_from_where_it_begins() -> None:
    backend = EchoBackend(EngineConfig(model="echo", backend="echo", echo_rate=10.0), clock=lambda: 100.0)
    request = EngineRequest("r", tuple(b"abcdef"), GenerationParams(), seed=0, generated=(tuple(b"abc"),))
    row = Choice(request, 0, ByteTokenizer(), backend.info)
    backend.add(row)
    assert [delta.text for delta in backend.step()] == ["d"]
    assert backend.delay() == pytest.approx(0.1)
