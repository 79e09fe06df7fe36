"""What is read from an adapter in PEFT's format, and every fault that is refused, by name, before anything changes."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import config, make_adapter, matrices, write_adapter
from safetensors.torch import save_file

from penstock.engine.adapters.files import AdapterFiles, adapter_source, check_adapter, check_room, read_adapter
from penstock.engine.adapters.loaded import Target, Targets
from penstock.schemas.errors import InvalidRequest

SIZES = {
    "model.layers.0.self_attn.q_proj": (8, 16),
    "model.layers.0.mlp.down_proj": (12, 8),
    "model.layers.11.self_attn.q_proj": (8, 16),
}
FIRST, DOWN, LAST = SIZES
OTHERS = frozenset({"lm_head", "model.embed_tokens", "model.layers.0.mlp.experts"})
TARGETS = Targets({name: Target(*size) for name, size in SIZES.items()}, OTHERS)


def read(directory: Path) -> AdapterFiles:
    return read_adapter("mine", directory, TARGETS)


def fault(directory: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(directory)
    assert caught.value.param == "adapter"
    return str(caught.value)


class TestReading:
    def test_matrices_and_scales(self, tmp_path: Path) -> None:
        tensors = matrices(SIZES, rank=4)
        files = read(write_adapter(tmp_path, tensors, config(4, lora_alpha=6)))
        assert files.name == "mine" and files.source == str(tmp_path) and files.rank == 4
        assert files.pairs.keys() == SIZES.keys()
        for module, (a, b, scale) in files.pairs.items():
            assert torch.equal(a, tensors[f"base_model.model.{module}.lora_A.weight"])
            assert torch.equal(b, tensors[f"base_model.model.{module}.lora_B.weight"])
            assert scale == 1.5

    def test_rank_stabilized_scale(self, tmp_path: Path) -> None:
        files = read(make_adapter(tmp_path, SIZES, 4, use_rslora=True))
        assert {pair.scale for pair in files.pairs.values()} == {8 / sqrt(4)}

    def test_patterns_match_names_and_their_ends(self, tmp_path: Path) -> None:
        """As PEFT matches them: `layers.1.` is no end of `layers.11.`, and the first match counts."""
        settings = config(4, lora_alpha=8) | {
            "rank_pattern": {"down_proj": 2, r"layers\.0\..*": 3, r"layers\.1\.self_attn\.q_proj": 7},
            "alpha_pattern": {r".*\.11\.self_attn\.q_proj": 20},
        }
        tensors = matrices(SIZES, 4, ranks={DOWN: 2, FIRST: 3})
        files = read(write_adapter(tmp_path, tensors, settings))
        assert {module: pair.scale for module, pair in files.pairs.items()} == {FIRST: 8 / 3, DOWN: 4, LAST: 5}
        assert files.rank == 4

    def test_the_digest_is_that_of_the_arithmetic(self, tmp_path: Path) -> None:
        """Not of the place, nor of settings without an effect."""
        one = read(make_adapter(tmp_path / "one", SIZES))
        same = read(make_adapter(tmp_path / "two", SIZES, lora_dropout=0.3))
        other = read(make_adapter(tmp_path / "three", SIZES, seed=1))
        scaled = read(make_adapter(tmp_path / "four", SIZES, lora_alpha=9))
        assert one.digest == same.digest
        assert len({one.digest, other.digest, scaled.digest}) == 3

    @pytest.mark.parametrize(
        "start", ["model.language_model.", "language_model.model.", "model.text_model.", "model.", ""]
    )
    @pytest.mark.parametrize("own", ["model.", "model.language_model.", "model.text_model."])
    def test_a_language_model_goes_by_several_names(self, start: str, own: str, tmp_path: Path) -> None:
        """By the class it was trained in: that of a model that sees, of one of text, or a bare one."""
        theirs = {module.replace("model.", start, 1): size for module, size in SIZES.items()}
        targets = Targets({module.replace("model.", own, 1): TARGETS.linear[module] for module in SIZES}, frozenset())
        tensors = matrices(theirs)
        directory = write_adapter(tmp_path, tensors, config(rank_pattern={f"{start}layers.0.mlp.down_proj": 4}))
        files = read_adapter("mine", directory, targets)
        assert files.pairs.keys() == targets.linear.keys()
        for module in SIZES:
            name = f"base_model.model.{module.replace('model.', start, 1)}.lora_A.weight"
            assert torch.equal(files.pairs[module.replace("model.", own, 1)].a, tensors[name])
        assert files.digest == check_adapter(directory)

    def test_initializations_that_leave_the_base_alone(self, tmp_path: Path) -> None:
        assert read(make_adapter(tmp_path, SIZES, init_lora_weights="gaussian")).pairs


class TestRefusals:
    def test_two_names_of_one_module(self, tmp_path: Path) -> None:
        both = {FIRST: SIZES[FIRST], FIRST.replace("model.", "model.language_model."): SIZES[FIRST]}
        assert f"changes {FIRST} twice, under two names; save it again" in fault(make_adapter(tmp_path, both))

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"peft_type": "LOHA"}, "of the kind LOHA; only LORA"),
            ({"use_dora": True}, "DoRA"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"bias": "lora_only"}, "bias='lora_only'"),
            ({"lora_bias": True}, "biases (lora_bias)"),
            ({"trainable_token_indices": [1]}, "embeddings"),
            ({"target_parameters": ["experts.gate_up_proj"]}, "parameters that are no linear layers"),
            ({"alora_invocation_tokens": [5]}, "only some tokens"),
            ({"init_lora_weights": "pissa_niter_4"}, "belongs to changed base weights"),
            ({"r": 8}, "do not fit its rank of 8"),
            ({"r": 0}, "r=0"),
            ({"r": None}, "r=None"),
            ({"lora_alpha": "16"}, "lora_alpha='16'"),
            ({"rank_pattern": {"[": 4}}, "rank_pattern"),
            ({"rank_pattern": [4]}, "rank_pattern"),
            ({"rank_pattern": {r"(\w+\.?)+x": 4}}, "could take too long"),
            ({"alpha_pattern": {".*.*.*.*x": 4}}, "could take too long"),
        ],
    )
    def test_settings(self, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
        assert words in fault(make_adapter(tmp_path, SIZES, **settings))

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            (SIZES | {FIRST: (8, 24)}, "for another model: its model.layers.0.self_attn.q_proj has 8 inputs and 24"),
            (SIZES | {DOWN: (10, 8)}, "for another model: its model.layers.0.mlp.down_proj has 10 inputs"),
            ({"transformer.h.0.attn.c_attn": (8, 16)}, "for another model: this one has no transformer.h.0.attn"),
            (dict.fromkeys([f"x{index}" for index in range(9)], (8, 8)), "no x0, x1, x2, …;"),
            (SIZES | {"lm_head": (8, 99)}, "changes lm_head: only linear layers between"),
            (SIZES | {"model.layers.0.mlp.experts": (8, 8)}, "changes model.layers.0.mlp.experts"),
        ],
    )
    def test_modules(self, tmp_path: Path, sizes: dict[str, tuple[int, int]], words: str) -> None:
        assert words in fault(make_adapter(tmp_path, sizes))

    @pytest.mark.parametrize(
        ("tensor", "words"),
        [
            ("model.embed_tokens.lora_embedding_A", "no LoRA matrix of a linear layer"),
            (f"{FIRST}.lora_magnitude_vector", "no LoRA matrix of a linear layer"),
            ("model.norm.weight", "no LoRA matrix of a linear layer"),
            (f"{FIRST}.lora_B.bias", "no LoRA matrix of a linear layer"),
            ("model.layers.1.mlp.down_proj.lora_A.weight", "only one of two matrices"),
        ],
    )
    def test_tensors(self, tmp_path: Path, tensor: str, words: str) -> None:
        tensors = matrices(SIZES) | {f"base_model.model.{tensor}": torch.zeros(4, 8)}
        assert words in fault(write_adapter(tmp_path, tensors, config()))

    def test_matrices_of_integers(self, tmp_path: Path) -> None:
        tensors = {name: tensor.to(torch.int32) for name, tensor in matrices(SIZES).items()}
        assert "matrices" in fault(write_adapter(tmp_path, tensors, config()))

    def test_no_matrices(self, tmp_path: Path) -> None:
        assert "has no matrices" in fault(write_adapter(tmp_path, {}, config()))

    @pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
    def test_missing_files(self, tmp_path: Path, missing: str) -> None:
        (make_adapter(tmp_path, SIZES) / missing).unlink()
        assert f"has no {missing}" in fault(tmp_path)

    def test_missing_directory(self, tmp_path: Path) -> None:
        assert "no such directory" in fault(tmp_path / "nowhere")

    def test_weights_in_torchs_format(self, tmp_path: Path) -> None:
        (make_adapter(tmp_path, SIZES) / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
        assert "as safetensors" in fault(tmp_path)

    @pytest.mark.parametrize("size", [0, 5, 100, -1])
    def test_truncated_weights(self, tmp_path: Path, size: int) -> None:
        path = make_adapter(tmp_path, SIZES) / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        assert "not a complete safetensors file" in fault(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[]", "nonsense"])
    def test_broken_settings(self, tmp_path: Path, text: str) -> None:
        (make_adapter(tmp_path, SIZES) / "adapter_config.json").write_text(text)
        assert "save" in fault(tmp_path)

    def test_no_name(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="needs a name"):
            read_adapter("", make_adapter(tmp_path, SIZES), TARGETS)

    def test_no_room(self) -> None:
        check_room(10, 10, "cuda:0")
        with pytest.raises(InvalidRequest, match=r"takes 2\.0 GiB, and cuda:0 has 1\.0 GiB left") as caught:
            check_room(2 << 30, 1 << 30, "cuda:0")
        assert caught.value.code == "insufficient_memory"


class TestChecking:
    """What a process without torch finds out from the files: the same digest, and the same faults as far as it can."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        """A model with these weights, of which one lies the other way round, as in GPT-2."""
        sizes = SIZES | {"lm_head": (8, 64)}
        shapes = {name: (outputs, inputs) for name, (inputs, outputs) in sizes.items()} | {DOWN: SIZES[DOWN]}
        path = tmp_path / "base"
        path.mkdir()
        save_file({f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}, path / "model.safetensors")
        (path / "config.json").write_text('{"vocab_size": 64, "max_position_embeddings": 128}')
        return path

    def test_the_digest_is_that_of_who_loads_it(self, tmp_path: Path, base: Path) -> None:
        adapter = make_adapter(tmp_path / "mine", SIZES, lora_alpha=3)
        digest = read(adapter).digest
        assert check_adapter(adapter) == check_adapter(adapter, base) == digest
        found = adapter_source("mine", adapter)
        assert (found.name, found.path, found.digest) == ("mine", str(adapter), digest)

    def test_an_adapter_that_cannot_be_read_has_no_digest(self, tmp_path: Path) -> None:
        assert adapter_source("mine", tmp_path / "gone").digest == ""

    def test_what_may_not_be_looked_at_is_named_with_the_reason(self, tmp_path: Path) -> None:
        weights = make_adapter(tmp_path / "mine", SIZES) / "adapter_model.safetensors"
        weights.unlink()
        weights.symlink_to(weights.name)
        with pytest.raises(InvalidRequest, match="Too many levels of symbolic links"):
            check_adapter(weights.parent)

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            (SIZES | {FIRST: (8, 24)}, f"for another model: its {FIRST} has 8 inputs and 24"),
            (SIZES | {DOWN: (10, 8)}, f"for another model: its {DOWN} has 10 inputs"),
            (SIZES | {"lm_head": (8, 64)}, "changes lm_head: only linear layers between"),
        ],
    )
    def test_sizes(self, tmp_path: Path, base: Path, sizes: dict[str, tuple[int, int]], words: str) -> None:
        with pytest.raises(InvalidRequest) as refused:
            check_adapter(make_adapter(tmp_path / "mine", sizes), base)
        assert words in str(refused.value)

    def test_what_the_files_of_the_model_do_not_tell_is_left_to_its_worker(self, tmp_path: Path, base: Path) -> None:
        elsewhere = make_adapter(tmp_path / "mine", {"by.another.name": (3, 5)})
        assert check_adapter(elsewhere, base) == check_adapter(elsewhere)
        (base / "model.safetensors").write_bytes(b"broken")
        assert check_adapter(elsewhere, base) == check_adapter(elsewhere)

    def test_broken_files(self, tmp_path: Path) -> None:
        adapter = make_adapter(tmp_path, SIZES)
        weights = adapter / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        with pytest.raises(InvalidRequest, match="is not a complete safetensors file"):
            check_adapter(adapter)
        (adapter / "adapter_config.json").write_text("{")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            check_adapter(adapter)
