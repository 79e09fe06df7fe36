"""Files that clients upload and then name by their ids, sent by the official clients in all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pdf_files import pdf
from serving import Served, until

PDF = pdf("The grass is green.")
SHOWN = "<document>\n<source>lawn.pdf</source>\n<content>\nThe grass is green.\n</content>\n</document>"
QUESTION = "What colour?"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def client(echo_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def upload(client: openai.OpenAI, purpose: Any = "user_data") -> str:
    return client.files.create(file=("lawn.pdf", PDF), purpose=purpose).id


def chat(id: str) -> list[Any]:
    parts = [{"type": "file", "file": {"file_id": id}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def said(id: str) -> list[Any]:
    parts = [{"type": "input_file", "file_id": id}, {"type": "input_text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("purpose", ["user_data", "assistants", "vision"])
def test_in_a_chat(client: openai.OpenAI, purpose: str) -> None:
    id = upload(client, purpose)
    answer = client.chat.completions.create(model="echo", messages=chat(id), max_tokens=400)
    assert f"{SHOWN}\n{QUESTION}" in (answer.choices[0].message.content or "")
    client.files.delete(id)
    with pytest.raises(openai.NotFoundError, match=f"there is no file '{id}'") as caught:
        client.chat.completions.create(model="echo", messages=chat(id))
    assert (caught.value.code, caught.value.param) == ("file_not_found", "messages[0].content[0].file.file_id")


def test_in_a_response_and_the_result_of_its_tool(client: openai.OpenAI) -> None:
    id = upload(client)
    answer = client.responses.create(model="echo", input=said(id), max_output_tokens=400)
    assert f"{SHOWN}\n{QUESTION}" in answer.output_text and answer.usage is not None
    assert client.responses.input_tokens.count(model="echo", input=said(id)).input_tokens == answer.usage.input_tokens
    (kept,) = client.responses.input_items.list(answer.id).data
    assert kept.type == "message" and kept.content[0].to_dict() == {"type": "input_file", "file_id": id}
    result: Any = [
        {"role": "user", "content": "Read it"},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_file", "file_id": id}]},
    ]
    answer = client.responses.create(model="echo", input=result, max_output_tokens=600)
    assert f"[document 1]\n{SHOWN}" in answer.output_text
    further = client.responses.create(
        model="echo", input="And the sky?", previous_response_id=answer.id, max_output_tokens=900
    )
    assert f"[document 1]\n{SHOWN}" in further.output_text

    client.files.delete(id)
    for ask in (client.responses.create, client.responses.input_tokens.count):
        for number, items in ((0, said(id)), (2, result)):
            with pytest.raises(openai.NotFoundError, match=f"there is no file '{id}'; upload it") as caught:
                ask(model="echo", input=items)
            place = f"input[{number}].{'output' if number else 'content'}[0].file_id"
            assert (caught.value.code, caught.value.param) == ("file_not_found", place)
        with pytest.raises(openai.NotFoundError, match="send the items again without it") as caught:
            ask(model="echo", input="And the sky?", previous_response_id=further.id)
        assert caught.value.param == "previous_response_id"


def test_a_conversation_goes_on_without_the_item_of_a_deleted_file(client: openai.OpenAI) -> None:
    id, conversation = upload(client), client.conversations.create()
    client.responses.create(model="echo", input=said(id), conversation=conversation.id, max_output_tokens=9)
    client.files.delete(id)
    with pytest.raises(openai.NotFoundError, match="an input before names it") as caught:
        client.responses.create(model="echo", input="And the sky?", conversation=conversation.id)
    assert caught.value.param == "conversation"
    (item,) = [one for one in client.conversations.items.list(conversation.id) if getattr(one, "role", "") == "user"]
    assert item.id is not None
    client.conversations.items.delete(item.id, conversation_id=conversation.id)
    answer = client.responses.create(
        model="echo", input="And the sky?", conversation=conversation.id, max_output_tokens=200
    )
    assert "And the sky?" in answer.output_text and "grass" not in answer.output_text


def test_in_a_message_and_the_result_of_its_tool(echo_server: Served, client: openai.OpenAI) -> None:
    id = upload(client)
    file: Any = {"type": "document", "source": {"type": "file", "file_id": id}, "context": "of a gardener"}
    asked: list[Any] = [{"role": "user", "content": [file, {"type": "text", "text": QUESTION}]}]
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [file]}
    used: list[Any] = [
        {"role": "user", "content": "Read it"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    with anthropic.Anthropic(base_url=echo_server.url, api_key="none", max_retries=0) as own:
        for messages, before in ((asked, "of a gardener"), (used, "[document 1]")):
            answer = own.beta.messages.create(
                model="echo", max_tokens=600, messages=messages, betas=["files-api-2025-04-14"]
            )
            (block,) = answer.content
            assert block.type == "text" and f"{before}\n{SHOWN}" in block.text
            assert answer.usage.input_tokens == own.messages.count_tokens(model="echo", messages=messages).input_tokens
        client.files.delete(id)
        with pytest.raises(anthropic.NotFoundError, match=f"messages: there is no file '{id}'"):
            own.messages.create(model="echo", max_tokens=9, messages=asked)
        with pytest.raises(anthropic.NotFoundError, match=f"messages: there is no file '{id}'"):
            own.messages.count_tokens(model="echo", messages=asked)


def test_in_the_lines_of_a_batch(client: openai.OpenAI) -> None:
    id = upload(client)
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "echo", "messages": chat(file), "max_tokens": 400},
        }
        for name, file in (("known", id), ("unknown", "file-none"))
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    input = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=input.id, endpoint="/v1/chat/completions", completion_window="24h")

    def ended() -> Any:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    done = until(ended)
    assert done.status == "completed"
    (known,) = client.files.content(done.output_file_id).text.splitlines()
    (unknown,) = client.files.content(done.error_file_id).text.splitlines()
    assert SHOWN in json.loads(known)["response"]["body"]["choices"][0]["message"]["content"]
    refused = json.loads(unknown)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("unknown", 404)
    assert refused["response"]["body"]["error"]["code"] == "file_not_found"
