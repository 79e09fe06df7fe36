"""API keys: who gets in, whose request it is, and that no key is written down anywhere."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from applications import Script
from asgi import ask
from structlog.testing import capture_logs
from typer.testing import CliRunner

from penstock.__main__ import app
from penstock.api.serve.processes import child_environment
from penstock.config.api_keys import ApiKey, Keys
from penstock.config.settings import Settings
from penstock.config.sources import load
from penstock.schemas.errors import ConfigurationError
from penstock.schemas.events import Accepted, Done, Event, Token, Usage

ADA, BOB = "sk-ada-0123456789", "sk-bob-0123456789"
KEYS = f"ada={ADA},bob={BOB},sk-nobody-in-particular"
BODY = {"model": "m", "prompt": "x"}
ANSWER: list[Event] = [
    Accepted("", "m", 1, 1),
    Token("", 0, 0, (1,), "y", None, "stop"),
    Done("", ("stop",), Usage(1, 1, 2)),
]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenant(keys: Keys, key: str) -> str | None:
    found = keys.find(key)
    return found and found.tenant


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/generate"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("DELETE", "/v1/streams/x"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
        ("GET", "/healthy"),
    ],
)
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "No API key"),
        ({"Authorization": "Bearer "}, "No API key"),
        ({"Authorization": "Basic YTpi"}, "No API key"),
        (bearer("sk-wrong-0123456789"), "Incorrect API key"),
        (bearer(ADA[:-1]), "Incorrect API key"),
        (bearer(sha256(ADA)), "Incorrect API key"),
        ({"x-api-key": "é"}, "Incorrect API key"),
    ],
)
async def test_without_a_known_key_there_is_nothing(
    method: str, path: str, headers: dict[str, str], message: str
) -> None:
    script = await Script.start(api_keys=KEYS)
    response = await ask(script.app, method, path, BODY, headers)
    assert (response.status, response.error["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert message in response.error["message"]
    assert response.headers["x-request-id"].startswith("req-")
    assert script.jobs == []


async def test_health_needs_no_key() -> None:
    script = await Script.start(api_keys=KEYS)
    assert (await ask(script.app, "GET", "/health/live")).status == 200
    for path in ("/health", "/health/ready"):
        assert (await ask(script.app, "GET", path)).status == 503  # it has no stages


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        (bearer(ADA), "ada"),
        ({"authorization": f"bearer  {BOB}"}, "bob"),
        ({"x-api-key": BOB}, "bob"),
        (bearer("sk-nobody-in-particular"), "default"),
        (bearer("sk-wrong-0123456789") | {"x-api-key": ADA}, "ada"),
    ],
)
async def test_a_request_is_its_tenants(headers: dict[str, str], tenant: str) -> None:
    script = await Script.start(api_keys=KEYS)
    asking = asyncio.create_task(ask(script.app, "POST", "/v1/completions", BODY, headers))
    await script.tell(ANSWER, await script.job(), tenant)
    assert (await asking).status == 200
    assert script.jobs[-1].subject.endswith(f".{tenant}")


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key"])
async def test_of_two_keys_in_the_same_header_neither_is_taken(name: str) -> None:
    script = await Script.start(api_keys=KEYS)
    prefix = "Bearer " if name == "Authorization" else ""
    headers = {name: prefix + ADA, name.lower(): prefix + BOB}
    response = await ask(script.app, "GET", "/v1/models", None, headers)
    assert (response.status, response.error["param"]) == (400, name)
    assert "has 2 values, not all the same; send one" in response.error["message"]
    same = {name: prefix + ADA, name.lower(): prefix + ADA}
    assert (await ask(script.app, "GET", "/v1/models", None, same)).status == 200


async def test_a_stream_is_hidden_from_other_tenants() -> None:
    script = await Script.start(api_keys=KEYS)
    asking = asyncio.create_task(ask(script.app, "POST", "/v1/completions", BODY, bearer(ADA)))
    job = await script.job()
    await script.tell(ANSWER, job, "ada")
    await asking
    for key, status in ((ADA, 200), (BOB, 404)):
        assert (await ask(script.app, "GET", f"/v1/streams/{job.id}", None, bearer(key))).status == status


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"# of the office\n\nada=sha256:{sha256(ADA)}\n")
    file.chmod(0o600)
    return file


def rewrite(file: Path, text: str) -> None:
    """As an editor does it: another file under the same name."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(file)


