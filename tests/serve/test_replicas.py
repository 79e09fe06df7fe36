"""Models with several replicas, and several hosts that may hold them, over the in-memory pipeline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from in_process import MODEL, TOKENS, Hosting

from penstock.api.serve.hosting import Host, gpus
from penstock.api.serve.supervisor import device_shares
from penstock.api.serve.swapping import Swaps
from penstock.config.settings import Settings
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey

NO_ROOM = 1  # bytes for models


async def test_two_replicas_serve_on_one_host() -> None:
    hosting = await Hosting.start({"replicas": 2})
    assert await (await hosting.ask()).answer() == "a" * TOKENS
    await hosting.until(lambda: len(hosting.workers) == 2)
    asked = [await hosting.ask() for _ in range(20)]  # more than one of them takes
    assert {await each.answer() for each in asked} == {"a" * TOKENS}
    await hosting.until(lambda: hosting.only({"ready"}))
    states = [state for key, state in (await hosting.store.states()).items() if key.first == RevisionKey(MODEL, 1)]
    assert sorted((state.replica, state.loads) for state in states) == [(0, 1), (1, 1)]
    await hosting.stop()


async def test_a_request_says_how_long_all_replicas_stay() -> None:
    """One that has no request, and so has not heard of it, does not stay behind, nor have the other loaded again."""
    hosting = await Hosting.start({"replicas": 2})
    await (await hosting.ask()).answer()
    await hosting.until(lambda: len(hosting.workers) == 2)
    assert await (await hosting.ask(keep_alive=0)).answer() == "a" * TOKENS
    await hosting.until(lambda: not hosting.workers)
    await hosting.until(lambda: hosting.only({"draining", "unloaded"}))
    states = await hosting.store.states()
    assert [state.loads for state in states.values()] == [1, 1]
    await hosting.stop()


async def test_each_host_gets_a_replica_and_the_one_that_stays_takes_over() -> None:
    hosting = await Hosting.start({"replicas": 2}, runs=False)
    for name in ("one", "two"):
        hosting.start_agent(name)
    await hosting.until(lambda: hosting.revision == 1 and len(hosting.pipeline.pipe.registry.agents) == 2)
    await (await hosting.ask()).answer()
    await hosting.until(lambda: len(hosting.workers) == 2)
    assert sorted(worker.partition("-")[0] for worker in hosting.workers) == ["one", "two"]
    running = [await hosting.ask() for _ in range(20)]
    await hosting.stop_agent("two")
    assert {await each.answer() for each in running} == {"a" * TOKENS}
    assert await (await hosting.ask()).answer() == "a" * TOKENS
    await hosting.until(lambda: [worker.partition("-")[0] for worker in hosting.workers] == ["one", "one"])
    await hosting.stop()


async def test_a_swap_replaces_every_replica_and_each_answer_is_one_revisions() -> None:
    hosting = await Hosting.start({"replicas": 2}, runs=False)
    for name in ("one", "two"):
        hosting.start_agent(name)
    await hosting.until(lambda: hosting.revision == 1)
    await (await hosting.ask()).answer()
    await hosting.until(lambda: len(hosting.workers) == 2)
    registry = hosting.pipeline.pipe.registry
    asked = [await hosting.ask() for _ in range(8)]
    await hosting.swap("b")
    while hosting.revision == 1:
        asked.append(await hosting.ask())
        await asked[-1].answer()  # else a slow machine has thousands of them before it has swapped
    asked += [await hosting.ask() for _ in range(8)]
    served = [await each.answer() for each in asked]
    assert served == sorted(served) and {*served} == {"a" * TOKENS, "b" * TOKENS}, "the old one's, then the new one's"
    await hosting.until(lambda: len(hosting.workers) == 2 and not registry.workers_for(MODEL, 1))
    await hosting.stop()


async def test_what_does_not_fit_on_one_host_is_loaded_on_another() -> None:
    """Nor does a swap fail that only the other one can hold."""
    hosting = await Hosting.start(runs=False)
    hosting.start_agent("small", models_memory=NO_ROOM)
    hosting.start_agent("large")
    await hosting.until(lambda: hosting.revision == 1 and len(hosting.pipeline.pipe.registry.agents) == 2)
    assert await (await hosting.ask()).answer() == "a" * TOKENS
    await hosting.swap("b")
    entry = await hosting.settled()
    assert (entry.revision, entry.failed_swap) == (2, None)
    assert await (await hosting.ask()).answer() == "b" * TOKENS
    assert {worker.partition("-")[0] for worker in hosting.workers} == {"large"}
    await hosting.stop()


async def test_what_fits_nowhere_is_refused_once_every_host_has_said_so() -> None:
    hosting = await Hosting.start(runs=False)
    for name in ("one", "two"):
        hosting.start_agent(name, models_memory=NO_ROOM)
    await hosting.until(lambda: hosting.revision == 1 and len(hosting.pipeline.pipe.registry.agents) == 2)
    with pytest.raises(AssertionError, match=r"m needs [\d,]+ bytes of memory on cpu, where models may take 1"):
        await (await hosting.ask()).answer()
    await hosting.stop()


async def test_files_that_one_host_lacks_fail_a_swap_only_if_no_other_has_them() -> None:
    hosting = await Hosting.start(runs=False)
    pipe = hosting.pipeline.pipe
    key = RevisionKey(MODEL, await hosting.swap("b"))
    for elsewhere in (True, False):
        host = Host(pipe.settings, {})
        host.faults[key] = "its files are not here"
        others = {key} if elsewhere else set()
        swaps = Swaps(
            *(pipe.broker, hosting.store, pipe.registry, host, pipe.settings, "one"),
            end=lambda _: None,
            may_go_elsewhere=others.__contains__,
        )
        await swaps.step(await hosting.store.read(), {}, ())
        assert (await hosting.entry()).candidate == (key.revision if elsewhere else None)
    failed = (await hosting.entry()).failed_swap
    assert failed is not None and failed.reason == "its files are not here"
    await hosting.stop()


GPUS = {f"cuda:{index}": 8 << 30 for index in range(3)}


async def test_a_model_may_have_every_gpu_or_those_that_it_names() -> None:
    host, key = Host(Settings(), GPUS), RevisionKey("m", 1)

    async def devices(**values: object) -> tuple[str, ...]:
        entry = CatalogueEntry.model_validate({"name": "m", "source": "penstock-nano"} | values)
        await host.examine(Catalogue().add(entry))
        return host.needs[key].devices if key in host.needs else ()

    assert await devices() == await devices(device="cuda") == ("cuda:0", "cuda:1", "cuda:2")
    assert await devices(device=["cuda:1", "cuda:2"]) == ("cuda:1", "cuda:2")
    assert await devices(device="cuda:1, cuda:7") == ("cuda:1",)
    assert await devices(device="cpu") == await devices(backend="echo") == ("cpu",), "which runs on a CPU alone"
    assert await devices(device="cuda:7") == ()
    assert "this host has cuda:0, cuda:1, cuda:2, cpu; choose of these, or auto" in host.faults[key]
    assert host.devices([(key, "cuda:1")]).keys() == {*GPUS, "cpu"}


async def test_replicas_share_the_cores_of_a_host() -> None:
    host, key = Host(Settings(), {}), RevisionKey("m", 1)
    await host.examine(Catalogue().add(CatalogueEntry(name="m", source="x", backend="echo", replicas=3)))
    chosen = host.settings_of(key, "cpu", 3)
    assert (chosen.device, chosen.workers) == ("cpu", 3)


def test_each_worker_of_serve_gets_a_device_or_a_share_of_one() -> None:
    def shares(found: dict[str, int], **values: object) -> list[tuple[str, str]]:
        given = device_shares(Settings.model_validate(values), found)
        return [(each.get("PENSTOCK_DEVICE", ""), each.get("PENSTOCK_WORKERS", "")) for each in given]

    assert shares(GPUS, workers=3) == [(name, "1") for name in GPUS]
    assert shares(GPUS, workers=4) == [(name, "2") for name in (*GPUS, "cuda:0")]
    assert shares(GPUS, workers=2, device="cuda:2") == [("cuda:2", "2")] * 2
    assert shares({}, workers=2, device="cuda:1,cuda:0") == [("cuda:1", "1"), ("cuda:0", "1")]
    assert shares(GPUS, workers=2, device="cpu") == [("cpu", "2")] * 2
    assert shares(GPUS, workers=2, backend="llama_cpp") == [("", "")] * 2, "it runs on a CPU alone"
    assert shares({}, workers=2) == [("", "")] * 2, "they share the machine, as every worker is told"


def test_gpus_are_those_that_torch_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa11, 100'\necho '1, GPU-bb22, 200'\necho '2, GPU-cc33, 300'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for visible, found in ((None, [100, 200, 300]), ("2,GPU-bb", [300, 200]), ("1,7,0", [200]), ("", []), ("-1", [])):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus("2.9.0+cu130") == {f"cuda:{index}": free << 20 for index, free in enumerate(found)}
    assert gpus("2.9.0+cpu") == {}
