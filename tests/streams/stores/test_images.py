"""The images of requests, in the buckets of both brokers."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import pytest_asyncio

from penstock.engine.vision.images import PromptImage
from penstock.schemas.errors import Overloaded, QuotaExceeded, StreamNotFound
from penstock.schemas.events import Cancelled, Usage
from penstock.schemas.wire import codec
from penstock.streams.port import SCHEMA, Broker, BucketSpec
from penstock.streams.stores.images import FRESH, ImageStore, ImageUse, get_image, image_key
from penstock.streams.stores.quotas import Quotas
from penstock.streams.topology import IMAGE_WINDOW, IMAGES, Subjects, topology

DATA = bytes(range(256)) * 3000
DIGEST = hashlib.sha256(DATA).hexdigest()
ROOM = 4 * len(DATA)  # for three images, as an eighth stays free
NOW = 1_000_000.0

Put = Callable[..., Awaitable[tuple[str, str]]]


@pytest_asyncio.fixture
async def store(broker: Broker, namespace: str) -> Broker:
    streams, buckets = topology(namespace, ())
    await broker.ensure(
        [spec for spec in streams if spec.name == "EVENTS"],
        [replace(spec, max_bytes=ROOM) if spec.name == IMAGES else spec for spec in buckets],
    )
    return broker


@pytest.fixture
def put(store: Broker, namespace: str) -> Put:
    """Store another image, each time so much later that all is measured again."""
    return putting(store, namespace, 2 * FRESH)


def putting(store: Broker, namespace: str, pause: float) -> Put:
    """Store another image for a request, with its deadline so many seconds from now; its key and its digest. Each look
    at the clock is a `pause` behind the one before."""
    images = ImageStore(store, Subjects(namespace), Quotas(store, 1 << 30), count(0.0, pause).__next__)

    async def put(number: int, request: str, deadline: float = 600.0, tenant: str = "one") -> tuple[str, str]:
        data = bytes([number]) + DATA
        digest = hashlib.sha256(data).hexdigest()
        use = ImageUse(request, "http", store.now() + deadline)
        return await images.put(tenant, data, digest, NOW, use), digest

    return put


@pytest.fixture
def end(store: Broker, namespace: str) -> Callable[[str], Awaitable[None]]:
    """Store the last event of a request."""

    async def end(request: str) -> None:
        subject = Subjects(namespace).events("one", "http", request)
        event = codec.encode(Cancelled(request, Usage(1, 0, 1)))
        await store.publish(subject, event, message_id=f"{request}.end", headers={SCHEMA: codec.EVENT})

    return end


async def entries(broker: Broker) -> int:
    return len(await (await broker.bucket(IMAGES)).entries())


async def test_an_image_is_stored_once_in_a_while(store: Broker, namespace: str) -> None:
    images = ImageStore(store, Subjects(namespace), Quotas(store, 10 << 20))
    use = partial(ImageUse, bridge="http", deadline=store.now() + 600)
    key = await images.put("one", DATA, DIGEST, NOW, use("a"))
    assert await get_image(store, key, DIGEST) == DATA
    before = await entries(store)
    for request in ("a", *map(str, range(40))):
        assert await images.put("one", DATA, DIGEST, NOW + 1, use(request)) == key
    assert await entries(store) == before
    later = await images.put("one", DATA, DIGEST, NOW + IMAGE_WINDOW, use("a"))
    assert later != key and await get_image(store, later, DIGEST) == DATA


async def test_tenants_do_not_share_images(store: Broker, put: Put) -> None:
    key, digest = await put(1, "a")
    with pytest.raises(StreamNotFound, match="no longer stored; send the request again"):
        await get_image(store, image_key("two", digest, NOW), digest)
    with pytest.raises(StreamNotFound):
        await get_image(store, key, "0" * 64)


async def test_images_count_for_the_quota(store: Broker, namespace: str) -> None:
    images = ImageStore(store, Subjects(namespace), Quotas(store, len(DATA) + 2000))
    use = ImageUse("a", "http", store.now() + 600)
    await images.put("one", DATA, DIGEST, NOW, use)
    other = DATA[1:]
    with pytest.raises(QuotaExceeded):
        await images.put("one", other, hashlib.sha256(other).hexdigest(), NOW, use)
    await images.put("two", other, hashlib.sha256(other).hexdigest(), NOW, use)


async def test_images_whose_requests_have_ended_make_room(
    store: Broker, put: Put, end: Callable[[str], Awaitable[None]]
) -> None:
    first, both, running = await put(1, "a"), await put(2, "a"), await put(3, "b")
    assert await put(2, "b") == both  # a chat's next turn
    with pytest.raises(Overloaded) as refused:
        await put(4, "c")
    assert (refused.value.status, refused.value.retry_after) == (503, 5.0)
    assert await get_image(store, *first)
    await end("a")
    another = await put(4, "c")
    for kept in (both, running, another):
        assert await get_image(store, *kept)
    with pytest.raises(StreamNotFound):
        await get_image(store, *first)
    await end("c")
    assert await put(1, "d") == first, "cleared, and stored again"
    assert await get_image(store, *first)
    with pytest.raises(StreamNotFound):
        await get_image(store, *another)


async def test_the_room_that_is_made_is_used_at_once(
    store: Broker, namespace: str, end: Callable[[str], Awaitable[None]]
) -> None:
    put = putting(store, namespace, 0.0)
    for number in range(12):
        kept = await put(number, f"{number}")
        assert await get_image(store, *kept)
        await end(f"{number}")


async def test_an_image_is_kept_for_requests_until_their_deadlines(store: Broker, put: Put) -> None:
    queued, late = await put(1, "a"), await put(2, "b", deadline=-120.0)
    for request in range(40):  # more than are told apart
        await put(2, f"{request}", deadline=-120.0)
    await put(3, "c")
    await put(4, "d", deadline=-120.0)
    assert await get_image(store, *queued)
    with pytest.raises(StreamNotFound):
        await get_image(store, *late)
    assert await put(2, "e", deadline=-120.0) == late
    for request in range(40):
        await put(2, f"{request}", deadline=600.0 if request == 0 else -120.0)
    with pytest.raises(Overloaded):
        await put(5, "f")
    assert await get_image(store, *late)


async def test_one_tenants_images_leave_room_for_those_of_others(store: Broker, put: Put) -> None:
    await store.reconfigure([], [BucketSpec(IMAGES, storage="file", max_bytes=20 * len(DATA))])
    kept = [await put(number, "a") for number in range(17)]
    with pytest.raises(Overloaded):
        while True:
            kept.append(await put(len(kept), "a"))
    assert 17 <= len(kept) < 19
    kept.append(await put(100, "a", tenant="two"))
    for each in kept:
        assert await get_image(store, *each)


def test_an_identity_is_of_what_the_model_sees() -> None:
    image = PromptImage(DIGEST, 0, 4, (1, 4, 4), (None, 100), DATA)
    assert image.identity == PromptImage(DIGEST, 7, 4, (1, 4, 4), (None, 100)).identity
    assert image.identity != PromptImage(DIGEST, 0, 4, (1, 4, 4)).identity
