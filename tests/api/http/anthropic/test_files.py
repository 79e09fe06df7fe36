"""Files as Anthropic's client uploads, lists, fetches and deletes them, and names them in messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import anthropic
import httpx2
import pytest
import pytest_asyncio
from applications import Script
from serving import Served

LIMIT = 1 << 20
KEYS = {"one": "key-of-one", "two": "key-of-two"}


def client_of(script: Script, key: str) -> anthropic.AsyncAnthropic:
    http: Any = httpx2.AsyncClient(transport=httpx2.ASGITransport(script.app))
    return anthropic.AsyncAnthropic(
        base_url="http://localhost", api_key=key, max_retries=0, http_client=http, _strict_response_validation=True
    )


@pytest_asyncio.fixture
async def clients() -> AsyncIterator[list[anthropic.AsyncAnthropic]]:
    """Of two tenants."""
    keys = [f"{tenant}={key}" for tenant, key in KEYS.items()]
    script = await Script.start(api_keys=keys, file_limit=LIMIT, files_ttl=86400.0)
    clients = [client_of(script, key) for key in KEYS.values()]
    yield clients
    for client in clients:
        await client.close()


@pytest.mark.parametrize("beta", [True, False])
async def test_a_file_comes_back_as_it_went(clients: list[anthropic.AsyncAnthropic], beta: bool) -> None:
    files: Any = clients[0].beta.files if beta else clients[0].files
    file = await files.upload(file=("näme.pdf", b"data", "application/pdf"), expires_in_seconds=3600)
    assert (file.type, file.filename, file.mime_type, file.size_bytes) == ("file", "näme.pdf", "application/pdf", 4)
    assert file.downloadable is True and file.scope is None
    assert timedelta(seconds=3599) <= file.expires_at - file.created_at <= timedelta(seconds=3601)
    assert await files.retrieve_metadata(file.id) == file
    assert [one async for one in files.list()] == [file]
    assert await (await files.download(file.id)).read() == b"data"
    gone = await files.delete(file.id)
    assert (gone.id, gone.type) == (file.id, "file_deleted")
    for ask in (files.retrieve_metadata, files.download, files.delete):
        with pytest.raises(anthropic.NotFoundError, match="There is no file") as caught:
            await ask(file.id)
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_a_tenant_sees_nothing_of_another(clients: list[anthropic.AsyncAnthropic]) -> None:
    file = await clients[0].beta.files.upload(file=("a.txt", b"data"))
    assert [one async for one in clients[1].beta.files.list()] == []
    with pytest.raises(anthropic.NotFoundError):
        await clients[1].beta.files.download(file.id)


async def test_lists_come_in_pages(clients: list[anthropic.AsyncAnthropic]) -> None:
    files = clients[0].beta.files
    ids = [(await files.upload(file=(f"{number}.txt", b"x"))).id for number in range(5)][::-1]
    assert [file.id async for file in files.list(limit=2)] == ids
    assert [file.id async for file in files.list(ids=[ids[3], "file-none", ids[0]])] == [ids[0], ids[3]]
    assert [file async for file in files.list(scope_id="session")] == []
    old: Any = await files.list(limit=1, extra_query={"after_id": ids[2]})
    assert [file.id for file in old.data] == [ids[3]] and old.has_more
    async for file in files.list(limit=2):  # the last one of a page, too, is gone before the next is asked for
        await files.delete(file.id)
    assert [file async for file in files.list()] == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ({"page": "next"}, "page must be the next_page of a list"),
        ({"limit": 0}, "limit must be a number from 1 to 1000"),
        ({"ids": ["file-1"], "limit": 3}, "ids may be 100, without page and limit"),
        ({"ids": [f"file-{number}" for number in range(101)]}, "ids may be 100"),
    ],
)
async def test_a_bad_list_is_refused(
    clients: list[anthropic.AsyncAnthropic], query: dict[str, Any], fault: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=fault) as caught:
        await clients[0].beta.files.list(**query)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


async def test_a_bad_upload_is_refused(clients: list[anthropic.AsyncAnthropic]) -> None:
    files = clients[0].beta.files
    with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds must be from 3600 to 86400"):
        await files.upload(file=("a", b"data"), expires_in_seconds=90000)
    with pytest.raises(anthropic.BadRequestError, match="file has no name; send one"):
        await files.upload(file=b"data")
    with pytest.raises(anthropic.APIStatusError, match="the limit of the setting file_limit") as caught:
        await files.upload(file=("a", bytes(LIMIT + 1)))
    assert caught.value.status_code == 413
    with pytest.raises(anthropic.BadRequestError, match="purpose must be one of"):
        await files.upload(file=("a", b"data"), extra_body={"purpose": "fine-tune"})


def test_a_message_names_what_its_client_uploaded(echo_server: Served) -> None:
    with anthropic.Anthropic(base_url=echo_server.url, api_key="none", max_retries=0) as client:
        id = client.beta.files.upload(file=("lawn.txt", b"The grass is green.", "text/plain")).id
        file: Any = {"type": "document", "source": {"type": "file", "file_id": id}, "title": "My lawn"}
        answer = client.beta.messages.create(
            model="echo",
            max_tokens=300,
            messages=[{"role": "user", "content": [file]}],
            betas=["files-api-2025-04-14"],
        )
        (block,) = answer.content
        assert block.type == "text"
        assert "<source>My lawn</source>\n<content>\nThe grass is green.\n</content>" in block.text
