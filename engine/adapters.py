"""LoRA adapters in PEFT's format: reads one, checks it against the model, and describes it. Imports torch only to read.

An adapter adds scale · (x A') B' to the outputs of some of a model's linear layers: A is [r, I], B [O, r]. Whatever
else an adapter may change (embeddings, the output head, biases, magnitudes) is refused.

Source of the format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from math import isfinite, sqrt
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from ..schemas.errors import InvalidRequest, ModelNotFound
from .sizing import human, memory_of_machine

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
_SHOWN = 3  # module names in an error message


class Target(NamedTuple):
    """The size of a linear layer that adapters may change."""

    inputs: int
    outputs: int


class Targets(NamedTuple):
    """The `linear` layers of a model that adapters may change, and its `others`, which they may not, by module name."""

    linear: Mapping[str, Target]
    others: frozenset[str]


class LowRank(NamedTuple):
    """What an adapter adds to one layer: scale · (x A') B'. Each file states how `a` and `b` lie in memory."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter: `rank` is the highest of its layers, `memory` in bytes. `digest` identifies its content."""

    name: str
    source: str
    digest: str
    rank: int
    num_modules: int
    memory: int


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Adapter:
    """An adapter that a backend has loaded; its memory lasts as long as a request refers to it.

    `pairs` and `compiled` are the backend's own form of the matrices.
    """

    info: AdapterInfo
    pairs: Mapping[str, LowRank]
    compiled: Any = None


class LoadedAdapters:
    """An engine's adapters by name. Any thread may call it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Adapter] = {}  # replaced, never changed
        self._kept: WeakSet[Adapter] = WeakSet()  # these, and removed ones that requests still use
        self._lock = Lock()  # guards the two above

    @property
    def memory(self) -> int:
        """Bytes of all adapters, removed ones included as long as requests use them."""
        with self._lock:
            return sum(adapter.info.memory for adapter in self._kept)

    def add(self, adapter: Adapter) -> None:
        """Add an adapter, or replace the one of that name."""
        with self._lock:
            self._by_name = self._by_name | {adapter.info.name: adapter}
            self._kept.add(adapter)

    def find(self, name: str | None) -> Adapter | None:
        """The adapter of that name; None for None. Raises `ModelNotFound`."""
        if name is None:
            return None
        if (adapter := self._by_name.get(name)) is None:
            loaded = ", ".join(sorted(self._by_name)) or "none"
            raise ModelNotFound(f"no adapter {name!r} is loaded (loaded: {loaded}); load it first", param="adapter")
        return adapter

    def remove(self, name: str) -> None:
        """Forget the adapter of that name. Raises `ModelNotFound`."""
        with self._lock:
            self.find(name)
            self._by_name = {own: adapter for own, adapter in self._by_name.items() if own != name}

    def infos(self) -> list[AdapterInfo]:
        return [adapter.info for _, adapter in sorted(self._by_name.items())]


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
    try:
        config = json.loads(_file(directory, _CONFIG).read_text(encoding="utf-8"))
        check_room(_file(directory, _WEIGHTS).stat().st_size, memory_of_machine().available, "this machine")
        content = _file(directory, _WEIGHTS).read_bytes()
    except (OSError, ValueError) as error:
        raise _refused(f"the adapter in {directory} cannot be read: {error}; save it again") from error
    if not isinstance(config, dict):
        raise _refused(f"{directory / _CONFIG} is not a JSON object; save the adapter again")
    _check_config(config, directory)
    pairs = dict(_pairs(_tensors(content, directory), config, directory))
    _check_modules(pairs, targets, directory)
    scales = json.dumps(sorted((module, pair.scale) for module, pair in pairs.items()))
    digest = blake2b(scales.encode(), digest_size=16)
    digest.update(content)
    return AdapterFiles(name, str(directory), digest.hexdigest(), pairs)


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


def _pairs(tensors: Mapping[str, Tensor], config: dict[str, Any], directory: Path) -> Iterator[tuple[str, LowRank]]:
    """The matrices of each module, with the scale that the configuration gives it."""
    parts: dict[str, dict[str, Tensor]] = {}
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
