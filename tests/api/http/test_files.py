"""`/v1/files` as the official client sees it, and as other clients may ask."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx2
import openai
import orjson
import pytest
from applications import Script

from penstock.api.http import files
from penstock.schemas.openai.batches import Batch
from penstock.streams.stores.files import delete_expired_files
from penstock.streams.stores.objects import Objects
from penstock.streams.topology import BATCH_STATES, FILES

LIMIT = 3 << 20
KEYS = {"one": "key-of-one", "two": "key-of-two"}


class Desk:
    """The application without a pipeline, and a client for each of two tenants."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(script.app), base_url="http://localhost", headers=headers("one")
        )
        self.one, self.two = (openai_client(script, key) for key in KEYS.values())


def openai_client(script: Script, key: str) -> openai.AsyncOpenAI:
    http: Any = httpx2.AsyncClient(transport=httpx2.ASGITransport(script.app))
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=http, _strict_response_validation=True
    )


def headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    keys = [f"{tenant}={key}" for tenant, key in KEYS.items()]
    desk = Desk(
        await Script.start(
            api_keys=keys, file_limit=LIMIT, tenant_quota=2 * LIMIT + 10_000, files_ttl=86400.0, body_timeout=0.05
        )
    )
    yield desk
    await desk.http.aclose()
    await desk.one.close()
    await desk.two.close()


FORMS = {  # as they come from the wire
    "HttpClient of .NET": (
        'multipart/form-data; boundary="b-1"',
        "Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=purpose",
        "Content-Disposition: form-data; name=file; filename=a.jsonl; filename*=utf-8''a.jsonl",
        "a.jsonl",
    ),
    "HttpClient of .NET, a name beyond ASCII": (
        'multipart/form-data; boundary="b-1"',
        "Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=purpose",
        'Content-Disposition: form-data; name=file; filename="=?utf-8?B?bsOkbWUgMS5qc29ubA==?="; '
        "filename*=utf-8''n%C3%A4me%201.jsonl",
        "näme 1.jsonl",
    ),
    "OkHttp": (
        "multipart/form-data; boundary=b-1",
        'Content-Disposition: form-data; name="purpose"\r\nContent-Length: 5',
        'content-disposition: form-data; name="file"; filename="a.jsonl"\r\ncontent-type: application/jsonl',
        "a.jsonl",
    ),
    "a type in capitals": (
        "Multipart/Form-Data; boundary=b-1",
        'Content-Disposition: form-data; name="purpose"',
        'Content-Disposition: form-data; name="file"; filename="a.jsonl"',
        "a.jsonl",
    ),
}


@pytest.mark.parametrize("client", FORMS)
async def test_forms_of_other_clients_are_read(desk: Desk, client: str) -> None:
    kind, purpose, file, name = FORMS[client]
    body = f"--b-1\r\n{purpose}\r\n\r\nbatch\r\n--b-1\r\n{file}\r\n\r\n{{}}\r\n--b-1--\r\n"
    created = await desk.http.post("/v1/files", content=body.encode(), headers={"content-type": kind})
    assert created.status_code == 200, created.text
    assert {"filename": name, "bytes": 2, "purpose": "batch"}.items() <= created.json().items()


