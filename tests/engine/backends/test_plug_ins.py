"""Backends of other packages, found through real entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from plug_ins import install
from serving import Serve

from penstock.engine import (
    EngineConfig,
    EngineRequest,
    GenerationParams,
    InferenceEngine,
    find_backend,
    find_backends,
)
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.models import BUNDLED
from penstock.engine.planning.discovery import GROUP, why_not
from penstock.engine.planning.manifests import ECHO
from penstock.schemas.errors import ConfigurationError, GenerationFailed, InvalidRequest
from penstock.schemas.params import Grammar
from penstock.testing.backend import BackendConformance

MANIFEST: dict[str, Any] = {
    "id": "shout",
    "interface": 1,
    "backend": "shouting.backend:Shout",
    "licence": "MIT",
    "formats": (),
    "devices": ("cpu",),
    "modes": ("text",),
    "resume": "greedy",
    "parameters": ("max_tokens", "temperature", "seed", "n", "ignore_eos", "stop"),
}
BACKEND = """
from penstock.engine.backends.echo import EchoBackend
from penstock.engine.planning.manifest import Manifest
from shouting import MANIFEST

class Shout(EchoBackend):
    manifest = Manifest.model_validate(MANIFEST)

    def _next_token(self, row):
        token = super()._next_token(row)
        return token - 32 if ord("a") <= token <= ord("z") else token
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    before = {*sys.modules}
    yield directory
    for name in {*sys.modules} - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]


def add(site: Path, id: str = "shout", package: str = "shouting", **changes: Any) -> None:
    manifest = MANIFEST | {"id": id, "backend": f"{package}.backend:Shout"} | changes
    files = {
        f"{package}/__init__.py": f"MANIFEST = {manifest!r}\n",
        f"{package}/backend.py": BACKEND.replace("shouting", package),
    }
    install(site, package, GROUP, {id: f"{package}:MANIFEST"}, files)


def reached_from(site: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def config(**values: Any) -> EngineConfig:
    return EngineConfig(**{"model": "echo", "backend": "shout"} | values)


def test_an_installed_plug_in_runs(site: Path) -> None:
    add(site)
    with InferenceEngine(config()) as engine:
        assert engine.generate("abc", GenerationParams()).text == "ABC"
        assert engine.manifest.licence == "MIT"


class TestShout(BackendConformance):
    """The suite holds a plug-in to what its manifest claims: this one resumes only greedy answers."""

    config = config()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _installed(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        directory = tmp_path_factory.mktemp("site")
        add(directory)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(directory))
            patch.setenv("PYTHONPATH", str(directory), prepend=":")
            yield
        for name in ("shouting", "shouting.backend"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"interface": 2}, "it was written for interface 2 of backends, and this Penstock has 1"),
        ({"id": "whisper"}, "its manifest has the id 'whisper'"),
        ({"devices": ("tpu",)}, "devices.0: Input should be 'cpu', 'cuda' or 'mps'"),
        ({"parameters": ("magic",)}, "parameters: magic: no such parameters"),
        ({"vision": True}, "vision: Extra inputs are not permitted"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(site: Path, changes: dict[str, Any], fault: str) -> None:
    package = "shouting"
    files = {f"{package}/__init__.py": f"MANIFEST = {MANIFEST | changes!r}\n"}
    install(site, package, GROUP, {"shout": f"{package}:MANIFEST"}, files)
    with pytest.raises(ConfigurationError, match=r"the backend 'shout' of shouting 1\.0 cannot be used") as caught:
        find_backend("shout")
    assert fault in str(caught.value)


@pytest.mark.parametrize("code", ["raise RuntimeError", "import nothing_of_that_name", "raise SystemExit"])
def test_a_plug_in_that_cannot_be_imported_leaves_the_others_alone(site: Path, code: str) -> None:
    add(site)
    install(site, "broken", GROUP, {"broken": "broken:MANIFEST"}, {"broken.py": code})
    found = {one.id: one for one in find_backends()}
    assert found["broken"].manifest is None
    assert "importing it failed" in found["broken"].fault
    assert found["shout"].manifest is not None and found["paged"].manifest is not None
    with pytest.raises(ConfigurationError, match=r"of broken 1\.0 cannot be used: importing it failed"):
        InferenceEngine(config(backend="broken"))


def test_a_second_backend_with_the_same_id_is_refused(site: Path) -> None:
    add(site)
    add(site, package="imitation")
    with pytest.raises(ConfigurationError, match=r"imitation 1\.0 and shouting 1\.0 both have the id 'shout'"):
        find_backend("shout")


def test_our_own_backends_cannot_be_replaced(site: Path) -> None:
    add(site, id="echo")
    assert find_backend("echo") is ECHO
    (fault,) = [one.fault for one in find_backends() if one.id == "echo" and one.package == "shouting 1.0"]
    assert "one of Penstock's own backends, and a second one is refused" in fault


def test_only_allowed_plug_ins_are_imported(site: Path) -> None:
    add(site)
    for found in (find_backends(("other",)), find_backends(())):
        assert [one.fault for one in found if one.id == "shout"] == ["allowed_backends does not list it"]
    assert "shouting" not in sys.modules
    with pytest.raises(ConfigurationError, match="allowed_backends does not list it"):
        InferenceEngine(config(allowed_backends=()))
    with InferenceEngine(config(allowed_backends=("shout",))) as engine:
        assert engine.generate("a", GenerationParams()).text == "A"


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cuda:0", "the backend 'shout' runs only on a CPU; use cpu"),
        ({"devices": ("cpu", "mps")}, "cuda:0", "the backend 'shout' runs on cpu and mps"),
        (
            {"requires": ("no_such_module",), "install": "pip install it"},
            "cpu",
            "no_such_module not installed",
        ),
        ({"formats": ("gguf",)}, "cpu", "runs gguf models, and .* is safetensors"),
        ({"formats": ("safetensors",), "architectures": ("GemmaForCausalLM",)}, "cpu", "and .* is a LlamaForCausalLM"),
    ],
)
def test_what_a_manifest_excludes_is_refused_before_anything_loads(
    site: Path, tiny_model: Path, changes: dict[str, Any], device: str, reason: str
) -> None:
    add(site, **changes)
    with pytest.raises(ConfigurationError, match=reason):
        InferenceEngine(config(model=str(tiny_model), device=device))
    assert "shouting.backend" not in sys.modules


