"""Find a model, read what its files say about it, and check that its weight files are whole. Needs no torch.

A model is a directory in Hugging Face's format, or a GGUF file, alone or with a projector.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..schemas.errors import ConfigurationError, ModelLoadError, StartupError
from ..schemas.sources import (
    NO_PROJECTOR,
    absolute_pair,
    check_access,
    gguf_model,
    is_gguf,
    looks_like_path,
    split_pair,
)
from ..schemas.urls import check_proxies
from .checkpoints.files import read_header, read_json, unreadable, weight_files
from .checkpoints.gguf.file import read_gguf
from .checkpoints.gguf.pairs import config_of, find_projector, weights_of
from .checkpoints.packed import PackedWeight, Packing, find_weights, packing_of
from .checkpoints.quantized import Quantized
from .vision.defaults import completed
from .vision.families.family import family_of
from .vision.families.form import PROCESSORS, Family
from .vision.families.writing import image_token

BUNDLED = "penstock-nano"  # the model that comes with the package: see deploy/nano
_BUNDLED_AT = Path(__file__).parents[1] / "deploy" / "nano" / "model"
_OTHER_FORMS = ["original/*", "metal/*"]  # folders in which some keep the same weights once more
_CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    "model_max_length",
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model's files say. `context_length` counts tokens of prompt and answer together.

    `dtype` is the checkpoint's, None if its config does not say. `parameters` is None until the weight files are read.
    `slow_paths` says, for each fast path that the loaded model does not take, why not and what to do about it.
    `sees` images: with a backend that can. `chat_template` is the one of a family that is published without any.
    A model that `ranks` scores pairs of texts, and does nothing else. `most_images` are those that one request may have
    with the backend that has loaded it, if their memory bounds them. `image_token` is that of images where it lies
    behind the vocabulary: prompts have it, and no answer does.
    """

    source: str
    architecture: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str | None = None
    parameters: int | None = None
    slow_paths: tuple[str, ...] = ()
    sees: bool = False
    chat_template: str = ""
    ranks: bool = False
    most_images: int | None = None
    image_token: int | None = None


def keep(file: Path, content: bytes, most: int) -> None:
    """Write a file of the cache whole or not at all, and make room: of those beside it with its suffix the `most` that
    were used last stay. Raises `OSError`."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(content)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink()
        raise
    for old in sorted(file.parent.glob(f"*{file.suffix}"), key=_used, reverse=True)[most:]:
        old.unlink(missing_ok=True)


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # another process made room


def resolve_model(source: str) -> Path:
    """The directory or GGUF file of `source`: a path, the bundled model's name, or a Hugging Face id.

    A model on the hub is downloaded. The path is absolute, and names a GGUF file's projector, too: the one that
    `source` names, or the one beside the file. Raises `ModelLoadError`.
    """
    try:
        return _resolved(source)
    except OSError as error:
        raise unreadable(source, error) from error


def _resolved(source: str) -> Path:
    path = Path(source).expanduser()
    if (pair := absolute_pair(path)) is not None and is_gguf(path):
        return _checked(pair)
    check_access(path)
    if path.is_dir():
        check_access(config := path / "config.json")
        return path.resolve() if config.is_file() else _only_gguf(path)
    if path.is_file():
        if is_gguf(path):
            return find_projector(path.absolute())  # the target of a link may have another name, and its shards
        raise ModelLoadError(f"{source} is no GGUF file; name one, or the directory with config.json and the weights")
    if looks_like_path(source):
        raise ModelLoadError(f"no such directory or file: {source}; check the path")
    if source == BUNDLED:
        return _BUNDLED_AT
    return _download(source).resolve()


def _only_gguf(directory: Path) -> Path:
    """The one model in GGUF that lies in a directory without a config.json; with none, the directory."""
    found = sorted(path for path in directory.iterdir() if gguf_model(path.name))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ModelLoadError(f"{directory} holds several models; name one of its files: {names}")
    return find_projector(found[0].absolute()) if found else directory.resolve()


def _checked(pair: Path) -> Path:
    """Raises `ModelLoadError` for a projector that is missing."""
    text, projector = split_pair(pair)
    if projector is not None and (not projector.is_file() or not is_gguf(projector)):
        raise ModelLoadError(
            f"{projector} is no GGUF file; behind the comma name the projector of {text}, or {NO_PROJECTOR} for text "
            "alone"
        )
    return pair


def model_name(path: Path) -> str:
    """What a model is called unless it is given a name: like its directory or file."""
    text = split_pair(path)[0]
    return gguf_model(text.name) or text.name


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model, or what a GGUF file has in its place. Raises `ModelLoadError`."""
    if is_gguf(path):
        return config_of(read_gguf(path))
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{path} has no config.json: it is neither a model directory in Hugging Face's format nor a GGUF file"
        )
    config = read_json(path / "config.json")
    packing_of(config, path)  # refuses what cannot be read
    return completed(config)


def seeing_family(path: Path, config: Mapping[str, Any]) -> Family | None:
    """The family of a model at `path` with this configuration, if it sees images in a way that is supported."""
    family = family_of(config)
    if family is None or not family.may_be_blind or is_gguf(path):
        return family
    return family if any((path / name).is_file() for name in PROCESSORS) else None


