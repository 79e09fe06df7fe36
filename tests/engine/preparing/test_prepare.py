"""From requests to prompts, parameters and forms; and what no template or tokenizer can honour, refused by its name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from templates import HERMES, THINKING
from tokenizers import AddedToken

from penstock.engine.grammar.matcher import GrammarCompiler
from penstock.engine.preparing.prepare import Prepared, Preparer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.openai.completions import ChatRequest, CompletionRequest, parse_request

Prepare = Callable[..., Prepared]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "sub"}}
USER = {"role": "user", "content": "Hi"}
# Thinking is switched off unless the client switches it on, as in the bundled model's template.
QUIET = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""
# It is on, and the model begins the thought itself, as with Qwen 3's template.
OPEN = QUIET.replace("is defined and enable_thinking", "is defined and not enable_thinking").replace(
    "<think>\n", "<think>\n\n</think>\n\n"
)
# It is off for good.
CLOSED = QUIET.replace("enable_thinking is defined and enable_thinking", "true").replace(
    "<think>\n", "<think>\n\n</think>\n\n"
)


@pytest.fixture(scope="module")
def tokenizers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {"plain": Tokenizer(tiny_model)}
    for name, template in {
        "hermes": HERMES,
        "thinking": THINKING,
        "quiet": QUIET,
        "open": OPEN,
        "closed": CLOSED,
    }.items():
        directory = tmp_path_factory.mktemp("models") / name
        shutil.copytree(tiny_model, directory)
        (directory / "chat_template.jinja").write_text(template)
        found[name] = Tokenizer(directory)
    return found


@pytest.fixture
def prepare(tokenizers: dict[str, Tokenizer]) -> Prepare:
    def run(template: str = "hermes", context_length: int = 1000, **body: Any) -> Prepared:
        endpoint: Any = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        request = parse_request(endpoint, {"model": "m", **({} if "prompt" in body else {"messages": [USER]}), **body})
        assert isinstance(request, ChatRequest | CompletionRequest)
        return Preparer(tokenizers[template]).prepare(request, context_length=context_length, name="m", seed=7)

    return run


@pytest.fixture
def text(tokenizers: dict[str, Tokenizer], prepare: Prepare) -> Callable[..., str]:
    """The prompt as the model reads it."""
    return lambda **body: tokenizers["plain"].decode(prepare(**body).prompts[0])


def test_tools_stand_in_the_prompt_unless_none_may_be_called(text: Callable[..., str]) -> None:
    assert '"add"' in text(tools=[TOOL, OTHER]) and '"sub"' in text(tools=[TOOL, OTHER])
    assert "add" not in text(tools=[TOOL], tool_choice="none")


def test_a_form_goes_along_where_there_is_something_to_read(prepare: Prepare) -> None:
    assert prepare().form is None
    form = prepare(tools=[TOOL, OTHER], tool_choice="required").form
    assert form is not None and (form.tool_format, form.choice) == ("hermes", "required")
    assert list(form.tools) == ["add", "sub"]
    named = prepare(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}}).form
    assert named is not None and named.choice == "named"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_as_if_there_were_no_others(prepare: Prepare, mode: str) -> None:
    allowed = prepare(tools=[TOOL, OTHER], tool_choice=allowing("sub", "sub", mode=mode))
    assert allowed == prepare(tools=[OTHER], tool_choice=mode) != prepare(tools=[TOOL, OTHER], tool_choice=mode)
    assert allowed.form is not None and list(allowed.form.tools) == ["sub"]


def test_marks_that_are_special_tokens_are_to_be_seen(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    tokenizer = Tokenizer(tmp_path)
    tokenizer.huggingface.add_tokens([AddedToken("<tool_call>", special=True)])
    tokenizer.huggingface.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    tokenizer.vocabulary_size = len(tokenizer.vocabulary)
    request = parse_request("/v1/chat/completions", {"model": "m", "messages": [USER], "tools": [TOOL]})
    assert isinstance(request, ChatRequest)
    prepared = Preparer(tokenizer).prepare(request, context_length=1000, name="m", seed=1)
    assert prepared.params.visible_token_ids == (tokenizer.vocabulary["<tool_call>"],)


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
def test_a_pattern_is_of_what_the_format_writes(tokenizers: dict[str, Tokenizer], format: str) -> None:
    """Qwen's XML has strings without quotes and escapes."""
    pattern = r'a\n"b'
    properties = {"text": {"type": "string", "pattern": f"^{pattern}$"}}
    parameters = {"type": "object", "properties": properties, "required": ["text"], "additionalProperties": False}
    function = {"name": "add", "parameters": parameters, "strict": True}
    custom = {"name": "run", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": pattern}}}
    for tool in ({"type": "function", "function": function}, {"type": "custom", "custom": custom}):
        body = {"model": "m", "messages": [USER], "tools": [tool], "tool_choice": "required"}
        request = parse_request("/v1/chat/completions", body)
        assert isinstance(request, ChatRequest)
        preparer = Preparer(tokenizers["hermes"], tool_format=format)
        grammar = preparer.prepare(request, context_length=1000, name="m", seed=1).params.grammar
        assert grammar is not None
        once = json.dumps(r'a\u{a}"b')[1:-1]
        twice = json.dumps(once)[1:-1]  # within a grammar of its own
        assert (once in grammar.text or twice in grammar.text) == (format == "qwen3_coder"), grammar.text


def test_a_tool_is_held_to_its_schema_where_all_of_it_can_be(prepare: Prepare) -> None:
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tight = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}

    def tool(parameters: dict[str, Any], strict: bool) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}

    for strict in (False, True):
        grammar = prepare(tools=[tool(tight, strict)]).params.grammar
        assert grammar is not None and '"enum": ["x"]' in grammar.text
    grammar = prepare(tools=[tool(loose, False)]).params.grammar
    assert grammar is not None and "uniqueItems" not in grammar.text
    with pytest.raises(InvalidRequest) as raised:
        prepare(tools=[tool({**tight, "properties": {"a": {"type": "array", "uniqueItems": True}}}, True)])
    assert raised.value.param == "tools[0].function.parameters.properties.a.uniqueItems"
    with pytest.raises(InvalidRequest):
        prepare(tools=[tool({"type": 5}, False)])


