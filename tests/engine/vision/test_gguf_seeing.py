"""Models that see, as pairs of GGUF files, against transformers' own generation from the directories that they are of.

Prompts and images are prepared from the pair, and for the oracle by the directory's own processor: both must agree.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf_pairs import KINDS, write_pair
from pydantic import ByteSize
from vision_models import make_vision_model, picture
from vision_runs import requests_of, run
from vision_truth import expected, reference

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, ImageText, InferenceEngine, loading
from penstock.engine.checkpoints import rounded
from penstock.engine.loading import load_config
from penstock.engine.models import resolve_model
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.preparing.prompts import Prompt
from penstock.engine.vision.families.names import is_of_tower
from penstock.engine.vision.processor import VisionProcessor
from penstock.schemas.errors import ModelLoadError

COUNT = 20  # tokens generated
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TEXT = "A sentence without any picture, which runs beside the others."
UNLIKE = {"initializer_range", "dtype", "_name_or_path", "projection_dim", "num_hidden_layers"}  # in both forms
GEMMAS_4 = ("gemma4", "gemma4_e", "gemma4_unified")
TOWERS = {  # that of all its models: GGUF does not have it
    **{family: {"window_size": 112} for family in ("qwen2_5_vl", "qwen2_5_omni")},
    "lfm2_vl": {"patch_size": 16},
    **{family: {"pooling_kernel_size": 3} for family in GEMMAS_4},
}
PIXELS = {"min_pixels": 65_536, "max_pixels": 16_777_216}  # so are these of the families of Qwen 3
TILES = {"encoder_patch_size": 16, "tile_size": 512, "min_image_tokens": 64, "max_image_tokens": 256, "max_tiles": 10}
LLAMA4 = {"max_patches": 16}
GLMS = ("glm4v", "glm4v_moe", "glm_ocr")
GLM = {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}, "image_processor_type": "Glm46VImageProcessor"}
SOFT_TOKENS = {"pooling_kernel_size": 3, "max_soft_tokens": 280}  # and these

Tokens = tuple[int, ...]


class Seer(NamedTuple):
    """A model in both forms; `requests` are for `prompts`, and transformers answers `wanted`."""

    directory: Path
    gguf: Path
    prompts: list[Prompt]
    requests: list[EngineRequest]
    wanted: list[Tokens]


def config(model: Path | str, **changes: Any) -> EngineConfig:
    settings = {"kv_cache_memory": ByteSize(16 << 20), "dtype": "float32", "device": "cpu", **changes}
    return EngineConfig(model=str(model), **settings)


def prompts_of(mark: str) -> list[Prompt]:
    """One picture, two of other shapes, one of which takes several windows or tiles, and none."""
    return [
        ImageText(f"Here is {mark} and nothing else. What do you see?", (picture(),)),
        ImageText(f"{mark} is one, {mark} another. Which is larger?", (picture(150, 60, 1), picture(40, 90, 2))),
        TEXT,
    ]


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seer]:
    root = tmp_path_factory.mktemp("pairs")

    def make(family: str) -> Seer:
        directory = make_vision_model(root / family, family, tower=TOWERS.get(family))
        known = {**dict.fromkeys(GEMMAS_4, SOFT_TOKENS), "lfm2_vl": TILES, "llama4": LLAMA4, **dict.fromkeys(GLMS, GLM)}
        if pixels := PIXELS if family.startswith("qwen3") else known.get(family, {}):
            file = directory / "preprocessor_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | pixels))
        path = write_pair(directory, root / f"{family}-gguf", family)
        with InferenceEngine(config(directory)) as engine:
            prompts = prompts_of(engine.image_mark)
            requests, processor = requests_of(engine, prompts, GREEDY), VisionProcessor.of(directory)
            said = [output.token_ids for output in engine.generate(prompts, GREEDY)]
        assert processor is not None
        model, asked = reference(directory), zip(requests, said, strict=True)
        wanted = [expected(model, request, processor, family, COUNT, it) for request, it in asked]
        assert len({*wanted}) == 3, "the answers do not depend on the pictures"
        return Seer(directory, path, prompts, requests, wanted)

    return cache(make)


@pytest.mark.parametrize("family", KINDS)
def test_a_pair_of_files_sees_what_transformers_sees(family: str, seer: Callable[[str], Seer]) -> None:
    """In a batch, alone behind a cached prefix, and from pieces of a prompt."""
    found = seer(family)
    both = [load_config(path) for path in (resolve_model(str(found.gguf)), found.directory)]
    own, theirs = (one.vision_config.to_dict() for one in both)
    assert {name for name in theirs if own.get(name) != theirs[name]} <= UNLIKE
    rotated, wanted = (one.text_config.rope_parameters or {} for one in both)
    for name in wanted.keys() & {"mrope_section", "mrope_interleaved"}:  # tokens of a model this small do not tell
        assert rotated.get(name) == wanted[name]
    with InferenceEngine(config(found.gguf)) as engine:
        assert engine.model_info().sees
        requests = requests_of(engine, found.prompts, GREEDY)
        assert [(one.prompt, one.images) for one in requests] == [(one.prompt, one.images) for one in found.requests]
        together = [output.token_ids for output in engine.generate(found.prompts, GREEDY)]
        assert together == found.wanted
        again = [engine.generate(prompt, GREEDY) for prompt in found.prompts]
        assert [output.token_ids for output in again] == found.wanted
        assert all(output.stats.cached_tokens > 0 for output in again)
        is_slow = family in ("glm4v_moe", "hunyuan_vl", "llama4")
        assert bool(engine.model_info().slow_paths) == is_slow, "decoding is compiled, as for text"
    backend = PagedBackend(config(found.gguf, prefill_chunk_size=16, max_batch_size=3))
    assert run(backend, found.requests) == found.wanted
    backend.close()


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_preemption_changes_nothing(family: str, seer: Callable[[str], Seer]) -> None:
    found = seer(family)
    longest = max(len(request.prompt) for request in found.requests) + COUNT
    memory = ByteSize((longest // 16 + 2) * 16 * 3 * 2 * 2 * 16 * 4)
    tight = config(found.gguf, kv_cache_memory=memory, max_batch_size=3, max_sequence_length=longest)
    backend = PagedBackend(tight)
    assert run(backend, [replace(request, cache_salt=request.id) for request in found.requests]) == found.wanted
    stats = backend.cache_stats()
    assert stats is not None and stats.num_preemptions > 0
    backend.close()


def test_a_projector_in_16_bits_is_the_tower_in_16_bits(seer: Callable[[str], Seer], tmp_path: Path) -> None:
    found = seer("llava")
    path = write_pair(found.directory, tmp_path, "llava", dtype="F16")
    model, processor = reference(found.directory), VisionProcessor.of(found.directory)
    assert processor is not None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if is_of_tower(name) and weight.ndim == 2 and "position" not in name:
                weight.copy_(weight.half().float())
    with InferenceEngine(config(path)) as engine:
        said = [output.token_ids for output in engine.generate(found.prompts, GREEDY)]
    asked = zip(found.requests, said, strict=True)
    assert said == [expected(model, request, processor, "llava", COUNT, it) for request, it in asked]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("smolvlm", "model.text_model.layers.0.self_attn.q_proj"),
        ("qwen3_5_moe", "model.language_model.layers.0.linear_attn.in_proj_qkv"),
    ],
)
def test_levels_are_kept_of_the_language_model_alone(
    family: str, name: str, seer: Callable[[str], Seer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, as usual."""
    kept: list[str] = []

    def attach(model: torch.nn.Module, found: dict[str, rounded.ReadRounded], experts: Any) -> None:
        kept.extend(found)
        rounded.attach(model, found, experts)

    monkeypatch.setattr(loading, "attach", attach)
    directory, kind = (
        seer(family).directory,
        lambda _, values: "Q8_0" if values.ndim == 2 and values.shape[1] % 32 == 0 else None,
    )
    path = write_pair(directory, tmp_path, family, dtype="Q8_0", text_kind=kind)
    with InferenceEngine(config(path, dtype="bfloat16")) as engine:
        assert name in kept and not any(map(is_of_tower, kept))
        prompts = prompts_of(engine.image_mark)
        other = ImageText(prompts[0].text, (picture(salt=5),)) if isinstance(prompts[0], ImageText) else TEXT
        answers = [output.token_ids for output in engine.generate([*prompts, other], GREEDY)]
        assert len({*answers}) == 4


