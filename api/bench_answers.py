"""A mixed load, a client that gives up nothing, and what tells a lost, a doubled, a different answer from a right one.

When its connection breaks it goes on at the next bridge: behind the last event id that it has, or, before there was
one, by the same request with the same `Idempotency-Key`. A bridge that refuses for now is asked again when it said.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from random import Random
from typing import Any, NamedTuple

import httpx
import orjson

CONNECT_LIMIT, SILENCE = 5.0, 30.0  # seconds; a bridge sends a comment after half of that silence
PAUSE = 0.2  # seconds before the next try at another bridge

WORDS = (
    "der Fluß|水力発電|dam|🙂|naïve|гидро|turbine|3.14|«ja»|क्ष|pipe\n|valve|é̂|flow,|0x1F|gate|water.|👩\u200d🔧|end;"
)
KINDS = ("lost", "doubled", "different")

Request = tuple[str, dict[str, Any]]  # path and body

clock = time.monotonic


def mixed_requests(count: int, longest: int, seed: int, model: str) -> list[Request]:
    """Paths and bodies, of all kinds in turn; the same of the same arguments."""
    random, words, found = Random(seed), WORDS.split("|"), []
    for place in range(count):
        text = " ".join(f"{random.choice(words)} {random.randrange(1000)}" for _ in range(random.randint(1, 60)))
        body: dict[str, Any] = {"model": model, "seed": place, "stream": True, "ignore_eos": random.random() < 0.8}
        body |= {"priority": random.choice(("high", "normal", "normal", "low")), "n": random.choice((1, 1, 1, 2))}
        body |= {"max_tokens": random.randint(longest // 8, longest), "stream_options": {"include_usage": True}}
        body |= {"temperature": random.choice((0.0, 0.0, 0.7, 1.0)), "top_p": random.choice((0.9, 1.0))}
        body |= random.choice(({}, {}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}))
        body |= random.choice(({}, {}, {}, {"stop": ["🙂 1", "水力発電 7", " water"]}))
        with_logprobs = random.random() < 0.5
        if random.random() < 0.3:
            found.append(("/v1/completions", body | {"prompt": text} | ({"logprobs": 1} if with_logprobs else {})))
        else:
            body["messages"] = [{"role": "user", "content": text}]
            body |= {"logprobs": True, "top_logprobs": 1} if with_logprobs else {}
            found.append(("/v1/chat/completions", body))
    return found


@dataclass(slots=True)
class Choice:
    """One of a request's answers, as it came."""

    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)  # each with its log probability, where asked for
    reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """All that a client got for one request. Times are `clock`'s."""

    sent: float = field(default_factory=clock)
    ended: float = 0.0
    choices: dict[int, Choice] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # under which the server ran it: one
    usages: list[tuple[int, int]] = field(default_factory=list)  # tokens of prompt and completion
    ends: int = 0
    last: str = ""  # event id
    error: str | None = None
    times: list[float] = field(default_factory=list)  # when each piece arrived
    resumed: int = 0  # times that it went on behind an event id
    repeated: int = 0  # times that it was asked again, before there was one
    refusals: Counter[str] = field(default_factory=Counter)  # by status and code

    @property
    def longest_pause(self) -> float:
        """Seconds between two pieces, 0 where there are no two."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)

    @property
    def to_first(self) -> float | None:
        """Seconds to the first piece."""
        return self.times[0] - self.sent if self.times else None

    def add(self, data: bytes) -> None:
        """Take in the data of one SSE message."""
        if data == b"[DONE]":
            self.ends += 1
            return
        chunk = orjson.loads(data)
        if error := chunk.get("error"):
            self.error = f"{error['code']}: {error['message']}"
            return
        self.names.add(chunk["id"])
        if chunk["choices"]:
            self.times.append(clock())
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
            choice.tokens += _tokens(part["logprobs"] or {})
            choice.reasons += [part["finish_reason"]] if part["finish_reason"] else []
        if usage := chunk.get("usage"):
            self.usages.append((usage["prompt_tokens"], usage["completion_tokens"]))

    def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> float | None:
        """Take in a refusal: for good, unless it says after how many seconds to ask again, which are returned."""
        text = body.decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            error = orjson.loads(text)["error"]
            text = f"{error['code']}: {error['message']}"
        if status in (429, 503) and "retry-after" in headers:
            self.refusals[f"{status} {text.partition(':')[0]}"] += 1
            return float(headers["retry-after"])
        self.error = f"HTTP {status} {text}"
        return None


class Fault(NamedTuple):
    """`kind` is one of `KINDS`."""

    kind: str
    detail: str


class Client:
    """`urls` are bridges of one server. `path` and `body` of a request are OpenAI's; `close` it."""

    def __init__(
        self,
        urls: Sequence[str],
        patience: float,
        *,
        pause: float = PAUSE,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._urls, self._patience, self._pause = urls, patience, pause
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(SILENCE, connect=CONNECT_LIMIT)
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, path: str, body: dict[str, Any], key: str, first: int) -> Answer:
        """Ask at the bridge number `first` and read to the end, wherever that is. What fails for good is `error`."""
        answer, place = Answer(), first
        reason = ""
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    url = self._urls[place % len(self._urls)]
                    try:
                        wait = await self._try(f"{url}{path}", body, key, answer)
                        reason = "the stream ended without [DONE]" if wait is None else "refused"
                    except httpx.TransportError as error:
                        wait, reason = None, type(error).__name__
                    if answer.ends or answer.error is not None:
                        break
                    if wait is None:
                        place += 1
                        answer.resumed += bool(answer.last)
                        answer.repeated += not answer.last
                    await asyncio.sleep(self._pause if wait is None else wait)
        except TimeoutError:
            answer.error = f"given up after {self._patience:g} s; the last time: {reason}"
        answer.ended = clock()
        return answer

    async def _try(self, url: str, body: dict[str, Any], key: str, answer: Answer) -> float | None:
        """Add to the answer what comes; returns after how many seconds to ask the same bridge again, if it said so."""
        headers = {"Penstock-Resumable": "true", "Idempotency-Key": key}
        headers |= {"Last-Event-ID": answer.last} if answer.last else {}
        async with self._http.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                return answer.refuse(response.status_code, response.headers, await response.aread())
            event, data, rest = answer.last, b"", b""
            async for piece in response.aiter_bytes():  # not aiter_lines: to httpx, a line ends at U+2028 too
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    name, _, value = line.partition(b":")
                    if name == b"id":
                        event = value.strip().decode()
                    elif name == b"data":
                        data = value.strip()
                    elif not line and data:  # only now is the message whole
                        answer.add(data)
                        answer.last, data = event, b""
        return None


