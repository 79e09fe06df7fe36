"""A stream that is cut anywhere goes on at any bridge, and its parts put together are the stream that was not cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from applications import Applications, Script
from asgi import Response, Sent, ask, messages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.bridge.resume import Progress
from penstock.api.render.calls import join_calls
from penstock.schemas.events import Accepted, Done, Event, FinishReason, Token, TokenLogprob, ToolCallDelta, Usage
from penstock.schemas.jobs import Job

CHAT = "/v1/chat/completions"
RESUMABLE = {"Penstock-Resumable": "true"}
LIVE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def body(choices: int = 1, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "grüße 🙂 an alle"}]
    more = {"logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}} | more
    return {"model": "echo", "messages": messages, "n": choices, "stream": True, **more}


class Choice(NamedTuple):
    roles: int
    text: str
    logprobs: list[Any]
    reasons: list[str]


def put_together(sent: list[Sent]) -> tuple[dict[int, Choice], list[Any], int]:
    """What a client has of each choice, the usages and the ends that it saw."""
    choices: dict[int, Choice] = {}
    for message in sent:
        for choice in message.data["choices"] if message.data != "[DONE]" else []:
            had = choices.get(choice["index"], Choice(0, "", [], []))
            delta = choice["delta"]
            choices[choice["index"]] = Choice(
                had.roles + ("role" in delta),
                had.text + delta.get("content", ""),
                had.logprobs + (choice["logprobs"] or {"content": []})["content"],
                had.reasons + [reason for reason in [choice["finish_reason"]] if reason],
            )
    usages = [message.data["usage"] for message in sent if message.data != "[DONE]" and message.data["usage"]]
    return choices, usages, sum(message.data == "[DONE]" for message in sent)


def last_id(sent: list[Sent], response: Response) -> str:
    return next((message.id for message in reversed(sent) if message.id), response.headers["x-request-id"])


def telling(choices: int, *, last_first: bool = False, quiet: bool = False) -> list[Event]:
    """Choices that take turns, by one token and by two, and end one after the other, or the last one first. `quiet`:
    of their first tokens there is nothing to send."""
    events: list[Event] = [Accepted("", "echo", 7, 3)]
    for index, text in enumerate(["", "g"] * quiet + ["g", ""] * (not quiet) + ["rü", "ße 🙂", "", "."]):
        for choice in sorted(range(choices), reverse=last_first):
            ids = (index,) if index != 2 or choice else (index, 99)
            at = index + (choice == 0 and index > 2)
            logprobs = tuple(TokenLogprob("ü", id, -0.5, (195, 188)) for id in ids if index or not quiet)
            events.append(Token("", choice, at, ids, text, logprobs, "stop" if index == 5 else None))
    reason: FinishReason = "stop"
    return [*events, Done("", (reason,) * choices, Usage(3, 6 * choices + 1, 6 * choices + 4))]


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(("choices", "last_first"), [(1, False), (3, False), (3, True)])
async def test_a_stream_cut_at_any_byte_is_completed_by_another_bridge(
    choices: int, last_first: bool, quiet: bool
) -> None:
    """Where the last choice comes first, messages that open the others precede its first one."""
    script = await Script.start()
    told = telling(choices, last_first=last_first, quiet=quiet)
    await script.tell(told, Job(id="chatcmpl-1", bridge="that-died", body={}))
    asked = body(choices, stream_options={"include_usage": True, "continuous_usage_stats": True})
    whole = await ask(script.app, "POST", CHAT, asked, RESUMABLE | {"Last-Event-ID": "chatcmpl-1"})
    expected = put_together(messages(whole.body))
    assert [choice.text for choice in expected[0].values()] == ["grüße 🙂."] * choices
    assert all(choice.roles == 1 and choice.reasons == ["stop"] for choice in expected[0].values())
    assert [*expected[0]] == [*range(choices)]
    assert len(expected[1]) == len(messages(whole.body)) - 1
    assert expected[2] == 1
    assert all(message.id for message in messages(whole.body)[:-1])
    places = {whole.body[:cut].count(b"\n\n"): cut for cut in range(len(whole.body))}
    for cut in places.values():  # any byte of a message that is not whole cuts off the same
        first = messages(whole.body[:cut])
        rest = await ask(script.app, "POST", CHAT, asked, RESUMABLE | {"Last-Event-ID": last_id(first, whole)})
        assert rest.status == 200
        assert first + messages(rest.body) == messages(whole.body)


async def test_a_thought_text_and_calls_of_one_event_are_chunks_of_their_own_and_are_resumed_between_them() -> None:
    scores = tuple(TokenLogprob("x", id, -0.5, (120,)) for id in (1, 2))
    calls = (ToolCallDelta(0, '{"a": 1}', "call_1", "f"), ToolCallDelta(1, '{"b"', "call_2", "g"))
    rest = ToolCallDelta(1, ": 2}"), ToolCallDelta(2, "{}", "call_3", "h")
    events: list[Event] = [
        Accepted("", "echo", 7, 3),
        Token("", 0, 0, (1, 2), "So:", scores, reasoning="Hm.", tool_calls=calls),
        Token("", 0, 2, (3,), "", (), "tool_calls", tool_calls=rest),
        Done("", ("tool_calls",), Usage(3, 3, 6)),
    ]
    script = await Script.start()
    await script.tell(events, Job(id="chatcmpl-2", bridge="that-died", body={}))
    asked = body(return_token_ids=True)
    whole = await ask(script.app, "POST", CHAT, asked, RESUMABLE | {"Last-Event-ID": "chatcmpl-2"})
    sent = messages(whole.body)
    choices = [message.data["choices"][0] for message in sent[:-2]]
    heads = [
        {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
        for call, text in ((calls[0], '{"a": 1}'), (calls[1], '{"b"'), (rest[1], "{}"))
    ]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": None, "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"content": "So:"},
        {"tool_calls": [heads[0]]},
        {"tool_calls": [heads[1]]},
        {"tool_calls": [{"index": 1, "function": {"arguments": ": 2}"}}]},
        {"tool_calls": [heads[2]]},
        {},
    ]
    assert [choice["token_ids"] for choice in choices] == [[1, 2], [], [], [], [3], [], []]
    assert [len((choice["logprobs"] or {"content": []})["content"]) for choice in choices] == [2, 0, 0, 0, 0, 0, 0]
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["tool_calls"]
    for place, message in enumerate(sent[:-1], 1):
        headers = RESUMABLE | {"Last-Event-ID": message.id or ""}
        assert messages((await ask(script.app, "POST", CHAT, asked, headers)).body) == sent[place:]


@LIVE
@given(st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_a_running_stream_cut_again_and_again_loses_and_repeats_nothing(
    applications: Applications, choices: int, cuts: list[int], logprobs: bool
) -> None:
    more = {} if logprobs else {"logprobs": False, "top_logprobs": None}
    asked = body(choices, max_tokens=20, ignore_eos=True, **more)

    async def read(cuts: list[int | None]) -> list[Sent]:
        sent: list[Sent] = []
        headers = dict(RESUMABLE)
        for place, cut in enumerate(cuts):
            response = await ask(applications.apps[place % 2], "POST", CHAT, asked, headers, leave_after=cut)
            assert response.status == 200
            sent += messages(response.body)
            headers["Last-Event-ID"] = last_id(sent, response)
            if sent and sent[-1].data == "[DONE]":
                break
        return sent

    expected = put_together(applications.run(read([None])))
    assert put_together(applications.run(read([*cuts, None]))) == expected


@st.composite
def tellings(draw: st.DrawFn) -> tuple[list[Token], list[Token]]:
    """One request told twice: the same tokens, thoughts, text and tool call, grouped and held back differently."""
    length = draw(st.integers(0, 12))
    text = draw(st.text(max_size=20))
    thought, said_all = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    reason: FinishReason = "length"

    def saying(token: Token, start: int, end: int) -> Token:
        arguments = text[max(start, said_all) : end]
        has_head = start <= said_all < end
        call = ToolCallDelta(0, arguments, *(("call_1", "f") if has_head else (None, None)))
        return replace(
            token,
            reasoning=text[start : min(end, thought)],
            text=text[max(start, thought) : min(end, said_all)],
            tool_calls=(call,) if arguments else (),
        )

    def telling() -> list[Token]:
        places = sorted(draw(st.sets(st.integers(0, length), max_size=6)) | {0, length})
        told = sorted(draw(st.lists(st.integers(0, len(text)), min_size=len(places) - 1, max_size=len(places) - 1)))
        told = [*told[:-1], len(text)] if told else []
        tokens = []
        for place, (start, end) in enumerate(pairwise(places)):
            logprobs = tuple(TokenLogprob("x", token, -1.0, ()) for token in range(start, end))
            scores = None if start else (TokenLogprob("p", 1, None, ()),)
            token = Token("r", 0, start, tuple(range(start, end)), "", logprobs, prompt_logprobs=scores)
            tokens.append(saying(token, told[place - 1] if place else 0, told[place]))
        if draw(st.booleans()) and tokens:
            *tokens, last = tokens
            return [*tokens, replace(last, finish_reason=reason)]
        return [*tokens, saying(Token("r", 0, length, (), "", (), reason), told[-1] if told else 0, len(text))]

    return telling(), telling()


@settings(max_examples=500, deadline=None)
@given(tellings(), st.integers(0, 8))
def test_a_place_is_exact_though_the_events_are_cut_elsewhere(told: tuple[list[Token], list[Token]], cut: int) -> None:
    first, second = Progress("r"), told[1]
    had = told[0][:cut]
    for token in had:
        assert first.split(token) == (None, token)
    resumed = Progress.parse(first.id)
    news = [new for token in second if (new := resumed.split(token)[1]) is not None]
    assert resumed.reached
    joined, whole = had + news, told[0]
    assert [id for token in joined for id in token.token_ids] == [id for token in whole for id in token.token_ids]
    assert "".join(token.text for token in joined) == "".join(token.text for token in whole)
    assert "".join(token.reasoning for token in joined) == "".join(token.reasoning for token in whole)
    assert join_calls(joined) == join_calls(whole)
    assert [call.id for token in joined for call in token.tool_calls if call.id] == [
        call.id for token in whole for call in token.tool_calls if call.id
    ]
    assert sum((token.logprobs or () for token in joined), ()) == sum((token.logprobs or () for token in whole), ())
    assert [token.prompt_logprobs for token in joined if token.prompt_logprobs] == [
        token.prompt_logprobs for token in whole if token.prompt_logprobs
    ]
    assert [token.finish_reason for token in joined if token.finish_reason] == ["length"]


def test_a_place_keeps_what_was_not_seen_again_yet() -> None:
    progress = Progress.parse("r/1:1,2:3f")
    assert progress.split(Token("r", 0, 0, (1, 2), "ab")) == (Token("r", 0, 0, (1,), "a"), Token("r", 0, 1, (2,), "b"))
    assert progress.id == "r/2:2,2:3f"
    assert not progress.reached


async def test_completions_go_on_counting_their_offsets() -> None:
    script = await Script.start()
    await script.tell(telling(2), Job(id="cmpl-1", bridge="that-died", body={}))
    asked = {"model": "echo", "prompt": "x", "logprobs": 1, "stream": True}
    whole = messages((await ask(script.app, "POST", "/v1/completions", asked, {"Last-Event-ID": "cmpl-1"})).body)
    assert whole[-2].data["choices"][0]["logprobs"]["text_offset"] == [5]
    rest = await ask(script.app, "POST", "/v1/completions", asked, {"Last-Event-ID": str(whole[5].id)})
    assert messages(rest.body) == whole[6:]


def test_without_the_header_no_id_is_sent(applications: Applications) -> None:
    assert b"\nid:" not in b"\n" + applications.run(ask(applications.apps[0], "POST", CHAT, body())).body