def test_a_key_is_revoked_and_added_while_all_runs(file: Path) -> None:
    keys = Keys((), file)
    assert (tenant(keys, ADA), tenant(keys, BOB)) == ("ada", None)
    rewrite(file, f"bob=sha256:{sha256(BOB).upper()}")
    assert (tenant(keys, ADA), tenant(keys, BOB)) == (None, "bob")


@pytest.mark.parametrize("fault", ["gone", "malformed", "binary", "folder"])
def test_a_broken_file_leaves_the_keys_that_were_known(file: Path, fault: str) -> None:
    keys = Keys((), file)
    match fault:
        case "gone":
            file.unlink()
        case "malformed":
            rewrite(file, "ada=sha256:123")
        case "binary":
            file.write_bytes(b"\xff\xfe")
        case "folder":
            file.unlink()
            file.mkdir()
    with capture_logs() as logs:
        for _ in range(3):
            assert tenant(keys, ADA) == "ada"
    (entry,) = logs
    assert entry["log_level"] == "error" and str(file) in entry["reason"]
    if fault == "folder":
        file.rmdir()
    rewrite(file, f"bob={BOB}")
    assert (tenant(keys, ADA), tenant(keys, BOB)) == (None, "bob")


def test_every_faulty_line_is_named_and_no_key_is_told(file: Path) -> None:
    file.write_text(f"ada={ADA}\nbad name={BOB}\n# fine\nsha256:xyz\nshort\nbob={ADA}\nlong enough but spaced\n")
    with pytest.raises(ConfigurationError) as raised:
        Keys((), file)
    assert [fault.partition(":")[0].rpartition(" ")[2] for fault in raised.value.faults] == ["2", "4", "5", "6", "7"]
    assert ADA not in str(raised.value) and BOB not in str(raised.value) and "spaced" not in str(raised.value)


def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere cannot be read"):
        Keys((), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("mode", "key", "warned"), [(0o644, ADA, True), (0o600, ADA, False), (0o644, f"sha256:{sha256(ADA)}", False)]
)
def test_plain_keys_for_every_eye_are_warned_of(file: Path, mode: int, key: str, warned: bool) -> None:
    file.write_text(f"ada={key}")
    os.chmod(file, mode)
    with capture_logs() as logs:
        assert tenant(Keys((), file), ADA) == "ada"
    assert [entry["log_level"] for entry in logs] == ["warning"] * warned


def test_an_empty_file_lets_nobody_in(file: Path) -> None:
    file.write_text("")
    assert tenant(Keys((), file), ADA) is None
    assert tenant(Keys((), file), "") is None


def config(**variables: str) -> tuple[int, str]:
    names: dict[str, str | None] = {name: None for name in os.environ if name.startswith("PENSTOCK_")}
    ran = CliRunner().invoke(app, ["config", "--config", os.devnull], env=names | variables)
    return ran.exit_code, ran.output


def test_config_shows_whose_keys_there_are_and_none_of_them() -> None:
    code, output = config(PENSTOCK_API_KEYS=KEYS)
    assert code == 0
    assert "ada=***,bob=***,default=***" in output
    assert not any(secret in output for key in (ADA, BOB) for secret in (key, sha256(key)))


@pytest.mark.parametrize(
    "fault", ["", " ,", "S3cret", "a b=S3cret-long-enough", "ada=S3cret\x7f-long-enough", "sha256:S3cret"]
)
def test_a_fault_in_the_keys_is_named_without_them(fault: str) -> None:
    code, output = config(PENSTOCK_API_KEYS=fault)
    assert code == 2
    assert "api_keys (PENSTOCK_API_KEYS)" in output
    assert "S3cret" not in output


def test_children_get_the_keys_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEYS", KEYS)
    settings = load().settings
    environment = child_environment(settings, "nats://x")
    assert not any(ADA in value or BOB in value for value in environment.values())
    monkeypatch.setenv("PENSTOCK_API_KEYS", environment["PENSTOCK_API_KEYS"])
    assert load().settings.api_keys == settings.api_keys
    assert ADA not in repr(settings)


