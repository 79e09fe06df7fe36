"""Which projector goes with a GGUF file, and why others do not: everything is said from the headers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_pairs import KINDS, Array, write_pair
from vision_models import make_vision_model

from penstock.engine.checkpoints.gguf.file import read_gguf
from penstock.engine.checkpoints.gguf.pairs import processor_of, weights_of
from penstock.engine.models import model_name, read_config, read_model_info, resolve_model
from penstock.engine.paged.spill.identity import weights_digest
from penstock.engine.planning.discovery import files_for
from penstock.engine.planning.manifests import HF, PAGED
from penstock.engine.vision.sight import load_sight
from penstock.schemas.errors import ModelLoadError

Write = Callable[..., Path]
PROJECTOR = "mmproj-model.gguf"


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    def make(family: str) -> Path:
        return root / family if (root / family).exists() else make_vision_model(root / family, family)

    return make


@pytest.fixture
def write(directory_of: Callable[[str], Path], tmp_path: Path) -> Write:
    """A pair in a folder of its own; returns the model's file."""

    def make(name: str = "pair", family: str = "smolvlm", **changes: Any) -> Path:
        return write_pair(directory_of(family), tmp_path / name, family, **changes)

    return make


def fault(source: Path | str) -> str:
    with pytest.raises(ModelLoadError) as refused:
        read_model_info(resolve_model(str(source)), "m")
    return str(refused.value)


def test_the_one_projector_beside_a_model_is_used(write: Write) -> None:
    path = write()
    found = resolve_model(str(path))
    assert found == resolve_model(str(path.parent)) == resolve_model(str(found)), "whichever way it is named"
    assert str(found) == f"{path},{path.parent / PROJECTOR}"
    assert model_name(found) == "model"
    assert read_model_info(found, "m").sees
    assert files_for(PAGED, str(path)) == found and files_for(HF, str(path)) == path


def test_a_projector_can_be_named(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of Ollama's files, which have neither names nor a folder of their own."""
    path = write()
    os.rename(path, tmp_path / "sha256-1")
    os.rename(path.parent / PROJECTOR, tmp_path / "sha256-2")
    assert not read_model_info(resolve_model(str(tmp_path / "sha256-1")), "m").sees
    monkeypatch.chdir(tmp_path)
    found = resolve_model("sha256-1,sha256-2")
    assert str(found) == f"{tmp_path / 'sha256-1'},{tmp_path / 'sha256-2'}"
    assert read_model_info(found, "m").sees and model_name(found) == "sha256-1"
    assert "sha256-3 is no GGUF file; behind the comma name the projector" in fault("sha256-1,sha256-3")


def test_a_comma_may_be_in_a_name(write: Write, tmp_path: Path) -> None:
    path = write("a,b")
    assert read_model_info(resolve_model(str(path)), "m").sees
    alone = tmp_path / "one,two.gguf"
    shutil.copy(path, alone)
    shutil.copy(path, tmp_path / "one")
    assert resolve_model(str(alone)) == alone


def test_text_alone_can_be_asked_for(write: Write) -> None:
    path = write()
    found = resolve_model(f"{path},none")
    assert found == resolve_model(str(found)), "a later process takes it for the same"
    assert not read_model_info(found, "m").sees
    assert read_config(found)["model_type"] == "llama"


def test_of_several_projectors_one_must_be_named(write: Write) -> None:
    path = write()
    shutil.copy(path.parent / PROJECTOR, path.parent / "mmproj-f16.gguf")
    assert "beside it lie several projectors: mmproj-f16.gguf, mmproj-model.gguf; name one by --mmproj" in (
        fault(path).replace(f"beside {path}", "beside it")
    )
    named = resolve_model(f"{path},{path.parent / PROJECTOR}")
    assert read_model_info(named, "m").sees


def test_several_models_in_a_folder_each_get_what_fits(write: Write, tiny_model: Path) -> None:
    """One that none fits is for text alone, as it was before there were any."""
    path, other = write(), write("other", "qwen2_vl")
    shutil.copy(other, path.with_name("qwen.gguf"))
    shutil.copy(other.parent / PROJECTOR, path.with_name("mmproj-qwen.gguf"))
    third = write("third", "internvl")
    shutil.copy(third, path.with_name("third.gguf"))
    assert resolve_model(str(path)).name == PROJECTOR
    assert resolve_model(str(path.with_name("qwen.gguf"))).name == "mmproj-qwen.gguf"
    assert not read_model_info(resolve_model(str(path.with_name("third.gguf"))), "m").sees


def test_an_unsupported_kind_beside_a_model_leaves_it_for_text(write: Write) -> None:
    path = write(keys={"clip.projector_type": "gemma3nv"})
    found = resolve_model(str(path))
    assert found == path and not read_model_info(found, "m").sees
    sight = load_sight(str(path), "paged")
    assert sight.processor is None and "a projector of the kind gemma3nv, which is not supported" in sight._blind
    named = fault(f"{path},{path.parent / PROJECTOR}")
    known = "idefics3, mlp, gemma3, gemma4v, gemma4uv, qwen2vl_merger"
    assert f"of the kind gemma3nv, which is not supported; supported: {known}" in named


def test_a_projector_is_no_model(write: Write) -> None:
    projector = write().parent / PROJECTOR
    assert "is a projector, the vision part of a model; name the model's own file" in fault(projector)
    assert "model.gguf is no projector" in fault(f"{projector.parent / 'model.gguf'},{projector.parent / 'model.gguf'}")


def test_the_projector_of_another_model_is_refused(write: Write) -> None:
    path, other = write(), write("other", "qwen2_vl")
    assert "goes with models of the architecture qwen2vl, and" in fault(f"{path},{other.parent / PROJECTOR}")

    def widen(tensors: dict[str, Array]) -> None:
        tensors["mm.model.fc.weight"] = np.zeros((96, 128), np.float32)

    wide = write("wide", edit=widen)
    named = fault(wide)
    assert "makes tokens of 96 numbers, and those of" in named and "have 64; name the projector" in named
    assert f"for text alone name {wide},none" in named


def test_tensors_must_be_those_of_the_kind(write: Write) -> None:
    missing = write("missing", edit=lambda tensors: tensors.pop("v.blk.1.attn_q.bias"))
    assert "lacks the tensor v.blk.1.attn_q.bias: it is incomplete; download it again" in fault(missing)
    more = write("more", edit=lambda tensors: tensors.update({"mm.extra.weight": np.zeros(3, np.float32)}))
    assert "the tensor mm.extra.weight is unknown in a projector of the kind idefics3" in fault(more)
    endless = write("endless", keys={"clip.vision.block_count": 4_000_000_000})
    assert "lacks the tensor v.blk.2." in fault(endless)
    colourless = write("colourless", keys={"clip.vision.image_mean": None})
    assert "has no 3 numbers clip.vision.image_mean; convert the model again" in fault(colourless)
    none = write("none", keys={"clip.vision.embedding_length": 0})
    assert "says that clip.vision.embedding_length is 0; convert the model again" in fault(none)


def test_pictures_are_resized_as_the_file_says(write: Write) -> None:
    assert "resizes pictures by lanczos, which is not supported; supported: bilinear, bicubic" in fault(
        write("lanczos", "lfm2_vl", keys={"clip.vision.image_resize_algo": "lanczos"})
    )
    for index, (given, number) in enumerate(((None, 2), ("bilinear", 2), ("bicubic", 3))):
        path = write(f"{index}", "lfm2_vl", keys={"clip.vision.image_resize_algo": given})
        assert processor_of(read_gguf(resolve_model(str(path))))["resample"] == number


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"clip.vision.projector.scale_factor": 2}, "shows 2 by 2 patches in a token, which is not supported"),
        ({"clip.vision.wa_layer_indexes": [0, 1]}, "has no one layer in wa_layer_indexes; convert the model again"),
    ],
)
def test_other_minicpms_are_refused(keys: dict[str, Any], reason: str, write: Write) -> None:
    assert reason in fault(write(family="minicpmv4_6", keys=keys))


