"""The tools of a Responses request: those that the client runs (functions, custom tools, and some of OpenAI's), MCP
servers whose tools Penstock runs, and the choice of tools that the model may or must call. What OpenAI's servers run is
ignored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ...base import MAX_TOOLS, ToolName, tool_name
from ...errors import InvalidRequest
from ...jobs import TOKEN_PATTERN
from ...loops import LoopTool, Source
from ..body import Body, OpenBody
from ..chat import Function, InputGrammar
from .base import by_type, type_tag
from .built_in_tools import DEFINITIONS


class _Direct(Body):
    """Tools that the model sees from the start and calls itself; `defer_loading` has no effect."""

    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: bool | None = None


class FunctionTool(Function, _Direct):
    """A function that the client runs."""

    type: Literal["function"]


class TextInput(Body):
    type: Literal["text"]


class GrammarInput(InputGrammar):
    type: Literal["grammar"]


class CustomTool(_Direct):
    """A tool of the client that takes a text instead of JSON; without a `format` any."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: (
        Annotated[
            Annotated[TextInput, Tag("<text>")] | Annotated[GrammarInput, Tag("<grammar>")],
            by_type("input_format", "a format of type text or grammar"),
        ]
        | None
    ) = None

    @property
    def in_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        custom = self.model_dump(include={"name", "description"}, exclude_none=True)
        if isinstance(self.format, GrammarInput):
            grammar = self.format.model_dump(include={"syntax", "definition"})
            custom["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": custom}


class LocalSkill(Body):
    name: str
    description: str
    path: str


class LocalEnvironment(Body):
    """The client's own machine, with the skills that it has there."""

    type: Literal["local"]
    skills: list[LocalSkill] | None = None


def _not_of_container(value: object) -> object:
    if isinstance(value, dict) and str(value.get("type")).startswith("container"):
        raise ValueError("must be of type local: the commands are for your program to run, there are no containers")
    return value


class BuiltInTool(_Direct):
    """A tool of OpenAI's that the client runs; the model sees a function of this name."""

    type: Literal["local_shell", "apply_patch"]

    @property
    def name(self) -> str:
        return self.type

    @property
    def in_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        return {"type": "function", "function": {"name": self.name, **DEFINITIONS[self.name]}}


class ShellTool(BuiltInTool):
    """Without an `environment`, too, the client runs the commands."""

    type: Literal["shell"]  # type: ignore[assignment]
    environment: Annotated[LocalEnvironment | None, BeforeValidator(_not_of_container)] = None

    @property
    def in_chat(self) -> dict[str, Any]:
        tool = super().in_chat
        if self.environment and self.environment.skills:
            skills = [f"{skill.name} (in {skill.path}): {skill.description}" for skill in self.environment.skills]
            told = "\n".join([tool["function"]["description"], "There are directories with instructions:", *skills])
            tool["function"]["description"] = told
        return tool


class NamespaceTool(_Direct):
    """Functions under a common name. `description` has no effect: the model sees those of the functions."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[FunctionTool]


class HostedTool(OpenBody):
    """A tool that OpenAI's servers run; the model does not see it."""

    type: str


_is_hosted = re.compile(
    r"(web_search(_preview)?|file_search|code_interpreter|image_generation|tool_search|computer(_use)?(_preview)?)"
    r"(_[0-9]{4}_[0-9]{2}_[0-9]{2})?"
).fullmatch


