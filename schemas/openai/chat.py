"""The parts of a chat request, strictly typed: messages, tools and the format of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ..base import ToolName
from ..errors import InvalidRequest
from .body import Body, OpenBody
from .content import Content, FilePart, ImagePart, TextPart
from .custom_tools import arguments_of
from .lark_patterns import lark_pattern

MOST_MESSAGES = 10_000
Role = Literal["system", "developer", "user", "assistant", "tool"]


class FunctionCall(OpenBody):
    """`arguments` is JSON in a string, as the model wrote it."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCall(OpenBody):
    """One of a custom tool has `custom` with `name` and `input` in place of `function`."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients copy it from the chunks of a stream

    @model_validator(mode="before")
    @classmethod
    def _of_custom_tool(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "custom":
            return given
        match given.get("custom"):
            case {"name": str(name), "input": str(text)}:
                function = {"name": name, "arguments": arguments_of(text)}
                return {**given, "type": "function", "function": function}
        raise ValueError("needs custom, an object with the name and the input of the call")


class ChatMessage(OpenBody):
    """A message of any role; `content` is missing only in an assistant's, which may have had calls or thoughts alone.

    `reasoning` and `reasoning_content` are two names for one thing.
    """

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""

    @property
    def images(self) -> list[tuple[int, ImagePart]]:
        """The parts that are images, each with its index."""
        parts = self.content if isinstance(self.content, list) else []
        return [(index, part) for index, part in enumerate(parts) if isinstance(part, ImagePart)]

    @property
    def files(self) -> list[tuple[int, FilePart]]:
        """The parts that are documents, each with its index."""
        parts = self.content if isinstance(self.content, list) else []
        return [(index, part) for index, part in enumerate(parts) if isinstance(part, FilePart)]


def named_files(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """The ids of the uploaded files that a chat names, each with the path of the first parameter that does."""
    found: dict[str, str] = {}
    for index, message in enumerate(messages):
        parts = [(number, "image_url", part.image_url.file_id) for number, part in message.images]
        parts += [(number, "file", part.file.file_id) for number, part in message.files]
        for number, name, id in sorted(parts):
            if id is not None:
                found.setdefault(id, f"messages[{index}].content[{number}].{name}.file_id")
    return found


def has_named_files(request: object) -> bool:
    """Whether a request of any kind names uploaded files."""
    return bool(named_files(getattr(request, "messages", ())))


class Function(OpenBody):
    """`parameters` is a JSON Schema of an object; without it the function takes nothing."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    may_omit: Annotated[bool | None, Field(exclude=True)] = None  # strict as at Anthropic: properties may be optional


class FunctionTool(OpenBody):
    type: Literal["function"]
    function: Function


class InputGrammar(OpenBody):
    """What the input of a custom tool has to match as a whole: a regular expression, or a grammar in Lark that can be
    written as one, which may take a tenth of a second."""

    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Field(min_length=1, max_length=10_000)]


class InputFormat(OpenBody):
    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _grammar_where_due(self) -> InputFormat:
        if (self.grammar is not None) != (self.type == "grammar"):
            raise ValueError("must have grammar if and only if its type is grammar")
        return self


class Custom(OpenBody):
    """What a custom tool is called, and what it takes; without a `format` any text."""

    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(OpenBody):
    """A tool that takes a text instead of JSON."""

    type: Literal["custom"]
    custom: Custom

    @property
    def pattern(self) -> str | None:
        """What the whole text has to match. Raises `InvalidRequest` for a grammar that cannot be used."""
        grammar = self.custom.format.grammar if self.custom.format else None
        if grammar is None:
            return None
        if grammar.syntax == "regex":
            return grammar.definition
        try:
            return lark_pattern(grammar.definition)
        except ValueError as error:
            fault = f"tools: the grammar of {self.custom.name!r} cannot be used: {error}."
            raise InvalidRequest(fault, code="invalid_grammar", param="tools") from None

    @property
    def is_in_lark(self) -> bool:
        format = self.custom.format
        return format is not None and format.grammar is not None and format.grammar.syntax == "lark"

    @property
    def function(self) -> Function:
        """What the model sees."""
        return Function(
            name=self.custom.name,
            description=self.custom.description,
            parameters={
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
                "additionalProperties": False,
            },
        )


def _tool_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind == "custom" else "<function>"


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")], Discriminator(_tool_kind)
]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """A custom tool is named by `custom` in place of `function`."""

    type: Literal["function"]
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _of_custom_tool(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "custom" and given.keys() <= {"type", "custom"}:
            return {"type": "function", "function": given.get("custom")}
        return given


class JsonSchema(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class AllowedFunctions(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(Body):
    """Some of the request's tools, as if it had no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _choice_kind(value: object) -> str:
    if not isinstance(value, dict):
        return "<mode>"
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[
        Literal["none", "auto", "required"],
        BeforeValidator(lambda given: "required" if given == "any" else given),  # as Mistral's clients write it
        Tag("<mode>"),
    ]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(_choice_kind),
]


class ResponseFormat(Body):
    """`schema` beside `json_object` is llama.cpp's form of a schema; beside `json_schema` it is that of Together's
    clients, and llama.cpp's too."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="before")
    @classmethod
    def _of_others(cls, given: Any) -> Any:
        """Hugging Face's client turns a `json_schema` into a `json_object` with a `value`, and documents the type
        `json`."""
        if isinstance(given, dict) and given.keys() == {"type", "value"} and given["type"] in ("json", "json_object"):
            return {"type": "json_object", "schema": given["value"]}
        if isinstance(given, dict) and given.keys() == {"type", "schema"} and given["type"] == "json_schema":
            return {"type": "json_schema", "json_schema": {"name": "schema", "schema": given["schema"]}}
        return given

    @model_validator(mode="after")
    def _schema_where_due(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("must have json_schema if and only if its type is json_schema")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("may have schema only if its type is json_object")
        return self
