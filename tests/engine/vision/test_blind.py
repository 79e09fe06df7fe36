"""Models that see images in a way that is not supported: they answer text, as transformers does, and refuse images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import greedy_answers
from pydantic import ByteSize
from vision_models import picture

from penstock.engine import EngineConfig, GenerationParams, ImageText, InferenceEngine
from penstock.engine.vision.blind import BlindModel, split_text
from penstock.engine.vision.sight import load_sight
from penstock.schemas.errors import InvalidRequest, ModelLoadError

COUNT = 16
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = [[3 + (7 * length + index * index) % 500 for index in range(length)] for length in (1, 17, 50)]
TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llava_next": {  # without an image processor here
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": TOWER | {"model_type": "clip_vision_model"},
    },
    "granite_docling": {  # without an image processor, too; which scales its logits behind the language model
        "text_config": TEXT | {"logits_scaling": 3.0},
        "vision_config": TOWER | {"out_hidden_size": 64},
    },
    "mistral4": {key: value for key, value in TEXT.items() if key != "head_dim"}  # all of it is a language model
    | LATENT
    | EXPERTS
    | {"num_key_value_heads": 4},
    "muse_glimmer": {"text_config": TEXT, "vision_config": TOWER},  # multiplies its logits, and bounds them
}

Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, model_directory: Directory) -> Directory:
    """The directory of a tiny model of the family, with a tokenizer that has no marks of images."""
    root = tmp_path_factory.mktemp("blind")

    def make(family: str) -> Path:
        import transformers

        directory, library = root / family, transformers  # type: Path, Any
        if directory.exists():
            return directory
        shutil.copytree(model_directory("llama"), directory, ignore=shutil.ignore_patterns("*.safetensors"))
        ids = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0, "tie_word_embeddings": False}
        config = library.AutoConfig.for_model(family, **FAMILIES[family] | ids)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = library.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                if parameter.ndim > 1 and parameter.std() < 0.1:
                    torch.nn.init.normal_(parameter, std=0.12)
        model.generation_config = library.GenerationConfig(eos_token_id=0, pad_token_id=0)
        model.save_pretrained(directory)
        return directory

    return make


def config(directory: Path, **values: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
    return EngineConfig(model=str(directory), backend="paged", **fields | values)


def expected(directory: Path) -> list[tuple[int, ...]]:
    from transformers import AutoModelForImageTextToText

    library: Any = AutoModelForImageTextToText
    model = library.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    found = greedy_answers(model, PROMPTS, COUNT)
    assert len({*found[-1]}) > COUNT // 2
    return found


@pytest.mark.parametrize("family", ["llava_next", "granite_docling", "mistral4", "muse_glimmer"])
def test_text_is_answered_as_by_transformers(family: str, seeing: Directory) -> None:
    directory = seeing(family)
    wanted = expected(directory)
    with InferenceEngine(config(directory, prefill_chunk_size=7)) as engine:
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == wanted
        again = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in again] == wanted
        assert again[-1].stats.cached_tokens == 48


def test_a_model_of_known_structure_is_compiled_and_known_at_its_next_start(
    seeing: Directory, verdict_cache: Path
) -> None:
    directory = seeing("granite_docling")
    wanted = expected(directory)
    for _ in range(2):
        with InferenceEngine(config(directory)) as engine:
            assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == wanted
        assert [*verdict_cache.rglob("*.json")]


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("muse_glimmer", "images are not supported for muse_glimmer, but for .*gemma3"),
        ("llava_next", "its files have no preprocessor_config.json and no processor_config.json"),
    ],
)
def test_images_are_refused_with_the_reason(family: str, why: str, seeing: Directory) -> None:
    directory = seeing(family)
    with InferenceEngine(config(directory)) as engine:
        assert not engine.model_info().sees
        with pytest.raises(InvalidRequest, match="takes text alone"):
            engine.generate(ImageText("What is this?", (picture(),)), GREEDY)
        with pytest.raises(InvalidRequest, match=why):
            load_sight(str(directory), "paged").mark_of(engine.tokenizer)


def test_a_model_that_computes_text_otherwise_is_refused(seeing: Directory) -> None:
    from transformers import AutoModelForImageTextToText

    library: Any = AutoModelForImageTextToText
    model = library.from_pretrained(seeing("llava_next"), dtype=torch.float32)
    ids = torch.tensor(PROMPTS[1])
    own = split_text(model)
    assert isinstance(own, BlindModel)
    own.check(ids)
    other = BlindModel(model, model.model.language_model, torch.nn.Linear(64, 512, bias=False))
    with pytest.raises(ModelLoadError, match=r"LlavaNextFor.* computes text in a way that is not supported \(off by"):
        other.check(ids)


def test_a_model_that_does_not_write_token_by_token_is_refused(seeing: Directory) -> None:
    from transformers import AutoConfig, Florence2ForConditionalGeneration

    config: Any = AutoConfig
    tower = {"embed_dim": [8, 8, 8, 8], "num_heads": [1] * 4, "num_groups": [1] * 4, "depths": [1] * 4}
    words = {"d_model": 16, "vocab_size": 64, "encoder_layers": 1, "decoder_layers": 1}
    sizes = config.for_model("florence2", vision_config=tower | {"projection_dim": 16}, text_config=words)
    with pytest.raises(ModelLoadError, match=r"Florence2.* does not generate text token by token"):
        split_text(Florence2ForConditionalGeneration(sizes))