def test_many_tools_are_taken_and_the_strict_ones_held_to_their_schemas(
    prepare: Prepare, tokenizers: dict[str, Tokenizer]
) -> None:
    """Agents send the tools of several MCP servers at once; nobody waits for hundreds of schemas to compile."""

    def tool(number: int, strict: bool = False) -> dict[str, Any]:
        properties = {f"{name}_{number}": {"type": "string"} for name in ("path", "query", "limit", "format")}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if strict:
            parameters |= {"required": list(properties), "additionalProperties": False}
        function = {"name": f"mcp__server__tool_{number}", "parameters": parameters, "strict": strict}
        return {"type": "function", "function": function}

    def enforced(*tools: dict[str, Any]) -> set[int]:
        grammar = prepare(tools=[*tools], context_length=1_000_000).params.grammar
        assert grammar is not None
        GrammarCompiler(tokenizers["hermes"]).compile(grammar)
        assert all(f"mcp__server__tool_{number}\\" in grammar.text for number in range(len(tools)))
        return {int(number) for number in re.findall(r"path_(\d+)", grammar.text)}

    few, many = [tool(number) for number in range(100)], [tool(number) for number in range(1024)]
    assert enforced(*few) == {*range(100)}
    short = enforced(*many)
    assert 100 < len(short) < 300 and short == {*range(len(short))}  # the shortest, then the first
    assert enforced(*many[:-1], tool(1023, strict=True)) == {*short, 1023}
    named = {"type": "function", "function": {"name": "mcp__server__tool_7"}}
    grammar = prepare(tools=many, tool_choice=named, context_length=1_000_000).params.grammar
    assert grammar is not None and "path_7" in grammar.text and "tool_8" not in grammar.text
    with pytest.raises(InvalidRequest, match="at most 1024 items") as raised:
        prepare(tools=[*many, tool(1024)])
    assert raised.value.param == "tools"


def test_thoughts_are_read_and_switched_off(prepare: Prepare, text: Callable[..., str]) -> None:
    form = prepare("thinking").form
    assert form is not None and form.reasoning_format == "think" and form.thinking
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert text(template="thinking", **off).endswith("</think>\n\n")
        form = prepare("thinking", **off).form
        assert form is None or not form.thinking
    assert not text(template="thinking", reasoning_effort="high").endswith("</think>\n\n")


def test_a_turn_of_the_assistant_is_gone_on_with(text: Callable[..., str]) -> None:
    begun = [USER, {"role": "assistant", "content": "Once upon"}]
    assert text(messages=begun).endswith("assistant\nOnce upon")
    assert text(messages=begun, continue_final_message=False).endswith("<|im_start|>assistant\n")
    assert text(messages=begun, add_generation_prompt=True).endswith("<|im_start|>assistant\n")
    assert text(messages=[USER]).endswith("<|im_start|>assistant\n")


def test_calls_and_results_reach_the_template(text: Callable[..., str]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = text(
        messages=[
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "two"}]},
        ],
        tools=[TOOL],
    )
    assert '{"name": "add", "arguments": {"a": 1}}' in said and "tool\ntwo" in said