def hosted(tools: object) -> list[str]:
    """The types of a request's tools, not validated yet, that the model does not see."""
    kinds = [str(tool.get("type")) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [kind for kind in kinds if _is_hosted(kind)]


def namespaced(tools: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """The namespace and the name of each function in a namespace, by its name for the model. That is its own name,
    unless another function has it, too."""
    known = [*tools]
    own = [tool["name"] for tool in known if tool["type"] in ("function", "custom")]
    own += [tool["type"] for tool in known if tool["type"] in DEFINITIONS]
    inside = [(tool["name"], each["name"]) for tool in known if tool["type"] == "namespace" for each in tool["tools"]]
    times = Counter([*own, *(name for _, name in inside)])
    return {name if times[name] == 1 else tool_name(f"{space}__{name}"): (space, name) for space, name in inside}


class ToolNames(Body):
    tool_names: list[str]


class ApprovalFilter(Body):
    """`always` and `never` name tools. The others need approval, unless only `always` is given."""

    always: ToolNames | None = None
    never: ToolNames | None = None


def _as_filter(value: object) -> object:
    return {"tool_names": value} if isinstance(value, list) else value


class McpTool(_Direct):
    """The tools of an MCP server: the one at `server_url`, or a configured one named `server_label`.

    `server_description` has no effect: the model sees the descriptions of the tools. `sealed` holds `headers` and
    `authorization` encrypted.
    """

    type: Literal["mcp"]
    server_label: Annotated[str, Field(pattern=TOKEN_PATTERN)]
    # No user name or password: the URL is stored and shown.
    server_url: Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+([/?#]\S*)?$")] | None = None
    server_description: str | None = None
    allowed_tools: Annotated[
        ToolNames | None, BeforeValidator(_as_filter, json_schema_input_type=list[str] | ToolNames | None)
    ] = None
    require_approval: (
        Annotated[
            Annotated[Literal["always", "never"], Tag("<str>")] | Annotated[ApprovalFilter, Tag("<dict>")],
            by_type("approval_type", "always, never, or an object of these two"),
        ]
        | None
    ) = None
    headers: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")],
            Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")],
        ]
        | None,
        Field(repr=False),
    ] = None
    authorization: Annotated[str | None, Field(pattern=r"^[!-~]+$", repr=False)] = None
    sealed: Annotated[str | None, Field(repr=False)] = None

    @property
    def secrets(self) -> dict[str, str]:
        """The headers to send to the server."""
        token = {"Authorization": f"Bearer {self.authorization}"} if self.authorization else {}
        return (self.headers or {}) | token

    @property
    def source(self) -> Source:
        rule = self.require_approval
        approval: Literal["always", "never"] | tuple[str, ...] = rule if isinstance(rule, str) else "always"
        spared: tuple[str, ...] = ()
        if isinstance(rule, ApprovalFilter):
            always = tuple(rule.always.tool_names) if rule.always else ()
            if rule.never is None:
                approval = always if rule.always else "always"
            else:
                spared = tuple(name for name in rule.never.tool_names if name not in always)
        return Source(
            label=self.server_label,
            url=self.server_url,
            sealed=self.sealed,
            allowed=None if self.allowed_tools is None else tuple(self.allowed_tools.tool_names),
            approval=approval,
            spared=spared,
        )


def _tool_tag(value: Any) -> str:
    tag = type_tag(value)
    return "<hosted>" if _is_hosted(tag[1:-1]) else tag


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[ShellTool, Tag("<shell>")]
    | Annotated[BuiltInTool, Tag("<local_shell>")]
    | Annotated[BuiltInTool, Tag("<apply_patch>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[McpTool, Tag("<mcp>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(
        _tool_tag,
        custom_error_type="tool_kind",
        custom_error_message="Input should be a tool of type function, custom, shell, local_shell, apply_patch, "
        "namespace or mcp; there are no others",
    ),
]


Offered = FunctionTool | CustomTool | BuiltInTool | LoopTool  # what the model may call


class ChosenFunction(Body):
    """A function, or a custom tool."""

    type: Literal["function", "custom"]
    name: str

    def covers(self, tool: Offered) -> bool:
        return isinstance(tool, FunctionTool | CustomTool) and tool.name == self.name


class ChosenBuiltIn(Body):
    """OpenAI's API cannot choose `local_shell` by itself, only among allowed tools."""

    type: Literal["shell", "local_shell", "apply_patch"]

    @property
    def name(self) -> str:
        return self.type

    def covers(self, tool: Offered) -> bool:
        return isinstance(tool, BuiltInTool) and tool.name == self.name


class ChosenMcp(Body):
    """The named tool, or any, of the named server, or of any."""

    type: Literal["mcp"]
    server_label: str | None = None
    name: str | None = None

    def covers(self, tool: Offered) -> bool:
        return isinstance(tool, LoopTool) and self.server_label in (None, tool.label) and self.name in (None, tool.tool)


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[ChosenFunction, Tag("<function>")]
                | Annotated[ChosenFunction, Tag("<custom>")]
                | Annotated[ChosenBuiltIn, Tag("<shell>")]
                | Annotated[ChosenBuiltIn, Tag("<local_shell>")]
                | Annotated[ChosenBuiltIn, Tag("<apply_patch>")]
                | Annotated[ChosenMcp, Tag("<mcp>")],
                by_type("tool_kind", "a tool of type function, custom, shell, local_shell, apply_patch or mcp"),
            ]
        ],
        Field(min_length=1, max_length=MAX_TOOLS),
    ]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<str>")]
    | Annotated[ChosenFunction, Tag("<function>")]
    | Annotated[ChosenFunction, Tag("<custom>")]
    | Annotated[ChosenBuiltIn, Tag("<shell>")]
    | Annotated[ChosenBuiltIn, Tag("<apply_patch>")]
    | Annotated[ChosenMcp, Tag("<mcp>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")],
    by_type(
        "choice_kind",
        "none, auto, required, or an object of type function, custom, shell, apply_patch, mcp or allowed_tools",
    ),
]


def chosen(tools: Iterable[Offered], choice: ChosenFunction | ChosenBuiltIn | ChosenMcp) -> list[Offered]:
    """The tools that a choice covers. Raises `InvalidRequest` if there is none."""
    if found := [tool for tool in tools if choice.covers(tool)]:
        return found
    named = choice.model_dump(exclude={"type"}, exclude_none=True)
    fault = f"tool_choice: there is no tool with {', '.join(f'{key} {name!r}' for key, name in named.items())}."
    raise InvalidRequest(fault, param="tool_choice")
