"""OpenAI's Responses request, strictly typed, and the chat requests of its turns.

As in `completions`, a parameter acts, is accepted without effect, or is refused unless neutral. Responses always have
the model's thoughts in full and in plain text, so asking for a summary or for encrypted thoughts has no effect, and
neither has asking to include results of OpenAI's own tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, ValidationError

from ...base import MAX_TOOLS
from ...errors import InvalidRequest
from ...jobs import Priority, SubjectToken
from ...loops import LoopTool, Source
from ...params import GenerationParams
from ..body import Body, ModelName, Unsupported
from ..chat import JsonSchema
from ..completions import TIERS, parse_body, refusal
from .base import by_type
from .items import InputItem
from .tools import (
    AllowedTools,
    BuiltInTool,
    ChosenBuiltIn,
    ChosenFunction,
    ChosenMcp,
    CustomTool,
    FunctionTool,
    HostedTool,
    McpTool,
    NamespaceTool,
    Offered,
    Tool,
    ToolChoice,
    chosen,
    namespaced,
)

MAX_TURNS = 100
MAX_ITEMS = 5000  # of one request's input
LOGPROBS = "message.output_text.logprobs"

# Parameters that each turn copies from the response.
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}
_RENAMED = {"max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}
_SAME = _SAMPLING | {"model", "chat_template_kwargs", "parallel_tool_calls"}


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class TextOptions(Body):
    format: (
        Annotated[
            Annotated[PlainFormat, Tag("<text>")]
            | Annotated[PlainFormat, Tag("<json_object>")]
            | Annotated[SchemaFormat, Tag("<json_schema>")],
            by_type("format_kind", "a format of type text, json_object or json_schema"),
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None  # the chat template decides
    mode: Literal["standard"] | None = None


class StreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


def _bare_id(value: object) -> object:
    return value["id"] if isinstance(value, dict) and value.keys() == {"id"} else value


class ResponsesRequest(Body):
    """Body of `/v1/responses`. `max_output_tokens` limits all turns together; `max_turns`, `priority`, `timeout` and
    the sampling parameters behind it are Penstock's own."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "prompt": Unsupported(advice="send the instructions and the input, since Penstock stores no prompts"),
        "moderation": Unsupported(),
        "context_management": Unsupported((None, [])),
        "access_programs": Unsupported(),
        "image": Unsupported(),
        "prompt_cache_options": Unsupported((None, {})),
    }

    model: ModelName
    input: (
        Annotated[
            Annotated[str, Tag("<str>")] | Annotated[list[InputItem], Field(max_length=MAX_ITEMS), Tag("<list>")],
            by_type("input_type", "a string or a list of items"),
        ]
        | None
    ) = None
    instructions: str | None = None
    previous_response_id: SubjectToken | None = None
    conversation: Annotated[
        SubjectToken | None, BeforeValidator(_bare_id, json_schema_input_type=str | dict[Literal["id"], str] | None)
    ] = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: int | None = None
    include: list[Include] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: Priority | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted without effect.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # an input that is too long is refused in any case

    @property
    def client_tools(self) -> list[FunctionTool | CustomTool | BuiltInTool]:
        """The functions, under their names for the model, the custom tools, and those of OpenAI's."""
        inside = {
            (space.name, tool.name): tool
            for space in self.tools or ()
            if isinstance(space, NamespaceTool)
            for tool in space.tools
        }
        named = [inside[key].model_copy(update={"name": name}) for name, key in self.namespaced.items()]
        own = (tool for tool in self.tools or () if isinstance(tool, FunctionTool | CustomTool | BuiltInTool))
        return [*own, *named]

    @property
    def namespaced(self) -> dict[str, tuple[str, str]]:
        """See `response_tools.namespaced`."""
        kept: dict[str, Any] = {"type": True, "name": True, "tools": {"__all__": {"name"}}}
        return namespaced(tool.model_dump(include=kept) for tool in self.tools or ())

    @property
    def custom_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def built_in_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, BuiltInTool))

    @property
    def mcp_tools(self) -> list[McpTool]:
        return [tool for tool in self.tools or () if isinstance(tool, McpTool)]

    @property
    def wants_logprobs(self) -> bool:
        return wants_logprobs(self.top_logprobs, self.include)

    def sources(self, tenant: str = "default") -> tuple[Source, ...]:
        """The sources of the tools that Penstock runs. Raises `InvalidRequest` for a secret that is not sealed."""
        for index, tool in enumerate(self.tools or ()):
            if isinstance(tool, McpTool) and tool.secrets:
                param = f"tools[{index}].{'headers' if tool.headers else 'authorization'}"
                raise InvalidRequest(
                    f"{param}: send secrets only over HTTP, where the bridge encrypts them.", param=param
                )
        return tuple(tool.source.model_copy(update={"tenant": tenant}) for tool in self.mcp_tools)

    def chat_body(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[LoopTool],
        *,
        first: bool,
        tools_allowed: bool,
        spent: int = 0,
    ) -> dict[str, Any]:
        """The chat request of one turn. `tools` are those that are run here, and may be called if `tools_allowed`; only
        the `first` turn can be forced to. `spent` output tokens of the response are gone; some must be left.

        Raises `InvalidRequest` for a choice of what no server has, and for too many tools.
        """
        body = self.model_dump(include=_SAME, exclude_none=True)
        body |= {"messages": messages, "add_generation_prompt": True}
        if self.max_output_tokens is not None:
            body["max_completion_tokens"] = self.max_output_tokens - spent
        if self.reasoning and (effort := self.reasoning.effort):
            body["reasoning_effort"] = "xhigh" if effort == "max" else effort
        if self.wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        match self.text and self.text.format:
            case SchemaFormat() as form:
                schema = form.model_dump(exclude={"type"}, by_alias=True, exclude_none=True)
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            case PlainFormat(type="json_object"):
                body["response_format"] = {"type": "json_object"}
        offered, choice = self._offer([*self.client_tools, *tools], first)
        if len(offered) > MAX_TOOLS:
            fault = f"tools: {len(offered)} functions and tools of servers exceed {MAX_TOOLS}; use allowed_tools."
            raise InvalidRequest(fault, param="tools")
        if offered:
            body["tools"] = [
                tool.in_chat if isinstance(tool, CustomTool | BuiltInTool) else _in_chat(tool) for tool in offered
            ]
            body["tool_choice"] = choice if tools_allowed else "none"
        return body

    def offered(self, tools: Sequence[LoopTool], *, first: bool) -> list[Offered]:
        """The tools of the chat request of a turn, in their order; the parameters are those of `chat_body`."""
        return self._offer([*self.client_tools, *tools], first)[0]

    def _offer(self, tools: list[Offered], first: bool) -> tuple[list[Offered], str | dict[str, Any]]:
        """The tools that the model sees, and the chat's `tool_choice`."""
        match self.tool_choice:
            case AllowedTools(mode=mode, tools=choices):
                covered = {id(tool) for choice in choices for tool in chosen(tools, choice)}
                return [tool for tool in tools if id(tool) in covered], mode if first else "auto"
            case ChosenFunction() | ChosenBuiltIn() | ChosenMcp() as choice if first:
                found = chosen(tools, choice)
                if choice.name is None:
                    return found, "required"
                return tools, {"type": "function", "function": {"name": found[0].name}}
            case str(mode) if first or mode == "none":
                return tools, mode
        return tools, "auto"


