"""The laws that the stored messages of a request obey, whatever was killed meanwhile. Messages in, broken laws out.

It knows no broker, and shares no code with the stages that it judges: it parses STREAM and EVENTS independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....schemas.events import FINAL, Accepted, Delta, Done, Event, ItemEvent, Queued, Started, Token, Turn
from ....schemas.wire import codec
from ....schemas.wire.codec import DecodeError
from ....streams.port import Message

MOST = 5  # broken laws that are reported of one request; most follow from the first


class Broken(NamedTuple):
    """A broken law, and what was stored instead, with its sequence."""

    law: str
    detail: str


@dataclass(slots=True)
class _Choice:
    """What was stored of one choice so far."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None

    def take(self, kind: str, at: str, piece: Token | Delta) -> Iterator[Broken]:
        """Add a piece, and yield the laws it breaks; `kind` and `at` name the stream and the position in it."""
        if self.reason is not None:
            yield Broken(f"{kind} end with the finish reason", f"{at}: {piece.index} after {self.reason}")
        elif piece.index != len(self.tokens):
            wrong = "said again" if piece.index < len(self.tokens) else "left out"
            yield Broken(f"{kind} are contiguous", f"{at}: {piece.index} instead of {len(self.tokens)}: {wrong}")
        self.tokens.extend(piece.token_ids)
        self.text += piece.text
        self.reason = piece.finish_reason or self.reason


@dataclass(slots=True)
class Account:
    """What a stream holds of one request: its choices, and the laws that it breaks."""

    choices: dict[int, _Choice] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    final: Event | None = None  # of events alone

    def choice(self, index: int) -> _Choice:
        return self.choices.setdefault(index, _Choice())


def events_of(request: str, messages: Sequence[Message]) -> Account:
    """The client events of a request, in stored order."""
    account = Account()
    account.broken = list(_read_events(request, messages, account))
    return account


def outputs_of(request: str, messages: Sequence[Message]) -> Account:
    """The raw outputs of a request, in stored order; those of the newest epoch count."""
    account = Account()
    account.broken = list(_read_outputs(request, messages, account))
    return account


def judge(events: Account, outputs: Account, texts: Mapping[int, str] | None) -> list[Broken]:
    """Every law that a request breaks, the first of them. `texts` are what its client got of each choice."""
    return [*events.broken, *outputs.broken, *_compared(events, outputs, texts)][:MOST]


def _read_events(request: str, messages: Sequence[Message], account: Account) -> Iterator[Broken]:
    accepted, numbers = 0, list[int]()
    for message in messages:
        at = f"EVENTS {message.sequence}"
        try:
            event = codec.decode_event(message.data)
        except DecodeError as error:
            yield Broken("events can be read", f"{at}: {error}")
            continue
        if event.request != request:
            yield Broken("events are the request's own", f"{at}: of {event.request}")
        if account.final is not None:
            law = "one final event" if isinstance(event, FINAL) else "the final event is the last"
            yield Broken(law, f"{at}: {event.type} after {account.final.type}")
        match event:
            case Accepted():
                accepted += 1
                if accepted > 1:
                    yield Broken("accepted once", at)
            case Token():
                if not accepted:
                    yield Broken("accepted before it is answered", at)
                yield from account.choice(event.choice).take("events", at, event)
            case ItemEvent() | Turn():
                numbers.append(event.index)
            case Queued():
                if not accepted or account.choices:
                    yield Broken("positions are told between acceptance and answer", at)
            case _:
                account.final = account.final or event
    if sorted(numbers) != list(range(len(numbers))):
        yield Broken("items have every number once", f"{numbers}")
    if account.final is None:
        yield Broken("one final event", f"none among {len(messages)}")
    elif isinstance(account.final, Done) and account.choices:
        yield from _ended(account, account.final)


def _ended(account: Account, done: Done) -> Iterator[Broken]:
    reasons = tuple(account.choices[index].reason for index in sorted(account.choices))
    if reasons != done.finish_reasons:
        yield Broken("every choice has its finish reason", f"{reasons} of tokens, {done.finish_reasons} at the end")
    count = sum(len(choice.tokens) for choice in account.choices.values())
    if count != done.usage.completion_tokens:
        yield Broken("the usage counts the tokens", f"{done.usage.completion_tokens} instead of {count} tokens")


def _read_outputs(request: str, messages: Sequence[Message], account: Account) -> Iterator[Broken]:
    holders: dict[int, str] = {}
    newest = 0
    for message in messages:
        at = f"STREAM {message.sequence}"
        try:
            outputs = codec.decode_outputs(message.data)
        except DecodeError as error:
            yield Broken("outputs can be read", f"{at}: {error}")
            continue
        for output in outputs:
            if output.request != request:
                yield Broken("outputs are the request's own", f"{at}: of {output.request}")
            match output:
                case Started():
                    if output.epoch in holders:
                        both = f"{holders[output.epoch]} and {output.holder}"
                        yield Broken("one announcement an epoch", f"{at}: epoch {output.epoch} of {both}")
                    elif output.epoch < newest:
                        yield Broken("epochs rise", f"{at}: epoch {output.epoch} after {newest}")
                    holders.setdefault(output.epoch, output.holder)
                    newest = max(newest, output.epoch)
                case Delta():
                    if output.epoch not in holders:
                        yield Broken("an epoch is announced first", f"{at}: epoch {output.epoch}")
                    elif output.epoch == newest:  # outputs of former holders are fenced off
                        yield from account.choice(output.choice).take("outputs", at, output)


def _compared(events: Account, outputs: Account, texts: Mapping[int, str] | None) -> Iterator[Broken]:
    """Compare what the client received, the events and the outputs of workers."""
    if isinstance(events.final, Done):
        for index in sorted(events.choices.keys() | outputs.choices.keys()):
            told, said = events.choice(index).tokens, outputs.choice(index).tokens
            if told != said:
                detail = f"choice {index}: {len(told)} tokens of events, {len(said)} of outputs"
                yield Broken("events are the outputs of the newest epoch", detail)
    if texts is not None:
        for index in sorted(events.choices.keys() | texts.keys()):
            stored, got = events.choice(index).text, texts.get(index, "")
            if stored != got:
                same = next((i for i, pair in enumerate(zip(stored, got, strict=False)) if len(set(pair)) > 1), None)
                offset = min(len(stored), len(got)) if same is None else same
                detail = f"choice {index} from {offset} on: {got[offset:][:40]!r} instead of {stored[offset:][:40]!r}"
                yield Broken("the client got what is stored", detail)
