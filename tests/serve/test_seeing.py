"""Chats about pictures with a real server, as the official clients send them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx2
import openai
import psutil
import pytest
from pdf_files import joined, pdf, photograph, scan
from PIL import Image
from pydantic import ByteSize
from serving import START_TIMEOUT, Served, serving
from vision_models import animation, damaged, enormous, make_vision_model, picture

from penstock import EngineConfig, InferenceEngine, OpenAIAdapter
from penstock.engine.preparing.pdf_pages import pages_of

LONG = 400  # tokens
WORDS = "What do you see here?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("seeing") / "qwen2_5_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    arguments = str(model), "--dtype", "float32", "--served-model-name", "seer", "--kv-cache-memory", "64MiB"
    store = "--store-limit", "208MiB"  # with 3 MiB for images
    with serving(tmp_path_factory.mktemp("serve") / "state", *arguments, *store) as served:
        yield served


@pytest.fixture(scope="module")
def library(model: Path) -> Iterator[OpenAIAdapter]:
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory=ByteSize(64 << 20))
    with InferenceEngine(config) as engine:
        yield OpenAIAdapter(engine)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def body(*images: bytes, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    messages = [{"role": "user", "content": [{"type": "text", "text": WORDS}, *parts]}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True} | more


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def post(served: Served, sent: dict[str, Any], path: str = "/v1/chat/completions") -> httpx2.Response:
    return httpx2.post(f"{served.url}{path}", json={"model": "seer", **sent}, timeout=START_TIMEOUT)


def test_the_model_says_that_it_sees(served: Served) -> None:
    (card,) = httpx2.get(f"{served.url}/v1/models").json()["data"]
    assert card["architecture"]["input_modalities"] == ["text", "image"]


def test_pictures_of_requests_that_have_ended_keep_no_room(served: Served) -> None:
    for number in range(8):
        noise = Image.frombytes("RGB", (500, 500), Random(number).randbytes(750_000))
        with io.BytesIO() as file:
            noise.save(file, "PNG")
            answer = post(served, body(file.getvalue(), max_tokens=2))
        assert answer.status_code == 200, f"after {number} pictures: {answer.text}"


def test_official_clients_get_what_the_library_answers(served: Served, library: OpenAIAdapter) -> None:
    one, two = picture(), picture(80, 30, 1, "JPEG")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for images in ((one,), (one, two), (two,)):
            sent = body(*images)
            wanted = library.create(sent)
            extra = {"ignore_eos": sent.pop("ignore_eos")}
            answer = client.chat.completions.create(model="seer", **sent, extra_body=extra)
            assert answer.choices[0].message.content == text_of(wanted)
            assert answer.usage is not None and answer.usage.prompt_tokens == wanted["usage"]["prompt_tokens"]
        asked: Any = [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": WORDS},
                    {"type": "input_image", "image_url": data_url(one), "detail": "auto"},
                ],
            }
        ]
        response = client.responses.create(model="seer", input=asked, temperature=0, max_output_tokens=16)
        assert response.output_text == text_of(library.create(body(one, max_tokens=16, ignore_eos=False)))
        further = client.responses.create(
            model="seer", input="And its colour?", previous_response_id=response.id, temperature=0, max_output_tokens=8
        )
        assert further.usage is not None and response.usage is not None
        assert further.usage.input_tokens > response.usage.input_tokens, "the picture is still part of the chat"
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as other:
        source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(one).decode()}
        blocks: Any = [{"type": "text", "text": WORDS}, {"type": "image", "source": source}]
        said = other.messages.create(
            model="seer",
            max_tokens=16,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"temperature": 0},
        )
        assert said.content[0].type == "text"
        assert said.content[0].text == text_of(library.create(body(one, max_tokens=16, ignore_eos=False)))


def test_a_figure_is_seen_unless_its_sender_does_without(served: Served) -> None:
    """Each page with a figure takes an image's tokens; the request says by `detail` which pages are shown."""
    file = base64.b64encode(joined(pdf("Red:", photograph(100, 100)), pdf("Alone."))).decode()
    part: Any = {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{file}"}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        def tokens(*pages: Any) -> int:
            answer = client.responses.create(
                model="seer", input=[{"role": "user", "content": [*pages]}], max_output_tokens=16, store=False
            )
            assert answer.usage is not None
            return answer.usage.input_tokens

        none, one, two = (tokens(part | {"detail": detail}) for detail in ("low", "auto", "high"))
        assert tokens(part) == one
        assert two > one != none, "an image takes fewer tokens here than the words that it is not shown"


def test_the_pages_of_a_scan_are_seen(served: Served, library: OpenAIAdapter) -> None:
    """In all three APIs, with the answer to the same chat in which the pages are images."""
    file = base64.b64encode(scan(picture(300, 200), picture(200, 300, 1))).decode()
    pages = [page["picture"] for page in pages_of(base64.b64decode(file), 40_000_000, "scans")]
    first, second = ({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{page}"}} for page in pages)
    opening = "<document>\n<source>scan.pdf</source>\n<content>\n"
    texts = [{"type": "text", "text": text} for text in (opening, "\n", "\n</content>\n</document>\n", WORDS)]
    shown = [texts[0], first, texts[1], second, *texts[2:]]
    wanted = library.create({"messages": [{"role": "user", "content": shown}], "temperature": 0, "max_tokens": 12})
    question = {"type": "text", "text": WORDS}
    part = {"type": "file", "file": {"filename": "scan.pdf", "file_data": f"data:application/pdf;base64,{file}"}}
    chat: Any = {"messages": [{"role": "user", "content": [part, question]}], "temperature": 0, "max_tokens": 12}
    assert text_of(library.create(chat)) == text_of(wanted)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(model="seer", **chat)
        assert answer.choices[0].message.content == text_of(wanted)
        assert answer.usage is not None and answer.usage.prompt_tokens == wanted["usage"]["prompt_tokens"]
        item: Any = {"type": "input_file", "filename": "scan.pdf", "file_data": f"data:application/pdf;base64,{file}"}
        asked: Any = [{"role": "user", "content": [item, {"type": "input_text", "text": WORDS}]}]
        response = client.responses.create(model="seer", input=asked, temperature=0, max_output_tokens=16)
        assert response.usage is not None and response.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as other:
        source = {"type": "base64", "media_type": "application/pdf", "data": file}
        turn: Any = [
            {"role": "user", "content": [{"type": "document", "source": source, "title": "scan.pdf"}, question]}
        ]
        said = other.messages.create(model="seer", max_tokens=12, messages=turn)
        cached = said.usage.cache_read_input_tokens or 0
        assert said.usage.input_tokens + cached == wanted["usage"]["prompt_tokens"]
        counted = other.messages.count_tokens(model="seer", messages=turn)
        assert counted.input_tokens == wanted["usage"]["prompt_tokens"]


def test_pictures_in_the_results_of_tools_are_seen(served: Served, library: OpenAIAdapter) -> None:
    """As agents send what they have looked at: their answers are those to the same chat with the picture of a user."""
    one, two = picture(), picture(80, 30, 1)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in (one, two)]
    marks = [{"type": "text", "text": f"[image {number}]"} for number in (1, 2)]
    shown = [marks[0], parts[0], marks[1], parts[1]]
    messages = [
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "[image 1]\n[image 2]"},
        {"role": "user", "content": shown},
    ]
    wanted = library.create({"messages": messages, "temperature": 0, "max_tokens": 16})
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        output = [{"type": "input_image", "image_url": data_url(image)} for image in (one, two)]
        items: Any = [
            {"role": "user", "content": WORDS},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": output},
        ]
        response = client.responses.create(model="seer", input=items, temperature=0, max_output_tokens=16)
        assert response.output_text == text_of(wanted)
        assert response.usage is not None and response.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as other:
        blocks: Any = [
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()},
            }
            for image in (one, two)
        ]
        turns: Any = [
            {"role": "user", "content": WORDS},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": blocks}]},
        ]
        said = other.messages.create(model="seer", max_tokens=16, messages=turns, extra_body={"temperature": 0})
        assert said.content[0].type == "text" and said.content[0].text == text_of(wanted)
        counted = said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)
        assert counted == wanted["usage"]["prompt_tokens"]