@pytest.mark.parametrize(
    ("family", "behind", "backend"),
    [
        ("smolvlm", ",none", "paged"),
        ("smolvlm", "", "hf"),
        ("glm4v", ",none", "paged"),
        ("paddleocr_vl", "", "hf"),
        ("hunyuan_vl", ",none", "paged"),
    ],
)
def test_the_language_model_runs_alone(family: str, behind: str, backend: str, seer: Callable[[str], Seer]) -> None:
    """Where that is asked for, and with a backend that sees nothing."""
    found = seer(family)
    with InferenceEngine(config(f"{found.gguf}{behind}", backend=backend)) as engine:
        assert not engine.model_info().sees
        assert engine.generate(TEXT, GREEDY).token_ids == found.wanted[2]


@pytest.mark.parametrize("spare", ["<unused7>", "<other>"])
def test_another_token_stands_for_an_image_where_converters_left_its_own_out(
    spare: str, seer: Callable[[str], Seer], tmp_path: Path
) -> None:
    """As those of Gemma 3 do: its image token lies behind the vocabulary that they write."""
    found = seer("gemma3")
    directory = shutil.copytree(found.directory, tmp_path / "gemma3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = directory / name
        file.write_text(file.read_text().replace("<image_soft_token>", spare))
    path = write_pair(directory, tmp_path / "gguf", "gemma3")
    if spare == "<other>":
        with pytest.raises(ModelLoadError, match="has no token <image_soft_token>"):
            InferenceEngine(config(path))
        return
    with InferenceEngine(config(path)) as engine:
        assert [output.token_ids for output in engine.generate(found.prompts, GREEDY)] == found.wanted