def test_what_a_backend_cannot_resume_is_refused(site: Path) -> None:
    class Forgetful(EchoBackend):
        manifest = ECHO.model_copy(update={"resume": "none"})

    own = config(backend="echo")
    with InferenceEngine(own, backend=Forgetful(own)) as engine:
        request = EngineRequest("r", (97, 98, 99), GenerationParams(temperature=0.0), seed=0)
        with pytest.raises(GenerationFailed, match="continues no answers of another one; send the request again"):
            engine.open(replace(request, generated=((97,),)))


def test_a_fallback_runs_what_the_backend_lacks(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(site)
    with InferenceEngine(config(fallback_backend="echo")) as engine:
        plain = engine.generate("abc", GenerationParams())
        assert (plain.text, plain.fallback) == ("ABC", None)
        scored = engine.generate("abc", GenerationParams(logprobs=1))
        assert (scored.text, scored.fallback) == ("abc", "echo")
        assert scored.logprobs is not None
        assert "runs on the fallback backend echo: the backend 'shout' does not support logprobs" in caplog.text
        with pytest.raises(InvalidRequest, match="the backend 'shout' does not support grammar"):
            engine.generate("abc", GenerationParams(grammar=Grammar(kind="regex", text="a")))
        assert engine.stats().num_requests == 2
    with InferenceEngine(config()) as engine, pytest.raises(InvalidRequest, match="does not support logprobs"):
        engine.generate("abc", GenerationParams(logprobs=1))


def test_backends_are_listed_with_what_speaks_against_them(site: Path, tiny_model: Path) -> None:
    add(site, formats=("gguf",))
    install(site, "broken", GROUP, {"broken": "broken:MANIFEST"}, {"broken.py": "1 / 0"})
    command = [sys.executable, "-m", "penstock", "backends", str(tiny_model), "--json"]
    environment = os.environ | reached_from(site)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = {row["id"]: row for row in orjson.loads(done.stdout)}
    assert found["paged"]["usable"] and found["hf"]["manifest"]["resume"] == "exact"
    assert "importing it failed: ZeroDivisionError" in found["broken"]["reason"]
    assert "runs gguf models" in found["shout"]["reason"]


def test_a_server_shows_who_answered(site: Path, serve: Serve) -> None:
    add(site)
    install(site, "broken", GROUP, {"broken": "broken:MANIFEST"}, {"broken.py": "1 / 0"})
    served = serve("--backend", "shout", "--fallback-backend", "echo", environment=reached_from(site))
    body = {"model": BUNDLED, "prompt": "abc", "max_tokens": 8}
    with httpx2.Client(base_url=served.url, timeout=60) as client:
        plain = client.post("/v1/completions", json=body).json()
        assert plain["choices"] and "fallback_backend" not in plain
        other = client.post("/v1/completions", json=body | {"logprobs": 1}).json()
        assert (other["choices"][0]["text"], other["fallback_backend"]) == ("abc", "echo")
        streamed = client.post("/v1/completions", json=body | {"logprobs": 1, "stream": True}).text
        assert streamed.count('"fallback_backend":"echo"') == 1
        asked = {"model": BUNDLED, "input": "abc", "max_output_tokens": 8}
        plain = client.post("/v1/responses", json=asked).json()
        assert plain["output"] and "fallback_backend" not in plain
        asked |= {"include": ["message.output_text.logprobs"]}
        other = client.post("/v1/responses", json=asked).json()
        assert (other["status"], other["fallback_backend"]) == ("incomplete", "echo")
        assert client.get(f"/v1/responses/{other['id']}").json() == other
        streamed = client.post("/v1/responses", json=asked | {"stream": True}).text
        assert streamed.count('"fallback_backend":"echo"') == 1 and '"type":"response.incomplete"' in streamed
        message = {"role": "user", "content": "abc"}
        asked = {"model": BUNDLED, "messages": [message], "max_tokens": 8}
        plain = client.post("/v1/messages", json=asked).json()
        assert plain["content"] and "fallback_backend" not in plain
        asked |= {"top_k": 3}
        assert client.post("/v1/messages", json=asked).json()["fallback_backend"] == "echo"
        streamed = client.post("/v1/messages", json=asked | {"stream": True}).text
        (marked,) = [line for line in streamed.splitlines() if "fallback_backend" in line]
        assert orjson.loads(marked.removeprefix("data: "))["type"] == "message_delta"
    assert re.search("backend plug-in refused.*broken", served.process.output)
    served.process.wait_for("runs on the fallback backend echo")


def test_the_manifest_of_each_own_backend_claims_what_it_does() -> None:
    for found in find_backends(()):
        if found.package == "penstock":
            assert found.manifest is not None and not found.fault
            optional = found.id in ("llama_cpp", "vllm")  # whose packages are no test dependencies
            missing = found.manifest.missing if optional else ""
            assert why_not(found.manifest, device="cpu") == (
                missing and f"the backend {found.id!r} cannot run here: {missing}"
            )
