"""Turns an OpenAI request into what the engine runs: prompts in tokens, parameters, and how to read the answer.

There is one `Preparer` for each model. It refuses what the model's chat template cannot express and what its tokenizer
does not know, before anything runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from threading import Lock
from typing import Any, Literal, NamedTuple

from ...schemas.errors import InvalidRequest, prompt_too_long
from ...schemas.jobs import Form
from ...schemas.openai.chat import AllowedTools, ChatMessage, CustomTool, NamedTool, Tool
from ...schemas.openai.completions import ChatRequest, CompletionRequest, generation_params
from ...schemas.openai.embeddings import EmbeddingRequest, PooledRequest
from ...schemas.params import MAX_CHOICES, GenerationParams, Grammar
from ..grammar.json_schema import json_schema_grammar
from ..grammar.patterns import Strings, check_pattern
from ..grammar.tool_grammar import answer_grammar
from ..request import check_ids, check_scores
from ..text.forms import choose_form, ends_in_thought, markers
from ..text.tokenizer import Tokenizer, load_tokenizer
from ..text.tokenizer_port import TokenizerLike, encode_within
from ..text.tool_formats import TOOL_FORMATS
from ..vision.chat import NOTHING, Fetched
from ..vision.images import PromptImage
from ..vision.reading import ANY, ImageLimits
from ..vision.sight import NO_SIGHT, Sight, load_sight
from .chat_checks import check_messages
from .documents import with_contents
from .infill import Infill
from .pooled_inputs import prepare_pooled, refuse_pooled
from .response_grammar import response_grammar
from .thinking import may_think, switch_thinking

# Template variables that a client may not set: they would replace the template, or are options of its renderer.
_NOT_FOR_TEMPLATES = frozenset(
    {
        *("self", "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "sanitize_control_tokens"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
# Characters of schemas that are enforced unasked; with 150,000 tokens in the vocabulary they take 2 s to compile.
_MOST_ENFORCED = 40_000

Choice = Literal["none", "auto", "required", "named"]  # whether a model calls tools


class Prepared(NamedTuple):
    """A request for the engine. `prompts` holds token ids; choice `c` belongs to prompt `c // params.n`."""

    prompts: list[list[int]]
    params: GenerationParams
    form: Form | None = None
    dimensions: int | None = None
    grammar_param: str = ""  # the request parameter that the grammar comes from
    asked_grammar: Grammar | None = None  # no schema; where `params.grammar` allows a thought or calls beside it
    images: tuple[PromptImage, ...] = ()  # of the first prompt


_loading = Lock()  # of two threads that import transformers at the same time, one finds half of it


def load_preparer(
    source: str, backend: str, tool_format: str, reasoning_format: str, limits: ImageLimits = ANY
) -> Preparer:
    """Load the preparer of a model, as its card describes it. Raises `ModelLoadError` and `ConfigurationError`."""
    with _loading:
        tokenizer, sight = load_tokenizer(source, backend), load_sight(source, backend, limits)
        sight.warm()
    return Preparer(tokenizer, tool_format=tool_format, reasoning_format=reasoning_format, sight=sight)


class Preparer:
    """Prepares requests for one model; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        sight: Sight = NO_SIGHT,
    ) -> None:
        """The formats are names in the engine's tables, "auto" or "none". Raises `ConfigurationError`."""
        self.tokenizer = tokenizer
        self._sight = sight
        self._infill = Infill(tokenizer)
        self.fills_gaps = self._infill.is_known
        self.form = choose_form(
            tokenizer.chat_template,
            tokenizer.vocabulary,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self._sight.processor is not None

    @property
    def limits(self) -> ImageLimits | None:
        """Of images; None if the model sees none."""
        return self._sight.limits if self.sees else None

    def prepare(
        self,
        request: ChatRequest | CompletionRequest | PooledRequest,
        *,
        context_length: int,
        name: str,
        seed: int,
        fetched: Fetched = NOTHING,
    ) -> Prepared:
        """Prepare a request; `name` is the model's, for error messages; `seed` is for a request without one, `fetched`
        has the files of images that are not in it, by URL or by id.

        Raises `InvalidRequest`.
        """
        if isinstance(request, PooledRequest):
            inputs = prepare_pooled(request, self.tokenizer, context_length=context_length, name=name)
            dimensions = request.dimensions if isinstance(request, EmbeddingRequest) else None
            return Prepared(inputs, GenerationParams(max_tokens=1), dimensions=dimensions)
        refuse_pooled(self.tokenizer, name)
        form: Form | None
        images: tuple[PromptImage, ...] = ()
        grammar, param = response_grammar(request)
        asked = grammar
        match request:
            case ChatRequest():
                request = with_contents(request, self.limits)
                tools, choice, named = _tools(request)
                given = self._sight.look(request.messages, name, fetched)
                is_bound = grammar is not None or choice in ("required", "named")
                text, form, thinks = self._chat(request, tools, choice, is_bound)
                ids, images = self._sight.encode(text, given, self.tokenizer, context_length)
                prompts = [ids]
                if form is not None:
                    custom = _inputs(tools, form.tool_format)
                    grammar = answer_grammar(
                        form,
                        tool_choice=choice,
                        named=named,
                        parallel=request.parallel_tool_calls is not False,
                        schemas=_schemas(tools, named, form.tool_format, custom),
                        inputs=custom,
                        response=grammar,
                        thinks=thinks,
                    )
                param = param or "tools"
            case CompletionRequest():
                if len(request.prompts) * (request.n or 1) > MAX_CHOICES:
                    raise InvalidRequest(f"Prompts times n is above {MAX_CHOICES}; ask for fewer.", param="n")
                prompts = [self._completion(request, prompt, context_length) for prompt in request.prompts]
                echoed = tuple(map(self.tokenizer.decode, prompts)) if request.echo else ()
                form = Form(echo=echoed, prompt_alone=request.max_tokens == 0) if request.echo else None
        longest = max(map(len, prompts))
        if longest >= context_length:
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise prompt_too_long(longest, context_length, param=param)
        params = generation_params(request, room=context_length - longest, seed=seed)
        if isinstance(request, CompletionRequest) and request.suffix and not params.ignore_eos:
            ends = tuple(dict.fromkeys((*params.stop_token_ids, *self._infill.end_ids)))
            params = params.model_copy(update={"stop_token_ids": ends})
        check_scores(params, sum(map(len, prompts)))
        check_ids(params.logit_bias, "logit_bias", self.tokenizer.vocabulary_size)
        check_ids(params.stop_token_ids, "stop_token_ids", self.tokenizer.vocabulary_size)
        if grammar is not None and not isinstance(self.tokenizer, Tokenizer):
            raise InvalidRequest(
                f"{param} needs a model with a vocabulary; {name} has none, so leave it out.",
                code="unsupported_parameter",
                param=param,
            )
        shown = self.tokenizer.special_token_ids
        if request.skip_special_tokens is not False:  # only those that the form's parser looks for
            marks = markers(form) if form else ()
            shown = shown.intersection([self.tokenizer.vocabulary.get(mark, -1) for mark in marks])
        visible = tuple(sorted(shown))
        if grammar is not None or visible:
            params = params.model_copy(update={"grammar": grammar, "visible_token_ids": visible})
        if asked == grammar or (asked is not None and asked.kind == "json_schema"):
            asked = None  # what a schema allows has been looked at already
        return Prepared(prompts, params, form, grammar_param=param, asked_grammar=asked, images=images)

    def _chat(
        self, request: ChatRequest, tools: Sequence[Tool], choice: Choice, is_bound: bool
    ) -> tuple[str, Form | None, bool]:
        """The prompt, how to read its answer, and whether one that `is_bound` by a grammar may begin with a thought."""
        check_messages(request.messages)
        if tools and self.form.tool_format is None:
            raise InvalidRequest(
                "This model's chat template takes no tools, or uses an unknown format; leave them out, or name the "
                "format with --tool-format.",
                code="unsupported_parameter",
                param="tools",
            )
        functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
        definitions = [{"type": "function", "function": function} for function in functions] or None
        messages = [self._sight.mark(message, _for_template(message), self.tokenizer) for message in request.messages]
        options, render = self._options(request), self.tokenizer.render_chat
        text = render(messages, definitions, **options)
        form = Form(
            tool_format=self.form.tool_format if tools else None,
            reasoning_format=self.form.reasoning_format,
            tools={tool.function.name: tool.function.parameters or {} for tool in tools},
            thinking=ends_in_thought(text, self.form),
            choice="auto" if choice == "none" else choice,
        )
        read = form.tool_format is not None or form.reasoning_format is not None
        thinks = not is_bound or may_think(
            text, form, options, self.tokenizer.chat_template, lambda other: render(messages, definitions, **other)
        )
        return text, form if read else None, thinks

    def _options(self, request: ChatRequest) -> dict[str, Any]:
        """The chat template's variables."""
        options = dict(request.chat_template_kwargs or {})
        if taken := sorted(options.keys() & _NOT_FOR_TEMPLATES):
            raise InvalidRequest(
                f"{', '.join(taken)}: not for the chat template; leave it out.", param="chat_template_kwargs"
            )
        if (effort := request.reasoning_effort) is not None:
            switch_thinking(options, effort, self.tokenizer.chat_template, self.form)
        last = request.messages[-1]
        continues = last.role == "assistant" and not last.tool_calls and bool(last.text.strip())
        if request.add_generation_prompt is not None:
            options["add_generation_prompt"] = request.add_generation_prompt
            continues = continues and not request.add_generation_prompt
        if request.continue_final_message is not None:
            if request.continue_final_message and not continues:
                raise InvalidRequest(
                    "Only a last message of the assistant, with text, can be continued; send one.",
                    param="continue_final_message",
                )
            continues = request.continue_final_message
        if continues:
            options["continue_final_message"] = True
        return options

    def _completion(self, request: CompletionRequest, prompt: str | list[int], context_length: int) -> list[int]:
        adds = request.add_special_tokens is not False
        if not request.suffix and (not prompt or (isinstance(prompt, str) and not prompt.strip())):
            raise InvalidRequest("The prompt is blank; send some text.", code="empty_prompt", param="prompt")
        if isinstance(prompt, list):
            check_ids(prompt, "prompt", self.tokenizer.vocabulary_size)
        if request.suffix:
            return self._infill.prompt(prompt, request.suffix, context_length, add_special_tokens=adds)
        if isinstance(prompt, list):
            return prompt
        return encode_within(self.tokenizer, prompt, context_length, "prompt", add_special_tokens=adds)


def _for_template(message: ChatMessage) -> dict[str, Any]:
    values = message.model_dump(exclude_none=True)
    if thought := message.reasoning_content or message.reasoning:
        values |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
    return values


def _tools(request: ChatRequest) -> tuple[Sequence[Tool], Choice, str | None]:
    """The tools that the model may call, whether it must, and the name of the one that it must call, if any."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise InvalidRequest(f"tools: {', '.join(twice)} is defined twice; define it once.", param="tools")
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools; send some, or leave it out.", param="tool_choice")
    if not tools or choice == "none":
        return [], "none", None
    allowed = choice.allowed_tools if isinstance(choice, AllowedTools) else None
    chosen = allowed.tools if allowed else [choice] if isinstance(choice, NamedTool) else []
    known = set(names)
    if absent := [each.function.name for each in chosen if each.function.name not in known]:
        raise InvalidRequest(f"tool_choice: {absent[0]!r} is not in tools.", param="tool_choice")
    if allowed:
        kept = {each.function.name for each in allowed.tools}
        return [tool for tool in tools if tool.function.name in kept], allowed.mode, None
    if isinstance(choice, NamedTool):
        return tools, "named", choice.function.name
    return tools, "required" if choice == "required" else "auto", None


def _schemas(
    tools: Sequence[Tool], named: str | None, format: str | None, inputs: Collection[str]
) -> dict[str, dict[str, Any]]:
    """The schemas that the grammar of the tool format enforces on arguments, but for tools in `inputs`, and of the tool
    `named` alone if there is one; of those that are not strict only ones of which all can be enforced, and as many as
    are short enough together, the shortest first.

    Raises `InvalidRequest` for an invalid schema, and for a strict one that cannot be enforced.
    """
    strings = _strings_of(format)
    schemas: dict[str, dict[str, Any]] = {}
    free: dict[str, int] = {}  # the lengths of those that are not strict
    for index, tool in enumerate(tools):
        function = tool.function
        if function.parameters is None or function.name in inputs:
            continue
        path = f"tools[{index}].function.parameters"
        try:
            strict = bool(function.strict and not function.may_omit)
            counts = bool(function.strict)
            text = json_schema_grammar(
                function.parameters, path=path, strict=strict, strings=strings, counts=counts
            ).text
        except InvalidRequest as error:
            if function.strict or error.code != "unsupported_schema":
                raise
            continue
        if named not in (None, function.name):
            continue
        schemas[function.name] = json.loads(text)
        if not function.strict:
            free[function.name] = len(text)
    left = _MOST_ENFORCED
    for name, length in sorted(free.items(), key=lambda one: one[1]):
        left -= length
        if left < 0:
            del schemas[name]
    return schemas


def _inputs(tools: Sequence[Tool], format: str | None) -> dict[str, str]:
    """What the texts for custom tools have to match, as the tool format writes them, by the tools' names.

    Raises `InvalidRequest` for a pattern that cannot be enforced.
    """
    strings: Strings = "raw" if _strings_of(format) == "raw" else "escaped"
    return {
        tool.custom.name: check_pattern(pattern, f"tools[{index}].custom.format", strings=strings)
        for index, tool in enumerate(tools)
        if isinstance(tool, CustomTool) and (pattern := tool.pattern) is not None
    }


def _strings_of(format: str | None) -> Strings:
    """How a tool format writes the strings among a call's arguments."""
    return "raw" if format in TOOL_FORMATS and TOOL_FORMATS[format].layout.style == "qwen_xml" else "plain"
