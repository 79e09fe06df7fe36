"""Tiny random models of each architecture, written as GGUF: the engine says what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf_cases import CASES, PROMPTS, Case
from gguf_files import write_gguf
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints.gguf.file import read_gguf
from penstock.engine.checkpoints.gguf.models import config_of, weights_of
from penstock.engine.checkpoints.gguf.weights import level_readers
from penstock.engine.cpu import layouts
from penstock.engine.cpu.library import INT4, INT8, PLAIN
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.models import count_parameters, model_name, read_model_info, resolve_model
from penstock.engine.planning.sizing import footprint
from penstock.schemas.errors import ModelLoadError

LENGTH = 24
GPT_OSS = next(case for case in CASES if case.architecture == "gpt-oss")
AutoConfig: Any = transformers.AutoConfig
AutoModelForCausalLM: Any = transformers.AutoModelForCausalLM


def generate(model: Path, prompts: list[list[int]], backend: str = "paged") -> list[list[int]]:
    config = EngineConfig(
        model=str(model), backend=backend, dtype="float32", device="cpu", kv_cache_memory=ByteSize(16 << 20)
    )
    with InferenceEngine(config) as engine:
        params = GenerationParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
        return [list(output.choices[0].token_ids) for output in engine.generate(prompts, params)]


def reference(directory: Path, weights: dict[str, Any] | None = None) -> list[list[int]]:
    """Greedy tokens by transformers' own hand, of the directory's model with other weights."""
    if weights is None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        config = AutoConfig.from_pretrained(directory)
        tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
        kind = type(AutoModelForCausalLM.from_config(config))
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(LENGTH):
            best = model(input_ids=ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat((ids, best.view(1, 1)), dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model_type}-{len(case.settings)}")
def test_a_model_in_gguf_says_what_transformers_says(
    case: Case, make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    directory, path = make_model(case), tmp_path / "model.gguf"
    write_gguf(directory, path, case.architecture, metadata=case.metadata)
    assert generate(path, PROMPTS) == reference(directory)
    assert count_parameters(path) == count_parameters(directory)


def test_experts_in_mxfp4_have_the_numbers_of_the_file(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    """As published: gpt-oss with experts in MXFP4 and attention in other types, on both backends."""
    directory, path = make_model(GPT_OSS), tmp_path / "model.gguf"
    weights = write_gguf(
        directory,
        path,
        "gpt-oss",
        lambda name, _: "MXFP4" if ".experts." in name else "Q8_0" if "_proj" in name or "embed" in name else None,
        metadata=GPT_OSS.metadata,
    )
    expected = reference(directory, weights)
    assert generate(path, PROMPTS) == expected
    assert generate(path, PROMPTS, backend="hf") == expected


def test_experts_without_their_other_half_are_refused(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    directory, path = make_model(GPT_OSS), tmp_path / "model.gguf"
    write_gguf(directory, path, "gpt-oss", metadata=GPT_OSS.metadata)
    found = read_gguf(path)
    gate, up, down = (found.tensors[f"blk.0.ffn_{kind}_exps.weight"] for kind in ("gate", "up", "down"))
    for tensors, fault in (
        ({up.name: up._replace(name="blk.0.attn_k.weight")}, f"{gate.name} .*, and {up.name} is missing; convert"),
        ({gate.name: gate._replace(shape=(4, 64, 64))}, f"{gate.name} has the shape .* {up.name} has the shape"),
        ({down.name: down._replace(shape=(256, 64))}, f"{down.name} has the shape .256, 64., which is not that of all"),
    ):
        changed = {one.name: one for one in (found.tensors | tensors).values()}
        with pytest.raises(ModelLoadError, match=fault):
            weights_of(replace(found, tensors=changed))


def test_layers_that_guess_further_tokens_are_left_out(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    case = next(case for case in CASES if case.architecture == "qwen35")
    directory, path = make_model(case), tmp_path / "model.gguf"
    extra = {f"blk.2.{name}.weight": np.ones((64, 64), np.float32) for name in ("attn_q", "nextn.eh_proj")}
    metadata = case.metadata | {"nextn_predict_layers": 1}
    write_gguf(directory, path, case.architecture, metadata=metadata, extra=extra)
    assert generate(path, PROMPTS[:1]) == reference(directory)[:1]


def test_value_heads_that_do_not_fit_are_refused(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    case = next(case for case in CASES if case.architecture == "qwen35")
    directory, path = make_model(case), tmp_path / "model.gguf"
    for change, fault in (
        ({"ssm.time_step_rank": 5}, "5 value heads of 192 numbers do not go with 2 key heads"),
        ({"ssm.inner_size": 96}, "blk.0.ssm_conv1d.weight has 256 rows for 6 value heads"),
    ):
        write_gguf(directory, path, case.architecture, metadata=case.metadata | change)
        with pytest.raises(ModelLoadError, match=fault):
            weights_of(read_gguf(path))


QUANTIZED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def test_every_type_is_loaded_with_the_numbers_that_it_stands_for(
    make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    """One matrix of each type, in two shards; the reference has the same numbers in float32."""
    directory, path = make_model(CASES[0]), tmp_path / "m.gguf"
    kinds = iter(QUANTIZED * 10)
    weights = write_gguf(
        directory, path, "llama", lambda _, values: next(kinds) if values.ndim == 2 else None, shards=2
    )
    first = next(tmp_path.glob("m-00001-*"))
    assert {tensor.type for tensor in read_gguf(first).tensors.values()} == {*QUANTIZED, "F32"}
    expected = reference(directory, weights)
    assert generate(first, PROMPTS) == expected
    assert generate(first, PROMPTS, backend="hf") == expected


@pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")
@pytest.mark.parametrize("tied", [False, True])
def test_levels_of_a_file_are_kept_in_bfloat16(tied: bool, make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    """Each product has the numbers of the file; a request's tokens do not depend on what else runs."""
    directory, path = make_model(Case("llama", "llama", {"tie_word_embeddings": tied}, {})), tmp_path / "model.gguf"
    kinds = {"q_proj": "Q4_0", "v_proj": "Q5_1", "down_proj": "Q4_1", "up_proj": "BF16"}
    weights = write_gguf(
        directory,
        path,
        "llama",
        lambda name, values: kinds.get(name.split(".")[-2], "Q8_0") if values.ndim == 2 else None,
    )
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", max_batch_size=64)
    params = GenerationParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    with InferenceEngine(config) as engine:
        backend: Any = engine._driver.backend
        *layers, head = [linear.product for linear in backend.runner._decoder.linears()]
        assert [product.kind for product in layers] == [INT8, INT8, INT8, PLAIN, INT4] * 2 and head.kind == INT8
        kept = backend.weight_bytes + 2 * 512 * 64  # and the embedding, in bfloat16
        assert footprint(config).weights == pytest.approx(kept, rel=0.1)
        found = layouts.numbers(layers[4], torch.bfloat16, 0, 1)
        assert torch.equal(found, torch.from_numpy(weights["model.layers.0.mlp.down_proj.weight"]))
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
        together = engine.generate(PROMPTS * 20, params)
        assert [output.token_ids for output in together] == alone * 20
    config = config.model_copy(update={"quantization": "int8"})
    with InferenceEngine(config) as engine:
        backend = engine._driver.backend
        assert {linear.product.kind for linear in backend.runner._decoder.linears()} == {INT8}


