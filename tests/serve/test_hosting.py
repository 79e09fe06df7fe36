"""What a model of the catalogue needs on a host."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora import make_adapter
from pydantic import ByteSize
from rerankers import encoder
from vision_models import make_vision_model

from penstock.api.serve.declaring import named_models
from penstock.api.serve.hosting import Host
from penstock.api.serve.processes import child_environment
from penstock.config.settings import Settings
from penstock.config.sources import load
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey


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


async def test_who_asks_before_it_runs_hears_that_a_model_sees(tiny_model: Path, tmp_path: Path) -> None:
    """Of a model of the catalogue that is not loaded, and of one that a set-up declares."""
    seeing = str(make_vision_model(tmp_path / "seeing", "llava"))
    entries = [
        CatalogueEntry(name="sees", source=seeing, device="cpu", kv_cache_memory=1 << 20),
        CatalogueEntry(name="blind", source=seeing, device="cpu", backend="hf"),
        CatalogueEntry(name="text", source=str(tiny_model), device="cpu"),
    ]
    host = Host(Settings())
    await host.examine(Catalogue().offer(entries))
    assert [host.card(RevisionKey(entry.name, 1)).modalities for entry in entries] == [
        ("text", "image"),
        ("text",),
        ("text",),
    ]
    for model, holds in ((seeing, ("text", "image")), (str(tiny_model), ("text",))):
        (card,) = named_models(load({"model": model})) or []
        assert card.modalities == holds


async def test_who_asks_before_it_runs_hears_where_a_model_answers(tmp_path: Path) -> None:
    """Of a model of the catalogue that is not loaded, and of one that a set-up declares."""
    source, host = str(encoder(tmp_path)), Host(Settings())
    entry = CatalogueEntry(name="judge", source=source, device="cpu", backend="sentence_transformers")
    await host.examine(Catalogue().offer([entry]))
    [declared] = named_models(load({"model": source, "backend": "sentence_transformers"})) or []
    assert host.card(RevisionKey("judge", 1)).endpoint == declared.endpoint == "/v1/rerank"


async def test_what_is_loaded_takes_memory_until_it_has_ended(tmp_path: Path) -> None:
    """Also after it has left the catalogue, and when its files cannot be read any more."""
    vanished = tmp_path / "vanished"
    entries = [CatalogueEntry(name=name, source=f"no-{name}", backend="echo") for name in "ab"]
    catalogue, removed, broken = Catalogue().offer(entries), RevisionKey("a", 1), RevisionKey("b", 1)
    host, held = Host(Settings()), {removed, broken}
    await host.examine(catalogue, held)
    needs = dict(host.needs)
    assert {*needs} == held
    vanished.mkdir()
    (vanished / "config.json").write_text("no JSON")
    catalogue = catalogue.remove("a").model_copy(
        update={"entries": (entries[1].model_copy(update={"source": str(vanished)}),)}
    )
    await host.examine(catalogue, held)
    assert host.needs == needs and {*host.faults} == {broken}
    assert (
        host.devices([(key, "cpu") for key in held])["cpu"].free
        == host.devices([])["cpu"].free - 2 * needs[broken].memory
    )
    await host.examine(catalogue)
    assert host.needs == {}


async def test_a_model_without_a_prefix_cache_gets_no_directory_for_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that a server of many models was given, wherever it stands; its backend would refuse it."""
    monkeypatch.setenv("PENSTOCK_PREFIX_CACHE_DIR", str(tmp_path))
    host = Host(Settings(prefix_cache_dir=tmp_path, prefix_cache_limit=ByteSize(1 << 20)))
    model = CatalogueEntry(name="model", source=str(tiny_model), device="cpu", kv_cache_memory=1 << 20)
    echo = CatalogueEntry(name="echo", source="no-model", backend="echo")
    await host.examine(Catalogue().offer([model, echo]))
    found = {}
    for name in ("model", "echo"):
        settings = host.settings_of(RevisionKey(name, 1), "cpu", 1)
        environment = child_environment(settings, "nats://x")
        found[name] = environment.get("PENSTOCK_PREFIX_CACHE_DIR"), settings.prefix_cache_limit
    assert found == {"model": (str(tmp_path), 1 << 20), "echo": (None, 10 << 30)}
