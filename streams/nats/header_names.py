"""The headers of ours under their names, in whichever case a client writes them.

NATS tells cases apart, but clients write names as HTTP's libraries do: Go's as Traceparent, others in lower case.
"""

from __future__ import annotations

from ..port import DEADLINE, HOPS, MESSAGE_ID, NEXT, SCHEMA, TRACE_PARENT, Headers

_OURS = {
    form(name): name
    for name in (MESSAGE_ID, TRACE_PARENT, SCHEMA, DEADLINE, NEXT, HOPS)
    for form in (str.lower, str.title, str.upper)
}


def with_our_names(headers: Headers | None) -> Headers:
    """The headers, ours named as in `port`; the others are left as they are."""
    return {_OURS.get(name, name): value for name, value in headers.items()} if headers else {}
