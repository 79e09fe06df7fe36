"""Reads the models to serve from a TOML file with one table a model, and from a directory with one folder or GGUF file
a model.

    [models.qwen]
    source = "models/Qwen3-8B"      # a directory or GGUF file, relative to this file or absolute, or a Hugging Face id
    aliases = ["fast"]
    keep_alive = "10m"
    defaults = { temperature = 0.7 }
    quantizations = ["int8"]        # also offered as qwen:int8
    adapters = { support = "adapters/support" }     # LoRA adapters, each a model name of its own

The other keys are the fields of `schemas.catalogue.CatalogueEntry`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from pydantic import ByteSize, TypeAdapter, ValidationError

from ..schemas.errors import ConfigurationError
from ..schemas.models.catalogue import CatalogueEntry, parse_keep_alive
from ..schemas.sources import absolute_pair, check_access, gguf_model, is_gguf, looks_like_path
from .files import read_toml
from .sources import Loaded

log = structlog.get_logger(__name__)

_KEPT = ("version", "name", "revision", "others", "failed_swap")  # not the file's to set
VARIANTS = "quantizations"  # the key of a model's table that is no field of its entry
KEYS = tuple(key for key in CatalogueEntry.model_fields if key not in _KEPT)

_bytes = TypeAdapter(ByteSize).validate_python


class _Found(NamedTuple):
    """A model that a file or a directory names: `entry` is None if it has faults; `where` is for messages."""

    name: str
    aliases: tuple[str, ...]
    adapters: tuple[str, ...]
    where: str
    entry: CatalogueEntry | None


# Settings that a server of several models cannot have.
OF_ONE = ("model", "mmproj", "workers", "served_model_name", "lora_modules")


def offered_models(loaded: Loaded) -> tuple[CatalogueEntry, ...] | None:
    """The models that `serve` is to offer by name; None if it serves one.

    A setting that was given counts for each model that does not set it itself. Raises `ConfigurationError` with every
    fault.
    """
    settings = loaded.settings
    if settings.models is None and settings.model_dir is None:
        return None
    if wrong := [name for name in OF_ONE if loaded.origins[name] != "default"]:
        raise ConfigurationError(
            [
                f"{name} is for a server of one model: leave it out with --models and --model-dir"
                + (", and give a model `replicas` in its table" if name == "workers" else "")
                for name in wrong
            ]
        )
    given = [name for name in CatalogueEntry.model_fields if loaded.origins.get(name, "default") != "default"]
    entries = read_models(settings.models, settings.model_dir)
    if len(entries) > settings.max_models:
        raise ConfigurationError(
            [f"{len(entries)} models are offered, and max_models is {settings.max_models}: raise --max-models"]
        )
    return tuple(
        entry.model_copy(update={name: getattr(settings, name) for name in given if name not in entry.model_fields_set})
        for entry in entries
    )


def read_models(file: Path | None = None, directory: Path | None = None) -> tuple[CatalogueEntry, ...]:
    """The models of a TOML file, then those of a directory.

    Raises `ConfigurationError` with every fault of both, one line each.
    """
    faults: list[str] = []
    found = [] if file is None else _from_file(file, faults)
    found += [] if directory is None else _from_directory(directory, faults)
    _check_names(found, faults)
    if faults:
        raise ConfigurationError(faults)
    return tuple(model.entry for model in found if model.entry is not None)


def _from_file(path: Path, faults: list[str]) -> list[_Found]:
    try:
        tables = read_toml(path)
    except FileNotFoundError:
        faults.append(f"{path}: no such file; name an existing one")
    except ConfigurationError as error:
        faults += error.faults
    else:
        for key in (key for key in tables if key != "models"):
            faults.append(f"{path}: [{key}] is unknown; each model needs a table of its own, such as [models.{key}]")
        models = tables.get("models")
        if isinstance(models, dict) and models:
            found = [
                _from_table(f"{path} [models.{name}]", path.parent, name, values, faults)
                for name, values in models.items()
            ]
            return [each for model in found for each in (model, *_variants(model, models[model.name], faults))]
        faults.append(f"{path}: names no model; add a table such as [models.qwen] with its source")
    return []


def parse_model(name: str, values: Mapping[str, object]) -> CatalogueEntry:
    """A model with the values that a table of the file of models would have; its files are not looked at.

    Raises `ConfigurationError` with every fault.
    """
    faults = [f"{name}: {VARIANTS}: add each as a model of its own, with quantization"] if VARIANTS in values else []
    entry = _from_table(f"{name}:", None, name, values, faults).entry
    if entry is None or faults:
        raise ConfigurationError(faults)
    return entry


def _from_table(where: str, base: Path | None, name: str, values: object, faults: list[str]) -> _Found:
    """Paths are seen from `base`; without one they stay as they are."""
    if not isinstance(values, dict):
        faults.append(f"{where}: must be a table, got {values!r}; write [models.{name}] above its source")
        return _Found(name, (), (), where, None)
    before = len(faults)
    given = {key: value for key, value in values.items() if key in KEYS}
    known = (*KEYS, VARIANTS)
    for key in (key for key in values if key not in known):
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
        faults.append(f"{where} {key}: no such key; {hint}")
    if given.get("max_batch_size") == "auto":
        given["max_batch_size"] = None
    converters: tuple[tuple[str, Callable[[Any], object]], ...]
    converters = ("keep_alive", parse_keep_alive), ("kv_cache_memory", _to_bytes)
    for key, convert in converters:
        if key in given:
            try:
                given[key] = convert(given[key])
            except ValueError as error:
                faults.append(f"{where} {key}: {error}, got {given.pop(key)!r}")
    if base is not None and isinstance(given.get("source"), str) and given["source"]:
        try:
            given["source"] = _resolve(given["source"], base)
        except (OSError, ValueError) as error:
            faults.append(f"{where} source: {_unreadable(error) if isinstance(error, OSError) else error}")
            given["source"] = "-"  # anything valid: the other keys are to be checked, too
    adapters = given.get("adapters")
    if base is not None and isinstance(adapters, dict):
        given["adapters"] = {
            own: str((base / Path(at).expanduser()).resolve()) if isinstance(at, str) and at else at
            for own, at in adapters.items()
        }
    entry = None
    try:
        entry = CatalogueEntry.model_validate({**given, "name": name})
    except ValidationError as error:
        faults += [f"{where} {_explain(each)}" for each in error.errors(include_url=False, include_context=False)]
    aliases = given.get("aliases")
    texts = tuple(each for each in aliases if isinstance(each, str)) if isinstance(aliases, list) else ()
    names = tuple(adapters) if isinstance(adapters, dict) else ()
    return _Found(name, texts, names, where, entry if len(faults) == before else None)


def _variants(model: _Found, values: object, faults: list[str]) -> list[_Found]:
    """The model as `name:quantization`, once for each that its table names: a model of its own otherwise like it."""
    given = values.get(VARIANTS, []) if isinstance(values, dict) else []
    if not isinstance(given, list) or not all(isinstance(each, str) and each.split() == [each] for each in given):
        faults.append(f'{model.where} {VARIANTS}: must be a list such as ["int8", "int4"], got {given!r}')
        return []
    if model.entry is None:
        return []
    own: dict[str, object] = {"aliases": (), "adapters": {}, "pin": False, "preload": False}
    found = []
    for each in given:
        name = f"{model.name}:{each}"
        entry = model.entry.model_copy(update=own | {"name": name, "quantization": each})
        found.append(_Found(name, (), (), f"{model.where} {VARIANTS}", entry))
    return found


def _to_bytes(value: object) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool):
        raise ValueError("must be a number of bytes, or a size such as 4GiB, or auto")
    try:
        return int(_bytes(value))
    except ValidationError:
        raise ValueError("must be a number of bytes, or a size such as 4GiB, or auto") from None


def _resolve(source: str, base: Path) -> str:
    """An absolute path if `source` is a directory or a file, seen from `base`; otherwise a Hugging Face id as it is."""
    path = base / Path(source).expanduser()
    if (pair := absolute_pair(source, base.absolute())) is not None:
        return str(pair)
    check_access(path)
    if path.is_dir():
        if not _holds_model(path):
            raise ValueError(f"{path} has no config.json: name a model's directory in Hugging Face's format")
        return str(path.resolve())
    if path.is_file():
        if not is_gguf(path):
            raise ValueError(f"{path} is no GGUF file: name one, or a model's directory in Hugging Face's format")
        return str(path.absolute())  # the target of a link may have another name
    if path.exists() or looks_like_path(source) or ("/" in source and path.parent.is_dir()):
        raise ValueError(
            f"no such directory or file: {path}; check the path (a relative one begins at the file's directory)"
        )
    return source


def _explain(fault: Mapping[str, Any]) -> str:
    """One fault of a table, from pydantic's words."""
    location = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f"{location}: missing; give a directory, a GGUF file or a Hugging Face id"
    return f"{location}: {fault['msg'].removeprefix('Value error, ')}, got {fault['input']!r}"


