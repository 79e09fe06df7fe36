"""LoRA adapters in PEFT's format: reads one, checks it against the model, and describes it. Imports torch only to read.

An adapter adds scale · (x A') B' to the outputs of some of a model's linear layers: A is [r, I], B [O, r]. Whatever
else an adapter may change (embeddings, the output head, biases, magnitudes) is refused.

Source of the format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from itertools import islice
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...schemas.errors import InvalidRequest, ModelLoadError
from ...schemas.jobs import AdapterSource
from ...schemas.sources import check_access
from ..checkpoints.files import read_header
from ..cpu.machine import human, memory_of_machine
from ..models import read_model_info, read_shapes
from .loaded import LowRank, Target, Targets

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_UNSUPPORTED = {  # fields of adapter_config.json that change the arithmetic, with what they stand for
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "trainable_token_indices": "embeddings (trainable_token_indices)",
    "target_parameters": "parameters that are no linear layers (target_parameters)",
    "layer_replication": "the number of layers (layer_replication)",
    "alora_invocation_tokens": "only some tokens (activated LoRA)",
    "use_qalora": "groups of inputs (QALoRA)",
    "use_bdlora": "block-diagonal matrices (BD-LoRA)",
    "monteclora_config": "random matrices (MonteCLoRA)",
    "velora_config": "compressed inputs (VeLoRA)",
    "arrow_config": "a choice among adapters (Arrow)",
    "kasa_config": "singular values (KaSA)",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # those that leave the base model's weights alone
_SLOW = re.compile(r"\)[*+{]|(?:[*+{].*){4}")  # patterns for which `re` may take exponential time, or nearly
_LANGUAGE_MODELS = frozenset({"model", "language_model", "text_model"})  # what names of modules begin with
_SHOWN = 3  # module names in an error message
_CHUNK = 1 << 20  # bytes of a file that are hashed at a time


class AdapterFiles(NamedTuple):
    """A checked adapter, by module name; `a` is [r, I] and `b` is [O, r], in the dtype of the file."""

    name: str
    source: str
    digest: str
    pairs: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        return max(pair.a.shape[0] for pair in self.pairs.values())


def read_adapter(name: str, directory: Path, targets: Targets) -> AdapterFiles:
    """Read the adapter in `directory` and check that it fits a model with these `targets`.

    Raises `InvalidRequest` naming the fault.
    """
    if not name:
        raise _refused("an adapter needs a name; give it one")
    config = _read_config(directory)
    try:
        check_room(_file(directory, _WEIGHTS).stat().st_size, memory_of_machine().available, "this machine")
        content = _file(directory, _WEIGHTS).read_bytes()
    except OSError as error:
        raise _unreadable(directory, error) from error
    pairs = dict(_pairs(_tensors(content, directory), config, directory))
    digest, pairs = _digest(pairs, (content,)), _renamed(pairs, targets, directory)
    _check_modules(pairs, targets, directory)
    return AdapterFiles(name, str(directory), digest, pairs)


def check_adapter(directory: Path, base: Path | None = None) -> str:
    """Check the adapter in `directory` without loading it, and return the digest that `read_adapter` gives it.

    Modules that go by the same names in the files of the model in `base` must have its sizes; what else tells
    whether it fits, only a worker knows. Needs no torch. Raises `InvalidRequest` naming the fault.
    """
    config, weights = _read_config(directory), _file(directory, _WEIGHTS)
    try:
        shapes = {name: _Shape(shape) for name, shape in read_header(weights).items()}
        pairs = dict(_pairs(shapes, config, directory))
        if base is not None:
            _check_modules(*_comparable(pairs, base), directory)
        with weights.open("rb") as file:
            return _digest(pairs, iter(partial(file.read, _CHUNK), b""))
    except OSError as error:
        raise _unreadable(directory, error) from error
    except ModelLoadError as error:
        raise _refused(f"the adapter in {directory} cannot be read: {error}") from error


def adapter_source(name: str, path: str | Path) -> AdapterSource:
    """The adapter in `path` as other processes know it; it has no digest if its files cannot be used now."""
    directory = Path(path).expanduser().resolve()
    try:
        digest = check_adapter(directory)
    except InvalidRequest:  # who loads it will say so
        digest = ""
    return AdapterSource(name=name, path=str(directory), digest=digest)


def adapter_size(path: str) -> int:
    """Bytes that the adapter in `path` takes about; 0 if it is not there."""
    weights = Path(path).expanduser() / _WEIGHTS
    return weights.stat().st_size if weights.is_file() else 0


class _Shape(NamedTuple):
    """Stands for a tensor that is not read."""

    shape: list[int]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return True  # as far as can be said


def _comparable(pairs: Mapping[str, LowRank], base: Path) -> tuple[Mapping[str, LowRank], Targets]:
    """The modules that the weight files of `base` have, and their sizes there."""
    try:
        vocabulary = read_model_info(base, str(base), needs_context=False).vocabulary_size
        weights = {name.removesuffix(".weight"): shape for name, shape in read_shapes(base).items() if len(shape) == 2}
    except ModelLoadError:  # who loads the model will say so
        return {}, Targets({}, frozenset())
    common = {module: pair for module, pair in pairs.items() if module in weights}
    linear, others = {}, set()
    for module, (a, b, _) in common.items():
        shape = weights[module]
        if shape[0] >= vocabulary:  # embeddings or the output head
            others.add(module)
        elif shape == [a.shape[1], b.shape[0]]:  # GPT-2's layers lie in memory the other way round
            linear[module] = Target(*shape)
        else:
            linear[module] = Target(shape[1], shape[0])
    return common, Targets(linear, frozenset(others))


def _digest(pairs: Mapping[str, LowRank], content: Iterable[bytes]) -> str:
    scales = json.dumps(sorted((module, pair.scale) for module, pair in pairs.items()))
    digest = blake2b(scales.encode(), digest_size=16)
    for part in content:
        digest.update(part)
    return digest.hexdigest()


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads(_file(directory, _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(directory, error) from error
    if not isinstance(config, dict):
        raise _refused(f"{directory / _CONFIG} is not a JSON object; save the adapter again")
    _check_config(config, directory)
    return config


def _unreadable(directory: Path, error: Exception) -> InvalidRequest:
    return _refused(f"the adapter in {directory} cannot be read: {error}; save it again")


def check_room(needed: int, available: int, owner: str) -> None:
    """Raise `InvalidRequest` if an adapter of `needed` bytes does not fit into the `available` ones of `owner`."""
    if needed > available:
        raise _refused(
            f"the adapter takes {human(needed)}, and {owner} has {human(available)} left; unload another adapter first",
            "insufficient_memory",
        )


def _refused(message: str, code: str = "invalid_adapter") -> InvalidRequest:
    return InvalidRequest(message, code=code, param="adapter")


def _file(directory: Path, name: str) -> Path:
    path = directory / name
    try:
        check_access(path)
    except OSError as error:
        raise _unreadable(directory, error) from error
    if path.is_file():
        return path
    if not directory.is_dir():
        raise _refused(f"no such directory: {directory}; name the one that PEFT's save_pretrained wrote")
    hint = "save the adapter as safetensors" if (directory / "adapter_model.bin").exists() else "save the adapter again"
    raise _refused(f"{directory} has no {name}: it is not an adapter in PEFT's format; {hint}")


def _check_config(config: dict[str, Any], directory: Path) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise _refused(f"the adapter in {directory} is of the kind {kind}; only LORA is supported")
    if found := [what for field, what in _UNSUPPORTED.items() if config.get(field)]:
        raise _refused(f"the adapter in {directory} changes {', '.join(found)}: not supported; train it without")
    if (bias := config.get("bias", "none")) != "none":
        raise _refused(f"the adapter in {directory} changes biases (bias={bias!r}): not supported; train it with none")
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise _refused(
            f"the adapter in {directory} belongs to changed base weights (init_lora_weights={start!r}); convert it "
            "to a plain LoRA when saving (path_initial_model_for_weight_conversion)"
        )


def _tensors(content: bytes, directory: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _refused(
            f"{directory / _WEIGHTS} is not a complete safetensors file ({error}); copy or save it again"
        ) from error


def _pairs(tensors: Mapping[str, Any], config: dict[str, Any], directory: Path) -> Iterator[tuple[str, LowRank]]:
    """The matrices of each module, with the scale that the configuration gives it."""
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in sorted(tensors.items()):
        if (match := _TENSOR.fullmatch(name)) is None:
            raise _refused(
                f"the adapter in {directory} has the tensor {name}, which is no LoRA matrix of a linear layer: "
                "embeddings, magnitudes and whole modules are not supported; train it on linear layers alone"
            )
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    if not parts:
        raise _refused(f"the adapter in {directory} has no matrices; save it again")
    for module, both in parts.items():
        if both.keys() != {"A", "B"}:
            raise _refused(f"the adapter in {directory} has only one of two matrices for {module}; save it again")
        a, b = both["A"], both["B"]
        rank = _setting(config, "r", "rank_pattern", module, directory)
        alpha = _setting(config, "lora_alpha", "alpha_pattern", module, directory)
        if not (a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] == rank and a.is_floating_point()):
            raise _refused(
                f"the adapter in {directory} has matrices {list(a.shape)} and {list(b.shape)} for {module}, which do "
                f"not fit its rank of {rank:g}; save it again"
            )
        yield module, LowRank(a, b, alpha / (sqrt(rank) if config.get("use_rslora") else rank))


def _setting(config: dict[str, Any], field: str, patterns: str, module: str, directory: Path) -> float:
    """A number for `module`: of the first of PEFT's patterns that matches its name or its end, else of all modules."""
    value = config.get(field)
    try:
        for pattern, own in (config.get(patterns) or {}).items():
            if _SLOW.search(pattern):
                raise re.error(f"the pattern {pattern!r} could take too long")
            if re.match(rf"(.*\.)?({pattern})$", module):
                value = own
                break
    except (re.error, AttributeError, TypeError) as error:
        raise _refused(f"{patterns} of the adapter in {directory} cannot be used ({error}); correct it") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise _refused(f"the adapter in {directory} has {field}={value!r} for {module}; it must be above 0")
    return value


