"""LoRA adapters as model names of real servers: the merged models' answers, whatever dies, added while it serves.

The oracle is transformers' own model with W + scale · B A in place of W, one prompt at a time, in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from lora import config, linear_sizes, make_adapter, matrices, merged, write_adapter
from safetensors.torch import load_file, save_file
from serving import LOOK, START_TIMEOUT, Served, Start, serving, until
from transformers import AutoModelForCausalLM

from penstock.engine.models import BUNDLED
from penstock.schemas.events import Started
from penstock.schemas.wire.codec import decode_outputs
from penstock.streams.topology import INFER, Subjects, partition

TOKENS = 24
LONG = 2000  # tokens: so many that a worker dies before the last
PROMPTS = [[3 + (7 * length + index * index) % 500 for index in range(length)] for length in (2, 17, 40)]
ADMIN = {"Authorization": "Bearer sk-admin-of-adapters"}
USER = {"Authorization": "Bearer sk-user-of-adapters"}


class World:
    """Adapters of the tiny model on disk, and what transformers makes of them."""

    def __init__(self, model: Path, root: Path) -> None:
        self.base: Any = AutoModelForCausalLM.from_pretrained(model, dtype="float32", attn_implementation="eager")
        self.base.generation_config.eos_token_id = None
        self.sizes = linear_sizes(self.base)
        self.paths = {name: make_adapter(root / name, self.sizes, seed=seed) for seed, name in enumerate("abc", 1)}
        self._models = {name: merged(self.base, path) for name, path in self.paths.items()} | {"tiny": self.base}

    def answer(self, name: str, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        kept = self._models[name].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        return [int(token) for token in kept[0, len(prompt) :]]


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_model, tmp_path_factory.mktemp("adapters"))


class Deployment:
    """A catalogue of one model, which may be served again in the same state directory."""

    def __init__(self, model: Path, root: Path) -> None:
        self.root = root
        self._model = model
        self._running = contextlib.ExitStack()

    def start(self, replicas: int, adapters: Mapping[str, Path]) -> Served:
        """Serve the model from now on, with these adapters and the right to add more."""
        self._running.close()
        table = {"source": str(self._model), "dtype": "float32", "kv_cache_memory": "64MiB", "wait_limit": 300}
        file = self.root / "models.toml"
        lines = [f"{key} = {value!r}" for key, value in (table | {"replicas": replicas}).items()]
        own = ", ".join(f"{name} = {str(path)!r}" for name, path in adapters.items())
        file.write_text("\n".join(["[models.tiny]", *lines, f"adapters = {{ {own} }}", ""]))
        settings = ("--models", str(file), "--models-memory", "8GiB", "--heartbeat-interval", "0.3")
        rights = ("--api-keys", "one=sk-user-of-adapters,two=sk-admin-of-adapters admin")
        allowed = ("--allow-runtime-lora-updating", "true")
        return self._running.enter_context(serving(self.root / "state", *settings, *rights, *allowed))

    def end(self) -> None:
        self._running.close()


@pytest.fixture(scope="module")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    found = Deployment(tiny_model, tmp_path_factory.mktemp("serve"))
    yield found
    found.end()


@pytest.fixture(scope="module")
def served(world: World, deployment: Deployment) -> Served:
    """Two replicas with two adapters."""
    served = deployment.start(2, {name: world.paths[name] for name in "ab"})
    ask(served, "tiny", PROMPTS[0])  # which has both loaded
    until(lambda: len(workers(served)) == 2)
    return served


def workers(served: Served) -> list[psutil.Process]:
    """Those that serve."""
    status = httpx2.get(f"{served.url}/v1/models/status", headers=USER).json()
    running = [child for child in psutil.Process(served.process.pid).children() if "worker" in child.cmdline()]
    return running if status["models"][0]["workers"] == len(running) else []


def body(model: str, prompt: list[int], count: int = TOKENS) -> dict[str, Any]:
    settings = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt} | settings


def ask(served: Served, model: str, prompt: list[int], count: int = TOKENS) -> httpx2.Response:
    url = f"{served.url}/v1/completions"
    return httpx2.post(url, json=body(model, prompt, count), headers=USER, timeout=START_TIMEOUT)


def tokens_of(answer: httpx2.Response, model: str) -> list[int]:
    found = answer.json()
    assert answer.status_code == 200, found
    assert (found["model"], found["usage"]["completion_tokens"]) == (model, TOKENS)
    tokens: list[int] = found["choices"][0]["token_ids"]
    return tokens


def change(served: Served, verb: str, key: Mapping[str, str] = ADMIN, **asked: Any) -> httpx2.Response:
    url = f"{served.url}/v1/{verb}_lora_adapter"
    return httpx2.post(url, json=asked, headers={**key}, timeout=START_TIMEOUT)


def listed(served: Served) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in httpx2.get(f"{served.url}/v1/models", headers=USER).json()["data"]}


def test_answers_are_the_merged_models_alone_and_mixed(served: Served, world: World) -> None:
    asked = [(name, prompt) for name in ("a", "tiny", "b") for prompt in PROMPTS]
    wanted = [world.answer(*each) for each in asked]
    assert len({*map(tuple, wanted)}) == len(wanted)
    assert [tokens_of(ask(served, *each), each[0]) for each in asked[::4]] == wanted[::4]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda each: ask(served, *each), asked)
        assert [tokens_of(answer, name) for answer, (name, _) in zip(answers, asked, strict=True)] == wanted


def test_they_are_models_whose_parent_is_the_base(served: Served, world: World) -> None:
    models = listed(served)
    assert [*models][:3] == ["tiny", "a", "b"]
    assert (models["a"]["parent"], models["a"]["root"]) == ("tiny", str(world.paths["a"]))
    assert models["tiny"]["parent"] is None and models["b"]["status"] == models["tiny"]["status"]
    assert httpx2.get(f"{served.url}/v1/models/a", headers=USER).json() == models["a"]
    assert httpx2.get(f"{served.url}/v1/models/a:latest", headers=USER).json() == models["a"]


def test_a_stream_goes_on_with_its_adapter_when_every_worker_is_killed(served: Served, world: World) -> None:
    """The next process loads it for the stream, and continues with the next token."""
    wanted = ask(served, "b", PROMPTS[0], LONG).json()["choices"][0]["token_ids"]
    assert wanted[:TOKENS] == world.answer("b", PROMPTS[0])
    running = until(lambda: workers(served))
    told: list[int] = []
    request = ""
    asked = body("b", PROMPTS[0], LONG) | {"stream": True}
    url = f"{served.url}/v1/completions"
    with httpx2.stream("POST", url, json=asked, headers=USER, timeout=START_TIMEOUT) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert chunk["model"] == "b" and "error" not in chunk
                told += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                request = chunk["id"]
            while told and running:
                running.pop().kill()
    assert told == wanted and len(told) == LONG
    assert len(asyncio.run(epochs(served, request))) > 1, "one worker began it, and another ended it"


async def epochs(served: Served, request: str) -> list[int]:
    broker = await served.broker()
    subject = Subjects("penstock").stream(partition("one", request, 8), "one", request)
    outputs = [output for message in await broker.replay("STREAM", subject) for output in decode_outputs(message.data)]
    await broker.close()
    return [output.epoch for output in outputs if isinstance(output, Started)]


async def rest(served: Served) -> None:
    """Return when workers hold nothing more: a client has its answer a little earlier."""
    broker = await served.broker()
    while (await broker.held(INFER)).messages:  # noqa: ASYNC110
        await asyncio.sleep(LOOK)
    await broker.close()


def test_added_and_removed_while_it_serves(served: Served, world: World, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"lora_name": "c", "lora_path": str(world.paths["c"])}
    assert ask(served, "c", PROMPTS[0]).status_code == 404
    assert change(served, "load", USER, **asked).json()["error"]["code"] == "not_admin"
    answer = change(served, "load", **asked)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'c' added successfully.")
    assert listed(served)["c"]["parent"] == "tiny"
    with ThreadPoolExecutor(6) as pool:  # on both workers
        for tokens in pool.map(lambda _: tokens_of(ask(served, "c", PROMPTS[1]), "c"), range(6)):
            assert tokens == world.answer("c", PROMPTS[1])
    assert "already been loaded" in change(served, "load", **asked).json()["error"]["message"]
    wrong = write_adapter(tmp_path, matrices({"model.layers.9.mlp.up_proj": (7, 9)}), config())
    assert change(served, "load", **asked | {"lora_path": str(wrong), "load_inplace": True}).status_code == 400
    assert tokens_of(ask(served, "c", PROMPTS[1]), "c") == world.answer("c", PROMPTS[1])
    assert (
        change(served, "load", **asked | {"lora_path": str(world.paths["a"]), "load_inplace": True}).status_code == 200
    )
    # Parts elsewhere hear of it with their next look.
    until(lambda: tokens_of(ask(served, "c", PROMPTS[1]), "c") == world.answer("a", PROMPTS[1]))
    answer = change(served, "unload", lora_name="c")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'c' removed successfully.")
    assert "c" not in listed(served)
    assert change(served, "unload", lora_name="c").status_code == 404
    assert "comes from the settings" in change(served, "unload", lora_name="a").json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tiny", "is the name of a model"),
        ("vanished", "no such directory"),
        ("wrong", "for another model: its model.layers.0.mlp.up_proj has 7 inputs"),
        ("deep", "for another model: this one has no model.layers.9.mlp.up_proj"),
        ("head", "changes lm_head"),
    ],
)
def test_what_does_not_fit_is_refused_and_disturbs_nothing(
    served: Served, world: World, tmp_path: Path, name: str, reason: str
) -> None:
    """Some faults show in the files, and others only to a worker."""
    own, (inputs, outputs) = "model.layers.0.mlp.up_proj", world.sizes["model.layers.0.mlp.up_proj"]
    shapes = {
        "wrong": {own: (7, outputs)},
        "deep": {"model.layers.9.mlp.up_proj": (inputs, outputs)},
        "head": {"lm_head": (inputs, 512)},
        "tiny": {own: (inputs, outputs)},
    }
    if name in shapes:
        write_adapter(tmp_path, matrices(shapes[name]), config())
    before = {id: model["root"] for id, model in listed(served).items()}
    answer = change(served, "load", lora_name=name, lora_path=str(tmp_path if name in shapes else tmp_path / name))
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    assert {id: model["root"] for id, model in listed(served).items()} == before
    assert tokens_of(ask(served, "a", PROMPTS[0]), "a") == world.answer("a", PROMPTS[0])


def test_every_fault_of_the_files_is_named_before_anything_starts(
    start: Start, world: World, tiny_model: Path, tmp_path: Path
) -> None:
    wrong = make_adapter(tmp_path / "wrong", {"model.layers.0.mlp.up_proj": (7, 9)})
    table = {"gone": tmp_path / "gone", "wrong": wrong, "tiny": world.paths["a"]}
    modules = [part for name, path in table.items() for part in ("--lora-modules", f"{name}={path}")]
    process = start("serve", str(tiny_model), "--served-model-name", "tiny", *modules)
    assert process.wait() == 2
    for said in ("'gone' of tiny: no such directory", "'wrong' of tiny: .* is for another model", "the same name"):
        process.wait_for(said)
    assert "penstock ready" not in process.output


def test_those_of_the_catalogue_and_those_added_survive_a_restart_and_a_swap(
    deployment: Deployment, served: Served, world: World, tiny_model: Path, tmp_path: Path
) -> None:
    """The base is loaded for the first request to an adapter. One whose files vanish is refused, and no other; nor does
    it hold up a swap. A swap to a model that an adapter does not fit fails."""
    assert change(served, "load", lora_name="c", lora_path=str(world.paths["c"])).status_code == 200
    asyncio.run(rest(served))  # a request that is not acknowledged when all are killed would have the base loaded
    mine = Path(shutil.copytree(world.paths["b"], tmp_path / "mine"))
    served = deployment.start(1, {"a": world.paths["a"], "mine": mine})
    until(lambda: listed(served)["c"]["status"] == {"value": "unloaded"})
    shutil.rmtree(mine)
    for name in "ca":
        assert tokens_of(ask(served, name, PROMPTS[0]), name) == world.answer(name, PROMPTS[0])
    refused = ask(served, "mine", PROMPTS[0])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert "no such directory" in refused.json()["error"]["message"]

    assert "with the adapter 'a': " in swapped(served, BUNDLED)["error"]
    assert tokens_of(ask(served, "a", PROMPTS[0]), "a") == world.answer("a", PROMPTS[0])
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({key: value * 1.5 for key, value in weights.items()}, other / "model.safetensors")
    assert swapped(served, other) == {}
    second = World(other, tmp_path / "adapters")
    for name in ("c", "a", "tiny"):
        assert tokens_of(ask(served, name, PROMPTS[0]), name) == second.answer(name, PROMPTS[0])


def swapped(served: Served, source: str | Path) -> dict[str, Any]:
    """Swap the base, and return what its status says of that once it is over: why it has failed, or nothing."""
    body = {"model": "tiny", "source": str(source)}
    revision = httpx2.post(f"{served.url}/models/swap", json=body, headers=ADMIN).json()["revision"]

    def ended() -> dict[str, Any] | None:
        model: dict[str, Any] = httpx2.get(f"{served.url}/v1/models/status", headers=USER).json()["models"][0]
        is_over = model["revision"] == revision or (model["swap"] or {}).get("state") == "failed"
        return model if is_over else None

    return until(ended)["swap"] or {}
