"""What loading a model for a request costs on a running `penstock serve --models`, and whether memory comes back.

    penstock serve --models models.toml --port 8000 &
    python deploy/loads.py http://127.0.0.1:8000 MODEL --rounds 100

Each round asks the unloaded model for one token as a stream, and unloads it when that has come. Prints the time to the
first token, and the memory and open files of every process of the server after the first rounds and at the end. With
API keys, `--key` needs one with the word admin.
"""

from __future__ import annotations

import asyncio
import time

import httpx2
import psutil
import typer
from rich.progress import track

from penstock.api.bench.report import milliseconds

WARM = 5  # rounds before memory is first measured
LIMIT = 300.0  # seconds until a model counts as not loaded


def resources(server: int) -> dict[str, tuple[float, int]]:
    """Memory in MiB and open files of each lasting process of `penstock serve`, by its command."""
    root = psutil.Process(server)
    processes = [root, *(child for child in root.children() if "worker" not in child.cmdline())]
    return {
        " ".join(process.cmdline()[-4:])[-40:]: (process.memory_info().rss / 2**20, process.num_fds())
        for process in processes
    }


def serving(port: int) -> int:
    """The process of `penstock serve` whose child listens; another server's own."""
    (listening, *_) = (found.pid for found in psutil.net_connections("tcp") if found.laddr and found.laddr.port == port)
    process = psutil.Process(listening)
    return next((parent.pid for parent in process.parents() if "serve" in parent.cmdline()), process.pid)


async def state(client: httpx2.AsyncClient, model: str) -> str:
    models = (await client.get("/models")).raise_for_status().json()["data"]
    return next(str(each["status"]["value"]) for each in models if each["id"] == model)


async def unloaded(client: httpx2.AsyncClient, model: str) -> None:
    """Unload the model, and return when it is."""
    if await state(client, model) == "unloaded":
        return
    (await client.post("/models/unload", json={"model": model})).raise_for_status()
    async with asyncio.timeout(LIMIT):
        while await state(client, model) != "unloaded":  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def first_token(client: httpx2.AsyncClient, model: str) -> float:
    """Seconds until the first token of a request."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "stream": True}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - began
    raise SystemExit("no token came")


async def measure(url: str, model: str, rounds: int, key: str) -> None:
    parent = serving(httpx2.URL(url).port or 80)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    times: list[float] = []
    before: dict[str, tuple[float, int]] = {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=LIMIT) as client:
        await unloaded(client, model)
        for turn in track(range(rounds), "rounds", transient=True):
            if turn == min(WARM, rounds - 1):
                before = resources(parent)
            times.append(await first_token(client, model))
            await unloaded(client, model)
    half, most = (milliseconds(times, share) for share in (50, 100))
    print(f"first token of an unloaded model: p50 {half or 0:.0f} ms, max {most or 0:.0f} ms, of {rounds}")
    for name, (memory, files) in resources(parent).items():
        then = before.get(name, (0.0, 0))
        print(f"{name}: {then[0]:.0f} → {memory:.0f} MiB, {then[1]} → {files} open files")


def loads(url: str, model: str, rounds: int = 100, key: str = "") -> None:
    """Load and unload a model again and again."""
    asyncio.run(measure(url, model, rounds, key))


if __name__ == "__main__":
    typer.run(loads)
