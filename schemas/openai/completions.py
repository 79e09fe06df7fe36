"""OpenAI's request bodies, strictly typed, and the meaning of each parameter.

Three kinds of parameter: those that act, those that change nothing about the answer (accepted), and those that would
change it and cannot be honoured (refused unless they hold their neutral value). Anything else is unknown, and refused
here: over HTTP the bridge has left it out, unless it is strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from ..base import MAX_TOOLS
from ..bounds import MOST_LISTED, in_words_of_json, listed
from ..errors import InvalidRequest
from ..jobs import Endpoint, Priority
from ..models.catalogue import parse_keep_alive
from ..params import GenerationParams, PlugInUses
from .body import Body, ModelName, OpenBody, Unsupported
from .chat import MOST_MESSAGES, ChatMessage, ResponseFormat, Tool, ToolChoice
from .content import TextPart
from .embeddings import EmbeddingRequest, PooledRequest
from .prompts import Prompt, as_list
from .rerank import RerankRequest

Kind = TypeVar("Kind", bound=Body)

TIERS: dict[str, Priority] = {"priority": "high", "auto": "normal", "default": "normal", "flex": "low"}


_UNSUPPORTED = {
    "functions": Unsupported((None, []), "send tools"),
    "function_call": Unsupported((None, "none"), "send tools and tool_choice"),
    "modalities": Unsupported((None, ["text"])),
    "audio": Unsupported(),
    "web_search_options": Unsupported(),
    "verbosity": Unsupported((None, "medium")),
    "moderation": Unsupported(),
    "store": Unsupported((None, False)),
    # Parameters of vLLM, SGLang and llama.cpp.
    "use_beam_search": Unsupported((None, False)),
    "include_stop_str_in_output": Unsupported((None, False)),
    "bad_words": Unsupported((None, []), "use logit_bias"),
    "allowed_token_ids": Unsupported((None, []), "use structured_outputs"),
    "truncate_prompt_tokens": Unsupported(advice="shorten the prompt; Penstock never truncates one"),
    "chat_template": Unsupported(advice="the model's own is used; chat_template_kwargs are its variables"),
    "documents": Unsupported((None, []), "put them into messages"),
    "structural_tag": Unsupported(advice="send response_format"),
}


def _is_stop(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise ValueError("must be a string or a list of strings")


def _no_limit(value: int | None) -> int | None:
    return None if value in (-1, 0) else value


def _no_maximum(value: int | None) -> int | None:
    return None if value == -1 else value


Maximum = Annotated[int | None, AfterValidator(_no_maximum)]  # in llama.cpp and LM Studio -1 means no maximum
Stop = Annotated[str | list[str], BeforeValidator(_is_stop)]


class StreamOptions(OpenBody):
    """`continuous_usage_stats`: every chunk has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """vLLM's newer names of the `guided_` parameters; exactly one is given."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None
    # Accepted without effect.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    seconds = parse_keep_alive(value)
    return -1.0 if seconds is None else seconds


KeepAlive = Annotated[float | None, BeforeValidator(_seconds)]


class _Sampling(Body):
    unsupported: ClassVar[Mapping[str, Unsupported]] = _UNSUPPORTED

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Maximum = None
    fit_max_tokens: bool | None = None  # reduce max_tokens to what the prompt leaves, instead of refusing it
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int | None, AfterValidator(_no_limit)] = None  # in vLLM -1 and 0 mean no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # its name in llama.cpp and Ollama
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # these two have SGLang's names, the next two llama.cpp's
    ebnf: str | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None
    json_schema: dict[str, Any] | str | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    keep_alive: KeepAlive = None  # how long the model stays loaded after this, in one of Ollama's forms
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    # Generation plug-ins that the operator allows, by name, or as objects with name and arguments.
    logits_processors: PlugInUses | None = None
    stopping_criteria: PlugInUses | None = None
    clean_ups: PlugInUses | None = None
    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Prediction(OpenBody):
    """What the client expects much of the answer to be."""

    type: Literal["content"]
    content: str | list[TextPart]


class ChatRequest(_Sampling):
    """Body of `/v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **_UNSUPPORTED,
        "prompt": Unsupported(advice="send messages, or ask /v1/completions"),
        "best_of": Unsupported((None, 1), "ask for n"),
        "echo": Unsupported((None, False), "ask /v1/completions"),
        "suffix": Unsupported((None, ""), "ask /v1/completions"),
        "add_special_tokens": Unsupported((None, False), "the chat template writes every special token itself"),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Maximum = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None  # changes nothing: what repeats the prompt is predicted from there anyway


class CompletionRequest(_Sampling):
    """Body of `/v1/completions`. A list of prompts gets `n` choices for each, in order."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **_UNSUPPORTED,
        "messages": Unsupported(advice="send a prompt, or ask /v1/chat/completions"),
        "prediction": Unsupported(advice="ask /v1/chat/completions"),
    }

    prompt: Prompt
    suffix: str | None = None  # what follows the answer, for models that fill gaps
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return as_list(self.prompt)


Request = ChatRequest | CompletionRequest

KINDS: dict[Endpoint, type[Request | PooledRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
}


def parse_body(kind: type[Kind], body: dict[str, Any]) -> Kind:
    """Validate a body. Raises `InvalidRequest` with OpenAI's `param` and `code`."""
    try:
        return kind.model_validate(kind.supported(body))
    except ValidationError as error:
        raise refusal(error) from None


def parse_request(endpoint: Endpoint, body: dict[str, Any]) -> Request | PooledRequest:
    """Validate a body for its endpoint. Raises `InvalidRequest` with OpenAI's `param` and `code`."""
    request = parse_body(KINDS[endpoint], body)
    if request.priority and request.service_tier and TIERS[request.service_tier] != request.priority:
        raise InvalidRequest("priority and service_tier differ; give one.", param="service_tier")
    if isinstance(request, PooledRequest):
        return request
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true.", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs needs an answer that does not stream.", param="prompt_logprobs")
    return request


def generation_params(request: Request, *, room: int, seed: int) -> GenerationParams:
    """The engine's parameters. `room` is the number of tokens that the prompt leaves, `seed` the default seed.

    Raises `InvalidRequest` for a value out of range.
    """
    names: dict[str, str] = {}  # the client's names of parameters, where they differ
    values: dict[str, Any] = {
        name: value
        for name in GenerationParams.model_fields
        if name not in ("logprobs", "stop") and (value := getattr(request, name, None)) is not None
    }
    values.setdefault("seed", seed)
    if request.top_p == 0:  # which leaves the likeliest token alone
        values |= {"top_p": 1.0, "temperature": 0.0}
    if request.repeat_penalty is not None:
        names["repetition_penalty"] = "repeat_penalty"
        if request.repetition_penalty not in (None, request.repeat_penalty):
            raise InvalidRequest("repetition_penalty and repeat_penalty differ; give one.", param="repeat_penalty")
        values["repetition_penalty"] = request.repeat_penalty
    if request.stop is not None:
        values["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if isinstance(request, ChatRequest):
        names["logprobs"] = "top_logprobs"
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
            if request.max_tokens not in (None, request.max_completion_tokens):
                raise InvalidRequest("max_tokens and max_completion_tokens differ; give one.", param="max_tokens")
            values["max_tokens"] = request.max_completion_tokens
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
        values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    else:
        values["logprobs"] = request.logprobs
        if request.echo:
            if request.suffix:
                raise InvalidRequest("echo cannot be combined with suffix; leave one out.", param="echo")
            if request.prompt_logprobs not in (None, request.logprobs):
                raise InvalidRequest("With echo, prompt_logprobs must be logprobs.", param="prompt_logprobs")
            values["prompt_logprobs"] = request.logprobs
            values["max_tokens"] = request.max_tokens or (1 if request.max_tokens == 0 else room)
        if request.best_of not in (None, request.n or 1):
            fault = f"best_of is not supported beside an n of {request.n or 1}; leave it out."
            raise InvalidRequest(fault, code="unsupported_parameter", param="best_of")
    if values.get("max_tokens", 0) > room and not request.fit_max_tokens:
        param = names.get("max_tokens", "max_tokens")
        raise InvalidRequest(
            f"{param} is {values['max_tokens']}, but of this model's maximum context length the prompt leaves {room} "
            "tokens.",
            code="context_length_exceeded",
            param=param,
        )
    values["max_tokens"] = min(values.get("max_tokens", room), room)
    try:
        return GenerationParams.model_validate(values)
    except ValidationError as error:
        raise refusal(error, names) from None


def refusal(error: ValidationError, names: Mapping[str, str] = MappingProxyType({})) -> InvalidRequest:
    """An error with the `param` and `code` of the first fault, and all faults in its message."""
    if (count := error.error_count()) > MOST_LISTED:
        return InvalidRequest(f"The body has {count:,} faults; see /docs for its schema.")
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    paths = [_path((names.get(str(fault["loc"][0]), fault["loc"][0]), *fault["loc"][1:])) for fault in faults]
    sentences = []
    for fault, path in zip(faults, paths, strict=True):
        match fault["type"]:
            case "missing":
                sentences.append(f"{path} is missing.")
            case "extra_forbidden":
                sentences.append(f"{path} is not a known parameter.")
            case _:
                sentences.append(f"{path}: {in_words_of_json(fault)}.")
    codes = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
    kind = faults[0]["type"]
    code = codes.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return InvalidRequest(" ".join(listed(sentences, count)), code=code, param=paths[0])


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, str) and part.startswith("<"):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