def test_a_key_that_was_made_works(file: Path) -> None:
    ran = CliRunner().invoke(app, ["key", "acme"])
    assert ran.exit_code == 0
    lines = ran.output.splitlines()
    (key,) = (line for line in lines if line.startswith("sk-penstock-"))
    (entry,) = (line for line in lines if line.startswith("acme="))
    assert key not in entry and len(key) > 40
    file.write_text(entry)
    assert tenant(Keys((), file), key) == "acme"
    assert key not in CliRunner().invoke(app, ["key", "acme"]).output


NORMAL = f"ada={ADA} max_priority=normal,bob={BOB} max_priority=low,sk-nobody-in-particular"


@pytest.mark.parametrize(
    ("key", "body", "lane"),
    [
        (ADA, {}, "normal"),
        (ADA, {"priority": "normal"}, "normal"),
        (ADA, {"service_tier": "auto"}, "normal"),
        (ADA, {"service_tier": "flex"}, "low"),
        (ADA, {"priority": "high"}, None),
        (ADA, {"service_tier": "priority"}, None),
        (BOB, {}, "low"),
        (BOB, {"service_tier": "auto"}, "low"),
        (BOB, {"priority": "low"}, "low"),
        (BOB, {"priority": "normal"}, None),
        (BOB, {"service_tier": "default"}, None),
        ("sk-nobody-in-particular", {"priority": "high"}, "high"),
        ("sk-nobody-in-particular", {"service_tier": "priority"}, "high"),
        ("sk-nobody-in-particular", {}, "normal"),
        (ADA, {"priority": "urgent"}, "normal"),  # which validate refuses, with every other fault
        (ADA, {"priority": ["high"], "service_tier": 5}, "normal"),
    ],
)
async def test_a_key_has_a_ceiling(key: str, body: dict[str, Any], lane: str | None) -> None:
    script = await Script.start(api_keys=NORMAL)
    asking = asyncio.create_task(ask(script.app, "POST", "/v1/completions", BODY | body, bearer(key)))
    if lane is None:
        response = await asking
        assert (response.status, response.error["code"]) == (403, "priority_not_allowed")
        assert response.error["param"] == next(iter(body)) and script.jobs == []
    else:
        owner = {ADA: "ada", BOB: "bob"}.get(key, "default")
        await script.tell(ANSWER, await script.job(), owner)
        assert (await asking).status == 200
        assert script.jobs[-1].subject.endswith(f".{lane}.{owner}")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/generate"])
async def test_the_ceiling_holds_on_every_path(path: str) -> None:
    script = await Script.start(max_priority="normal")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "priority": "high"}
    assert (await ask(script.app, "POST", path, body)).status == 403
    assert script.jobs == []


def test_the_ceiling_of_a_key_is_in_its_line(file: Path) -> None:
    ran = CliRunner().invoke(app, ["key", "acme", "--max-priority", "low"])
    (entry,) = (line for line in ran.output.splitlines() if line.startswith("acme="))
    (key,) = (line for line in ran.output.splitlines() if line.startswith("sk-penstock-"))
    file.write_text(f"{entry}\nada={ADA}   max_priority=high\n")
    keys = Keys((), file)
    assert keys.find(key) == ApiKey("acme", sha256(key), "low")
    assert keys.find(ADA) == ApiKey("ada", sha256(ADA), "high")
    assert CliRunner().invoke(app, ["key", "acme", "--max-priority", "urgent"]).exit_code == 2


@pytest.mark.parametrize("option", ["max_priority=urgent", "max_priority", "max=low", "max_priority=low x=y"])
def test_what_stands_behind_a_key_is_checked(file: Path, option: str) -> None:
    file.write_text(f"ada={ADA} {option}")
    with pytest.raises(ConfigurationError, match="line 1: only admin and max_priority= may follow a key"):
        Keys((), file)


@pytest.mark.parametrize("tenant", ["", "a b", "a=b", "a.b", "x" * 65])
def test_a_key_for_no_proper_tenant_is_refused(tenant: str) -> None:
    ran = CliRunner().invoke(app, ["key", tenant])
    assert ran.exit_code == 2
    assert "sk-penstock-" not in ran.output


@pytest.mark.parametrize("values", [{"api_keys": ["ada=" + ADA]}, {"api_keys": "ada=" + ADA + "=="}])
def test_keys_may_be_a_list_and_end_in_padding(values: dict[str, Any]) -> None:
    given = values["api_keys"]
    keys = Keys(Settings(**values).api_keys or ())
    assert tenant(keys, ADA + ("==" if isinstance(given, str) else "")) == "ada"
