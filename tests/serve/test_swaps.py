"""Hot swaps of real models under load, with real processes: nothing is lost, and every answer is one model's."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import orjson
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import START_TIMEOUT, Served, serving, until

from penstock.engine.models import BUNDLED

CLIENTS = 2
TOKENS = 24
PROMPTS = ("The river", "Once", "A swap of", "In the year")


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("swaps")
    file = root / "models.toml"
    table = {"source": str(tiny_model), "dtype": "float32", "kv_cache_memory": "64MiB", "max_sequence_length": 256}
    file.write_text("\n".join(["[models.m]", *(f"{key} = {value!r}" for key, value in table.items())]))
    keys = ("--api-keys", "one=sk-user-of-swaps,two=sk-admin-of-swaps admin")
    with serving(
        root / "state", "--models", str(file), "--models-memory", "8GiB", "--heartbeat-interval", "0.3", *keys
    ) as served:
        yield served


def api(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="sk-user-of-swaps", max_retries=0, timeout=START_TIMEOUT)


def answer(client: openai.OpenAI, prompt: str) -> str:
    asked: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    return "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True))


def swap(served: Served, source: str | Path) -> httpx2.Response:
    headers = {"Authorization": "Bearer sk-admin-of-swaps"}
    return httpx2.post(f"{served.url}/models/swap", json={"model": "m", "source": str(source)}, headers=headers)


def news(served: Served) -> dict[str, Any]:
    found = httpx2.get(f"{served.url}/v1/models/status", headers={"Authorization": "Bearer sk-user-of-swaps"}).json()
    (model,) = found["models"]
    assert isinstance(model, dict)
    return model


def swapped(served: Served, source: str | Path) -> dict[str, Any]:
    """Swap, and return what the model's status says once that is over."""
    begun = swap(served, source)
    assert begun.status_code == 200, begun.text
    revision, headers = begun.json()["revision"], {"Authorization": "Bearer sk-user-of-swaps"}
    with httpx2.stream("GET", f"{served.url}/models/sse", headers=headers, timeout=START_TIMEOUT) as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                model = orjson.loads(line.removeprefix("data: "))
                if model["revision"] == revision or model.get("swap", {}).get("state") == "failed":
                    return news(served)
    raise AssertionError("the news end before the swap")


class Load:
    """Clients that ask all the time; `answers` has what each got, in order. `patient` ones ask again where the
    connection breaks, or the server cannot answer."""

    def __init__(self, served: Served, *, patient: bool = False) -> None:
        self._patient = patient
        self.answers: list[list[tuple[str, str]]] = [[] for _ in range(CLIENTS)]
        self._enough = threading.Event()
        self._answered = threading.Condition()
        self._served = served

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._running = [self._pool.submit(self._ask, own) for own in self.answers]
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._pool.shutdown()
        for each in self._running:
            each.result()

    def go_on(self) -> None:
        """Return when every client has got two more answers."""
        wanted = [len(own) + 2 for own in self.answers]
        with self._answered:
            got = self._answered.wait_for(
                lambda: all(len(own) >= count for own, count in zip(self.answers, wanted, strict=True)), START_TIMEOUT
            )
        assert got, [each.exception() for each in self._running if each.done()]

    def _ask(self, answers: list[tuple[str, str]]) -> None:
        with api(self._served) as client:
            for prompt in itertools.cycle(PROMPTS):
                if self._enough.is_set():
                    return
                try:
                    text = answer(client, prompt)
                    with self._answered:
                        answers.append((prompt, text))
                        self._answered.notify()
                except (openai.APIConnectionError, openai.InternalServerError, httpx.HTTPError):
                    if not self._patient:
                        raise


def runs(own: list[tuple[str, str]], expected: list[dict[str, str]]) -> list[int]:
    """Which of the models gave a client's answers, one after another, repetitions left out."""
    order: list[int] = []
    for prompt, text in own:
        possible = [number for number, texts in enumerate(expected) if texts[prompt] == text]
        assert possible, f"{text!r} is no model's answer to {prompt!r}"
        if order[-1:] != possible[:1]:
            order.append(possible[0])
    return order


