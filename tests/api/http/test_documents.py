"""Documents in all three APIs, sent by the official clients: what they say reaches the model."""

from __future__ import annotations

import base64
from typing import Any

import anthropic
import openai
import pytest
from pdf_files import pdf
from serving import Served

PDF = base64.b64encode(pdf("The grass is green.")).decode()
URL = f"data:application/pdf;base64,{PDF}"
SHOWN = "<document>\n<source>lawn.pdf</source>\n<content>\nThe grass is green.\n</content>\n</document>"
CALL: Any = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
TOOL: Any = {"name": "read", "input_schema": {"type": "object", "properties": {}}}


def test_in_a_chat(echo_server: Served) -> None:
    with openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none", max_retries=0) as client:
        file: Any = {"type": "file", "file": {"filename": "lawn.pdf", "file_data": URL}}
        question: Any = {"type": "text", "text": "What colour?"}
        answer = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": [file, question]}], max_tokens=400
        )
        assert f"{SHOWN}\nWhat colour?" in (answer.choices[0].message.content or "")


def test_in_a_response_and_the_result_of_its_tool(echo_server: Served) -> None:
    with openai.OpenAI(base_url=f"{echo_server.url}/v1", api_key="none", max_retries=0) as client:
        file: Any = {"type": "input_file", "filename": "lawn.pdf", "file_data": URL}
        question: Any = {"type": "input_text", "text": "What colour?"}
        answer = client.responses.create(
            model="echo", input=[{"role": "user", "content": [file, question]}], max_output_tokens=400
        )
        assert f"{SHOWN}\nWhat colour?" in answer.output_text
        answer = client.responses.create(
            model="echo",
            input=[
                {"role": "user", "content": "Read it"},
                {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [file]},
            ],
            max_output_tokens=600,
        )
        assert f"[document 1]\n{SHOWN}" in answer.output_text
        with pytest.raises(openai.BadRequestError, match="documents are not fetched from this address") as caught:
            remote: Any = {"type": "input_file", "file_url": "https://a.example/b.pdf"}
            client.responses.create(model="echo", input=[{"role": "user", "content": [remote]}])
        assert (caught.value.code, caught.value.param) == ("remote_document", "input")
        with pytest.raises(openai.BadRequestError) as counted:
            client.responses.input_tokens.count(model="echo", input=[{"role": "user", "content": [remote]}])
        assert counted.value.body == caught.value.body
        with pytest.raises(openai.BadRequestError, match="must have one of file_data, file_id and file_url"):
            client.responses.create(model="echo", input=[{"role": "user", "content": [remote | file]}])


def test_in_a_message_and_the_result_of_its_tool(echo_server: Served) -> None:
    with anthropic.Anthropic(base_url=echo_server.url, api_key="none", max_retries=0) as client:
        source: Any = {"type": "base64", "media_type": "application/pdf", "data": PDF}
        file: Any = {"type": "document", "source": source, "title": "lawn.pdf", "citations": {"enabled": True}}
        question: Any = {"type": "text", "text": "What colour?"}
        text: Any = {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "Roses are red."},
            "context": "of a gardener",
        }
        found: Any = {
            "type": "search_result",
            "source": "https://sky.example",
            "title": "The sky",
            "content": [{"type": "text", "text": "It is blue."}],
        }
        asked: Any = [{"role": "user", "content": [file, text, found, question]}]
        raw = client.messages.with_raw_response.create(model="echo", max_tokens=600, messages=asked)
        (block,) = raw.parse().content
        assert block.type == "text" and SHOWN in block.text and "</search_result>\nWhat colour?" in block.text
        roses = "<context>of a gardener</context>\n<content>\nRoses are red.\n</content>"
        assert f"<document>\n{roses}\n</document>" in block.text
        sky = "<source>https://sky.example</source>\n<title>The sky</title>\n<content>\nIt is blue.\n</content>"
        assert f"<search_result>\n{sky}\n</search_result>" in block.text
        assert raw.headers["Penstock-Ignored"] == "messages[].content[].citations"
        assert client.messages.count_tokens(model="echo", messages=asked).input_tokens > 100

        result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [file, found]}
        asked = [
            {"role": "user", "content": "Read it"},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [result, question]},
        ]
        answer = client.messages.create(model="echo", max_tokens=600, messages=asked)
        (block,) = answer.content
        assert block.type == "text" and "[document 1]\n<search_result>" in block.text
        assert f"[document 1]\n{SHOWN}\nWhat colour?" in block.text
        remote: Any = {"type": "document", "source": {"type": "url", "url": "https://a.example/b.pdf"}}
        for content in ([remote], [{**result, "content": [remote]}]):
            asked = [*asked[:2], {"role": "user", "content": content}]
            with pytest.raises(
                anthropic.BadRequestError, match="messages: documents are not fetched from this address"
            ):
                client.messages.create(model="echo", max_tokens=9, messages=asked)
