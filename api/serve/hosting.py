"""What a host could load: for each revision of the catalogue the memory that it takes, and what its files say."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from ...config.settings import Settings
from ...engine import BACKENDS, EngineConfig, resolve_model
from ...engine.adapter_files import adapter_size, adapter_source
from ...engine.models import read_model_info
from ...engine.sizing import Memory, footprint, memory_of_machine
from ...schemas.catalogue import Catalogue, CatalogueEntry, RevisionKey
from ...schemas.errors import ConfigurationError, Fatal
from ...schemas.placement import Device, Need
from ...schemas.registry import ModelCard

SHARE = 0.9  # of the memory that is free at the start: models may take that together
AGAIN = 10.0  # seconds until the files of a model with a fault are read again
TOGETHER = 4  # models of open size that are to fit beside each other
_ECHO_CONTEXT = 131_072  # tokens; the echo backend without a model's files has this many


class Host:
    """`examine` finds out what the models of a catalogue need here, `devices` what there is."""

    def __init__(self, settings: Settings) -> None:
        self.needs: dict[RevisionKey, Need] = {}  # of each revision that could be loaded here; set by examine
        self.faults: dict[RevisionKey, str] = {}  # why another one cannot be; set by examine
        self._settings = settings
        self._gpus = _gpus()
        self._machine = memory_of_machine()
        self._examined: dict[RevisionKey, CatalogueEntry] = {}
        self._found: dict[RevisionKey, float] = {}  # when each fault was found, by the monotonic clock
        self._chosen: dict[RevisionKey, Settings] = {}
        self._cards: dict[RevisionKey, ModelCard] = {}

    async def examine(self, catalogue: Catalogue) -> None:
        """Read the files of what has come to the catalogue or changed in it, and forget what has left it."""
        live = {
            RevisionKey(entry.name, number): _served(entry, number)
            for entry in catalogue.entries
            for number in entry.sources
        }
        for known in (self._examined, self.needs, self.faults, self._chosen, self._cards):
            for key in [key for key in known if key not in live]:
                del known[key]
        now = time.monotonic()
        for key, entry in live.items():
            again = key in self.faults and now - self._found.get(key, 0.0) >= AGAIN
            if self._examined.get(key) != entry or again:
                self.needs.pop(key, None)
                self.faults.pop(key, None)
                try:
                    await asyncio.to_thread(self._examine, key, entry, len(live))
                except Fatal as error:
                    self.faults[key] = f"The model {key.name!r} cannot be served here: {error}"
                    self._found[key] = now
                self._examined[key] = entry

    def forget(self, key: RevisionKey) -> None:
        """Have its files read again."""
        self._examined.pop(key, None)

    def card(self, key: RevisionKey) -> ModelCard:
        """What others need to know to prepare requests for it."""
        return self._cards[key]

    def settings_of(self, key: RevisionKey) -> Settings:
        """Those of a worker that serves it."""
        return self._chosen[key]

    def devices(self, held: Mapping[RevisionKey, Need]) -> dict[str, Device]:
        """The memory of each device, of which our own models have `held` some."""
        found = {}
        for name in (*self._gpus, "cpu"):
            capacity = self._capacity(name)
            taken = sum(need.memory for need in held.values() if need.device == name)
            found[name] = Device(capacity, max(0, capacity - taken))
        return found

    def _capacity(self, device: str) -> int:
        """Bytes that models may take together on a device."""
        if device in self._gpus:
            return int(SHARE * self._gpus[device])
        return int(self._settings.models_memory or SHARE * self._machine.available)

    def _examine(self, key: RevisionKey, entry: CatalogueEntry, models: int) -> None:
        """Raises `Fatal` where the model cannot be served on this host."""
        source = entry.source
        if entry.backend not in BACKENDS:
            raise ConfigurationError([f"unknown backend {entry.backend!r}; known: {', '.join(sorted(BACKENDS))}"])
        own = {name: getattr(entry, name) for name in _OWN}
        settings = self._settings.model_copy(update=own | {"model": source, "workers": 1})
        context = entry.max_sequence_length or _ECHO_CONTEXT
        if entry.backend != "echo" or Path(source).expanduser().is_dir():
            directory = resolve_model(source).resolve()
            context = read_model_info(directory, source, entry.max_sequence_length).context_length
            settings = settings.model_copy(update={"model": str(directory)})
        else:
            settings = settings.model_copy(update={"model": None})
        device = entry.device if entry.device != "auto" else next(iter(self._gpus), "cpu")
        shared = EngineConfig.model_fields.keys() & Settings.model_fields.keys()
        own = {name: getattr(settings, name) for name in shared}
        config = EngineConfig(**own | {"model": settings.model or "echo", "device": device})
        # What is left open is chosen so that a few of the models fit beside each other.
        capacity = self._capacity(device)
        takes = footprint(config, max(1, min(TOGETHER, models)), Memory(capacity, capacity))
        memory = takes.total + sum(map(adapter_size, entry.adapters.values()))
        chosen: dict[str, object] = {"device": device, "served_model_name": key.name}
        if entry.adapters:
            chosen["lora_modules"] = tuple(f"{own}={path}" for own, path in entry.adapters.items())
        if takes.cache:
            chosen["kv_cache_memory"] = takes.cache
        self._chosen[key] = settings.model_copy(update=chosen)
        self.needs[key] = Need(device, memory)
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


def _gpus() -> dict[str, int]:
    """The free memory of each NVIDIA GPU in bytes, by the name that torch has for it."""
    query = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[int(part) for part in line.split(",")] for line in lines if line.strip()]
    return {f"cuda:{index}": free << 20 for index, free in rows}
