"""What needs no vLLM: the manifest, what is refused before anything loads, and how requests are put in its words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gguf_files import write_gguf
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine, find_backend
from penstock.engine.choice import Choice, ChosenLogprob
from penstock.engine.models import BUNDLED, read_model_info
from penstock.engine.planning.manifest import Manifest
from penstock.engine.planning.sizing import footprint, sized
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.vllm.arguments import arguments_of, options_of
from penstock.engine.vllm.backend import VllmBackend
from penstock.engine.vllm.parameters import chosen, sampling_of, scores
from penstock.schemas.errors import ConfigurationError, GenerationFailed, InvalidRequest

KNOWN = ("enforce_eager", "tensor_parallel_size", "attention_backend", "block_size")


@pytest.fixture
def path(model_directory: Callable[[str], Path]) -> Path:
    return model_directory("llama")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were installed."""
    monkeypatch.setattr(Manifest, "missing", "")


def config(path: Path | str, **values: Any) -> EngineConfig:
    default: dict[str, Any] = {"model": str(path), "backend": "vllm", "kv_cache_memory": ByteSize(64 << 20)}
    return EngineConfig(**default | values)


def arguments(path: Path, device: str = "cpu", **values: Any) -> dict[str, Any]:
    return arguments_of(sized(config(path, **values)), path, device, KNOWN)


def choice(path: Path, begun: tuple[int, ...] = (), number: int = 0, seed: int = 7, **values: Any) -> Choice:
    params = GenerationParams(max_tokens=20, **values)
    request = EngineRequest("r", (5, 6, 7), params, seed=seed, generated=(begun,) if begun else (), first_choice=number)
    return Choice(request, 0, Tokenizer(path), read_model_info(path, str(path)))


def test_without_the_package_the_error_says_how_to_install_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.planning.manifest.find_spec", lambda name: None)
    assert find_backend("vllm").missing == "vllm not installed; install with: pip install 'penstock[vllm]'"
    with pytest.raises(ConfigurationError, match=r"vllm not installed; install with: pip install"):
        InferenceEngine(config(path))


def test_a_package_that_cannot_be_imported_is_an_error_with_its_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "penstock.engine.vllm.core", None)
    with pytest.raises(ConfigurationError, match="'vllm' cannot run here: importing vllm failed: import of"):
        VllmBackend(config(path))


@pytest.mark.usefixtures("installed")
def test_only_safetensors_on_a_cpu_or_a_gpu(path: Path, tmp_path: Path) -> None:
    write_gguf(path, tmp_path / "tiny.gguf", "llama", lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"runs safetensors models, and .*tiny\.gguf is gguf"):
        InferenceEngine(config(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigurationError, match="runs on cpu and cuda"):
        InferenceEngine(config(BUNDLED, device="mps"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "int4"),
        ("attention", "sdpa"),
        ("echo_rate", 5.0),
        ("prefix_cache_dir", Path("prefixes")),
        ("prefix_cache_limit", ByteSize(1 << 20)),
    ],
)
def test_a_setting_that_it_cannot_honour_is_refused(name: str, value: Any, path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}=.*the backend 'vllm' does not support.*leave it out"):
        VllmBackend(config(path, **{name: value}))


def test_limits_reach_vllm(path: Path) -> None:
    found = arguments(path, dtype="float32", max_batch_size=5, max_sequence_length=300, prefill_chunk_size=64)
    assert (found["model"], found["dtype"], found["max_num_seqs"]) == (str(path), "float32", 5)
    assert (found["max_model_len"], found["max_num_batched_tokens"]) == (300, 64)
    assert found["kv_cache_memory_bytes"] == 64 << 20
    assert arguments(path)["max_model_len"] == -1  # as much of the model's as fits


def test_it_computes_eagerly_on_a_cpu_unless_told_otherwise(path: Path) -> None:
    assert arguments(path)["enforce_eager"] is True
    assert arguments(path, backend_options=("enforce_eager=false",))["enforce_eager"] is False
    assert arguments(path, "cuda")["enforce_eager"] is False
    assert arguments(path, "cuda", enable_cuda_graph=False)["enforce_eager"] is True
    with pytest.raises(ConfigurationError, match="enable_cuda_graph=True: vLLM runs on a CPU here"):
        arguments(path, enable_cuda_graph=True)