TERNARY = {"q_proj": "TQ1_0", "k_proj": "TQ1_0", "v_proj": "TQ2_0", "o_proj": "TQ2_0", "down_proj": "TQ1_0"}


def test_ternary_weights_have_the_numbers_of_the_file(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    """In float32; in bfloat16 products keep them in 4 bits, side by side too, and take the memory that is announced."""
    case = Case("llama", "llama", {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}, {})
    directory, path = make_model(case), tmp_path / "model.gguf"
    weights = write_gguf(directory, path, "llama", lambda name, _: TERNARY.get(name.split(".")[-2]))
    kinds = {tensor.type for tensor in read_gguf(path).tensors.values()}
    assert kinds == {"F32", "TQ1_0", "TQ2_0"}
    assert generate(path, PROMPTS) == reference(directory, weights)
    if {*cpu_flags().split()} >= KERNEL_FLAGS:
        config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", kv_cache_memory=ByteSize(16 << 20))
        with InferenceEngine(config) as engine:
            backend: Any = engine._driver.backend
            products = [linear.product for linear in backend.runner._decoder.linears()]
            assert [product.kind for product in products[:2]] == [INT4, INT4] and products[4].kind == INT4
            found = layouts.numbers(products[4], torch.bfloat16, 0, 4)
            assert torch.equal(found, torch.from_numpy(weights["model.layers.0.mlp.down_proj.weight"]))
            kept = backend.weight_bytes + 2 * 512 * 256  # and the embedding, in bfloat16
            assert footprint(config).weights == pytest.approx(kept, rel=0.1)


def _in_nvfp4(name: str, values: Any) -> str | None:
    is_product = name.endswith("_proj.weight") or ".experts." in name or ".linear_attn.in_proj" in name
    return "NVFP4" if is_product and values.ndim > 1 and not values.shape[-1] % 64 else None


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "qwen35", "gpt-oss"])
def test_nvfp4_has_the_numbers_of_the_file_times_its_scales(
    architecture: str, make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    """One scale for a weight, or one for each expert; in bfloat16 products have them too."""
    case = next(case for case in CASES if case.architecture == architecture)
    directory, path = make_model(case), tmp_path / "model.gguf"
    weights = write_gguf(directory, path, architecture, _in_nvfp4, metadata=case.metadata)
    assert {tensor.type for tensor in read_gguf(path).tensors.values()} == {"F32", "NVFP4"}
    assert generate(path, PROMPTS) == reference(directory, weights)
    assert count_parameters(path) == count_parameters(directory)
    found = level_readers(read_gguf(path))
    for name, values in weights.items():
        if (read := found.get(name.removesuffix(".weight"))) is not None:
            assert np.array_equal(read().numbers.numpy(), values)
    assert len(found) > 6
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", kv_cache_memory=ByteSize(16 << 20))
    assert footprint(config).weights < 1.1 * 2 * sum(values.size for values in weights.values())
    with InferenceEngine(config) as engine:
        assert engine.generate(PROMPTS[0], GenerationParams(max_tokens=4, ignore_eos=True)).token_ids


@pytest.mark.skipif(not {*cpu_flags().split()} >= KERNEL_FLAGS, reason="the kernels need AVX2")
def test_a_prompt_comes_in_pieces_where_a_head_has_a_scale_for_16(
    make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    """A step before the last piece wants no logits."""
    directory, path = make_model(Case("llama", "llama", {"tie_word_embeddings": False}, {})), tmp_path / "model.gguf"
    write_gguf(directory, path, "llama", lambda name, _: "NVFP4" if name == "lm_head.weight" else None)
    found = []
    for size in (None, 16):
        config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", prefill_chunk_size=size)
        with InferenceEngine(config) as engine:
            params = GenerationParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
            found.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    assert found[0] == found[1]


def test_a_scale_that_does_not_fit_is_refused(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    directory, path = make_model(CASES[0]), tmp_path / "model.gguf"
    for name, values, fault in (
        ("blk.0.attn_q.scale", np.ones(2, np.float32), r"blk\.0\.attn_q\.scale has the type F32 and the shape \[2\], "),
        ("blk.0.attn_q.scale", np.ones(1, np.float16), r"attn_q\.scale has the type F16 and the shape \[1\], which do"),
        (
            "blk.0.attn_o.scale",
            np.ones(1, np.float32),
            r"the tensor blk\.0\.attn_o\.scale is unknown in a model of the",
        ),
    ):
        write_gguf(directory, path, "llama", extra={name: values})
        with pytest.raises(ModelLoadError, match=fault):
            count_parameters(path)


def test_rotations_are_divided_by_the_files_factors(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    directory, path = make_model(Case("llama", "llama", {"rope_parameters": rope}, {})), tmp_path / "model.gguf"
    scaled = AutoModelForCausalLM.from_pretrained(directory).model.rotary_emb.inv_freq
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    write_gguf(directory, path, "llama", extra={"rope_freqs.weight": (plain / scaled).numpy()})
    assert generate(path, PROMPTS) == reference(directory)


def test_what_the_header_says_is_known_before_anything_is_read(
    make_model: Callable[[Case], Path], tmp_path: Path
) -> None:
    directory, path = make_model(CASES[0]), tmp_path / "model.gguf"
    write_gguf(directory, path, "llama", lambda name, values: "Q8_0" if values.ndim == 2 else None)
    info = read_model_info(path, "m")
    assert (info.architecture, info.context_length, info.vocabulary_size) == ("LlamaForCausalLM", 256, 512)
    assert (info.eos_token_ids, info.dtype) == ((0, 2), "bfloat16")
    assert count_parameters(path) == count_parameters(directory)


def broken(path: Path, name: str, **changes: Any) -> ModelLoadError:
    """The error for a file that has one more tensor, or another architecture or setting."""
    import gguf
    import numpy as np

    writer: Any = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    for key, value in {"block_count": 1, "embedding_length": 64, **changes}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor(name, np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    with pytest.raises(ModelLoadError) as refused:
        weights_of(found)
        config_of(found)
    return refused.value


def test_what_is_not_supported_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    assert "the architecture 'grok', which is not supported in GGUF" in str(
        broken(path, "token_embd.weight", architecture="grok")
    )
    assert "the tensor blk.0.ssm_a.weight is unknown in a model of the architecture llama" in str(
        broken(path, "blk.0.ssm_a.weight")
    )
    assert "the tensor v.patch_embd is unknown" in str(broken(path, "v.patch_embd"))
    assert "has no token_embd.weight" in str(broken(path, "output.weight"))
    assert "has no llama.feed_forward_length" in str(broken(path, "token_embd.weight"))
    assert "llama.feed_forward_length differs between layers" in str(
        broken(path, "token_embd.weight", feed_forward_length=[64, 128])
    )
    assert "has 64 rows for 3 heads" in str(broken(path, "blk.0.attn_q.weight", head_count=3))


def test_the_files_tokenizer_serves_the_echo_backend(make_model: Callable[[Case], Path], tmp_path: Path) -> None:
    """Of a file, and of a directory that holds nothing but a model in GGUF."""
    (tmp_path / "alone").mkdir()
    write_gguf(make_model(CASES[0]), tmp_path / "alone" / "tiny-Q8.gguf", "llama")
    for source in (tmp_path / "alone", tmp_path / "alone" / "tiny-Q8.gguf"):
        with InferenceEngine(EngineConfig(model=str(source), backend="echo")) as engine:
            assert engine.model_info().architecture == "LlamaForCausalLM"
            assert engine.detokenize(engine.tokenize("Hello, world!")) == "Hello, world!"
    (tmp_path / "alone" / "tiny-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ModelLoadError, match=r"holds several models; name one of its files: tiny-Q4\.gguf, tiny-Q8\.gguf"
    ):
        resolve_model(str(tmp_path / "alone"))


def test_a_model_is_called_like_its_file(tmp_path: Path) -> None:
    names = {"tiny-Q8.gguf": "tiny-Q8", "big-00001-of-00003.gguf": "big", "sha256-0123": "sha256-0123"}
    assert {name: model_name(tmp_path / name) for name in names} == names
