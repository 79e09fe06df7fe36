"""Tells clients in headers what they may have a minute, what is left of it, and when it will all be there again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....schemas.rates import Bucket, Kind
from ....schemas.times import rfc3339
from ...bridge.rates import HeardRates

_FIGURES, _KINDS = ("limit", "remaining", "reset"), ("requests", "tokens")
OPENAI_NAMES = tuple(f"x-ratelimit-{figure}-{kind}" for figure in _FIGURES for kind in _KINDS)
ANTHROPIC_NAMES = tuple(f"anthropic-ratelimit-{kind}-{figure}" for kind in _KINDS for figure in _FIGURES)
_ANTHROPIC = "/v1/messages"


class RateHeaders:
    """ASGI middleware for the responses to requests in whose state `open_request` has put the tenant as `metered`."""

    def __init__(self, app: ASGIApp, rates: HeardRates) -> None:
        self.app = app
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                tenant = scope.get("state", {}).get("metered")
                buckets = self._rates.buckets(tenant) if tenant is not None else {}
                name = anthropic if scope["path"].startswith(_ANTHROPIC) else openai
                headers = MutableHeaders(scope=message)
                for key, value in name(buckets):
                    headers[key] = value
            await send(message)

        await self.app(scope, receive, told if scope["type"] == "http" else send)


def openai(buckets: Mapping[Kind, Bucket]) -> Iterator[tuple[str, str]]:
    """https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers"""
    for kind, bucket in buckets.items():
        yield f"x-ratelimit-limit-{kind}", str(bucket.limit)
        yield f"x-ratelimit-remaining-{kind}", _left(bucket)
        yield f"x-ratelimit-reset-{kind}", _duration(bucket.wait(bucket.limit))


def anthropic(buckets: Mapping[Kind, Bucket]) -> Iterator[tuple[str, str]]:
    """https://docs.anthropic.com/en/api/rate-limits#response-headers"""
    for kind, bucket in buckets.items():
        yield f"anthropic-ratelimit-{kind}-limit", str(bucket.limit)
        yield f"anthropic-ratelimit-{kind}-remaining", _left(bucket)
        yield f"anthropic-ratelimit-{kind}-reset", rfc3339(math.ceil(time.time() + bucket.wait(bucket.limit)))


def _left(bucket: Bucket) -> str:
    return str(max(0, math.floor(bucket.left)))


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1s, 7.66s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000 - 0.001)
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest = divmod(milliseconds / 1000, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