def _tokens(logprobs: dict[str, Any]) -> list[tuple[str, float]]:
    """Those of a chat or of a completion."""
    if "content" in logprobs:
        return [(f"{entry['token']} {entry['bytes']}", entry["logprob"]) for entry in logprobs["content"]]
    return list(zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True))


def compare(expected: Answer, got: Answer) -> Fault | None:
    """What is wrong with an answer beside the undisturbed one."""
    if got.error is not None or not got.ends:
        return Fault("lost", got.error or "no end")
    if len(got.names) > 1:
        return Fault("doubled", f"answered under {len(got.names)} names: {', '.join(sorted(got.names))}")
    for index in expected.choices.keys() | got.choices.keys():
        wanted, came = expected.choices.get(index, Choice()), got.choices.get(index, Choice())
        tokens = [token for token, _ in wanted.tokens], [token for token, _ in came.tokens]
        for what, right, found in (("text", wanted.text, came.text), ("tokens", *tokens)):
            if fault := difference(right, found):
                return Fault(fault.kind, f"choice {index}, {what}: {fault.detail}")
        if wanted.reasons != came.reasons:
            kind = "doubled" if len(came.reasons) > len(wanted.reasons) else "different"
            return Fault(kind, f"choice {index}: finish reasons {came.reasons} instead of {wanted.reasons}")
    if got.usages != expected.usages or got.ends != expected.ends:
        kind = "doubled" if len(got.usages) > len(expected.usages) or got.ends > expected.ends else "different"
        return Fault(kind, f"usage {got.usages} instead of {expected.usages}, {got.ends} ends")
    return None


def difference(expected: Sequence[Any], got: Sequence[Any]) -> Fault | None:
    """Whether `got` says a part twice, or differs otherwise, and where it begins to."""
    if expected == got:
        return None
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, got, strict=False)))
    extra = len(got) - len(expected)
    is_doubled = 0 < extra <= same and got[same:] == expected[same - extra :]
    wanted, came = (repr(text[max(0, same - 10) : same + 30]) for text in (expected, got))
    detail = f"from {same} on, {came} instead of {wanted} ({len(got)} instead of {len(expected)} in all)"
    return Fault("doubled" if is_doubled else "different", detail)