def read_model_info(
    path: Path, source: str, max_sequence_length: int | None = None, *, needs_context: bool = True
) -> ModelInfo:
    """Read a model's configuration; `max_sequence_length` shortens the context, never lengthens it.

    Without `needs_context` the context of a model that does not give it is 0.
    Raises `ModelLoadError` for missing or broken files, `ConfigurationError` for a length above the model's.
    """
    config = read_config(path)
    text = config.get("text_config", config)
    own = next((text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), None)
    if own is not None and max_sequence_length is not None and max_sequence_length > own:
        raise ConfigurationError(
            [f"max_sequence_length={max_sequence_length}: the context of {source} has {own} tokens; set no more"]
        )
    context = max_sequence_length or own
    if context is None and needs_context:
        raise ModelLoadError(f"{path} does not give the context length; set max_sequence_length")
    if not isinstance(text.get("vocab_size"), int):
        raise ModelLoadError(f"{path} has no vocab_size: it is not a language model's; choose a language model")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    eos = dict.fromkeys(_as_ids(text.get("eos_token_id")) + _as_ids(generation_config.get("eos_token_id")))
    return ModelInfo(
        source=source,
        architecture=(config.get("architectures") or ["unknown"])[0],
        context_length=context or 0,
        vocabulary_size=text["vocab_size"],
        eos_token_ids=tuple(eos),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        sees=(family := seeing_family(path, config)) is not None,
        chat_template=family.template if family is not None else "",
        ranks=ranks(path, config),
        image_token=image_token(config) if family is not None and family.crosses else None,
    )


def ranks(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether a model scores pairs of texts: a cross-encoder, as sentence-transformers calls it, or a classifier."""
    own = path / "config_sentence_transformers.json"
    if kind := (read_json(own) if own.is_file() else {}).get("model_type"):
        return bool(kind == "CrossEncoder")
    is_classifier = (config.get("architectures") or [""])[0].endswith("ForSequenceClassification")
    return is_classifier and not (path / "modules.json").is_file()


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def count_parameters(path: Path) -> int:
    """Check every weight file of a model, and count its numbers.

    Raises `ModelLoadError` naming a missing or broken file, or a weight that is not supported.
    """
    return sum(map(prod, read_shapes(path).values()))


def read_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of all weights by name, from the headers of the files, which are checked as by `count_parameters`."""
    if is_gguf(path):
        return {name: list(weight.shape) for name, weight in weights_of(read_gguf(path)).items()}
    shapes = {name: shape for file in weight_files(path) for name, shape in read_header(file).items()}
    if quantized := read_quantized(path):
        return quantized.shapes(shapes)
    packing = packing_of(read_json(path / "config.json"), path) if (path / "config.json").is_file() else None
    return {
        name: shapes[weight] if isinstance(weight, str) else list(weight.shape)
        for name, weight in find_weights(shapes, packing, path).items()
    }


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """The weights of a directory with packed ones: how they are packed, and in which file each tensor lies."""

    packing: Packing
    weights: dict[str, PackedWeight | str]
    files: dict[str, Path]


def packed_files(path: Path) -> PackedFiles | None:
    """What is to be expanded of the model in a directory; None if its weights are not packed."""
    packing = packing_of(read_config(path), path)
    if packing is None:
        return None
    headers = {file: read_header(file) for file in weight_files(path)}
    shapes = {name: shape for header in headers.values() for name, shape in header.items()}
    files = {name: file for file, header in headers.items() for name in header}
    return PackedFiles(packing, find_weights(shapes, packing, path), files)


def read_quantized(path: Path) -> Quantized | None:
    """What a model says of its quantisation; None unless `penstock quantize` wrote it."""
    file = path / "config.json"
    return Quantized.of(read_json(file), str(path)) if file.is_file() else None


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        check_proxies()
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(source, allow_patterns=wanted, ignore_patterns=_OTHER_FORMS))
    except StartupError as error:
        raise ModelLoadError(f"{source} cannot be looked for on Hugging Face: {error}") from error
    except HFValidationError as error:
        raise ModelLoadError(f"{source!r} is neither a directory nor a Hugging Face id: {error}") from error
    except GatedRepoError as error:
        raise ModelLoadError(f"{source} is gated: accept its terms on huggingface.co, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no directory {source!r} here, and no such model on Hugging Face; a private one needs HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"no directory {source!r} here, no copy of it in the Hugging Face cache, and the hub cannot be reached; "
            "name a local directory, or go online once"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"cannot download {source} from Hugging Face: {error}; try again") from error


def files_of(path: Path) -> list[Path]:
    """Those that make up the model at `path`."""
    if is_gguf(path):
        gguf = read_gguf(path)
        both = (gguf,) if gguf.projector is None else (gguf, gguf.projector)
        return sorted({tensor.path for one in both for tensor in one.tensors.values()} | {one.path for one in both})
    return sorted({*path.glob("*.json"), *weight_files(path)})


def state_of(path: Path) -> list[list[Any]]:
    """What the file system says of a model's files: it differs after any of them has changed. Raises `OSError`."""
    stats = [(file.name, file.stat()) for file in files_of(path)]
    return [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats]


def keeps_states(model: Any) -> bool:
    """Whether layers of transformers' model keep a running state, which is no cache of keys and values."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(model._is_stateful or "linear_attention" in kinds)
