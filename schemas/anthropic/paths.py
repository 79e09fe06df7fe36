"""What a Messages request calls that which a refusal of the chat behind it calls by the chat's name."""

from __future__ import annotations

import re

_IMAGE, _FILE = r"image_url\.(url|file_id)", r"file(\.file_(data|id|url))?"
_NAMES = (
    (re.compile(r"tools\[([0-9]+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"tools\[([0-9]+)\]\.function"), r"tools[\1]"),
    (re.compile(r"response_format\.json_schema|response_format"), "output_config.format"),
    (re.compile(r"stop(?=\[|$)"), "stop_sequences"),
    # Turns are merged, so that the number of a message in the chat would mislead.
    (re.compile(rf"messages\[[0-9]+\]\.content\[[0-9]+\]\.({_IMAGE}|{_FILE})"), "messages"),
)


def in_message(fault: str, param: str | None) -> str:
    """The text of a fault with the names of the body of a Messages request; `param` is the path that it names."""
    for chat, own in _NAMES if param else ():
        if (found := chat.match(param or "")) is not None:
            return fault.replace(found[0], found.expand(own), 1)  # where it begins; a word may be alike behind it
    return fault