def test_a_language_model_without_its_dimensions_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "qwen2_vl", KINDS["qwen2_vl"]._replace(text_keys={}))
    assert "has no qwen2vl.rope.dimension_sections; convert the model again" in fault(write(family="qwen2_vl"))


def test_a_truncated_projector_is_refused(write: Write) -> None:
    projector = write().parent / PROJECTOR
    projector.write_bytes(projector.read_bytes()[:-100])
    assert "is not a complete GGUF file: the tensor" in fault(projector.parent)


def test_a_tokenizer_without_image_tokens_is_refused(directory_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "renamed"
    shutil.copytree(directory_of("smolvlm"), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (directory / name).read_text("utf-8")
        (directory / name).write_text(text.replace('"<image>"', '"<picture>"'), "utf-8")
    path = write_pair(directory, tmp_path / "pair", "smolvlm")
    assert "has no token <image>, which stands for an image; use a file that was converted" in fault(path)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"clip.vision.mm_patch_merge_type": "spatial_unpad"}, "is of LLaVA 1.6, which sees an image in tiles"),
        ({"clip.vision.image_grid_pinpoints": [336, 672]}, "is of LLaVA 1.6, which sees an image in tiles"),
        ({"clip.vision.feature_layer": [1, 2]}, r"looks at the layers [1, 2] of 2, which is not supported"),
    ],
)
def test_other_llavas_are_refused(keys: dict[str, Any], reason: str, write: Write) -> None:
    assert reason in fault(write(family="llava", keys=keys))


def test_the_first_projectors_of_llava_name_no_kind(write: Write) -> None:
    """And their first and second layers have each other's names; those of later ones have their own."""

    def swap(tensors: dict[str, Array]) -> None:
        for name in [name for name in tensors if ".ffn_up." in name]:
            other = name.replace("_up.", "_down.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    path = write(family="llava", keys={"clip.projector_type": None})
    assert read_model_info(resolve_model(str(path)), "m").architecture == "LlavaForConditionalGeneration"
    swapped = write("swapped", "llava", edit=swap)
    one, other = (weights_of(read_gguf(resolve_model(str(each)))) for each in (path, swapped))
    name = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
    assert one[name].shape == other[name].shape == (64, 32)
    assert one[name].tensor.name != other[name].tensor.name


def test_what_is_kept_on_disk_belongs_to_both_files(write: Write) -> None:
    path = write()
    found = resolve_model(str(path))
    both, alone = weights_digest(found), weights_digest(path)
    assert both != alone
    projector = path.parent / PROJECTOR
    content = bytearray(projector.read_bytes())
    content[-1] ^= 1
    projector.write_bytes(content)
    assert weights_digest(found) != both and weights_digest(path) == alone
