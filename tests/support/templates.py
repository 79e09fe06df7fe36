"""Chat templates in the layout of public models, short enough to read; and two tools to call."""

from typing import Any

HERMES = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Answer with {"name": <name>, "arguments": <object>} within <tool_call></tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'tool') or (message.role == 'system' and not loop.first) %}<|im_start|>
{{- message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

THINKING = (
    HERMES
    + """\
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% elif add_generation_prompt %}<think>
{% endif %}"""
)

SEARCH = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["metric", "imperial"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["unit", "days", "exact"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {"tag": {"enum": ["a", "b"]}},
    "required": ["tag"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": SEARCH, "note": NOTE}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