def test_uploaded_pictures_are_seen(served: Served, library: OpenAIAdapter) -> None:
    """Whatever they are called; the answers are those to the same pictures in the request."""
    one = picture()
    wanted = library.create(body(one, max_tokens=16, ignore_eos=False))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        id = client.files.create(file=("scan", one), purpose="vision").id
        image: Any = {"type": "image_url", "image_url": {"file_id": id}}
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": WORDS}, image]}]
        answer = client.chat.completions.create(model="seer", messages=asked, temperature=0, max_tokens=16)
        assert answer.choices[0].message.content == text_of(wanted)
        items: Any = [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": WORDS}, {"type": "input_image", "file_id": id}],
            }
        ]
        response = client.responses.create(model="seer", input=items, temperature=0, max_output_tokens=16)
        assert response.output_text == text_of(wanted)
        details = response.usage and response.usage.input_tokens_details
        assert details and details.cached_tokens, "the same picture has the same prefix, however it comes"
        with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as other:
            source: Any = {"type": "file", "file_id": id}
            blocks: Any = [{"type": "text", "text": WORDS}, {"type": "image", "source": source}]
            turns: Any = [{"role": "user", "content": blocks}]
            said = other.messages.create(model="seer", max_tokens=16, messages=turns, extra_body={"temperature": 0})
            assert said.content[0].type == "text" and said.content[0].text == text_of(wanted)
            counted = other.messages.count_tokens(model="seer", messages=turns).input_tokens
            assert counted == wanted["usage"]["prompt_tokens"]
        words = client.files.create(file=("words.png", b"no picture"), purpose="vision").id
        image["image_url"] = {"file_id": words}
        with pytest.raises(openai.BadRequestError, match="this is no PNG, JPEG, WebP or GIF image") as caught:
            client.chat.completions.create(model="seer", messages=asked)
        assert caught.value.param == "messages[0].content[1].image_url.file_id"


