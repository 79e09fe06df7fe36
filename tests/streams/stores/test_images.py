"""The images of requests, in the buckets of both brokers."""

from __future__ import annotations

import hashlib

import pytest
import pytest_asyncio

from penstock.engine.vision.images import PromptImage
from penstock.schemas.errors import QuotaExceeded, StreamNotFound
from penstock.streams.port import Broker, BucketSpec
from penstock.streams.stores.images import get_image, image_key, put_image
from penstock.streams.stores.quotas import Quotas
from penstock.streams.topology import IMAGE_WINDOW, IMAGES

DATA = bytes(range(256)) * 3000
DIGEST = hashlib.sha256(DATA).hexdigest()
NOW = 1_000_000.0


@pytest_asyncio.fixture
async def store(broker: Broker) -> Broker:
    await broker.ensure([], [BucketSpec(name) for name in (IMAGES, "files", "responses", "batches", "batch-results")])
    return broker


async def entries(broker: Broker) -> int:
    return len(await (await broker.bucket(IMAGES)).entries())


async def test_an_image_is_stored_once_in_a_while(store: Broker) -> None:
    quotas = Quotas(store, 10 << 20)
    key = await put_image(store, quotas, "one", DATA, DIGEST, NOW)
    assert await get_image(store, key, DIGEST) == DATA
    before = await entries(store)
    assert await put_image(store, quotas, "one", DATA, DIGEST, NOW + 1) == key
    assert await entries(store) == before
    later = await put_image(store, quotas, "one", DATA, DIGEST, NOW + IMAGE_WINDOW)
    assert later != key and await get_image(store, later, DIGEST) == DATA


async def test_tenants_do_not_share_images(store: Broker) -> None:
    quotas = Quotas(store, 10 << 20)
    key = await put_image(store, quotas, "one", DATA, DIGEST, NOW)
    with pytest.raises(StreamNotFound, match="no longer stored; send the request again"):
        await get_image(store, image_key("two", DIGEST, NOW), DIGEST)
    with pytest.raises(StreamNotFound):
        await get_image(store, key, "0" * 64)


async def test_images_count_for_the_quota(store: Broker) -> None:
    quotas = Quotas(store, len(DATA) + 2000)
    await put_image(store, quotas, "one", DATA, DIGEST, NOW)
    other = DATA[1:]
    with pytest.raises(QuotaExceeded):
        await put_image(store, quotas, "one", other, hashlib.sha256(other).hexdigest(), NOW)
    await put_image(store, quotas, "two", other, hashlib.sha256(other).hexdigest(), NOW)


def test_an_identity_is_of_what_the_model_sees() -> None:
    image = PromptImage(DIGEST, 0, 4, (1, 4, 4), (None, 100), DATA)
    assert image.identity == PromptImage(DIGEST, 7, 4, (1, 4, 4), (None, 100)).identity
    assert image.identity != PromptImage(DIGEST, 0, 4, (1, 4, 4)).identity
