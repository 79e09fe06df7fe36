"""Every bad input has its own message, and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine, resolve_model
from penstock.schemas.errors import ConfigurationError, InvalidRequest, ModelLoadError


@pytest.fixture
def copy(model_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model directory that a test may damage."""
    return Path(shutil.copytree(model_directory("llama"), tmp_path / "model"))


def load(model: Path | str, **settings: Any) -> None:
    InferenceEngine(EngineConfig(model=str(model), dtype="float32", **{"device": "cpu"} | settings)).close()


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no such directory or file: .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"no such directory or file: \./nowhere"):
        resolve_model("./nowhere")


def test_a_file_in_place_of_a_directory(copy: Path) -> None:
    with pytest.raises(ModelLoadError, match="is no GGUF file; name one, or the directory"):
        load(copy / "model.safetensors")


def test_a_hub_id_that_cannot_be_had_offline(tmp_path: Path) -> None:
    script = "from penstock.engine import resolve_model; resolve_model('nobody/nothing')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "no directory 'nobody/nothing' here, no copy of it in the Hugging Face cache" in result.stderr


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load(copy)


def test_a_config_that_is_not_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json is not JSON"):
        load(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"config\.json is not a JSON object"):
        load(copy)


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_a_config_that_lacks_something(copy: Path, key: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config[key]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"no vocab_size|set max_sequence_length"):
        load(copy)


def test_a_model_that_is_no_causal_language_model(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ModelLoadError, match="is a BertForMaskedLM, which transformers does not know as a causal"):
        load(copy)


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="the weights are missing"):
        load(copy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-100], r"model\.safetensors is not a complete safetensors file: it has \d+ bytes instead"),
        (lambda data: b"", "its header is truncated"),
        (lambda data: b"\xff" * 8 + data[8:], "its header is truncated"),
        (lambda data: data[:8] + b"x" + data[9:], "its header cannot be read"),
    ],
    ids=["cut", "empty", "length", "header"],
)
def test_broken_weights(copy: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelLoadError, match=message):
        load(copy)


def test_a_missing_shard(copy: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.move(copy / "model.safetensors", copy / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelLoadError, match=r"names missing files: model-00002-of-00002\.safetensors;"):
        load(copy)
    (copy / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="is not an index of safetensors files"):
        load(copy)


def test_weights_that_lack_tensors(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack 1 tensors, such as model\.norm\.weight"):
        load(copy)


@pytest.mark.parametrize("content", ["{}", "{", ""])
def test_a_broken_tokenizer(copy: Path, content: str) -> None:
    (copy / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="has no usable tokenizer"):
        load(copy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:97"}, r"device='cuda:97': not available, torch finds \d+ CUDA devices"),
        ({"device": "tpu"}, "device='tpu': must be auto, cpu, cuda, cuda:N or mps"),
        ({"backend": "magic"}, "unknown backend 'magic'; use one of: echo, hf, llama_cpp, paged"),
        (
            {"backend": "hf", "quantization": "int8"},
            "quantization='int8': the backend 'hf' does not support this setting",
        ),
        ({"backend": "hf", "enable_cuda_graph": True}, "enable_cuda_graph=True: the backend 'hf' does not"),
        (
            {"backend": "hf", "enable_chunked_prefill": True, "prefill_chunk_size": 5},
            "enable_chunked_prefill.*\n.*prefill_chunk_size=5",
        ),
        ({"backend": "hf", "echo_rate": 1.0}, "echo_rate=1.0: the backend 'hf' does not"),
        ({"backend": "echo", "device": "cuda:0"}, "device='cuda:0': the backend 'echo' runs only on a CPU"),
        ({"backend": "echo", "quantization": "int8"}, "the backend 'echo' does not support this setting"),
        ({"backend": "hf", "attention": "guess"}, "attention='guess': must be one of auto, eager"),
        ({"attention": "sdpa"}, "attention='sdpa': the backend 'paged' has its own"),
        ({"quantization": "int3"}, "quantization='int3': must be one of int8, int4"),
        ({"echo_rate": 1.0}, "echo_rate=1.0: the backend 'paged' does not"),
        ({"kv_cache_memory": 1 << 50}, "kv_cache_memory=1125899906842624: this machine has .* set at most"),
        ({"kv_cache_memory": 100}, r"kv_cache_memory=100: one block of 16 tokens takes 16384 bytes"),
        (
            {"kv_cache_memory": 1 << 20, "max_sequence_length": 2048},
            "kv_cache_memory=1048576: holds 1024 tokens of one request, fewer than max_sequence_length=2048",
        ),
        ({"max_sequence_length": 4096}, r"max_sequence_length=4096: the context of .* has 2048 tokens"),
    ],
)
def test_settings_that_cannot_be_honoured(
    settings: dict[str, Any], message: str, model_directory: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(model_directory("llama"), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": ""},
        {"max_batch_size": 0},
        {"dtype": "int3"},
        {"kv_cache_memory": "much"},
        {"temperature": 1},
        {"max_batch_size": 4, "reserved_batch_size": 4},
        {"max_pixels": 100, "min_pixels": 101},
    ],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EngineConfig(**{"model": "m"} | settings)


def test_sizes_may_be_written_with_a_unit() -> None:
    assert EngineConfig.model_validate({"model": "m", "kv_cache_memory": "2GiB"}).kv_cache_memory == 2 << 30


def test_a_shorter_context_is_kept(model_directory: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(model_directory("llama")), device="cpu", max_sequence_length=10)
    with InferenceEngine(config) as engine:
        with pytest.raises(InvalidRequest, match=r"is 10 tokens, answer included, .*: 10 tokens > 9 maximum"):
            engine.generate([5] * 10, GenerationParams())
        assert len(engine.generate([5] * 8, GenerationParams(ignore_eos=True)).token_ids) == 2


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GenerationParams(), "The prompt is empty"),
        ([5] * 3000, GenerationParams(), "too long: 3000 tokens > 2047 maximum"),
        ([512], GenerationParams(), "prompt: token id 512 is outside the vocabulary of 512"),
        ([-1], GenerationParams(), "prompt: token id -1 is outside"),
        ([5], GenerationParams(logit_bias={512: 1.0}), "logit_bias: token id 512 is outside"),
        ([5], GenerationParams(stop_token_ids=(600,)), "stop_token_ids: token id 600 is outside"),
    ],
)
def test_requests_that_can_never_be_served(
    llama: InferenceEngine, prompt: list[int] | str, params: GenerationParams, message: str
) -> None:
    before = llama.stats().num_requests
    with pytest.raises(InvalidRequest, match=message):
        llama.generate(prompt, params)
    with pytest.raises(InvalidRequest, match=message):
        llama.generate([[5], llama.tokenize(prompt) if isinstance(prompt, str) else prompt], params)
    assert llama.stats().num_requests == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2**63}, "does not fit into 64 bits"),
        ({"generated": ((5,), (6,))}, "generated has 2 choices, but n is 1"),
        ({"generated": ((512,),)}, "generated: token id 512 is outside"),
    ],
)
async def test_bad_requests_of_the_pipeline(llama: InferenceEngine, change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"id": "r", "prompt": (5,), "params": GenerationParams(), "seed": 1} | change
    with pytest.raises(InvalidRequest, match=message):
        llama.open(EngineRequest(**fields))


def test_light_processes_import_no_torch() -> None:
    script = (
        "import sys, penstock.engine as e\n"
        "e.load_tokenizer('echo', 'echo').encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "e.InferenceEngine(e.EngineConfig(model='echo', backend='echo')).close()\n"
        "sys.exit(' '.join({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr.strip() == ""
