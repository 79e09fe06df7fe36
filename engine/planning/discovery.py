"""Finds backends, Penstock's own and installed plug-ins, by their manifests, without importing a backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ...schemas.errors import ConfigurationError
from ...schemas.sources import is_gguf, split_pair
from ..models import ModelInfo, ranks, read_config, resolve_model
from .manifest import Format, Manifest, explain, read_manifest

GROUP = "penstock.backends"
_OWN = {  # found like those of plug-ins
    name: EntryPoint(name, f"{Manifest.__module__}s:{name.upper()}", GROUP)
    for name in ("paged", "hf", "llama_cpp", "vllm", "sentence_transformers", "echo")
}


@dataclass(frozen=True, slots=True)
class Found:
    """A backend that is here: its id, the package that it comes from, and its manifest, or why there is none."""

    id: str
    package: str
    manifest: Manifest | None
    fault: str = ""


def find_backends(allowed: Collection[str] | None = None) -> list[Found]:
    """Penstock's own backends, then the plug-ins, by id. One that cannot be used does not affect the others.

    `allowed` are the ids of the plug-ins that may be imported; None allows all.
    """
    own = [_read(entry, "penstock") for entry in _OWN.values()]
    return own + [_plug_in(name, entries, allowed) for name, entries in installed(GROUP).items()]


def modalities(info: ModelInfo, backend: str, allowed: Collection[str] | None = None) -> tuple[str, ...]:
    """What prompts for a model may hold: images, where it sees them and the backend can show it some."""
    return ("text", "image") if info.sees and "images" in find_backend(backend, allowed).modes else ("text",)


def find_backend(id: str, allowed: Collection[str] | None = None) -> Manifest:
    """The manifest of one backend; no other plug-in is imported. Raises `ConfigurationError`."""
    if id in _OWN:
        found = _read(_OWN[id], "penstock")
    else:
        plug_ins = installed(GROUP)
        if id not in plug_ins:
            names = ", ".join(sorted(_OWN.keys() | plug_ins.keys()))
            raise ConfigurationError([f"unknown backend {id!r}; use one of: {names}"])
        found = _plug_in(id, plug_ins[id], allowed)
    if found.manifest is None:
        raise ConfigurationError([f"the backend {id!r} of {found.package} cannot be used: {found.fault}"])
    return found.manifest


def why_not(manifest: Manifest, model: str | None = None, device: str = "auto") -> str:
    """Why a backend cannot run here, or not `model`, or not on `device`; empty if nothing speaks against it.

    Reads the model's config.json or the header of its GGUF file, and downloads a model of the hub. Raises
    `ModelLoadError`.
    """
    if missing := manifest.missing:
        return f"the backend {manifest.id!r} cannot run here: {missing}"
    kind = device.partition(":")[0]
    if kind in ("cpu", "cuda", "mps") and kind not in manifest.devices:
        only = "only on a CPU; use cpu" if manifest.devices == ("cpu",) else f"on {' and '.join(manifest.devices)}"
        return f"device={device!r}: the backend {manifest.id!r} runs {only}"
    if model is None or not manifest.formats:
        return ""
    path = files_for(manifest, model)
    form: Format = "gguf" if is_gguf(path) else "safetensors"
    if form not in manifest.formats:
        return f"the backend {manifest.id!r} runs {' and '.join(manifest.formats)} models, and {model} is {form}"
    config = read_config(path)
    if "scores" not in manifest.modes and ranks(path, config):
        return (
            f"the backend {manifest.id!r} ranks no documents, and {model} does nothing else; "
            "use the backend 'sentence_transformers'"
        )
    if manifest.architectures is not None:
        names = config.get("architectures") or ["unknown"]
        if not {*names} & {*manifest.architectures}:
            known = ", ".join(manifest.architectures)
            return f"the backend {manifest.id!r} runs {known}, and {model} is a {names[0]}"
    return ""


def files_for(manifest: Manifest, model: str) -> Path:
    """What a backend reads of a model: without its projector, if it sees nothing. Raises `ModelLoadError`."""
    path = resolve_model(model)
    return path if "images" in manifest.modes else split_pair(path)[0]


def installed(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of installed packages by name, in alphabetical order."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


def _plug_in(name: str, entries: list[EntryPoint], allowed: Collection[str] | None) -> Found:
    packages = sorted(map(package_of, entries))
    fault = ""
    if name in _OWN:
        fault = f"{name!r} is one of Penstock's own backends, and a second one is refused; uninstall {packages[0]}"
    elif len(entries) > 1:
        fault = f"{' and '.join(packages)} both have the id {name!r}; uninstall one of them"
    elif allowed is not None and name not in allowed:
        fault = "allowed_backends does not list it"
    return Found(name, packages[0], None, fault) if fault else _read(entries[0], packages[0])


def package_of(entry: EntryPoint) -> str:
    """The package that has an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _read(entry: EntryPoint, package: str) -> Found:
    try:
        return Found(entry.name, package, read_manifest(entry.load(), entry.name))
    except (Exception, SystemExit) as error:  # whatever a plug-in does must not end the others
        return Found(entry.name, package, None, explain(error))