def _from_directory(directory: Path, faults: list[str]) -> list[_Found]:
    """Each GGUF file, and each folder with a model; others are passed over."""
    try:
        paths = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        faults.append(f"{directory}: no such directory; name one that holds a folder or a GGUF file for each model")
        return []
    except OSError as error:
        faults.append(_unreadable(error))
        return []
    found = []
    for path in paths:
        try:
            check_access(path)
            name = gguf_model(path.name) if path.is_file() else path.name if _holds_model(path) else None
        except OSError as error:  # as of the folder lost+found of a disk
            log.warning("passed over, as it cannot be read", path=str(path), reason=error.strerror)
            continue
        if name is None:
            continue
        try:
            entry = CatalogueEntry(name=name, source=str(path.absolute() if path.is_file() else path.resolve()))
        except ValidationError as error:
            faults.append(
                f"{path}: {error.errors(include_url=False)[0]['msg'].removeprefix('Value error, ')}; rename it"
            )
            continue
        found.append(_Found(name, (), (), str(path), entry))
    if not found and not faults:
        faults.append(
            f"{directory}: holds no model; put a GGUF file or a folder with config.json and safetensors there for each"
        )
    return found


def _holds_model(path: Path) -> bool:
    """Whether a folder holds a model: one with a config.json, or a single one in GGUF."""
    check_access(config := path / "config.json")
    if config.is_file():
        return True
    return path.is_dir() and len([file for file in path.iterdir() if gguf_model(file.name)]) == 1


