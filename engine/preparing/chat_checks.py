"""Refuses chats whose messages do not belong together, before their template sees them."""

from __future__ import annotations

from collections.abc import Sequence

from ...schemas.bounds import shortened
from ...schemas.errors import InvalidRequest
from ...schemas.openai.chat import ChatMessage


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise `InvalidRequest` for content or an id that is missing, and for a chat without any text or image."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.content is None and message.role != "assistant":
            fault = "null; send text" if "content" in message.model_fields_set else "missing; send it"
            raise InvalidRequest(f"{path}.content is {fault}.", param=f"{path}.content")
        if message.role == "tool" and message.tool_call_id is None:
            raise InvalidRequest(f"{path}.tool_call_id is missing; send the call's id.", param=f"{path}.tool_call_id")
        if message.role == "tool" and message.tool_call_id not in called:
            fault = f"{path}.tool_call_id: no earlier call has the id {shortened(str(message.tool_call_id), 100)!r}."
            raise InvalidRequest(fault, param=f"{path}.tool_call_id")
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest("Only assistant messages may have tool_calls.", param=f"{path}.tool_calls")
        called.update(call.id for call in message.tool_calls or ())
    if not any(message.text.strip() or message.images or message.tool_calls for message in messages):
        raise InvalidRequest("Every message is blank; send some text.", code="empty_prompt", param="messages")
