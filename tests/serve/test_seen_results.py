"""Images that MCP servers return: a model that sees is shown them, and its client can fetch them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import mcp_types as types
import openai
import pytest
from anyio.from_thread import start_blocking_portal
from mcp_servers import McpServer
from serving import Served, serving
from vision_models import make_vision_model, picture

TOOLS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Answer with {"name": <name>, "arguments": <object>} within <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}{% endfor %}"""  # in front of the messages, which a template of images alone leaves out
FORCED: Any = {"type": "mcp", "server_label": "desk", "name": "pictures"}


@pytest.fixture(scope="module")
def desk() -> Iterator[McpServer]:
    with start_blocking_portal() as portal:
        server = McpServer()
        portal.call(server.start)
        yield server
        portal.call(server.stop)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, desk: McpServer) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("seen")
    model = make_vision_model(root / "model", "qwen2_5_vl")
    template = model / "chat_template.jinja"
    template.write_text(TOOLS + template.read_text())
    arguments = "--dtype", "float32", "--kv-cache-memory", "64MiB", "--mcp-allowed-urls", desk.url
    with serving(root / "state", str(model), *arguments, "--served-model-name", "seer") as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120, _strict_response_validation=True
    ) as client:
        yield client


def looked(client: openai.OpenAI, desk: McpServer, *content: types.ContentBlock) -> Any:
    """A response that has called the tool, which returned this."""
    desk.pictures = list(content)
    server: Any = {"type": "mcp", "server_label": "desk", "server_url": desk.url, "require_approval": "never"}
    return client.responses.create(
        model="seer", input="Look.", tools=[server], tool_choice=FORCED, max_output_tokens=200, temperature=0
    )


def call_of(response: Any) -> Any:
    [call] = [item for item in response.output if item.type == "mcp_call"]
    return call


def image(data: bytes, kind: str = "image/png") -> types.ImageContent:
    return types.ImageContent(data=base64.b64encode(data).decode(), mime_type=kind)


def counted(client: openai.OpenAI, response: Any) -> int:
    """The tokens of the prompt that the response's successor would have."""
    return client.responses.input_tokens.count(
        model="seer", input="And?", previous_response_id=response.id
    ).input_tokens


def test_the_model_sees_them_and_the_client_fetches_them(client: openai.OpenAI, desk: McpServer) -> None:
    small, large = picture(), picture(80, 30, 1, "JPEG")
    blob = types.BlobResourceContents(uri="file:///b", blob=base64.b64encode(large).decode(), mime_type="image/jpeg")
    said = types.TextContent(text="Two:")
    response = looked(client, desk, said, image(small), types.EmbeddedResource(resource=blob))
    call = call_of(response)
    one, two = call.images
    assert call.output == f"Two:\n[image {one}]\n[image {two}]"
    assert [client.files.content(id).content for id in (one, two)] == [small, large]
    assert client.files.retrieve(one).purpose == "assistants_output"
    both = counted(client, response)
    further = client.responses.create(
        model="seer", input="And?", previous_response_id=response.id, max_output_tokens=16
    )
    assert further.usage is not None and further.usage.input_tokens == both
    client.files.delete(two)
    without = counted(client, response)
    client.files.delete(one)
    assert len({both, without, counted(client, response)}) == 3, "each picture has tokens of its own"
    client.responses.create(model="seer", input="And?", previous_response_id=response.id, max_output_tokens=16)


def test_what_no_model_can_be_shown_is_described(client: openai.OpenAI, desk: McpServer) -> None:
    broken = types.ImageContent(data="not base64", mime_type="image/png")
    content = [broken, image(b"no picture"), image(b"<svg/>", "image/svg+xml"), image(picture(4, 4))]
    call = call_of(looked(client, desk, *content, *[image(picture())] * 9))
    first, second, third, fourth, *kept, last = call.output.split("\n")
    assert first == "[image of type image/png, not shown]"
    assert second.startswith("[image of type image/png, not shown: ") and "PNG" in second
    assert third.startswith("[image of type image/svg+xml, not shown: ") and "not supported" in third
    assert "4 x 4 pixels" in fourth
    assert kept == [f"[image {id}]" for id in call.images] and len(kept) == 8
    assert last == "[image of type image/png, not shown: these are more than 8]"
