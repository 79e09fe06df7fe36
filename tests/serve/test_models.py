"""Several models by name on one machine: loaded when asked for, switched without losing a word, with real processes."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from serving import START_TIMEOUT, Served, serving, until

from penstock.engine import EngineConfig
from penstock.engine.planning.sizing import footprint

NAMES = ("a", "b", "c", "d")
REQUESTS = 48
TOKENS = 20
NEED = footprint(EngineConfig(model="echo", backend="echo", device="cpu")).total  # bytes that one of the models takes


def table(name: str, source: str, **values: Any) -> str:
    values = {"source": source, "wait_limit": 300, "queue_limit": 100} | values
    return "\n".join([f"[models.{name}]", *(f"{key} = {value!r}" for key, value in values.items()), ""])


@pytest.fixture(scope="module")
def offered(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Four models on a machine with room for two, besides one that stays loaded; and some that cannot be loaded."""
    root = tmp_path_factory.mktemp("models")
    broken = root / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    tables = [table(name, f"no-files-{name}", backend="echo") for name in NAMES]
    tables[0] += 'aliases = ["first"]\ndefaults = { max_tokens = 3 }\n'
    tables.append(table("huge", str(tiny_model), kv_cache_memory="64GiB"))
    tables.append(table("broken", str(broken)))
    tables.append(table("kept", "no-files-kept", backend="echo") + "pin = true\npreload = true\n")
    file = root / "models.toml"
    file.write_text("\n".join(tables))
    room = ("--models-memory", str(3 * NEED + NEED // 2), "--least-residency", "0.5", "--longest-wait", "5")
    keys = ("--api-keys", "one=sk-user-of-models,two=sk-admin-of-models admin")
    with serving(root / "state", "--models", str(file), *room, *keys, "--echo-rate", "200") as served:
        yield served


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="sk-user-of-models", max_retries=0, timeout=START_TIMEOUT)


def ask_all(served: Served, seed: int) -> list[tuple[str, str]]:
    """Wanted and given answers of requests to all models, in random order and of mixed priority, some streamed."""
    rng = random.Random(seed)
    asked = [(rng.choice(NAMES), f"request {number} " + "abc " * 10) for number in range(REQUESTS)]
    with client(served) as api:

        def ask(request: tuple[str, str]) -> str:
            model, prompt = request
            extra = {"priority": rng.choice(("high", "normal", "low"))}
            if rng.random() < 0.5:
                answer = api.completions.create(model=model, prompt=prompt, max_tokens=TOKENS, extra_body=extra)
                return answer.choices[0].text
            parts = api.completions.create(model=model, prompt=prompt, max_tokens=TOKENS, stream=True, extra_body=extra)
            return "".join(part.choices[0].text for part in parts)

        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(zip([prompt[:TOKENS] for _, prompt in asked], pool.map(ask, asked), strict=True))


def headers(key: str = "sk-user-of-models") -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def models(served: Served) -> dict[str, dict[str, Any]]:
    found = httpx2.get(f"{served.url}/v1/models/status", headers=headers()).json()
    return {model["id"]: model for model in found["models"]}


def reached(served: Served, name: str, state: str) -> None:
    until(lambda: models(served)[name]["state"] == state)


def workers(served: Served) -> Iterator[psutil.Process]:
    for child in psutil.Process(served.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or it has just died
            if "worker" in child.cmdline():
                yield child


def test_four_models_share_room_for_two_and_lose_nothing(offered: Served) -> None:
    """At first one model alone is loaded, before any request, and it is never unloaded; then requests to all of the
    others, and once more while every worker is killed."""
    reached(offered, "kept", "ready")
    known = models(offered)
    assert {known[name]["state"] for name in (*NAMES, "huge")} == {"unloaded"}
    assert known["broken"]["state"] == "failed" and "model.safetensors" in known["broken"]["last_error"]
    for wanted, given in ask_all(offered, 1):
        assert given == wanted
    assert sum(models(offered)[name]["loads"] for name in NAMES) < 20
    assert (models(offered)["kept"]["state"], models(offered)["kept"]["loads"]) == ("ready", 1)
    assert sum(models(offered)[name]["state"] in ("loading", "ready", "draining") for name in NAMES) <= 2
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, offered, 2)
        killed: set[int] = set()

        def kill() -> bool:
            for worker in workers(offered):
                if worker.pid not in killed:
                    killed.add(worker.pid)
                    worker.kill()
            return len(killed) >= 3 or asked.done()

        until(kill)
        for wanted, given in asked.result():
            assert given == wanted
    assert len(killed) >= 3


def test_what_is_asked_of_models(offered: Served) -> None:
    """Aliases, defaults, refusals that say why, loading and unloading by hand, and the list with its states."""
    with client(offered) as api:
        answer = api.completions.create(model="first", prompt="abcdef")
        assert (answer.choices[0].text, answer.model) == ("abc", "first")  # its default is three tokens
        assert sorted(model.id for model in api.models.list()) == sorted([*NAMES, "huge", "kept"])
        with pytest.raises(openai.NotFoundError, match="Did you mean first"):
            api.completions.create(model="frist", prompt="x")
        with pytest.raises(
            openai.InternalServerError, match=r"huge needs [\d,]+ bytes .* where models may take"
        ) as huge:
            api.completions.create(model="huge", prompt="x")
        assert huge.value.code == "model_unavailable"

    def change(verb: str, model: str, key: str = "sk-admin-of-models") -> httpx2.Response:
        return httpx2.post(f"{offered.url}/models/{verb}", json={"model": model}, headers=headers(key))

    assert change("load", "b", "sk-user-of-models").json()["error"]["code"] == "not_admin"
    assert change("load", "b").json() == {"success": True}
    reached(offered, "b", "ready")
    assert change("unload", "first").json() == {"success": True}
    reached(offered, "a", "unloaded")
    listed = httpx2.get(f"{offered.url}/models", headers=headers()).json()["data"]
    assert {model["id"]: model["status"]["value"] for model in listed}["b"] == "loaded"
    assert change("load", "nothing").status_code == 404


def test_a_request_says_how_long_its_model_stays(offered: Served) -> None:
    """A key that may not unload models may not do it like this, either."""

    def ask(key: str, keep_alive: object) -> httpx2.Response:
        body = {"model": "d", "prompt": "x", "max_tokens": 1, "keep_alive": keep_alive}
        url = f"{offered.url}/v1/completions"
        return httpx2.post(url, json=body, headers=headers(key), timeout=START_TIMEOUT)

    answer = ask("sk-user-of-models", 0)
    assert (answer.status_code, answer.headers["penstock-ignored"]) == (200, "keep_alive")
    answer = ask("sk-admin-of-models", -1)
    assert answer.status_code == 200 and "penstock-ignored" not in answer.headers
    reached(offered, "d", "ready")
    assert ask("sk-admin-of-models", "0s").status_code == 200
    reached(offered, "d", "unloaded")


def test_news_of_models_are_told_as_they_come(offered: Served) -> None:
    httpx2.post(f"{offered.url}/models/unload", json={"model": "c"}, headers=headers("sk-admin-of-models"))
    reached(offered, "c", "unloaded")
    with httpx2.stream("GET", f"{offered.url}/models/sse", headers=headers(), timeout=START_TIMEOUT) as news:
        seen: list[str] = []
        for line in news.iter_lines():
            if line.startswith("data: ") and '"model":"c"' in line:
                seen.append(line.rpartition('"value":"')[2].partition('"')[0])
                if len(seen) == 1:
                    body = {"model": "c"}
                    httpx2.post(f"{offered.url}/models/load", json=body, headers=headers("sk-admin-of-models"))
            if seen[-1:] == ["loaded"]:
                break
    assert seen[0] == "unloaded" and seen[-2:] == ["loading", "loaded"]
