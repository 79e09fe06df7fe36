"""A mixed load, a client that never gives up, and a comparison that finds lost, doubled and different answers.

When its connection breaks, the client resumes at the next bridge behind the last event id that it received, or, before
the first, repeats the request with the same `Idempotency-Key`. It retries a refusal after the `Retry-After` of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from random import Random
from typing import Any, NamedTuple

from .load import Client, Sample, clock

PATIENCE = 120.0  # seconds after which the client gives a request up, where no part is away for longer
PAUSE = 0.2  # seconds before the next try at another bridge
WORDS = "der Fluß|水力発電|dam|🙂|naïve|гидро|3.14|«ja»|क्ष|pipe\n|é̂|water.|👩\u200d🔧|end;".split("|")  # noqa: SIM905

Request = tuple[str, dict[str, Any]]  # path and body


def mixed_requests(count: int, longest: int, seed: int, model: str) -> list[Request]:
    """Paths and bodies of all kinds; equal arguments give equal requests."""
    random, found = Random(seed), []
    for index in range(count):
        text = " ".join(f"{random.choice(WORDS)} {random.randrange(1000)}" for _ in range(random.randint(1, 60)))
        body: dict[str, Any] = {"model": model, "seed": index, "stream": True, "ignore_eos": random.random() < 0.8}
        body |= {"priority": random.choice(("high", "normal", "normal", "low")), "n": random.choice((1, 1, 1, 2))}
        body |= {"max_tokens": random.randint(longest // 8, longest), "stream_options": {"include_usage": True}}
        body |= {"temperature": random.choice((0.0, 0.0, 0.7, 1.0)), "top_p": random.choice((0.9, 1.0))}
        body |= random.choice(({}, {}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}))
        body |= random.choice(({}, {}, {}, {"stop": ["🙂 1", "水力発電 7", " water"]}))
        with_logprobs = random.random() < 0.5
        if random.random() < 0.3:
            found.append(("/v1/completions", body | {"prompt": text} | ({"logprobs": 1} if with_logprobs else {})))
        else:
            body |= {"messages": [{"role": "user", "content": text}], "logprobs": with_logprobs}
            found.append(("/v1/chat/completions", body | ({"top_logprobs": 1} if with_logprobs else {})))
    return found


@dataclass(eq=False)
class ReceivedAnswer(Sample):
    """All that a client received for one request, over as many connections as it took."""

    # Each part of the answer in pieces, by what it is: "choice 0, text" holds characters.
    said: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    names: set[str] = field(default_factory=set)  # ids under which the server ran it: one
    # How often it was resumed behind an event id, or repeated before there was one, or refused, by status and code.
    detours: Counter[str] = field(default_factory=Counter)

    @property
    def texts(self) -> dict[int, str]:
        """The text of each choice."""
        parts = {name.partition(", ")[0]: text for name, text in self.said.items() if name.endswith(", text")}
        return {int(name.removeprefix("choice ")): "".join(text) for name, text in parts.items()}

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """The times between which nothing came, the wait for the first piece included."""
        return list(pairwise((self.sent, *self.times, self.ended)))

    def add(self, event: dict[str, Any], now: float) -> None:
        super().add(event, now)
        if self.error is not None:
            return
        self.names.add(event["id"])
        for part in event["choices"]:
            name = f"choice {part['index']}"
            self.said[f"{name}, text"] += part["text"] if "text" in part else part["delta"].get("content") or ""
            logprobs = part["logprobs"] or {}  # of a chat or of a completion
            self.said[f"{name}, tokens"] += [(entry["token"], entry["bytes"]) for entry in logprobs.get("content", ())]
            self.said[f"{name}, tokens"] += logprobs.get("tokens", ())
            self.said[f"{name}, finish reason"] += [part["finish_reason"]] if part["finish_reason"] else []
        if usage := event.get("usage"):
            self.said["usage"].append((usage["prompt_tokens"], usage["completion_tokens"]))


async def ask(
    clients: Sequence[Client], path: str, body: dict[str, Any], key: str, first: int, patience: float = PATIENCE
) -> ReceivedAnswer:
    """Send the request by client number `first`, and read to the end by any. `error` is a final failure."""
    answer, index, sent, reason = ReceivedAnswer(), first, clock(), ""
    headers = {"Penstock-Resumable": "true", "Idempotency-Key": key}
    try:
        async with asyncio.timeout(patience):
            while not answer.ends:
                answer.error = answer.retry_after = None
                resume = {"Last-Event-ID": answer.last} if answer.last else {}
                try:
                    await clients[index % len(clients)].send(path, body, answer, headers | resume)
                except OSError as error:
                    reason, wait, index = str(error), PAUSE, index + 1
                    answer.detours["resumed" if answer.last else "repeated"] += 1
                else:
                    if answer.retry_after is None:
                        break
                    reason, wait = str(answer.error), answer.retry_after
                    answer.detours[reason.partition(":")[0]] += 1
                await asyncio.sleep(wait)
    except TimeoutError:
        answer.error = f"given up after {patience:g} s; the last time: {reason}"
    answer.sent, answer.ended = sent, clock()
    return answer


class Fault(NamedTuple):
    """`kind` is lost, doubled or different."""

    kind: str
    detail: str


def compare(expected: ReceivedAnswer, got: ReceivedAnswer) -> Fault | None:
    """How an answer differs from the undisturbed one; None if it does not."""
    if got.error is not None or not got.ends:
        return Fault("lost", got.error or "no end")
    if len(got.names) > 1:
        return Fault("doubled", f"answered under {len(got.names)} names: {', '.join(sorted(got.names))}")
    for what in expected.said | got.said:
        if fault := difference(expected.said[what], got.said[what]):
            return Fault(fault.kind, f"{what}: {fault.detail}")
    return Fault("doubled", f"{got.ends} ends") if got.ends > 1 else None


def difference(expected: Sequence[Any], got: Sequence[Any]) -> Fault | None:
    """Whether `got` repeats a part or differs otherwise, and from where on; None if it is equal."""
    if expected == got:
        return None
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, got, strict=False)))
    extra = len(got) - len(expected)
    is_doubled = 0 < extra <= same and got[same:] == expected[same - extra :]
    wanted, came = (repr(text[max(0, same - 10) : same + 30]) for text in (expected, got))
    detail = f"from {same} on, {came} instead of {wanted} ({len(got)} instead of {len(expected)} in all)"
    return Fault("doubled" if is_doubled else "different", detail)
