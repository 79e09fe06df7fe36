"""Request headers that have one value each."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers

from ....schemas.errors import InvalidRequest

KEYS = ("Authorization", "X-Api-Key", "Api-Key")  # that may hold an API key


def check_single(headers: Headers, names: Iterable[str]) -> None:
    """Of two values one would have to be ignored: the same one may come twice, as proxies may add it.

    Raises `InvalidRequest`."""
    for name in names:
        if len(given := headers.getlist(name)) > 1 and len(set(given)) > 1:
            raise InvalidRequest(f"The header {name} has {len(given)} values, not all the same; send one.", param=name)


def check_unused(headers: Headers) -> None:
    """Raises `InvalidRequest` for a header with which streams are resumed, on a path where they are not."""
    for name in ("penstock-resumable", "last-event-id", "penstock-events"):
        if name in headers:
            advice = "send Idempotency-Key, and repeat the request to get the same answer"
            raise InvalidRequest(f"The header {name} is not for this path; {advice}.", param=name)


def flag(headers: Headers, name: str) -> bool:
    value = headers.get(name, "")
    if value and value.lower() not in ("true", "1"):
        raise InvalidRequest(f"The header {name} must be `true`, or left out.", param=name)
    return bool(value)
