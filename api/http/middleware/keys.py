"""Who asks: requests without a known API key are refused at the door."""

from __future__ import annotations

from functools import partial

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ....config import metrics
from ....config.api_keys import Keys
from ....schemas.errors import InvalidRequest, Unauthorized
from ....schemas.events import ErrorBody
from ..answers import error_response
from .access import note
from .headers import KEYS, check_single

log = structlog.get_logger(__name__)

_OPEN = "/health/"
_PAGE = "/console/"  # the files of the page, which asks for a key itself


def is_open(path: str) -> bool:
    """Whether a path needs no key and is open to every web page."""
    return f"{path}/".startswith(_OPEN)


def is_page(path: str) -> bool:
    """Whether a path is that of the page or one of its files, which need no key."""
    return path == "/" or path.startswith(_PAGE)


class Authentication:
    """ASGI middleware: refuses a request without a known key; puts the tenant of any other into its scope's state.

    `owner_now` there looks the key up again, for answers that outlive it.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not (is_open(scope["path"]) or is_page(scope["path"])):
            try:
                headers = Headers(scope=scope)
                check_single(headers, KEYS)
                owner = self.keys.owner(headers)
            except (Unauthorized, InvalidRequest) as refusal:
                note(scope, error=refusal.code)
                address = (scope.get("client") or ("",))[0]
                log.warning("API key refused", address=address, reason=str(refusal))
                metrics.REFUSALS.labels(refusal.code or "unknown").inc()
                response = error_response(ErrorBody.of(refusal))
                if refusal.status == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {}).update(
                tenant=owner.tenant,
                max_priority=owner.max_priority,
                admin=owner.admin,
                owner_now=partial(self.keys.owner, headers),
            )
        await self.app(scope, receive, send)
