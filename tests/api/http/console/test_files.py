"""The files of the page: plain modules that ask for nothing from elsewhere, under a strict policy."""

from __future__ import annotations

import re

import pytest
from applications import Script
from asgi import ask

from penstock.api.http.console.files import FOLDER

MAX_LINES = 350
FILES = sorted(path.name for path in FOLDER.iterdir())


async def test_the_page_and_its_files_need_no_key() -> None:
    script = await Script.start(api_keys="op=sk-op-0123456789 admin")
    page = await ask(script.app, "GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for name in FILES:
        found = await ask(script.app, "GET", f"/console/{name}")
        assert (found.status, found.body) == (200, (FOLDER / name).read_bytes())
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-security-policy"] == policy
        again = await ask(script.app, "GET", f"/console/{name}", headers={"if-none-match": found.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    for path in ("/console/", "/console/x.js", "/console/../files.py", "/console/%2e%2e%2ffiles.py"):
        assert (await ask(script.app, "GET", path)).status == 404
    assert (await ask(script.app, "GET", "/server/stats")).status == 401


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_small_and_asks_for_nothing_from_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    if name.endswith(".html"):
        assert " style=" not in text and not re.search(r"\son\w+=", text) and "<script>" not in text
    if name.endswith(".js"):
        assert "innerHTML" not in text and "eval(" not in text and 'setAttribute("style"' not in text
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert module in FILES