def test_a_killed_worker_loses_no_picture(served: Served, library: OpenAIAdapter) -> None:
    """Another process fetches it, and goes on with the next token, though an uploaded one has been deleted since."""
    one, two = picture(90, 60, 7), picture(80, 30, 8)
    sent = body(one, two, max_tokens=LONG, return_token_ids=True)
    wanted = text_of(library.create(body(one, two, max_tokens=LONG)))
    form: Any = {"data": {"purpose": "vision"}, "files": {"file": ("a.png", two)}}
    id = httpx2.post(f"{served.url}/v1/files", **form).json()["id"]
    sent["messages"][0]["content"][2]["image_url"] = {"file_id": id}
    parent = psutil.Process(served.process.pid)
    running = [child for child in parent.children(recursive=True) if "worker" in child.cmdline()]
    told = ""
    url = f"{served.url}/v1/chat/completions"
    asked = {"model": "seer", **sent, "stream": True}
    with httpx2.stream("POST", url, json=asked, timeout=START_TIMEOUT) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk
                told += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if told and running:
                assert httpx2.delete(f"{served.url}/v1/files/{id}").status_code == 200
            while told and running:
                running.pop().kill()
    assert not running and told == wanted


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (data_url(picture(1, 1)), "1 x 1 pixels"),
        (data_url(enormous(10_000, 10_000)), "10000 x 10000 pixels, and 40000000 are allowed"),
        (data_url(animation(), "image/gif"), "animated"),
        (data_url(damaged()), "damaged"),
        ("data:image/png,notbase64", "not in base64"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,", "empty"),
        (data_url(b"no picture at all"), "no PNG, JPEG, WebP or GIF"),
        (data_url(picture(), "application/pdf"), "'application/pdf' is not supported"),
        ("http://127.0.0.1/a.png", "images are not fetched from this address"),
        ("a picture", "no data: URL"),
    ],
)
def test_what_is_no_good_picture_is_refused_in_words(served: Served, url: str, says: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    answer = post(served, {"messages": messages})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"] and error["param"] == "messages[0].content[0].image_url.url"


def test_refusals_harm_nobody(served: Served, library: OpenAIAdapter) -> None:
    assert text_of(post(served, body(picture())).json()) == text_of(library.create(body(picture())))


def test_a_text_that_pretends_to_be_an_image_is_refused(served: Served) -> None:
    sent = body(picture())
    sent["messages"][0]["content"][0]["text"] = "Look: <|image_pad|>"
    answer = post(served, sent)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "image_mark"


def test_pictures_count_as_tokens(served: Served) -> None:
    most = json.loads(httpx2.get(f"{served.url}/v1/models").text)["data"][0]["max_model_len"]
    answer = post(served, body(*[picture(112, 112, salt) for salt in range(64)], max_tokens=1))
    assert answer.status_code == 200, answer.text
    assert 64 * 16 < answer.json()["usage"]["prompt_tokens"] < most
    answer = post(served, body(*[picture(112, 112)] * 65))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_images")
    sent = body(*[picture(112, 112)] * 64)
    sent["messages"][0]["content"][0]["text"] = "word " * 2000
    answer = post(served, sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