@pytest.mark.parametrize("size", [0, 1, LIMIT])
async def test_a_file_comes_back_as_it_went(desk: Desk, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    now = int(time.time())
    created = await desk.one.files.create(file=("näme.jsonl", io.BytesIO(data[:size])), purpose="batch")
    assert (created.object, created.bytes, created.filename) == ("file", size, "näme.jsonl")
    assert (created.purpose, created.status) == ("batch", "processed")
    assert now <= created.created_at <= now + 60
    assert created.expires_at is not None and 0 <= created.expires_at - created.created_at - 86400 <= 1
    assert await desk.one.files.retrieve(created.id) == created
    assert (await desk.one.files.content(created.id)).content == data[:size]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_begins_behind_a_file_that_is_deleted_by_then(desk: Desk, order: Literal["asc", "desc"]) -> None:
    made = [(await desk.one.files.create(file=b"x", purpose="batch")).id for _ in range(5)]
    seen: list[str] = []
    async for file in desk.one.files.list(limit=2, order=order):
        if seen:
            await desk.one.files.delete(file.id)
        seen.append(file.id)
    assert seen == (made if order == "asc" else made[::-1])


async def test_a_list_pages_in_both_orders_and_by_purpose(desk: Desk) -> None:
    purposes: list[Any] = ["batch", "user_data", "batch", "batch", "user_data"]
    ids = [(await desk.one.files.create(file=b"x", purpose=purpose)).id for purpose in purposes]
    assert [file.id async for file in desk.one.files.list()] == ids[::-1]
    assert [file.id async for file in desk.one.files.list(order="asc", limit=2)] == ids
    assert [file.id async for file in desk.one.files.list(purpose="user_data")] == [ids[4], ids[1]]
    page = await desk.one.files.list(limit=2, after=ids[3])
    assert ([file.id for file in page.data], page.has_more) == ([ids[2], ids[1]], True)
    assert [file.id async for file in desk.two.files.list()] == []


async def test_a_deleted_file_is_gone(desk: Desk) -> None:
    file = await desk.one.files.create(file=b"data", purpose="batch")
    deleted = await desk.one.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    assert [file async for file in desk.one.files.list()] == []
    with pytest.raises(openai.NotFoundError):
        await desk.one.files.retrieve(file.id)
    assert await (await Objects.of(desk.script.broker, FILES)).infos() == []


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/content"), ("DELETE", "")])
async def test_an_unknown_file_is_404(desk: Desk, method: str, path: str) -> None:
    await desk.one.files.create(file=b"data", purpose="batch")
    for name in ("file-none", "none", "*", "file-*", "file->", "file-%20", "file-" + "x" * 5000):
        response = await desk.http.request(method, f"/v1/files/{name}{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "file_not_found")


async def test_a_tenant_sees_nothing_of_another(desk: Desk) -> None:
    file = await desk.one.files.create(file=b"data", purpose="batch")
    for ask in (desk.two.files.retrieve, desk.two.files.content, desk.two.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(file.id)
    with pytest.raises(openai.NotFoundError):
        await desk.two.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert (await desk.one.files.content(file.id)).content == b"data"


async def test_a_file_ends_when_it_was_said_to(desk: Desk) -> None:
    kept = await desk.one.files.create(file=b"kept", purpose="batch")
    file = await desk.one.files.create(
        file=b"data", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at is not None and 0 <= file.expires_at - file.created_at - 3600 <= 1
    objects = await Objects.of(desk.script.broker, FILES)
    infos = await desk.script.broker.bucket(FILES)
    for info in await objects.infos():
        info.about["expires_at"] = int(time.time()) - 1
        await infos.put(info.name, orjson.dumps(info))
    with pytest.raises(openai.NotFoundError):
        await desk.one.files.retrieve(file.id)
    assert [file async for file in desk.one.files.list()] == []
    running = Batch(
        id="batch_x", endpoint="/v1/completions", input_file_id=kept.id, created_at=0, expires_at=1, tenant="one",
        output_ttl=1.0,
    )  # fmt: skip
    await (await desk.script.broker.bucket(BATCH_STATES)).put(running.key, running.model_dump_json().encode())
    await delete_expired_files(desk.script.broker)
    assert [info.name for info in await objects.infos()] == [f"one.{kept.id}"]  # a batch still reads it


async def test_a_tenant_over_its_quota_is_told_what_to_do(desk: Desk) -> None:
    full, _ = [await desk.one.files.create(file=bytes(LIMIT), purpose="user_data") for _ in range(2)]
    with pytest.raises(openai.APIStatusError, match="tenant_quota allows 6,301,456: delete files") as caught:
        await desk.one.files.create(file=bytes(10_000), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (429, "insufficient_quota")
    assert caught.value.response.headers["x-should-retry"] == "false"
    await desk.two.files.create(file=b"x", purpose="batch")  # it is one tenant's own
    await desk.one.files.delete(full.id)
    await desk.one.files.create(file=bytes(10_000), purpose="batch")


async def test_uploads_at_once_keep_to_the_quota_together(desk: Desk) -> None:
    uploads = (desk.one.files.create(file=bytes(LIMIT), purpose="batch") for _ in range(5))
    done = await asyncio.gather(*uploads, return_exceptions=True)
    refused = [one for one in done if isinstance(one, openai.APIStatusError)]
    assert len(refused) >= 3 and {one.code for one in refused} == {"insufficient_quota"}
    assert len([file async for file in desk.one.files.list()]) == 5 - len(refused)


FORM: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("f", b"data")}}


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        (FORM | {"files": None}, 400, None),
        (FORM | {"files": {"other": b"data"}}, 400, "file"),
        (FORM | {"files": [("file", b"a"), ("file", b"b")]}, 400, None),
        ({"json": {"purpose": "batch"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, None),
        (FORM | {"data": {}}, 400, "purpose"),
        (FORM | {"data": {"purpose": "fine-tune"}}, 400, "purpose"),
        (FORM | {"data": {"purpose": "batch_output"}}, 400, "purpose"),
        (FORM | {"data": {"purpose": "batch", "expires_after[seconds]": "3600"}}, 400, "expires_after"),
        (FORM | {"data": {"purpose": "batch", "expires_after[anchor]": "created_at"}}, 400, "expires_after"),
        (
            FORM | {"data": {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9"}},
            400,
            "expires_after",
        ),
        (
            FORM
            | {"data": {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "90000"}},
            400,
            "expires_after",
        ),
        (FORM | {"files": {"file": b"x" * (LIMIT + 1)}}, 413, None),
        (FORM | {"files": {"file": b"x" * (LIMIT + (1 << 20))}}, 413, None),
    ],
)
async def test_a_bad_upload_is_refused(desk: Desk, form: dict[str, Any], status: int, param: str | None) -> None:
    response = await desk.http.post("/v1/files", **form)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert await (await Objects.of(desk.script.broker, FILES)).infos() == []


async def test_an_upload_without_a_length_is_bounded_too(desk: Desk) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        while sent < 100 * LIMIT:
            sent += 1 << 20
            yield bytes(1 << 20)

    response = await desk.http.post(
        "/v1/files", content=endless(), headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


async def test_an_upload_that_stalls_is_ended(desk: Desk) -> None:
    async def stalling() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await asyncio.Event().wait()

    response = await desk.http.post(
        "/v1/files", content=stalling(), headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")


async def test_an_upload_that_comes_drop_by_drop_is_ended(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_UPLOAD_RATE", 1 << 40)

    async def dripping() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while True:
            yield b"x"
            await asyncio.sleep(0)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = await desk.http.post("/v1/files", content=dripping(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "after=none"])
async def test_a_bad_page_is_refused(desk: Desk, query: str) -> None:
    response = await desk.http.get(f"/v1/files?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])
