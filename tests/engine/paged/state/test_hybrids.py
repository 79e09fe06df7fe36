"""Models that mix attention with layers of a running state. Their tokens in all schedules: `test_paged_oracle.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greedy import greedy_answer
from pydantic import ByteSize

from penstock.engine import EngineConfig, EngineRequest, GenerationParams, InferenceEngine
from penstock.engine.backends.registry import load_backend
from penstock.engine.choice import Choice
from penstock.engine.cpu.machine import KERNEL_FLAGS, cpu_flags
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.quality import Reader, compare
from penstock.engine.paged.state import kimi_delta, mamba
from penstock.engine.paged.state.delta_rule import Tokens, in_chunks, one_each
from penstock.engine.planning.model_files import STATES, ModelFiles
from penstock.engine.planning.sizing import footprint, sized
from penstock.engine.vision.sight import load_sight
from penstock.schemas.errors import ConfigurationError, InvalidRequest, ModelLoadError

SHAPES = [
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "bailing_hybrid",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "mamba",
    "mamba2",
    "olmo_hybrid",
]
COUNT = 20
GREEDY = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPT = [3 + (7 * index * index + 5) % 500 for index in range(40)]
OTHER = [3 + (11 * index * index + 2) % 500 for index in range(37)]

Directory = Callable[[str], Path]
has_kernels = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")


def config(directory: Path, **values: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": ByteSize(16 << 20)}
    return EngineConfig(model=str(directory), **fields | values)


def expected(
    reference_of: Callable[[str], Any], shape: str, prompt: list[int], said: Sequence[int] = ()
) -> tuple[int, ...]:
    return greedy_answer(reference_of(shape), prompt, COUNT, said)


def add(backend: PagedBackend, prompt: list[int], generated: tuple[int, ...] = ()) -> Choice:
    request = EngineRequest("r", tuple(prompt), GREEDY, seed=1, generated=(generated,))
    choice = Choice(request, 0, backend.tokenizer, backend.info)
    backend.add(choice)
    return choice


def finish(backend: PagedBackend) -> None:
    while backend.num_running or backend.num_waiting:
        backend.step()
        backend.check_integrity()


@contextmanager
def loaded(directory: Path, **values: Any) -> Iterator[PagedBackend]:
    backend = PagedBackend(config(directory, **values))
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize("num_keys", [2, 4])
@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_the_delta_rule_is_that_of_transformers(length: int, num_keys: int) -> None:
    """In chunks after some state, whole or cut in two, and token by token."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    generator = torch.Generator().manual_seed(length)
    query, key = (torch.randn(length, num_keys, 16, generator=generator) for _ in range(2))
    value = torch.randn(length, 4, 24, generator=generator)
    decay, rate = -torch.rand(length, 4, generator=generator), torch.rand(length, 4, generator=generator)
    before = torch.randn(4, 16, 24, generator=generator)
    reference: Any = torch_recurrent_gated_delta_rule
    arguments = [each[None] for each in (query, key, value, decay, rate)]
    wanted, after = reference(
        *arguments, initial_state=before[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    query, key = (
        torch.nn.functional.normalize(each, dim=-1).repeat_interleave(4 // num_keys, dim=1) for each in (query, key)
    )
    tokens = Tokens(query * 16**-0.5, key, value, decay, rate)
    found, state = in_chunks(tokens, before)
    torch.testing.assert_close(found, wanted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, after[0], atol=1e-4, rtol=1e-4)
    if length > 1:
        half = length // 2
        _, middle = in_chunks(tokens.part(0, half), before)
        rest, state = in_chunks(tokens.part(half, length), middle)
        torch.testing.assert_close(rest, wanted[0, half:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state, after[0], atol=1e-4, rtol=1e-4)
    states = before.clone()[None]
    singles = torch.cat([one_each(tokens.part(index, index + 1), states) for index in range(length)])
    torch.testing.assert_close(singles, wanted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_groups", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_mamba_s_scan_is_that_of_transformers(length: int, num_groups: int) -> None:
    """In chunks after some state, whole or cut in two, and token by token."""
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    generator = torch.Generator().manual_seed(length)
    key, query = (torch.randn(length, num_groups, 16, generator=generator) for _ in range(2))
    value = torch.randn(length, 8, 24, generator=generator)
    steps, rate = torch.rand(length, 8, generator=generator), -torch.rand(8, generator=generator)
    before = torch.randn(8, 16, 24, generator=generator)
    reference: Any = mamba2_chunk_scan
    wanted, after = reference(
        *(each[None] for each in (value, steps)),
        rate,
        *(each[None] for each in (key, query)),
        chunk_size=32,
        initial_states=before.transpose(1, 2)[None],
        return_final_states=True,
    )
    wanted, after = wanted[0], after[0].transpose(1, 2)
    tokens = mamba.Tokens(query, key, value * steps[..., None], steps * rate)
    found, state = mamba.in_chunks(tokens, before)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, after, atol=1e-4, rtol=1e-4)
    if length > 1:
        half = length // 2
        _, middle = mamba.in_chunks(tokens.part(0, half), before)
        rest, state = mamba.in_chunks(tokens.part(half, length), middle)
        torch.testing.assert_close(rest, wanted[half:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state, after, atol=1e-4, rtol=1e-4)
    states = before.clone()[None]
    singles = torch.cat([mamba.one_each(tokens.part(index, index + 1), states) for index in range(length)])
    torch.testing.assert_close(singles, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[0], after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 70])
def test_the_delta_rule_of_kimi_is_that_of_transformers(length: int) -> None:
    """In chunks after some state, whole or cut in two, and token by token; some numbers are forgotten at once."""
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    generator = torch.Generator().manual_seed(length)
    query, key = (torch.randn(length, 4, 16, generator=generator) for _ in range(2))
    value = torch.randn(length, 4, 16, generator=generator)
    decay = -torch.rand(length, 4, 16, generator=generator) * torch.tensor([0.1, 40.0]).repeat(8)
    rate = torch.rand(length, 4, generator=generator)
    before = torch.randn(4, 16, 16, generator=generator)
    reference: Any = recurrent_kimi_delta_attention
    arguments = [each[None] for each in (query, key, value, decay, rate)]
    wanted, after = reference(
        *arguments, initial_state=before[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    query, key = (torch.nn.functional.normalize(each, dim=-1) for each in (query, key))
    tokens = Tokens(query * 16**-0.5, key, value, decay, rate)
    found, state = kimi_delta.in_chunks(tokens, before)
    torch.testing.assert_close(found, wanted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state, after[0], atol=1e-4, rtol=1e-4)
    if length > 1:
        half = length // 2
        _, middle = kimi_delta.in_chunks(tokens.part(0, half), before)
        rest, _ = kimi_delta.in_chunks(tokens.part(half, length), middle)
        torch.testing.assert_close(rest, wanted[0][half:], atol=1e-4, rtol=1e-4)
    states = before.clone()[None]
    singles = torch.cat([kimi_delta.one_each(tokens.part(index, index + 1), states) for index in range(length)])
    torch.testing.assert_close(singles, wanted[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[0], after[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_sequence_will_take_is_known_from_the_files(shape: str, model_directory: Directory) -> None:
    own = config(model_directory(shape))
    files = ModelFiles.of(own)
    with loaded(model_directory(shape)) as backend:
        assert files.states() == STATES * backend.runner.states.nbytes(torch.float32)
        assert files.cache(16, 1) == 16 * backend.kv_bytes_per_token


@pytest.mark.parametrize("shape", SHAPES)
def test_a_successor_gives_the_same_tokens(
    shape: str, model_directory: Directory, reference_of: Callable[[str], Any]
) -> None:
    with loaded(model_directory(shape)) as backend:
        said = [add(backend, PROMPT), add(backend, OTHER)]
        finish(backend)
        whole, other = (
            expected(reference_of, shape, prompt, choice.tokens)
            for prompt, choice in zip((PROMPT, OTHER), said, strict=True)
        )
        assert [tuple(choice.tokens) for choice in said] == [whole, other]
        for count in (1, 9, COUNT - 1):
            first = add(backend, PROMPT, whole[:count])
            second = add(backend, OTHER)
            finish(backend)
            assert tuple(first.tokens) == whole
            assert tuple(second.tokens) == other


@pytest.mark.parametrize("shape", ["qwen3_5_text", "lfm2", "lfm2_moe", "granitemoehybrid", "bamba"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@has_kernels
def test_a_step_is_one_compiled_call(
    shape: str, model_directory: Directory, dtype: str, quantization: str | None
) -> None:
    with loaded(model_directory(shape), dtype=dtype, quantization=quantization) as backend:
        assert backend.info.slow_paths == ()
        compiled: Any = backend.runner._compiled
        calls, own = list[int](), compiled._kernels.library.step

        def step(*given: Any) -> int:
            calls.append(1)
            return int(own(*given))

        compiled._kernels.library = SimpleNamespace(step=step)
        choices = [add(backend, PROMPT), add(backend, OTHER)]
        steps = 0
        while backend.num_running or backend.num_waiting:
            backend.step()
            steps += 1
        assert len(calls) == steps and all(len(choice.tokens) == COUNT for choice in choices)


def test_a_step_that_fails_has_changed_no_state(
    model_directory: Directory, reference_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes after all layers have run; each row of the step is then computed by itself."""
    with loaded(model_directory("qwen3_5_text")) as backend:
        forward, failures = backend.runner.forward, list[int]()

        def fails(segments: Any, chosen: Any = None) -> Any:
            result = forward(segments, chosen)
            if len(segments) > 1 and len(failures) < 8:
                failures.append(len(segments))
                raise RuntimeError("after the fact")
            return result

        monkeypatch.setattr(backend.runner, "forward", fails)
        choices = [add(backend, prompt) for prompt in (PROMPT, OTHER)]
        finish(backend)
        assert len(failures) == 8
        assert [tuple(choice.tokens) for choice in choices] == [
            expected(reference_of, "qwen3_5_text", prompt) for prompt in (PROMPT, OTHER)
        ]


def test_states_survive_a_restart(model_directory: Directory, tmp_path: Path) -> None:
    with InferenceEngine(config(model_directory("qwen3_next"))) as engine:
        before = engine.generate(PROMPT, GREEDY)
        saved = engine.save_prefixes(tmp_path / "file")
    with InferenceEngine(config(model_directory("qwen3_next"))) as engine:
        assert engine.load_prefixes(tmp_path / "file") == saved == 3 + 2  # blocks, and states after 32 and 48 tokens
        again = engine.generate(PROMPT, GREEDY)
        assert (again.token_ids, again.stats.cached_tokens) == (before.token_ids, 32)


def test_the_prefix_cache_on_disk_is_refused(model_directory: Directory, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"prefix_cache_dir=.*keeps running states.*leave it out"):
        load_backend(config(model_directory("qwen3_next"), prefix_cache_dir=tmp_path))


def test_a_cache_without_room_for_the_states_is_refused(model_directory: Directory) -> None:
    directory = model_directory("qwen3_next")
    size = 2 * ((2 * 2 * 16 + 4 * 24) * 3 + 4 * 16 * 24) * 4  # of a state in two layers
    with pytest.raises(ConfigurationError, match=rf"requests take {2 * 8 * size} bytes.*max_batch_size to at most 3"):
        load_backend(config(directory, kv_cache_memory=ByteSize(7 * size), max_batch_size=8))
    with pytest.raises(ConfigurationError, match="one block of 16 tokens takes"):
        load_backend(config(directory, kv_cache_memory=ByteSize(6 * size), max_batch_size=3))
    with loaded(directory, kv_cache_memory=ByteSize(100 * size), max_batch_size=8) as backend:
        assert backend.slots is not None and backend.slots.num_slots == 32
        held = backend.cache_stats().num_blocks * backend.kv_bytes_per_token * 16
        assert 68 * size - 16 * backend.kv_bytes_per_token < held <= 68 * size


def test_the_choice_of_a_cache_counts_states(model_directory: Directory) -> None:
    """What a worker will take is known from its files, and covers a full batch's states."""
    own = config(model_directory("qwen3_next"), kv_cache_memory=None, max_batch_size=None)
    chosen = sized(own)
    assert footprint(own).cache == chosen.kv_cache_memory
    with loaded(model_directory("qwen3_next"), **{"kv_cache_memory": None}) as backend:
        assert backend.slots is not None and backend.slots.num_slots == 4 * chosen.max_batch_size


def test_nothing_is_guessed(model_directory: Directory) -> None:
    with loaded(model_directory("qwen3_next"), speculation="auto") as backend:
        assert "cannot take back a wrong guess" in backend.speculation_stats().off


def test_texts_are_read_like_answers(model_directory: Directory) -> None:
    """The comparison of quantised weights reads token by token."""
    readers = [Reader(config(model_directory("qwen3_next")), 24) for _ in range(2)]
    try:
        found = compare(readers[0], readers[1], [PROMPT[:24], OTHER[:24]], lambda _: None)
    finally:
        for reader in readers:
            reader.close()
    assert found.divergence == pytest.approx(0, abs=1e-6) and found.same_best == 1


@pytest.mark.parametrize(
    "shape",
    [
        *("qwen3_next", "falcon_h1", "lfm2", "lfm2_moe", "lfm3", "nemotron_h", "jamba", "kimi_linear", "mamba"),
        *("bailing_hybrid", "falcon_mamba", "mamba2", "olmo_hybrid"),
    ],
)
@pytest.mark.parametrize("dtype, quantization", [("bfloat16", None), ("bfloat16", "int8"), ("float32", "int8")])
def test_other_weights_run(shape: str, model_directory: Directory, dtype: str, quantization: str | None) -> None:
    with loaded(model_directory(shape), dtype=dtype, quantization=quantization) as backend:
        choices = [add(backend, PROMPT), add(backend, PROMPT)]
        finish(backend)
        assert choices[0].tokens == choices[1].tokens and len(choices[0].tokens) == COUNT


@pytest.mark.parametrize(
    ("shape", "what"),
    [("recurrent_gemma", "linear_attention"), ("minimax", "MiniMaxLightningAttention")],
)
def test_states_of_another_kind_are_refused_by_name(
    shape: str, what: str, model_directory: Directory, tmp_path: Path
) -> None:
    import transformers

    library: Any = transformers
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    if shape == "recurrent_gemma":
        sizes |= {"lru_width": 64, "max_position_embeddings": 512, "num_hidden_layers": 3}
    else:
        sizes |= {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}
        sizes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 0}
    settings = library.AutoConfig.for_model(shape, **sizes)
    model = library.AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(tmp_path)
    for file in model_directory("llama").glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(
        ModelLoadError, match=rf"does not know \(.*{what}.*\); choose another model, or try --backend vl"
    ):
        load_backend(config(tmp_path))
    with pytest.raises(
        ModelLoadError, match="keeps a recurrent state; the backend 'hf' needs a model with a key-value"
    ):
        load_backend(config(tmp_path, backend="hf"))


def test_another_backend_is_named_for_attention_of_another_kind(model_directory: Directory, tmp_path: Path) -> None:
    import transformers

    library: Any = transformers
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_rel": 16, "n_routed_experts": 4}
    sizes |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 32}
    model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model("inkling_text", **sizes))
    model.save_pretrained(tmp_path)
    for file in model_directory("llama").glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelLoadError, match=r"does not know \(.*Inkling.*\); use --backend hf"):
        load_backend(config(tmp_path))


def test_a_model_whose_attention_cannot_be_replaced_is_refused_in_words(
    model_directory: Directory, tmp_path: Path
) -> None:
    import transformers

    library: Any = transformers
    tower = {"hidden_size": 48, "num_hidden_layers": 1}
    settings = library.AutoConfig.for_model("git", vocab_size=512, vision_config=tower)
    library.AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    for file in model_directory("llama").glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelLoadError, match=r"GitForCausalLM does not support another attention .*use --backend hf"):
        load_backend(config(tmp_path))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_that_also_sees_is_served_for_text(family: str, model_directory: Directory, tmp_path: Path) -> None:
    """Where its checkpoint does not say how to prepare images, as some that others have quantised."""
    import transformers

    library: Any = transformers
    text = json.loads((model_directory(f"{family}_text") / "config.json").read_text())
    sections = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    text["rope_parameters"] = sections | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    sight = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    settings = library.AutoConfig.for_model(
        family, text_config=text, vision_config=sight | {"num_position_embeddings": 16}
    )
    torch.manual_seed(0)
    model = library.AutoModelForImageTextToText.from_config(settings, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for file in model_directory("llama").glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
    with loaded(tmp_path) as backend:
        assert not backend.info.sees and backend.runner.vision is None
        choice = add(backend, PROMPT)
        finish(backend)
        assert choice.tokens == output[0, len(PROMPT) :].tolist()
        with pytest.raises(InvalidRequest, match=r"text alone: its files have no preprocessor_config\.json"):
            load_sight(str(tmp_path), "paged").mark_of(backend.tokenizer)


def test_nobody_is_advised_to_make_replaced_layers_faster(model_directory: Directory) -> None:
    """In a process of its own, as transformers gives its advice once."""
    code = (
        "import sys; from penstock.engine import EngineConfig, InferenceEngine; "
        "InferenceEngine(EngineConfig(model=sys.argv[1], dtype='float32', device='cpu')).close()"
    )
    command = [sys.executable, "-c", code, str(model_directory("qwen3_5_text"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "falling back" not in done.stderr


def test_a_model_that_does_not_give_its_context_is_served_with_one(
    model_directory: Directory, reference_of: Callable[[str], Any], tmp_path: Path
) -> None:
    """As published ones of Mamba."""
    for file in model_directory("mamba").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match="does not give the context length; set max_sequence_length"):
        load_backend(config(tmp_path))
    with loaded(tmp_path, max_sequence_length=128) as backend:
        choice = add(backend, PROMPT)
        finish(backend)
        assert backend.info.context_length == 128
        assert tuple(choice.tokens) == expected(reference_of, "mamba", PROMPT)