def test_options_are_vllms_own_arguments(path: Path) -> None:
    found = arguments(path, backend_options=("tensor_parallel_size=2", "attention_backend=FLASH_ATTN"))
    assert (found["tensor_parallel_size"], found["attention_backend"]) == (2, "FLASH_ATTN")
    with pytest.raises(ConfigurationError) as raised:
        options_of(config(path, backend_options=("max_num_seqs=4", "enable_lora=true", "nothing", "=1")))
    assert [*raised.value.faults] == [
        "backend_options: max_num_seqs is decided by max_batch_size; set that instead",
        "backend_options: enable_lora is always False here; leave it out",
        "backend_options: 'nothing' is no NAME=VALUE; give an engine argument of vLLM and its value",
        "backend_options: '=1' is no NAME=VALUE; give an engine argument of vLLM and its value",
    ]
    with pytest.raises(ConfigurationError, match="this vLLM has no engine argument tensor_paralel_size"):
        arguments(path, backend_options=("tensor_paralel_size=2",))


def test_options_are_refused_by_other_backends(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"backend_options=.*the backend 'hf' does not support"):
        InferenceEngine(config(path, backend="hf", backend_options=("tensor_parallel_size=2",)))


def test_weights_and_cache_count_in_its_memory(path: Path) -> None:
    taken = footprint(config(path, device="cpu"))
    assert taken.cache == 64 << 20
    assert taken.weights == footprint(config(path, device="cpu", backend="hf")).weights


def test_parameters_are_passed_on(path: Path) -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 9,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {3: -100.0},
        "logprobs": 2,
        "prompt_logprobs": 1,
        "min_tokens": 4,
    }
    found = sampling_of(choice(path, **values))
    assert {name: found[name] for name in values} == values
    assert (found["max_tokens"], found["ignore_eos"], found["detokenize"]) == (20, True, False)


def test_a_choice_ends_at_the_tokens_that_end_it_here(path: Path) -> None:
    """The model's own, unless they are ignored, and the request's; stop strings stay here."""
    own = sorted(Tokenizer(path).eos_token_ids)
    assert sampling_of(choice(path))["stop_token_ids"] == own
    assert sampling_of(choice(path, stop_token_ids=(9,), stop=("a",)))["stop_token_ids"] == sorted([9, *own])
    assert sampling_of(choice(path, stop_token_ids=(9,), ignore_eos=True))["stop_token_ids"] == [9]
    assert "stop" not in sampling_of(choice(path, stop=("a",)))


def test_a_choice_that_was_begun_asks_for_the_rest(path: Path) -> None:
    found = sampling_of(choice(path, (11, 12, 13), temperature=0.0, min_tokens=5, prompt_logprobs=1, ignore_eos=True))
    assert (found["max_tokens"], found["min_tokens"], found["prompt_logprobs"]) == (17, 2, None)
    assert sampling_of(choice(path, (11,) * 8, temperature=0.0, min_tokens=5))["min_tokens"] == 0


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_on_tokens_of_another_worker_are_refused(name: str, path: Path) -> None:
    """vLLM would take those tokens for the prompt, which these do not count."""
    values: dict[str, Any] = {"temperature": 0.0, name: 0.5}
    with pytest.raises(GenerationFailed, match="does not continue answers with frequency_penalty"):
        sampling_of(choice(path, (11, 12), **values))


def test_a_temperature_that_vllm_would_raise_is_refused(path: Path) -> None:
    assert sampling_of(choice(path, temperature=0.01))["temperature"] == 0.01
    with pytest.raises(InvalidRequest, match=r"no temperature between 0 and 0\.01"):
        sampling_of(choice(path, temperature=0.009))


def test_each_choice_has_a_seed_of_its_own(path: Path) -> None:
    seeds = [sampling_of(choice(path, number=number, seed=seed))["seed"] for seed in (-1, 7) for number in range(3)]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[3] == sampling_of(choice(path))["seed"]


class Logprob(NamedTuple):
    """As vLLM has it."""

    logprob: float
    rank: int


def test_log_probabilities_are_the_token_and_the_best() -> None:
    """vLLM puts the token first, wherever it ranks, and then the best."""
    found = {7: Logprob(-5.0, 40), 3: Logprob(-0.5, 1), 4: Logprob(-1.5, 2)}
    assert chosen(7, found, 2) == ChosenLogprob(-5.0, ((3, -0.5), (4, -1.5)))
    assert chosen(7, found, 0) == ChosenLogprob(-5.0)
    assert scores([1, 7], [None, found], 1) == [ChosenLogprob(-5.0, ((3, -0.5),), 40)]


def test_what_vllm_would_do_otherwise_is_not_claimed() -> None:
    manifest = find_backend("vllm")
    assert manifest.parameters == GenerationParams.model_fields.keys() - {"logits_processors"}
    assert manifest.resume == "greedy"
