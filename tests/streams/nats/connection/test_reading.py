"""Messages are read as they were sent, wherever the network cuts them, and each waits for what has to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.streams.nats.connection.reading import DirectReader

WORDS = st.text("abcMSGH.0123", min_size=1, max_size=6).map(str.encode)
DATA = st.binary(max_size=20) | st.just(b"\r\nMSG a 1 0\r\n\r\n")
MESSAGES = st.tuples(WORDS, st.integers(0, 99), st.just(b"") | WORDS, st.just(b"") | DATA.filter(len), DATA)
LINES = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'MSG a 1 2'\r\n", b"MSG a b c\r\n", b"HMSG a 1 2\r\n"]
)


class Streams:
    """What nats-py reads, and does nothing else; it is told to end by nobody."""

    def __init__(self, said: list[object]) -> None:
        self.said = said

    def data_received(self, data: bytes) -> None:
        self.said.append(data)


class Transport:
    """A connection that is read as long as nobody has paused it."""

    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def encoded(message: tuple[bytes, int, bytes, bytes, bytes]) -> bytes:
    subject, subscription, reply, headers, data = message
    to = reply + b" " if reply else b""
    if headers:
        line = b"HMSG %b %d %b%d %d\r\n" % (subject, subscription, to, len(headers), len(headers) + len(data))
    else:
        line = b"MSG %b %d %b%d\r\n" % (subject, subscription, to, len(data))
    return line + headers + data + b"\r\n"


@given(st.lists(MESSAGES | LINES, max_size=8), st.data())
def test_all_is_read_in_its_order_wherever_it_is_cut(
    sent: list[tuple[bytes, int, bytes, bytes, bytes] | bytes], drawn: st.DataObject
) -> None:
    said: list[object] = []
    awaited = 0

    async def read() -> None:
        def receive(
            subscription: int, subject: bytes, reply: bytes, headers: bytes, data: bytes
        ) -> Awaitable[None] | None:
            async def later() -> None:
                await asyncio.sleep(0)
                said.append((subject, subscription, reply, headers, data))

            nonlocal awaited
            if drawn.draw(st.booleans()):
                awaited += 1
                return later()
            said.append((subject, subscription, reply, headers, data))
            return None

        transport = Transport()
        reader = DirectReader(transport, Streams(said), receive)  # type: ignore[arg-type]
        whole = b"".join(each if isinstance(each, bytes) else encoded(each) for each in sent)
        places = st.integers(0, len(whole))
        cuts = sorted(drawn.draw(st.just({*range(len(whole))}) | st.sets(places, max_size=6)) | {0, len(whole)})
        for begin, end in pairwise(cuts):
            reader.data_received(whole[begin:end])
            for _ in range(3 * len(sent)):  # until all that has to be awaited is done, and nats-py has read its lines
                await asyncio.sleep(0)
                if said and isinstance(said[-1], bytes):
                    reader.go_on()
        assert not transport.is_paused

    asyncio.run(read())
    assert said == sent


async def test_a_message_that_has_to_be_awaited_holds_up_what_follows_it_and_the_server() -> None:
    said: list[object] = []
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    async def later() -> None:
        await may_end.wait()
        said.append("awaited")
        asyncio.get_running_loop().call_soon(has_ended.set)

    def receive(subscription: int, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> Awaitable[None] | None:
        if subject == b"slow":
            return later()
        said.append(data)
        return None

    transport = Transport()
    reader = DirectReader(transport, Streams(said), receive)  # type: ignore[arg-type]
    reader.data_received(b"MSG slow 1 0\r\n\r\nMSG quick 1 3\r\none\r\nPING\r\nMSG quick 1 3\r\ntwo\r\n")
    reader.data_received(b"MSG quick 1 5\r\nthree\r\n")
    reader.go_on()  # nats-py reads nothing, as at the end of a connection
    await asyncio.sleep(0)
    assert transport.is_paused
    assert said == []
    may_end.set()
    await has_ended.wait()
    assert not transport.is_paused
    assert said == ["awaited", b"one", b"PING\r\n"]
    reader.go_on()
    assert said == ["awaited", b"one", b"PING\r\n", b"two", b"three"]
