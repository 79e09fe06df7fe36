"""What a model of the catalogue needs on a host."""

from __future__ import annotations

from pathlib import Path

from lora import make_adapter

from penstock.api.serve.hosting import Host
from penstock.config.settings import Settings
from penstock.schemas.catalogue import Catalogue, CatalogueEntry, RevisionKey


async def test_adapters_take_memory_and_are_the_workers_settings(tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "mine", {"model.layers.0.mlp.up_proj": (128, 256)})
    weights = adapter / "adapter_model.safetensors"
    gone = tmp_path / "gone"
    plain = CatalogueEntry(name="plain", source=str(tiny_model), device="cpu", kv_cache_memory=1 << 20)
    adapted = plain.model_copy(update={"name": "adapted", "adapters": {"mine": str(adapter), "gone": str(gone)}})
    host = Host(Settings())
    await host.examine(Catalogue().offer([plain, adapted]))
    alone, both = RevisionKey("plain", 1), RevisionKey("adapted", 1)
    assert host.needs[both].memory - host.needs[alone].memory == weights.stat().st_size
    assert host.settings_of(both, "cpu", 1).lora_modules == (f"mine={adapter}", f"gone={gone}")
    assert host.settings_of(alone, "cpu", 1).lora_modules == ()
    mine, other = host.card(both).adapters
    assert (mine.path, len(mine.digest), other.path, other.digest) == (str(adapter), 32, str(gone), "")
