"""What a host could load: for each revision of the catalogue the memory that it takes, and what its files say."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Collection, Iterable
from importlib.metadata import version
from itertools import takewhile

from ...config.settings import Settings
from ...engine import EngineConfig, resolve_model
from ...engine.adapters.files import adapter_size, adapter_source
from ...engine.cpu.machine import Memory, memory_of_machine
from ...engine.models import read_model_info
from ...engine.planning.discovery import find_backend, modalities
from ...engine.planning.manifests import PAGED
from ...engine.planning.sizing import footprint
from ...schemas.errors import ConfigurationError, Fatal
from ...schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey
from ...schemas.models.placement import Device, Need
from ...schemas.registry import ModelCard
from ...schemas.sources import is_here
from .backends import check_backends
from .declaring import ECHO_CONTEXT

SHARE = 0.9  # of the memory that is free at the start: models may take that together
AGAIN = 10.0  # seconds until the files of a model with a fault are read again
TOGETHER = 4  # models of open size that are to fit beside each other


class Host:
    """`examine` finds out what the models of a catalogue need here, `devices` what there is."""

    def __init__(self, settings: Settings, found: dict[str, int] | None = None) -> None:
        """`found` is what `gpus` finds."""
        self.needs: dict[RevisionKey, Need] = {}  # of each revision that could be loaded here; set by examine
        self.faults: dict[RevisionKey, str] = {}  # why another one cannot be; set by examine
        self._settings = settings
        self._gpus = gpus() if found is None else found
        self._machine = memory_of_machine()
        self._examined: dict[RevisionKey, CatalogueEntry] = {}
        self._found: dict[RevisionKey, float] = {}  # when each fault was found, by the monotonic clock
        self._chosen: dict[RevisionKey, Settings] = {}  # but for what `settings_of` adds
        self._cards: dict[RevisionKey, ModelCard] = {}

    async def examine(self, catalogue: Catalogue, held: Collection[RevisionKey] = ()) -> None:
        """Read the files of what has come to the catalogue or changed in it, and forget what has left it.

        The needs of the revisions that this host has loaded, `held`, stay: they take memory until they have ended.
        """
        live = {
            RevisionKey(entry.name, number): _served(entry, number)
            for entry in catalogue.entries
            for number in entry.sources
        }
        for known in (self._examined, self.faults, self._chosen, self._cards):
            for key in [key for key in known if key not in live]:
                del known[key]
        for key in [key for key in self.needs if key not in held and (key not in live or key in self.faults)]:
            del self.needs[key]
        now, replicas = time.monotonic(), sum(entry.num_replicas for entry in live.values())
        for key, entry in live.items():
            again = key in self.faults and now - self._found.get(key, 0.0) >= AGAIN
            if self._examined.get(key) != entry or again:
                self.faults.pop(key, None)
                try:
                    await asyncio.to_thread(self._examine, key, entry, replicas)
                except Fatal as error:
                    self.faults[key] = f"The model {key.name!r} cannot be served here: {error}"
                    self._found[key] = now
                    if key not in held:
                        self.needs.pop(key, None)
                self._examined[key] = entry

    def forget(self, key: RevisionKey) -> None:
        """Have its files read again."""
        self._examined.pop(key, None)

    def card(self, key: RevisionKey) -> ModelCard:
        """What others need to know to prepare requests for it."""
        return self._cards[key]

    def settings_of(self, key: RevisionKey, device: str, sharing: int) -> Settings:
        """Those of a worker that serves it on a device, whose cores `sharing` workers share."""
        return self._chosen[key].model_copy(update={"device": device, "workers": sharing})

    def devices(self, held: Iterable[tuple[RevisionKey, str]]) -> dict[str, Device]:
        """The memory of each device, where our own models are `held`, each on one."""
        taken = dict.fromkeys(self._names, 0)
        for key, device in held:
            taken[device] += self.needs[key.first].memory if key.first in self.needs else 0
        capacities = {name: self._capacity(name) for name in self._names}
        return {name: Device(capacity, max(0, capacity - taken[name])) for name, capacity in capacities.items()}

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._gpus, "cpu")

    def _capacity(self, device: str) -> int:
        """Bytes that models may take together on a device."""
        if device in self._gpus:
            return int(SHARE * self._gpus[device])
        return int(self._settings.models_memory or SHARE * self._machine.available)

    def _examine(self, key: RevisionKey, entry: CatalogueEntry, models: int) -> None:
        """Raises `Fatal` where the model cannot be served on this host."""
        source = entry.source
        check_backends(self._settings.model_copy(update={"backend": entry.backend, "model": source}))
        devices = tuple(name for name in entry.devices if name in self._names)
        runs_on = find_backend(entry.backend, self._settings.allowed_backends).devices
        if entry.device == "auto":
            devices = (*self._gpus,) if self._gpus and "cuda" in runs_on else ("cpu",)
        elif entry.device == "cuda":
            devices = (*self._gpus,)
        if not devices:
            here = ", ".join(self._names)
            raise ConfigurationError([f"device={entry.device!r}: this host has {here}; choose of these, or auto"])
        own = {name: getattr(entry, name) for name in _OWN}
        settings = self._settings.model_copy(update=own | {"model": source, "mmproj": None, "workers": 1})
        context = entry.max_sequence_length or ECHO_CONTEXT
        holds: tuple[str, ...] = ("text",)
        ranks = False
        if entry.backend != "echo" or is_here(source):
            path = resolve_model(source)
            info = read_model_info(path, source, entry.max_sequence_length)
            context, ranks = info.context_length, info.ranks
            holds = modalities(info, entry.backend, self._settings.allowed_backends)
            settings = settings.model_copy(update={"model": str(path)})
        else:
            settings = settings.model_copy(update={"model": None})
        shared = EngineConfig.model_fields.keys() & Settings.model_fields.keys()
        own = {name: getattr(settings, name) for name in shared}
        config = EngineConfig(**own | {"model": settings.model or "echo", "device": devices[0]})
        # What is left open is chosen so that a few of the models fit beside each other.
        capacity = min(map(self._capacity, devices))
        takes = footprint(config, max(1, min(TOGETHER, models)), Memory(capacity, capacity))
        memory = takes.total + sum(map(adapter_size, entry.adapters.values()))
        chosen: dict[str, object] = {"served_model_name": key.name}
        if entry.adapters:
            chosen["lora_modules"] = tuple(f"{own}={path}" for own, path in entry.adapters.items())
        if takes.cache:
            chosen["kv_cache_memory"] = takes.cache
        if entry.backend != PAGED.id:  # one directory for all models: the others do without, rather than not at all
            chosen |= {name: Settings.model_fields[name].default for name in ("prefix_cache_dir", "prefix_cache_limit")}
        self._chosen[key] = settings.model_copy(update=chosen)
        self.needs[key] = Need(devices, memory)
        self._cards[key] = ModelCard(
            name=key.name,
            source=settings.model or "echo",
            backend=entry.backend,
            context_length=context,
            created=int(time.time()),
            revision=key.revision,
            tool_format=entry.tool_format,
            reasoning_format=entry.reasoning_format,
            aliases=entry.aliases,
            defaults=entry.defaults,
            queue_limit=entry.queue_limit,
            wait_limit=entry.wait_limit,
            modalities=holds,
            ranks=ranks,
            catalogued=True,
            adapters=tuple(adapter_source(*each) for each in entry.adapters.items()),
        )


def _served(entry: CatalogueEntry, revision: int) -> CatalogueEntry:
    """What decides how one revision is served: it stays the same as others come and go."""
    changes = {"source": entry.sources[revision], "revision": revision, "others": (), "failed_swap": None}
    return entry.model_copy(update=changes)


_OWN = (
    *("backend", "dtype", "quantization", "max_batch_size", "max_sequence_length", "kv_cache_memory"),
    *("tool_format", "reasoning_format"),
)


def gpus(build: str | None = None) -> dict[str, int]:
    """The free memory of each NVIDIA GPU that torch may use, in bytes, by the name that it has for it; `build` is the
    version of torch."""
    if (build or version("torch")).endswith("+cpu"):
        return {}
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[part.strip() for part in line.split(",")] for line in lines if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and "MIG-" not in visible:  # torch numbers them in this order, until one is not there
        names = [name.strip() for name in visible.split(",")]
        found = [[row for row in rows if row[0] == name or (name and row[1].startswith(name))] for name in names]
        rows = [each[0] for each in takewhile(bool, found)]
    return {f"cuda:{index}": int(free) << 20 for index, (_, _, free) in enumerate(rows)}