def test_a_completion_may_begin_with_its_prompt(prepare: Prepare, tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["plain"].encode("the end")
    form = prepare(prompt=[ids, ids[:1]], echo=True).form
    assert form is not None and form.echo == ("the end", tokenizers["plain"].decode(ids[:1]))
    assert prepare(prompt="x").form is None


def test_an_echo_tells_the_prompts_logprobs_and_may_stand_alone(prepare: Prepare) -> None:
    prepared = prepare(prompt="the end", echo=True, logprobs=1, max_tokens=0)
    assert prepared.form is not None and prepared.form.prompt_alone
    assert (prepared.params.prompt_logprobs, prepared.params.max_tokens) == (1, 1)


def test_special_tokens_are_shown_to_who_asks(prepare: Prepare, tokenizers: dict[str, Tokenizer]) -> None:
    assert prepare(prompt="x", skip_special_tokens=True).params.visible_token_ids == ()
    shown = prepare(prompt="x", skip_special_tokens=False).params.visible_token_ids
    assert set(shown) == tokenizers["plain"].special_token_ids


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", "object"),
        ({"response_format": {"type": "json_object", "schema": {"type": "string"}}}, "json_schema", "string"),
        ({"response_format": {"type": "json_object", "value": {"type": "number"}}}, "json_schema", "number"),
        ({"response_format": {"type": "json", "value": {"type": "number"}}}, "json_schema", "number"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
            "json_schema",
            "integer",
        ),
        ({"guided_json": {"type": "boolean"}}, "json_schema", "boolean"),
        ({"guided_regex": "[ab]+"}, "ebnf", "[ab]+"),
        ({"guided_choice": ["yes", "no"]}, None, "yes"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", "root"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "json_schema", "boolean"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "json_schema", "boolean"),
        ({"structured_outputs": {"regex": "[ab]+", "whitespace_pattern": None}}, "ebnf", "[ab]+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, None, "yes"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", "root"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", "object"),
        ({"regex": "[ab]+"}, "ebnf", "[ab]+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", "root"),
        ({"grammar": 'root ::= "a"'}, "ebnf", "root"),
        ({"json_schema": {"type": "boolean"}}, "json_schema", "boolean"),
        ({"json_schema": '{"type": "boolean"}'}, "json_schema", "boolean"),
    ],
)
def test_what_the_answer_must_look_like_becomes_a_grammar(
    prepare: Prepare, asked: dict[str, Any], kind: str | None, text: str
) -> None:
    prepared = prepare("plain", **asked)
    grammar = prepared.params.grammar
    assert grammar is not None and text in grammar.text
    assert kind is None or grammar.kind == kind
    ((name, form),) = asked.items()
    assert prepared.grammar_param == (f"{name}.{next(iter(form))}" if name == "structured_outputs" else name)
    assert prepare("plain").params.grammar is None


def test_the_grammar_that_was_asked_for_goes_along_where_a_thought_may_precede_it(prepare: Prepare) -> None:
    prepared = prepare("thinking", guided_regex="a+")
    assert prepared.asked_grammar is not None and "a+" in prepared.asked_grammar.text
    assert prepared.params.grammar not in (None, prepared.asked_grammar)
    assert prepare("plain", guided_regex="a+").asked_grammar is None
    assert prepare("thinking").asked_grammar is None
    schema = prepare("thinking", guided_json={"type": "boolean"})
    assert schema.params.grammar is not None and schema.asked_grammar is None


@pytest.mark.parametrize(
    ("template", "options", "thinks"),
    [
        ("quiet", {}, False),
        ("quiet", {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("quiet", {"reasoning_effort": "none"}, False),
        ("quiet", {"reasoning_effort": "high"}, True),
        ("open", {}, True),
        ("open", {"reasoning_effort": "high"}, True),
        ("open", {"reasoning_effort": "none"}, False),
        ("closed", {}, False),
    ],
)
def test_an_answer_that_a_grammar_binds_has_a_thought_only_if_thinking_is_on(
    prepare: Prepare, template: str, options: dict[str, Any], thinks: bool
) -> None:
    grammar = prepare(template, response_format={"type": "json_object"}, **options).params.grammar
    assert grammar is not None
    assert ("</think>" in grammar.text) == thinks


@pytest.mark.parametrize("name", ["regex", "ebnf", "grammar", "json_schema"])
def test_an_empty_grammar_is_none(prepare: Prepare, name: str) -> None:
    assert prepare("plain", **{name: {} if name == "json_schema" else ""}).params.grammar is None


def test_the_old_and_the_new_name_of_the_same_grammar_go_together(prepare: Prepare) -> None:
    """Guidance sends both, because it does not know the release of the server."""
    both = prepare("plain", guided_regex="[ab]+", structured_outputs={"regex": "[ab]+"})
    assert both.params.grammar == prepare("plain", guided_regex="[ab]+").params.grammar


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("plain", {"tools": [TOOL], "tool_choice": "required"}, "tools", "takes no tools"),
    ("hermes", {"tools": [TOOL, TOOL]}, "tools", "twice"),
    ("hermes", {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        "hermes",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "'x' is not in tools",
    ),
    ("hermes", {"tools": [TOOL], "tool_choice": allowing("add", "x")}, "tool_choice", "'x' is not in tools"),
    ("hermes", {"tool_choice": allowing("add")}, "tool_choice", "needs tools"),
    ("hermes", {"reasoning_effort": "high"}, "reasoning_effort", "does not reason"),
    ("hermes", {"continue_final_message": True}, "continue_final_message", "last message"),
    ("hermes", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ("hermes", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
    (
        "hermes",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "", "tool_call_id": "d"},
            ]
        },
        "messages[1].tool_call_id",
        "no earlier call has the id 'd'",
    ),
    ("hermes", {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ("hermes", {"structured_outputs": {"json": '{"a":' * 5_000}}, "structured_outputs.json", "not valid JSON"),
    ("hermes", {"structured_outputs": {"json": "[" * 500 + "]" * 500}}, "structured_outputs.json", "nested deeper"),
    ("hermes", {"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "must be an object"),
    (
        "hermes",
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.regex",
        "exclude each other",
    ),
    (
        "hermes",
        {"prompt": [1] * 1000, "n": 128, "echo": True, "logprobs": 0, "context_length": 20_000},
        "prompt_logprobs",
        "may have 781 tokens for n = 128",
    ),
    (
        "hermes",
        {"prompt": [1] * 5_000, "prompt_logprobs": 20, "context_length": 20_000},
        "prompt_logprobs",
        "may have 4,761 tokens",
    ),
    (
        "hermes",
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
        "Only",
    ),
    ("hermes", {"messages": [{"role": "user", "content": " "}]}, "messages", "blank"),
    ("hermes", {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ("hermes", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "exclude each other"),
    ("hermes", {"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "exclude each other"),
    ("hermes", {"guided_regex": "a", "regex": "a", "ebnf": 'root ::= "a"'}, "guided_regex", "exclude each other"),
    ("hermes", {"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar", "GBNF"),
    ("hermes", {"prompt": ["a"] * 100, "n": 2}, "n", "above 128"),
    ("hermes", {"prompt": " "}, "prompt", "blank"),
    ("hermes", {"prompt": [10**6]}, "prompt", "outside the vocabulary"),
    ("hermes", {"logit_bias": {"1000000": 1}}, "logit_bias", "outside the vocabulary"),
    ("hermes", {"context_length": 5}, "messages", "context length"),
]


@pytest.mark.parametrize(("template", "asked", "param", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    prepare: Prepare, template: str, asked: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        prepare(template, **asked)
    assert raised.value.param == param


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("body", [{"prompt": "x" * 3_000_000}, {"messages": [USER | {"content": "word " * 600_000}]}])
def test_a_prompt_that_is_far_too_long_is_refused_before_all_of_it_is_read(
    tokenizers: dict[str, Tokenizer], body: dict[str, Any]
) -> None:
    counting: Any = Counting(tokenizers["plain"])
    endpoint: Any = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    request = parse_request(endpoint, {"model": "m", **body})
    assert isinstance(request, ChatRequest | CompletionRequest)
    with pytest.raises(InvalidRequest, match=r"length is 1000 tokens, .*: more than \d+ tokens > 999 maximum") as error:
        Preparer(counting).prepare(request, context_length=1000, name="m", seed=7)
    assert error.value.code == "context_length_exceeded"
    assert counting.characters < 300_000


def test_a_long_prompt_that_fits_is_tokenised_as_a_whole(tokenizers: dict[str, Tokenizer], prepare: Prepare) -> None:
    long = "All the words of it. " * 5_000
    assert prepare("plain", context_length=500_000, prompt=long).prompts == [tokenizers["plain"].encode(long)]


AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from penstock.engine.preparing.prepare import load_preparer

begin = Barrier(4)


def load(_: int) -> int:
    begin.wait()
    return len(load_preparer(sys.argv[1], "paged", "auto", "auto").tokenizer.encode("hello"))


with ThreadPoolExecutor(4) as pool:
    print(*pool.map(load, range(4)))
"""


def test_two_that_load_a_model_at_once_both_get_it(tiny_model: Path, tmp_path: Path) -> None:
    """In a process that has not imported transformers, and where no tokenizer is kept: as at the first two requests."""
    own = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    loading = subprocess.run([sys.executable, "-c", AT_ONCE, tiny_model], env=own, capture_output=True, text=True)
    assert loading.returncode == 0, loading.stderr
    assert len(set(loading.stdout.split())) == 1
