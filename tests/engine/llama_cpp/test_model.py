"""llama.cpp's own arithmetic: what Penstock relies on when it continues an answer in another batch or worker."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.llama_cpp.piece import Logits, Piece
from penstock.schemas.errors import ModelLoadError

llama_cpp: Any = pytest.importorskip("llama_cpp", reason="needs pip install 'penstock[llama-cpp]'")
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
TOKENS = [5 + (7 * index + index * index) % 480 for index in range(60)]
MakeFile = Callable[[str], Path]


@pytest.fixture(scope="session")
def gguf_of(model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeFile:
    """A tiny llama as a GGUF file whose matrices have the given type."""
    root = tmp_path_factory.mktemp("gguf")

    def make(kind: str) -> Path:
        path: Path = root / f"{kind}.gguf"
        if not path.exists():
            chosen = None if kind == "F32" else kind
            write_gguf(model_directory("llama"), path, "llama", lambda _, values: chosen if values.ndim == 2 else None)
        return path

    return make


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest, gguf_of: MakeFile) -> Iterator[Any]:
    from penstock.engine.llama_cpp.model import LlamaModel

    with closing(LlamaModel(gguf_of(request.param), 4, 256, 64, 1)) as model:
        yield model


def alone(model: Any, sequence: int = 0, tokens: list[int] = TOKENS) -> Logits:
    """The logits of each token, computed one by one."""
    rows = [model.compute(Piece(sequence, index, [token])) for index, token in enumerate(tokens)]
    model.clear(sequence)
    return np.concatenate(rows)


def test_a_token_has_the_same_bits_in_every_piece(model: Any) -> None:
    assert model.steady == 64
    expected = alone(model)
    for size in (2, 7, 60):
        for start in range(0, len(TOKENS), size):
            piece = Piece(0, start, TOKENS[start : start + size], wanted=True)
            assert np.array_equal(model.compute(piece), expected[start : start + size])
        model.clear(0)
    last = model.compute(Piece(0, 0, TOKENS))
    assert np.array_equal(last, expected[-1:])


def test_a_token_has_the_same_bits_beside_any_other(model: Any) -> None:
    expected = alone(model)
    for others in ([1], [1, 2, 3], [2], [3]):
        for index, token in enumerate(TOKENS):
            rows = [Piece(0, index, [token]), *(Piece(other, index, [TOKENS[-index]]) for other in others)]
            assert np.array_equal(model.advance(rows[::-1])[-1], expected[index])
        for sequence in (0, *others):
            model.clear(sequence)
    assert np.array_equal(alone(model, 3), expected)


def test_a_neighbour_leaves_what_it_borrows_as_it_was(gguf_of: MakeFile) -> None:
    """A lone row of F32 needs one, and the sequence beside it is in use."""
    from penstock.engine.llama_cpp.model import LlamaModel

    with closing(LlamaModel(gguf_of("F32"), 2, 256, 64, 1)) as model:
        expected = alone(model)
        model.compute(Piece(1, 0, TOKENS[:30]))
        assert np.array_equal(alone(model), expected)
        assert np.array_equal(model.compute(Piece(1, 30, TOKENS[30:], wanted=True)), expected[30:])


@pytest.mark.parametrize("kind", TYPES)
def test_greedy_tokens_are_those_of_llama_cpp(kind: str, gguf_of: MakeFile) -> None:
    """Its plainest use, by its own defaults but for keys and values: one sequence, one token after another."""
    path = gguf_of(kind)
    config = EngineConfig(model=str(path), backend="llama_cpp", max_batch_size=4)
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=40, temperature=0, ignore_eos=True)
        tokens = list(engine.generate([TOKENS[:20]], params)[0].token_ids)
    assert tokens == greedy(path, TOKENS[:20], 40)


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by llama.cpp's own sampler."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 256
    params.type_k = params.type_v = 30  # GGML_TYPE_BF16
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = llama_cpp.llama_init_from_model(model, params)
    sampler = llama_cpp.llama_sampler_init_greedy()
    found: list[int] = []
    tokens = prompt
    for _ in range(count):
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        assert llama_cpp.llama_decode(context, batch) == 0
        tokens = [int(llama_cpp.llama_sampler_sample(sampler, context, -1))]
        found += tokens
    llama_cpp.llama_sampler_free(sampler)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


def test_a_file_that_llama_cpp_refuses_is_named(tmp_path: Path) -> None:
    from penstock.engine.llama_cpp.model import LlamaModel

    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelLoadError, match=r"llama\.cpp cannot load .*broken\.gguf: .+; use"):
        LlamaModel(path, 2, 256, 64, 1)
