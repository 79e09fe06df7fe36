"""Generation plug-ins of an installed package, through a server: the worked example of `docs/plug-ins.md`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import nats
import openai
import orjson
import psutil
import pytest
from pages import ROOT, blocks
from plug_ins import install
from serving import Process, Served

from penstock.engine.plug_ins.found import GROUP

(EXAMPLE,) = (each.code for each in blocks(ROOT / "docs" / "plug-ins.md", "python") if "class Sentences" in each.code)
PROMPT = "Call 555-0100 or come to 12 Mill Lane. Ask for Ada. Or write, at any time of the day. That is all there is."
ENTRIES = {"sentences": "ours:Sentences", "no-digits": "ours:NoDigits", "rarer": "ours:Rarer", "broken": "theirs:Any"}
TWO = [{"name": "sentences", "arguments": {"count": 2}}]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the package is installed."""
    site = tmp_path_factory.mktemp("site")
    definitions = EXAMPLE.partition("plug_ins = {")[0]
    install(site, "ours", GROUP, ENTRIES, {"ours.py": definitions, "theirs.py": "raise OSError('no licence')"})
    return {"PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(scope="module")
def served(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("state")
    allowed = ("--allowed-plug-ins", "sentences,no-digits,broken")
    echo = ("--backend", "echo", "--echo-rate", "60", "--port", "0", "--state-dir", str(state))
    process = Process("serve", *echo, *allowed, environment=environment)
    try:
        yield Served(process, state)
    finally:
        process.end()


def post(served: Served, **body: Any) -> httpx2.Response:
    asked = {"model": "echo", "prompt": PROMPT, "max_tokens": 200} | body
    return httpx2.post(f"{served.url}/v1/completions", json=asked, timeout=60)


def test_the_worked_example_prints_what_it_says() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(EXAMPLE, {"__name__": "example"})
    expected = next(line for line in EXAMPLE.splitlines() if "print(" in line).rpartition("# ")[2]
    assert printed.getvalue() == expected + "\n"


def test_an_answer_goes_on_when_the_worker_dies_in_its_middle(served: Served) -> None:
    """The same text and end as without: the next worker's plug-ins know the tokens that there are."""
    expected = "Call ###-#### or come to ## Mill Lane. Ask for Ada."
    own: dict[str, Any] = {"stopping_criteria": TWO, "clean_ups": ["no-digits"]}
    whole = post(served, **own).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (expected, "stop", "sentences")
    text, killed, reasons = "", False, []
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for part in client.completions.create(model="echo", prompt=PROMPT, max_tokens=200, stream=True, extra_body=own):
            text += part.choices[0].text
            reasons += [part.choices[0].finish_reason] if part.choices[0].finish_reason else []
            if len(text) > 12 and not killed:
                for child in psutil.Process(served.process.pid).children():
                    if "worker" in child.cmdline():
                        child.kill()
                        killed = True
    assert killed and (text, reasons) == (expected, ["stop"])


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (
            {"clean_ups": ["no-didgits"]},
            "unknown_plug_in",
            "no clean-up 'no-didgits' for requests here; known: no-digits.",
        ),
        ({"logits_processors": ["rarer"]}, "unknown_plug_in", "known: none."),  # installed, and not allowed
        ({"stopping_criteria": ["sentences"]}, "invalid_plug_in_arguments", "missing a required argument: 'count'"),
        (
            {"stopping_criteria": [{"name": "sentences", "arguments": {"count": 0}}]},
            "invalid_plug_in_arguments",
            "count must be at least 1",
        ),
        (
            {"clean_ups": ["broken"]},
            "unusable_plug_in",
            "of ours 1.0 cannot be used: importing it failed: OSError: no l",
        ),
        ({"clean_ups": [{"name": "no-digits", "wrong": 1}]}, None, "wrong"),
        ({"clean_ups": ["no-digits"] * 9}, None, "at most 8"),
        (
            {"stopping_criteria": [{"name": "sentences", "arguments": {"count": "two"}}]},
            None,
            "'sentences' failed on this request (TypeError)",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, body: dict[str, Any], code: str | None, message: str
) -> None:
    answer = post(served, **body)
    error = answer.json()["error"]
    assert answer.status_code == (500 if "TypeError" in message else 400), error
    assert message in error["message"]
    assert error["param"] is None or error["param"].startswith(next(iter(body)))
    assert code is None or error["code"] == code


def test_jobs_on_nats_and_chats_name_them_too(served: Served) -> None:
    chat = {"model": "echo", "messages": [{"role": "user", "content": "Room 101."}], "clean_ups": ["no-digits"]}
    answer = httpx2.post(f"{served.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert "Room ###." in answer["choices"][0]["message"]["content"]

    async def run() -> str:
        connection = await nats.connect(served.nats_url)
        events = await connection.subscribe("penstock.events.default.mine.job-1")
        body = {"model": "echo", "prompt": "Room 101. Or 102.", "stopping_criteria": [], "clean_ups": ["no-digits"]}
        job = {"id": "job-1", "endpoint": "/v1/completions", "bridge": "mine", "body": body}
        await connection.jetstream().publish("penstock.jobs.normal.default", orjson.dumps(job))
        text = ""
        while (event := orjson.loads((await events.next_msg(timeout=60)).data))["type"] != "done":
            assert event["type"] != "error", event
            text += event.get("text", "")
        await connection.close()
        return text

    assert asyncio.run(run()) == "Room ###. Or ###."


def test_they_are_listed_with_what_speaks_against_them(served: Served, environment: dict[str, str]) -> None:
    assert any("generation plug-in refused" in line and "no licence" in line for line in served.process.lines)
    command = [sys.executable, "-m", "penstock", "plug-ins", "--allowed-plug-ins", "sentences"]
    given: dict[str, Any] = {"env": os.environ | environment, "capture_output": True, "text": True, "check": False}
    found = {row["name"]: row for row in orjson.loads(subprocess.run([*command, "--json"], **given).stdout)}
    assert (found["sentences"]["parameter"], found["sentences"]["arguments"]) == ("stopping_criteria", "count: int")
    assert [row["allowed"] for row in found.values()] == [name == "sentences" for name in found]
    assert "OSError: no licence" in found["broken"]["reason"] and not found["broken"]["usable"]
    assert "broken cannot be used: importing it failed: OSError" in subprocess.run(command, **given).stdout
    refused = subprocess.run([sys.executable, "-m", "penstock", "serve", "--allowed-plug-ins", "rare"], **given)
    assert refused.returncode != 0
    assert "no package brings a generation plug-in 'rare'; installed: broken, no-digits, rarer" in refused.stderr
