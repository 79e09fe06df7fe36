"""One judge of every OpenAI stream that a test receives: what the official client needs, and trips over without."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import orjson
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

KINDS: dict[str, Any] = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": Completion}


def check_stream(body: bytes, path: str, *, resumable: bool = False, usage_asked: bool | None = None) -> None:
    """Raise `AssertionError` where a whole stream breaks a rule. A resumed stream has no beginning to judge."""
    chunks, ended, failed = [], False, False
    assert body.endswith(b"\n\n"), "the last message is cut"
    for block in body.split(b"\n\n")[:-1]:
        lines = [line for line in block.split(b"\n") if line]
        fields = [line for line in lines if not line.startswith(b":")]
        if not fields:
            assert not resumable, "a comment with a blank line behind it, where the client keeps ids"
            continue
        names = [field.partition(b": ")[0] for field in fields]
        if b"event" in names:
            assert fields[0] == b"event: status", f"an unknown event: {fields[0]!r}"
            continue
        assert not ended and not failed, "something follows the end"
        assert names == [b"data"] or (resumable and names in ([b"id", b"data"], [b"data"])), names
        data = fields[-1].removeprefix(b"data: ")
        if data == b"[DONE]":
            ended = True
            continue
        value = orjson.loads(data)
        if "error" in value:
            assert value["error"].keys() == {"message", "type", "param", "code"}
            failed = True
            continue
        assert "x-penstock" not in value
        chunks.append(value)
    assert ended != failed, "neither ended nor failed, or both"
    _check_chunks(chunks, path, usage_asked=usage_asked, finished=ended, resumed=resumable)


def _check_chunks(
    chunks: list[dict[str, Any]], path: str, *, usage_asked: bool | None, finished: bool, resumed: bool
) -> None:
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) <= 1
    roles: dict[int, int] = defaultdict(int)
    calls: dict[int, list[dict[str, Any]]] = defaultdict(list)
    reasons: dict[int, str] = {}
    for place, chunk in enumerate(chunks):
        # OpenAI's types forget that a text goes on with null.
        likened = [
            choice | {"finish_reason": choice["finish_reason"] or "stop", "logprobs": _behind_first(choice)}
            for choice in chunk["choices"]
        ]
        KINDS[path].model_validate(chunk | {"choices": likened}, strict=True)
        if not chunk["choices"]:
            assert place == len(chunks) - 1 and chunk["usage"], "only the usage, at the end, comes without a choice"
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "a choice goes on after its end"
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
            if path == "/v1/chat/completions":
                roles[index] += "role" in choice["delta"]
                said = [choice["delta"].get(kind) for kind in ("reasoning", "content")]
                told = choice["delta"].get("tool_calls", [])
                assert len([*filter(None, said), *told]) <= 1, "a thought, text and each call have chunks of their own"
                for call in told:
                    if resumed and index not in calls:  # those before it came before the cut
                        calls[index] = [{"id": "", "arguments": ""} for _ in range(call["index"] + ("id" not in call))]
                    _check_call(call, calls[index])
    if usage_asked is not None and finished:
        assert bool(chunks and not chunks[-1]["choices"]) == usage_asked, "usage as asked for"
    if finished and not resumed:
        assert all(count == 1 for count in roles.values()), "one role a choice"
        for index, made in calls.items():
            if reasons[index] != "length":
                assert all(isinstance(orjson.loads(call["arguments"]), dict) for call in made), "arguments are JSON"
                assert reasons[index] in ("tool_calls", "stop")


def _check_call(call: dict[str, Any], made: list[dict[str, Any]]) -> None:
    function = call["function"]
    if call["index"] == len(made):
        assert call["id"] and call["type"] == "function" and function["name"], "a call begins with its head"
        assert call["id"] not in [other["id"] for other in made]
        made.append({"id": call["id"], "arguments": ""})
    else:
        assert call["index"] == len(made) - 1, "indices are dense, and one call ends before the next begins"
        assert "id" not in call and "name" not in function and "type" not in call, "the head comes once"
    made[-1]["arguments"] += function["arguments"]


def _behind_first(choice: dict[str, Any]) -> Any:
    """The log-probabilities, without that of a prompt's first token: null, which OpenAI's types forget too."""
    logprobs = choice["logprobs"]
    if logprobs and logprobs.get("token_logprobs", [0])[:1] == [None]:
        return {name: values[1:] for name, values in logprobs.items()}
    return logprobs
