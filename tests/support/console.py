"""A browser at the page of a running server: Debian's chromium, driven by playwright."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import nats
import openai
import psutil
from nats.js.api import PubAck
from pages import ROOT
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect, sync_playwright
from serving import Served

CHROMIUM = shutil.which("chromium")
ADMIN, USER = "sk-operator-of-all", "sk-user-of-acme"
KEYS = f"acme={USER},op={ADMIN} admin"
PATIENCE = 60_000  # milliseconds that a condition may take on a busy machine
AXE = ROOT / "deploy" / "examples" / "node_modules" / "axe-core" / "axe.min.js"
WIDE = ViewportSize(width=1280, height=860)


@contextmanager
def browsing() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Browser, served: Served, size: ViewportSize = WIDE, *, dark: bool = False) -> Iterator[Page]:
    """A tab with the operator's key, which fails where the page reports an error."""
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    context.add_init_script(f"sessionStorage.setItem('penstock-key', '{ADMIN}')")
    page = context.new_page()
    faults: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(served.url)
    expect(page.locator(".status")).to_have_text("Live")
    yield page
    assert faults == []
    context.close()


def serious_faults(page: Page) -> list[str]:
    """What axe finds that keeps people from using the page. It runs outside of the page's content security policy."""
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{fault['id']}: {node['html']}: {node.get('failureSummary', '')}"
        for fault in found["violations"]
        for node in fault["nodes"]
        if fault["impact"] in ("serious", "critical")
    ]


class Load:
    """Clients of the tenant acme that ask a model again and again until the block ends."""

    def __init__(self, served: Served, model: str, clients: int, max_tokens: int = 60) -> None:
        self._url, self._model, self._clients, self._max_tokens = served.url, model, clients, max_tokens
        self._over = threading.Event()

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(self._clients)
        for _ in range(self._clients):
            self._pool.submit(self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()

    def _ask(self) -> None:
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=USER, max_retries=9, timeout=120) as client:
            while not self._over.is_set():
                stream = client.completions.create(
                    model=self._model,
                    prompt="water through the gate",
                    max_tokens=self._max_tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                try:
                    for _ in stream:
                        if self._over.is_set():
                            break
                except openai.APIError:
                    pass  # a test has cancelled it
                finally:
                    stream.close()


def child(served: Served, word: str) -> psutil.Process:
    """The process of a server that was started with this word among its arguments."""
    family = psutil.Process(served.process.pid).children(recursive=True)
    return next(each for each in family if word in each.cmdline())


def bury(served: Served, request: str, model: str) -> None:
    """Publish a dead letter as the stage validate would, with a job inside that is well."""
    body = {
        "id": request,
        "body": {"model": model, "prompt": "a secret", "max_tokens": 3},
        "endpoint": "/v1/completions",
    }
    headers = {
        "Penstock-Schema": "job/1",
        "Penstock-Dead-Reason": "the disk was full",
        "Penstock-Dead-Subject": "penstock.jobs.high.acme",
        "Penstock-Dead-Attempts": "5",
        "Nats-Msg-Id": f"dead.{request}",
    }

    async def publish() -> PubAck:
        client = await nats.connect(served.nats_url)
        try:
            stream = client.jetstream()
            return await stream.publish("penstock.dead.validate", json.dumps(body).encode(), headers=headers)
        finally:
            await client.close()

    with ThreadPoolExecutor(1) as pool:  # playwright's own event loop runs in this thread
        pool.submit(asyncio.run, publish()).result()


def catalogue(directory: Path) -> Path:
    """A file of models that echo: `main` with two workers, and `spare`, which is not loaded."""
    file = directory / "models.toml"
    file.write_text(
        '[models.main]\nsource = "no-files-1"\nbackend = "echo"\nreplicas = 2\npreload = true\n'
        '[models.spare]\nsource = "no-files-2"\nbackend = "echo"\n'
    )
    return file
