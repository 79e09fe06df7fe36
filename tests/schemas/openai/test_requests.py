"""OpenAI bodies: every fault is refused with the parameter that has it, and nothing is bent into range."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.jobs import Endpoint
from penstock.schemas.openai.body import Body
from penstock.schemas.openai.completions import ChatRequest, CompletionRequest, generation_params, parse_request
from penstock.schemas.params import MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS, GenerationParams

EXAMPLES = settings(max_examples=200, deadline=None)
CHAT: Endpoint = "/v1/chat/completions"
COMPLETION: Endpoint = "/v1/completions"
KINDS: dict[Endpoint, type[Body]] = {CHAT: ChatRequest, COMPLETION: CompletionRequest}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
ROOM = 1000  # tokens that the context leaves

words = st.text(st.characters(codec="utf-8"), max_size=20)
objects = st.dictionaries(words, st.integers(), min_size=1, max_size=2)
fractions = st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer())
no_number = words | st.booleans() | st.lists(st.integers(), max_size=2) | objects
no_integer = no_number | fractions
no_text = st.integers() | st.booleans() | st.lists(st.integers(), max_size=2) | objects
no_switch = words | st.integers(2) | st.lists(st.booleans(), max_size=2) | objects

BOTH: tuple[Endpoint, ...] = (CHAT, COMPLETION)
# field: (where it is known, what it cannot be)
WRONG: dict[str, tuple[tuple[Endpoint, ...], st.SearchStrategy[Any]]] = {
    "model": (BOTH, no_text | st.none() | st.just("")),
    "keep_alive": (
        BOTH,
        st.booleans() | st.lists(st.integers()) | st.sampled_from(["", "soon", "5 apples", float("nan")]),
    ),
    "stream": (BOTH, no_switch),
    "stream_options": (BOTH, words | st.integers() | st.lists(st.integers())),
    "max_tokens": (BOTH, no_integer),
    "fit_max_tokens": (BOTH, no_switch),
    "min_tokens": (BOTH, no_integer),
    "temperature": (BOTH, no_number | st.sampled_from([float("inf"), float("nan")])),
    "top_p": (BOTH, no_number),
    "top_k": (BOTH, no_integer),
    "prompt_logprobs": (BOTH, no_integer),
    "min_p": (BOTH, no_number),
    "repetition_penalty": (BOTH, no_number),
    "repeat_penalty": (BOTH, no_number | st.sampled_from([0, 11])),
    "frequency_penalty": (BOTH, no_number),
    "presence_penalty": (BOTH, no_number),
    "stop_token_ids": (BOTH, words | st.integers() | objects),
    **dict.fromkeys(
        ("logits_processors", "stopping_criteria", "clean_ups"),
        (BOTH, words | st.integers() | objects | st.lists(st.integers(), min_size=1) | st.just([""])),
    ),
    "logit_bias": (BOTH, words | st.integers() | st.lists(st.integers())),
    "seed": (BOTH, no_integer),
    "n": (BOTH, no_integer),
    "ignore_eos": (BOTH, no_switch),
    "priority": (BOTH, no_text | words.filter(lambda word: word not in ("high", "normal", "low"))),
    "timeout": (BOTH, no_number | st.floats(max_value=0)),
    "user": (BOTH, no_text),
    "metadata": (BOTH, words | st.integers() | st.lists(st.integers())),
    "parallel_tool_calls": ((CHAT,), no_switch),
    "prediction": ((CHAT,), words | st.sampled_from([{}, {"type": "content"}, {"type": "x", "content": "a"}])),
    "add_generation_prompt": ((CHAT,), no_switch),
    "continue_final_message": ((CHAT,), no_switch),
    "reasoning_effort": ((CHAT,), no_text | words.filter(lambda word: word not in EFFORTS)),
    "tools": (
        (CHAT,),
        words
        | st.integers()
        | st.sampled_from(
            [
                [{}],
                [{"type": "custom", "custom": {"name": "f"}}],
                [{"type": "function"}],
                [{"type": "function", "function": {"name": "a b"}}],
                [{"type": "function", "function": {"name": "f", "parameters": []}}],
                [{"type": "function", "function": {"name": "f"}}] * 1025,
            ]
        ),
    ),
    "tool_choice": (
        (CHAT,),
        st.integers() | words.filter(lambda word: word not in ("none", "auto", "required")) | st.just({"type": "x"}),
    ),
    "response_format": (
        BOTH,
        words
        | st.sampled_from(
            [
                {},
                {"type": "xml"},
                {"type": "json_schema"},
                {"type": "json_object", "json_schema": {"name": "a"}},
                {"type": "text", "schema": {}},
                {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
            ]
        ),
    ),
    "structured_outputs": (
        BOTH,
        words
        | st.integers()
        | st.sampled_from(
            [{"json": 5}, {"regex": 5}, {"choice": []}, {"grammar": {}}, {"json_object": 1}, {"xml": "a"}]
        )
        | st.just({"structural_tag": "{}"}),
    ),
    "return_token_ids": (BOTH, no_switch),
    "skip_special_tokens": (BOTH, no_switch),
    "spaces_between_special_tokens": (BOTH, no_switch),
    "guided_json": (BOTH, words | st.integers()),
    "guided_regex": (BOTH, no_text),
    "guided_choice": (BOTH, words | st.just([]) | st.just([1])),
    "guided_grammar": (BOTH, no_text),
    "regex": (BOTH, no_text),
    "ebnf": (BOTH, no_text),
    "grammar": (BOTH, no_text),
    "json_schema": (BOTH, st.integers() | st.lists(st.integers())),
    "service_tier": (BOTH, no_text | words.filter(lambda word: word not in ("auto", "default", "flex", "priority"))),
    "echo": ((COMPLETION,), no_switch),
    "add_special_tokens": ((COMPLETION,), no_switch),
    "messages": ((CHAT,), no_text.filter(lambda value: not isinstance(value, list)) | words | st.none() | st.just([])),
    "max_completion_tokens": ((CHAT,), no_integer),
    "logprobs": ((CHAT,), no_switch),
    "top_logprobs": ((CHAT,), no_integer),
    "chat_template_kwargs": ((CHAT,), words | st.integers() | st.lists(st.integers())),
    "prompt": (
        (COMPLETION,),
        st.integers()
        | st.none()
        | objects
        | st.sampled_from([[], [-1], [True], ["a", 1], [1, "a"], [[1], "a"], [["a"]], [1.5]]),
    ),
    "suffix": ((COMPLETION,), no_text),
    "best_of": ((COMPLETION,), no_integer),
}

# Parameters that Penstock cannot honour: what they may hold all the same, and what not.
UNSUPPORTED: dict[str, tuple[list[Any], list[Any]]] = {
    "functions": ([None, []], [[{"name": "f"}]]),
    "function_call": ([None, "none"], ["auto", {"name": "f"}]),
    "modalities": ([None, ["text"]], [["text", "audio"], ["audio"]]),
    "audio": ([None], [{"voice": "alloy", "format": "wav"}]),
    "web_search_options": ([None], [{}]),
    "verbosity": ([None, "medium"], ["high"]),
    "store": ([None, False], [True]),
    "use_beam_search": ([None, False], [True]),
    "include_stop_str_in_output": ([None, False], [True]),
    "bad_words": ([None, []], [["a"]]),
    "allowed_token_ids": ([None, []], [[1]]),
    "truncate_prompt_tokens": ([None], [5]),
    "chat_template": ([None], ["{{ messages }}"]),
    "documents": ([None, []], [[{"text": "a"}]]),
    "structural_tag": ([None], ["{}"]),
}


def _body(endpoint: Endpoint, **parameters: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == CHAT else {"prompt": "hi"}
    return {"model": "m", **prompt, **parameters}


def _parsed(endpoint: Endpoint, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    request = parse_request(endpoint, body)
    assert isinstance(request, ChatRequest | CompletionRequest)
    return request


def _refused(endpoint: Endpoint, body: dict[str, Any]) -> InvalidRequest:
    """The refusal of a body, by whichever of the two steps finds its fault; it has all that a client needs."""
    with pytest.raises(InvalidRequest) as raised:
        generation_params(_parsed(endpoint, body), room=ROOM, seed=0)
    refusal = raised.value
    assert (refusal.status, refusal.type) == (400, "invalid_request_error")
    assert str(refusal)
    assert isinstance(refusal.code, str) and refusal.code
    return refusal


@st.composite
def faults(draw: st.DrawFn) -> tuple[Endpoint, dict[str, Any], str, str | None]:
    """A body with one fault: its endpoint, itself, the parameter at fault, and the code, where there is but one."""
    endpoint = draw(st.sampled_from(BOTH))
    body = _body(endpoint)
    match draw(st.sampled_from(["missing", "wrong", "range", "unknown", "unsupported"])):
        case "missing":
            name = draw(st.sampled_from(sorted(body)))
            del body[name]
            return endpoint, body, name, "missing_required_parameter"
        case "wrong":
            name = draw(st.sampled_from([name for name, (known, _) in WRONG.items() if endpoint in known]))
            body[name] = draw(WRONG[name][1])
            return endpoint, body, name, None
        case "range":
            name = draw(st.sampled_from(sorted(OUTSIDE)))
            body[name] = draw(OUTSIDE[name])
            return endpoint, body, name, "invalid_value"
        case "unknown":
            name = draw(st.from_regex(r"[a-z_]{1,20}", fullmatch=True))
            assume(name not in KINDS[endpoint].field_names())
            body[name] = draw(st.none() | words | st.integers())
            return endpoint, body, name, "unknown_parameter"
        case _:
            name = draw(st.sampled_from(sorted(UNSUPPORTED)))
            body[name] = draw(st.sampled_from(UNSUPPORTED[name][1]))
            return endpoint, body, name, "unsupported_parameter"


OUTSIDE: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.just(0) | st.integers(max_value=-2),
    "min_tokens": st.integers(max_value=-1),
    "temperature": st.floats(max_value=0, exclude_max=True) | st.floats(2, exclude_min=True),
    "top_p": st.floats(max_value=-1e-9) | st.floats(1, exclude_min=True),
    "top_k": st.integers(max_value=-2),
    "min_p": st.floats(max_value=0, exclude_max=True) | st.floats(1, exclude_min=True),
    "repetition_penalty": st.floats(max_value=0) | st.floats(10, exclude_min=True),
    "frequency_penalty": st.floats(max_value=-2, exclude_max=True) | st.floats(2, exclude_min=True),
    "presence_penalty": st.floats(max_value=-2, exclude_max=True) | st.floats(2, exclude_min=True),
    "stop": st.lists(words.filter(bool), min_size=MAX_STOPS + 1, max_size=MAX_STOPS + 3),
    "seed": st.integers(2**63) | st.integers(max_value=-(2**63) - 1),
    "n": st.integers(max_value=0) | st.integers(MAX_CHOICES + 1),
}
OUTSIDE = {
    name: values.filter(lambda value: value not in (float("inf"), float("-inf"))) for name, values in OUTSIDE.items()
}


@EXAMPLES
@given(faults())
@example(
    ("/v1/completions", {"model": "m", "prompt": "a", "structured_outputs": {"xml": "a"}}, "structured_outputs", None)
)
def test_every_fault_of_a_body_is_refused_by_its_name(
    fault: tuple[Endpoint, dict[str, Any], str, str | None],
) -> None:
    """P2: a missing field, a wrong type or a value out of range is refused with message, type, code and param."""
    endpoint, body, name, code = fault
    refusal = _refused(endpoint, body)
    assert refusal.param is not None
    assert refusal.param.split(".")[0].split("[")[0] == name
    assert name in str(refusal)
    wrong = ["invalid_type", "invalid_value", "missing_required_parameter"]
    inside = ["unknown_parameter"] if "." in refusal.param else []
    assert refusal.code in ([code] if code else wrong + inside)


def test_faults_are_tried_in_every_parameter() -> None:
    known = ChatRequest.model_fields | CompletionRequest.model_fields
    fields = {field.alias or name for name, field in known.items()}
    texts = {"safety_identifier", "prompt_cache_key", "prompt_cache_retention"}  # as `user`
    assert fields - texts - {"stop"} == WRONG.keys()


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([{"content": "hi"}], "messages[0].role", "missing_required_parameter"),
        ([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}], "messages[1].role", "invalid_value"),
        ([{"role": "user", "content": 5}], "messages[0].content", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]", "invalid_value"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].image_url",
            "missing_required_parameter",
        ),
        (["hi"], "messages[0]", "invalid_type"),
    ],
)
def test_fault_inside_a_message_is_named_by_its_path(messages: list[Any], param: str, code: str) -> None:
    refusal = _refused(CHAT, _body(CHAT, messages=messages))
    assert (refusal.param, refusal.code) == (param, code)
    assert param in str(refusal)


def test_a_part_of_another_type_is_refused_in_words() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    refusal = _refused(CHAT, _body(CHAT, messages=[{"role": "user", "content": [sound]}]))
    told = "a part of type 'text', 'image_url' or 'file'; audio is not supported."
    assert str(refusal) == f"messages[0].content[0]: Input should be {told}"


def test_every_fault_is_in_the_message() -> None:
    refusal = _refused(CHAT, {"temperature": "hot", "colour": "red"})
    assert all(name in str(refusal) for name in ("model", "messages", "temperature", "colour"))


@pytest.mark.parametrize(
    ("endpoint", "parameters", "param"),
    [
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": False, "stream_options": {}}, "stream_options"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"response_format": {"type": "text", "schema": {}}}, "response_format"),
        (CHAT, {"stop": ["a", ""]}, "stop[1]"),
        (CHAT, {"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        (CHAT, {"logit_bias": {"word": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"7": 101}}, "logit_bias[7]"),
        (COMPLETION, {"best_of": 2}, "best_of"),
        (CHAT, {"best_of": 2}, "best_of"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        (COMPLETION, {"logprobs": MAX_TOP_LOGPROBS + 1}, "logprobs"),
    ],
)
def test_parameters_that_do_not_go_together_are_refused(
    endpoint: Endpoint, parameters: dict[str, Any], param: str
) -> None:
    assert _refused(endpoint, _body(endpoint, **parameters)).param == param


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS + 1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": ROOM + 1}, "max_completion_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_fault_is_named_as_the_client_named_it(parameters: dict[str, Any], param: str) -> None:
    assert _refused(CHAT, _body(CHAT, **parameters)).param == param


@pytest.mark.parametrize(
    ("parameters", "meant"),
    [
        ({"max_tokens": -1}, {"max_tokens": ROOM}),
        ({"max_completion_tokens": -1}, {"max_tokens": ROOM}),
        ({"top_p": 0, "temperature": 0.7}, {"top_p": 1.0, "temperature": 0.0}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
    ],
    ids=str,
)
def test_values_of_other_servers_mean_the_same_here(parameters: dict[str, Any], meant: dict[str, Any]) -> None:
    params = generation_params(_parsed(CHAT, _body(CHAT, **parameters)), room=ROOM, seed=0).model_dump()
    assert {name: params[name] for name in meant} == meant


@given(st.integers(1, 10 * ROOM))
@EXAMPLES
def test_max_tokens_is_refused_beyond_the_context_and_kept_within(asked: int) -> None:
    request = _parsed(CHAT, _body(CHAT, max_tokens=asked))
    if asked <= ROOM:
        assert generation_params(request, room=ROOM, seed=0).max_tokens == asked
        return
    with pytest.raises(InvalidRequest) as raised:
        generation_params(request, room=ROOM, seed=0)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "max_tokens")
    assert str(asked) in str(raised.value)
    assert str(ROOM) in str(raised.value)


INSIDE: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(500, ROOM),
    "min_tokens": st.integers(0, 500),
    "temperature": st.floats(0, 2) | st.integers(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 10, exclude_min=True),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "stop": st.lists(words.filter(bool), max_size=MAX_STOPS).map(tuple),
    "stop_token_ids": st.lists(st.integers(0), max_size=4).map(tuple),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, MAX_CHOICES),
    "ignore_eos": st.booleans(),
}


@EXAMPLES
@given(st.sampled_from(BOTH), st.fixed_dictionaries({}, optional=INSIDE))
def test_values_in_range_are_kept_as_they_are(endpoint: Endpoint, given_values: dict[str, Any]) -> None:
    body = _body(endpoint, **json.loads(json.dumps(given_values)))
    params = generation_params(_parsed(endpoint, body), room=ROOM, seed=7)
    expected = GenerationParams(max_tokens=ROOM, seed=7).model_dump() | given_values
    assert params.model_dump() == expected


@EXAMPLES
@given(st.sampled_from(sorted(OUTSIDE)), st.data())
def test_parameters_out_of_range_are_refused_not_clamped(name: str, data: st.DataObject) -> None:
    value = data.draw(OUTSIDE[name])
    with pytest.raises(ValidationError) as raised:
        GenerationParams.model_validate({name: value})
    assert {str(fault["loc"][0]) for fault in raised.value.errors()} == {name}


@pytest.mark.parametrize("endpoint", BOTH)
def test_other_servers_words_mean_the_same(endpoint: Endpoint) -> None:
    def params(**parameters: Any) -> GenerationParams:
        return generation_params(_parsed(endpoint, _body(endpoint, **parameters)), room=ROOM, seed=0)

    assert params(top_k=-1) == params(top_k=0) == params(skip_special_tokens=True) == params(best_of=1) == params()
    assert params(repeat_penalty=1.2) == params(repetition_penalty=1.2) != params()
    assert not params(spaces_between_special_tokens=False).spaces_between_special_tokens


def test_an_echo_may_stand_alone_and_tells_the_prompts_logprobs() -> None:
    def params(**parameters: Any) -> GenerationParams:
        return generation_params(_parsed(COMPLETION, _body(COMPLETION, **parameters)), room=ROOM, seed=0)

    assert params(echo=True, max_tokens=0).max_tokens == 1
    assert params(echo=True, logprobs=1).prompt_logprobs == 1 and params(logprobs=1).prompt_logprobs is None
    assert params(echo=True).max_tokens == ROOM and params(echo=True).prompt_logprobs is None
    assert params(echo=True, logprobs=3, prompt_logprobs=3).prompt_logprobs == 3


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    "parameters, words",
    [
        ({"prompt_logprobs": 5, "stream": True}, "does not stream"),
        ({"prompt_logprobs": -1}, "greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "less than or equal to 20"),
    ],
)
def test_the_prompts_logprobs_are_a_number_and_do_not_stream(
    endpoint: Endpoint, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        generation_params(_parsed(endpoint, _body(endpoint, **parameters)), room=ROOM, seed=0)
    assert caught.value.param == "prompt_logprobs"


def test_an_echo_tells_the_prompts_logprobs_as_its_own() -> None:
    with pytest.raises(InvalidRequest, match="must be logprobs") as caught:
        body = _body(COMPLETION, echo=True, logprobs=1, prompt_logprobs=2)
        generation_params(_parsed(COMPLETION, body), room=ROOM, seed=0)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("endpoint", BOTH)
def test_neutral_value_of_an_unsupported_parameter_is_accepted(endpoint: Endpoint, name: str) -> None:
    plain = parse_request(endpoint, _body(endpoint))
    for value in UNSUPPORTED[name][0]:
        assert parse_request(endpoint, _body(endpoint, **{name: value})) == plain


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("endpoint", BOTH)
def test_other_value_of_an_unsupported_parameter_is_refused(endpoint: Endpoint, name: str) -> None:
    for value in UNSUPPORTED[name][1]:
        refusal = _refused(endpoint, _body(endpoint, **{name: value}))
        assert (refusal.param, refusal.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_form_of_a_prompt_is_understood(prompt: Any, prompts: list[Any]) -> None:
    request = parse_request(COMPLETION, _body(COMPLETION, prompt=prompt))
    assert isinstance(request, CompletionRequest)
    assert request.prompts == prompts


def test_endpoints_are_all_tried() -> None:
    assert {*BOTH, "/v1/embeddings", "/v1/rerank"} == set(get_args(Endpoint))