def _unreadable(error: OSError) -> str:
    return f"{error.filename} cannot be read: {error.strerror}; check the path and its permissions"


def _check_names(found: list[_Found], faults: list[str]) -> None:
    """Each name and alias may mean one model only."""
    by_name: dict[str, _Found] = {}
    for model in found:
        if (other := by_name.setdefault(model.name, model)) is not model:
            faults.append(f"{model.where}: {other.where} has the same name; rename one of the two")
    in_circle = _circles(by_name, faults)
    by_alias: dict[str, _Found] = {}
    for model in found:
        for alias in model.aliases:
            if alias in by_name:
                if (model.name, alias) not in in_circle:
                    faults.append(
                        f"{model.where} aliases: {alias!r} is the name of {by_name[alias].where}; choose another alias"
                    )
            elif alias in by_alias:
                faults.append(
                    f"{model.where} aliases: {alias!r} is already an alias of {by_alias[alias].where}; keep one"
                )
            else:
                by_alias[alias] = model
    by_adapter: dict[str, _Found] = {}
    for model in found:
        for adapter in model.adapters:
            if taken := by_name.get(adapter) or by_alias.get(adapter) or by_adapter.get(adapter):
                faults.append(
                    f"{model.where} adapters: {adapter!r} is a name of {taken.where}; choose another name for the "
                    "adapter"
                )
            by_adapter.setdefault(adapter, model)


def _circles(by_name: Mapping[str, _Found], faults: list[str]) -> set[tuple[str, str]]:
    """The pairs (name, alias) that lie on a circle of aliases; each circle is one fault."""
    edges: set[tuple[str, str]] = set()
    for start in by_name:
        if any(start == name for name, _ in edges):
            continue
        path = _way_back(by_name, start)
        if len(path) > 1:
            edges |= set(zip(path, [*path[1:], start], strict=True))
            faults.append(
                f"{by_name[start].where} aliases: {' → '.join([*path, start])} is a circle; remove one of these aliases"
            )
    return edges


def _way_back(by_name: Mapping[str, _Found], start: str) -> list[str]:
    """The shortest chain of names from `start`, each an alias of the one before, whose last has the alias `start`."""
    chains = [[start]]
    seen: set[str] = set()
    for chain in chains:
        for alias in by_name[chain[-1]].aliases:
            if alias == start:
                return chain
            if alias in by_name and alias not in seen:
                seen.add(alias)
                chains.append([*chain, alias])
    return []