def asked_of(served: Served) -> dict[str, str]:
    with api(served) as client:
        return {prompt: answer(client, prompt) for prompt in PROMPTS}


@pytest.fixture
def broken(tiny_model: Path, tmp_path: Path) -> dict[str, Path]:
    """Models to which no swap may lead: one without files, and one whose weights are not finite."""
    found = {name: tmp_path / name for name in ("absent", "sick")}
    shutil.copytree(tiny_model, found["sick"])
    weights = found["sick"] / "model.safetensors"
    save_file({key: torch.full_like(value, torch.nan) for key, value in load_file(weights).items()}, weights)
    return found


def children(served: Served, word: str) -> Iterator[psutil.Process]:
    """Those whose command begins with a part that has this word in it."""
    for child in psutil.Process(served.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if any(word in part for part in child.cmdline()[:4]):
                yield child


def test_swaps_under_load_lose_nothing(served: Served, broken: dict[str, Path]) -> None:
    """P28 and P29 with real processes: to models that fail, and to another architecture and tokenizer."""
    old = asked_of(served)
    with Load(served) as load:
        for name, reason in (
            ("absent", "no such directory"),
            ("sick", "it failed a test request"),
        ):
            model = swapped(served, broken[name])
            assert model["state"] == "ready" and model["revision"] == 1 and model["loads"] == 1
            assert reason in model["swap"]["error"], model
        assert swapped(served, BUNDLED)["swap"] is None
        new = asked_of(served)
        assert not {*old.values()} & {*new.values()}
        for worker in children(served, "worker"):
            worker.kill()
        load.go_on()
    for own in load.answers:
        assert runs(own, [old, new]) == [0, 1], "the old one's until the swap, then the new one's"


def test_a_swap_ends_whole_though_the_front_and_the_broker_die_in_its_middle(served: Served, tiny_model: Path) -> None:
    if not served.supervised:
        pytest.skip("nothing starts these parts again")
    former = asked_of(served)
    target = tiny_model if news(served)["revision"] > 1 else BUNDLED
    with Load(served, patient=True) as load:
        revision = swap(served, target).json()["revision"]
        until(lambda: (news(served)["swap"] or {}).get("state") == "loading")
        for name in ("front", "nats-server"):
            (victim,) = children(served, name)
            victim.kill()
        while True:
            with contextlib.suppress(httpx2.HTTPError, LookupError, ValueError):
                model = news(served)
                if model["revision"] == revision or (model["swap"] or {}).get("state") == "failed":
                    break
        is_swapped = model["swap"] is None
        assert is_swapped or model["swap"]["error"], "it says why it was rolled back"
        later = asked_of(served)
        load.go_on()
    assert (later != former) == is_swapped
    possible = ([0, 1], [1]) if is_swapped else ([0],)
    for own in load.answers:
        assert runs(own, [former, later]) in possible


def test_only_an_operator_swaps_and_one_swap_at_a_time(served: Served, tiny_model: Path) -> None:
    url, body = f"{served.url}/models/swap", {"model": "m", "source": str(tiny_model)}
    refused = httpx2.post(url, json=body, headers={"Authorization": "Bearer sk-user-of-swaps"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_admin")
    admin = {"Authorization": "Bearer sk-admin-of-swaps"}
    unknown = httpx2.post(url, json=body | {"model": "mm"}, headers=admin)
    assert unknown.status_code == 404 and "id you mean m?" in unknown.json()["error"]["message"]
    relative = httpx2.post(url, json=body | {"source": "./here"}, headers=admin)
    assert relative.status_code == 400 and "absolute" in relative.json()["error"]["message"]
    assert swap(served, tiny_model).json()["success"] is True
    second = swap(served, tiny_model)
    assert (second.status_code, second.json()["error"]["code"]) == (409, "swap_in_progress")