def _in_chat(tool: FunctionTool | LoopTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}


def wants_logprobs(top_logprobs: int | None, include: Sequence[str] | None) -> bool:
    """Whether a request with these two parameters asks for log-probabilities."""
    return bool(top_logprobs) or LOGPROBS in (include or ())


def parse_responses(body: dict[str, Any]) -> ResponsesRequest:
    """Validate a body. Raises `InvalidRequest` with OpenAI's `param` and `code`."""
    request = parse_body(ResponsesRequest, body)
    values = request.model_dump(include=_SAMPLING | _RENAMED.keys(), exclude_none=True)
    if values.get("top_p") == 0:  # which a turn understands
        del values["top_p"]
    try:
        GenerationParams.model_validate({_RENAMED.get(name, name): value for name, value in values.items()})
    except ValidationError as error:
        raise refusal(error, {engine: client for client, engine in _RENAMED.items()}) from None
    if not request.input and request.previous_response_id is None and request.conversation is None:
        raise InvalidRequest("input is missing.", code="missing_required_parameter", param="input")
    for param, fault in _faults(request):
        raise InvalidRequest(f"{param}: {fault}.", param=param)
    return request


def _faults(request: ResponsesRequest) -> Iterable[tuple[str, str]]:
    """The faults that involve several parameters: the param and the fault of each."""
    if request.conversation is not None and request.previous_response_id is not None:
        yield "previous_response_id", "cannot be combined with conversation; give one of the two"
    if request.priority and request.service_tier and TIERS[request.service_tier] != request.priority:
        yield "service_tier", "differs from priority; give one of the two"
    if request.stream_options is not None and not request.stream:
        yield "stream_options", "is only allowed with stream: true"
    if request.background and request.store is False:
        yield "background", "needs store; leave store out"
    names: set[str] = set()
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, HostedTool):
            continue
        if isinstance(tool, NamespaceTool) and len({one.name for one in tool.tools}) < len(tool.tools):
            yield f"tools[{index}].tools", "two functions have the same name; rename one"
        part, name = ("server_label", tool.server_label) if isinstance(tool, McpTool) else ("name", tool.name)
        part = "type" if isinstance(tool, BuiltInTool) else part
        kind = "function" if isinstance(tool, CustomTool | BuiltInTool) else tool.type  # the model sees no difference
        if (key := f"{kind} {name}") in names:
            yield f"tools[{index}].{part}", f"{name!r} is defined twice; rename one"
        names.add(key)
        if isinstance(tool, McpTool):
            if tool.authorization and any(header.lower() == "authorization" for header in tool.headers or ()):
                yield f"tools[{index}].authorization", "headers have an Authorization, too; give one"
            if tool.sealed is not None and tool.secrets:
                yield f"tools[{index}].sealed", "cannot be combined with headers or authorization"
    if len(request.namespaced) < sum(
        len(tool.tools) for tool in request.tools or () if isinstance(tool, NamespaceTool)
    ):
        yield "tools", "two functions of namespaces have the same name for the model; rename one"
    built_in = {tool.name for tool in request.client_tools if isinstance(tool, BuiltInTool)}
    functions = {tool.name for tool in request.client_tools} - built_in
    labels = {tool.server_label for tool in request.mcp_tools}
    choice = request.tool_choice
    if choice == "required" and not names:
        yield "tool_choice", "needs tools"
    choices = choice.tools if isinstance(choice, AllowedTools) else [] if isinstance(choice, str | None) else [choice]
    for one in choices:
        if isinstance(one, ChosenFunction) and one.name not in functions:
            yield "tool_choice", f"there is no function {one.name!r}"
        if isinstance(one, ChosenBuiltIn) and one.name not in built_in:
            yield "tool_choice", f"there is no tool of type {one.name!r}"
        if isinstance(one, ChosenMcp) and not any(one.server_label in (None, label) for label in labels):
            yield "tool_choice", f"there is no server {one.server_label!r}"
