"""Chat templates rendered as Hugging Face does it: Jinja in a sandbox, with the names that they know.

Source of the rules: transformers' `utils/chat_template_utils.py`; the tests compare them. Knows no transformers,
whose import takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates read the first
_MARK = "<the message goes on here> "  # its space shows whether the template strips what it prints


class ChatTemplates:
    """The templates of a model: one, or several by name. May be used from several threads."""

    def __init__(self, templates: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of every template: "bos_token", "eos_token" and so on."""
        self._templates = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._special_tokens = dict(special_tokens)

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def text(self) -> str:
        """All templates in one text."""
        return "\n".join(self._templates.values())

    def select(self, has_tools: bool) -> str:
        """The template for a chat with or without tools. Raises `ValueError` where none of the names says so."""
        wanted = ("tool_use", "default") if has_tools else ("default",)
        for name in wanted:
            if name in self._templates:
                return self._templates[name]
        raise ValueError(f"the model has the templates {', '.join(self._templates)}, and none is the default")

    def render(
        self,
        template: str,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """The prompt that `template` makes of `messages`.

        With `continue_final_message` it ends where the last message ends: its content, or the field named. `variables`
        come before special tokens of the same name. Raises what Jinja raises, `ValueError` and `TypeError`.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; set one")
        chat = [_with_reasoning(_plain({k: v for k, v in message.items() if v is not None})) for message in messages]
        if not chat:
            raise ValueError("the chat has no message")
        rest = ""
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            rest = _mark(chat[-1], field, template)
        text = _compile(template).render(
            messages=chat,
            tools=_plain(tools),
            **{"documents": None, "add_generation_prompt": add_generation_prompt}
            | self._special_tokens
            | {name: _plain(value) for name, value in variables.items()},
        )
        return _cut_at_mark(text, rest) if continue_final_message else text


def _mark(message: dict[str, Any], field: str, template: str) -> str:
    """Mark where a message's field ends, under each name that reasoning may have; what the field was."""
    value = message.get(field)
    if value is None:
        raise ValueError(f"the last message has no {field} to go on with")
    same = [name for name in _REASONING if message.get(name) == value] if field in _REASONING else [field]
    if not any(name in template for name in same):
        raise ValueError(f"this model's template does not read {field}, so no message can go on with it")
    if isinstance(value, str):
        message.update(dict.fromkeys(same, value + _MARK))
        return value
    for part in reversed(value):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _MARK
            return text
    raise ValueError("the last message has no text to go on with")


def _cut_at_mark(text: str, rest: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or rest.strip() not in text:
        raise ValueError("this model's template does not print the whole last message, so it cannot go on with it")
    found = text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
    return found.replace(_MARK, "").replace(_MARK.strip(), "")  # reasoning may be printed under several names


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Have a message's reasoning under the names that templates read."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain(value: Any) -> Any:
    """A copy in JSON's types alone: a template is foreign code, and must not reach any other object's methods."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    raise TypeError(f"a {type(value).__name__} is no value of JSON")


@lru_cache(maxsize=64)
def _compile(template: str) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what a model says, for training; its body is rendered as it stands."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration is the same

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PlainNamespace(Namespace):
        """One that keeps no name with an underscore in front, which may be the key to Python's own objects."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # so that a name may be "self"
            self, *given = args
            values = dict(*given, **kwargs)
            for name in values:
                _check(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace keeps no name with an underscore in front: {name!r}")

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": PlainNamespace,
    }
    return environment.from_string(template)


class _Dict:
    """`dict` without the class's own attributes."""

    fromkeys: Callable[..., dict[Any, Any]] = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
