"""What the runbooks of docs/operations.md promise to keep, and their commands."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
from pages import ROOT, blocks
from serving import until

WORDS = " ".join(f"w{number}" for number in range(30))
RESUMABLE = {"Penstock-Resumable": "true"}


def store_file(url: str) -> str:
    files = {"file": ("kept.txt", b"kept")}
    return str(httpx2.post(f"{url}/v1/files", files=files, data={"purpose": "user_data"}, timeout=60).json()["id"])


def content(url: str, file: str) -> bytes | None:
    """What is in a stored file; None while the servers elect leaders."""
    answer = httpx2.get(f"{url}/v1/files/{file}/content", timeout=60)
    assert answer.status_code in (200, 503), answer.text
    return answer.content if answer.status_code == 200 else None


def begin(url: str) -> str:
    """The id of a request that runs on, though its client has left after the first token."""
    body = {"model": "echo", "prompt": WORDS, "max_tokens": 500, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, headers=RESUMABLE, timeout=60) as stream:
        next(line for line in stream.iter_lines() if line.startswith("data: {"))
        return str(stream.headers["x-request-id"])


def whole(url: str, id: str) -> str:
    """The answer of that request from its beginning, when it has ended; refused while the servers elect leaders."""
    body = {"model": "echo", "prompt": WORDS, "max_tokens": 500, "stream": True}
    headers = RESUMABLE | {"Last-Event-ID": id}

    def ask() -> httpx2.Response | None:
        answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code in (200, 503), answer.text
        return answer if answer.status_code == 200 else None

    chunks = [json.loads(line[6:]) for line in until(ask).text.splitlines() if line.startswith("data: {")]
    return "".join(str(chunk["choices"][0]["text"]) if "choices" in chunk else str(chunk) for chunk in chunks)


def commands(mark: str, paths: dict[str, Path]) -> str:
    """The runbook's block that has `mark`, with our paths in place of its own."""
    (code,) = [block.code for block in blocks(ROOT / "docs" / "operations.md", "sh") if mark in block.code]
    for name, path in paths.items():
        assert name in code
        code = code.replace(name, str(path))
    return code


def no_copy_is_away(url: str) -> bool:
    lines = httpx2.get(f"{url}/metrics", timeout=60).text.splitlines()
    away = [line.rpartition(" ")[2] for line in lines if line.startswith("penstock_stream_away{")]
    return bool(away) and set(away) == {"0.0"}
