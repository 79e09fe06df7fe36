"""`penstock quantize` on a tiny model: what it writes is served, and bad input gets one clear line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ByteSize
from safetensors import SafetensorError
from tiny_model import make_tiny_model
from typer.testing import CliRunner, Result
from vision_models import make_vision_model, picture

from penstock.__main__ import app
from penstock.engine import EngineConfig, GenerationParams, ImageText, InferenceEngine


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets its own for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def quantize(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["quantize", *map(str, arguments)])


def tiny(shape: str, to: Path) -> Path:
    return make_tiny_model(to, shape)


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    result = quantize(tiny_model, out)
    assert result.exit_code == 0, result.output
    assert f"{out}: int4, " in result.stdout and " MB of " in result.stdout
    return out


def test_what_it_writes_is_loaded_with_its_tokenizer_and_template(made: Path, tiny_model: Path) -> None:
    names = {file.name for file in tiny_model.iterdir()}
    assert {file.name for file in made.iterdir()} == names
    assert not json.loads((tiny_model / "config.json").read_text()).get("quantization_config")
    with InferenceEngine(EngineConfig(model=str(made), device="cpu", kv_cache_memory=ByteSize(16 << 20))) as engine:
        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
        assert len(engine.generate(prompt, GenerationParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


@pytest.mark.parametrize("family", ["smolvlm", "lfm2_vl"])
def test_a_model_that_sees_still_does(family: str, tmp_path: Path) -> None:
    source, out = make_vision_model(tmp_path / family, family), tmp_path / "out"
    result = quantize(source, out)
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {file.name for file in source.iterdir()}
    with InferenceEngine(EngineConfig(model=str(out), device="cpu", kv_cache_memory=ByteSize(16 << 20))) as engine:
        one, two = (ImageText(f"{engine.image_mark} What?", (picture(salt=salt),)) for salt in (1, 2))
        params = GenerationParams(temperature=0, max_tokens=12, ignore_eos=True)
        first, second = engine.generate([one, two], params)
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe", "gpt_oss"])
def test_it_is_nearer_than_rounding_while_loading(shape: str, tmp_path: Path) -> None:
    source = tiny(shape, tmp_path / shape)
    assert quantize(source, tmp_path / "out").exit_code == 0
    divergences = []
    for index, (model, more) in enumerate(((tmp_path / "out", []), (source, ["--quantization=int4"]))):
        file = tmp_path / f"{index}.json"
        words = ["bench", "quality", str(model), *more, f"--against={source}", "--device=cpu"]
        result = CliRunner().invoke(app, [*words, f"--json={file}"])
        assert result.exit_code == 0, result.output
        results = json.loads(file.read_text())["results"]
        assert list(results) == ["int4"]
        divergences.append(results["int4"]["divergence"])
    assert divergences[0] < divergences[1]


def test_a_text_of_the_users_is_read(tiny_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100)
    result = quantize(tiny_model, tmp_path / "out", "--quantization=int8", f"--calibration={text}")
    assert result.exit_code == 0, result.output
    methods = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules"]
    assert set(methods.values()) == {"int8"}


def test_bad_input_has_one_clear_line(made: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "short").write_text("too short")
    shutil.copytree(tiny_model, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    for arguments, error in (
        ((tiny_model, tmp_path / "taken"), "taken exists and is not empty; name another directory"),
        ((tiny_model, tmp_path / "short"), "short exists and is not empty; name another directory"),
        (("/nowhere/model", tmp_path / "out"), ": /nowhere/model; check the path"),
        ((tiny_model, tmp_path / "out", "--quantization=int3"), "--quantization int3: must be int4 or int8"),
        ((tiny_model, tmp_path / "out", "--mmproj=none"), "is no GGUF file; it goes with one"),
        ((made, tmp_path / "out"), "is quantized already; name the model that it was made from"),
        ((tiny_model, tmp_path / "out", f"--calibration={tmp_path}/short"), "has fewer tokens than one chunk, 256"),
        ((tiny_model, tmp_path / "out", "--calibration=/nowhere/text"), "No such file or directory; check the path"),
        ((tmp_path / "broken", tmp_path / "out"), "the weights are missing; download them"),
        ((tiny_model, tmp_path / "short" / "out"), "/short/out cannot be written: Not a directory; name another"),
        ((tiny_model, tmp_path / ("x" * 300)), "xxx cannot be written: File name too long; name another directory"),
        ((tiny_model,), "name a model and a directory to write: penstock quantize MODEL OUT"),
    ):
        result = quantize(*arguments)
        assert result.exit_code == 2, arguments
        assert error in result.stderr and len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_a_disk_that_is_full_at_the_end_is_said_in_a_line(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("penstock.engine.checkpoints.rounded.save_file", full)
    result = quantize(tiny_model, tmp_path / "out")
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
    assert "/out cannot be written to its end: Error while" in result.stderr and "No space left" in result.stderr