def _renamed(pairs: Mapping[str, LowRank], targets: Targets, directory: Path) -> dict[str, LowRank]:
    """The matrices by the model's own names of modules, where those differ only in what they begin with.

    PEFT names the language model of one that sees `model.language_model` or `language_model.model`, by the class and
    the version of transformers it was trained in, that of a model of text `model`, and that of a bare one not at all.
    """
    known: dict[str, list[str]] = {}
    for own in (*targets.linear, *targets.others):
        known.setdefault(_within(own), []).append(own)
    renamed: dict[str, LowRank] = {}
    for module, pair in pairs.items():
        found = [module] if module in targets.linear else known.get(_within(module), [])
        own = found[0] if len(found) == 1 else module
        if own in renamed:
            raise _refused(f"the adapter in {directory} changes {own} twice, under two names; save it again")
        renamed[own] = pair
    return renamed


def _within(module: str) -> str:
    """The name of a module within its language model."""
    parts = module.split(".")
    start = next((place for place, part in enumerate(parts) if part not in _LANGUAGE_MODELS), len(parts))
    return ".".join(parts[start:])


def _check_modules(pairs: Mapping[str, LowRank], targets: Targets, directory: Path) -> None:
    if unknown := [module for module in pairs if module not in targets.linear]:
        shown = ", ".join(islice(unknown, _SHOWN)) + (", …" if len(unknown) > _SHOWN else "")
        if targets.others.issuperset(unknown):
            raise _refused(
                f"the adapter in {directory} changes {shown}: only linear layers between the embeddings and the "
                "output head can be changed, and only those that every token passes; train it without these"
            )
        raise _refused(f"the adapter in {directory} is for another model: this one has no {shown}; use its own base")
    for module, (a, b, _) in pairs.items():
        size = targets.linear[module]
        if (a.shape[1], b.shape[0]) != size:
            raise _refused(
                f"the adapter in {directory} is for another model: its {module} has {a.shape[1]} inputs and "
                f"{b.shape[0]} outputs, and this model's {size.inputs} and {size.outputs}; use its own base"
            )
