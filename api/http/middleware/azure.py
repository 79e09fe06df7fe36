"""The paths of Azure's OpenAI, for programs that have Azure's client: `/openai/deployments/NAME/chat/completions` asks
for the model NAME, and `/openai/responses` and its like are those below `/v1`."""

from __future__ import annotations

from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

_BASE, _DEPLOYMENTS = "/openai/", "deployments/"
_OF_DEPLOYMENTS = ("/chat/completions", "/completions", "/embeddings")  # the longest first
DEPLOYMENT = "deployment"  # name in a scope's state of what stands for the model of the body


class AzurePaths:
    """ASGI middleware: passes such requests on with the path of OpenAI's API. Its `api-version` has no effect."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] in ("http", "websocket") and path.startswith(_BASE):
            found, name = openai_path(path.removeprefix(_BASE))
            scope = {**scope, "path": found, "raw_path": quote(found).encode()}
            if name is not None:
                scope.setdefault("state", {})[DEPLOYMENT] = name
        await self.app(scope, receive, send)


def openai_path(rest: str) -> tuple[str, str | None]:
    """The path in OpenAI's API that Azure has as `/openai/` and `rest`, and the deployment that it names."""
    if rest.startswith(_DEPLOYMENTS):
        for end in _OF_DEPLOYMENTS:
            if rest.endswith(end) and (name := rest[len(_DEPLOYMENTS) : -len(end)]):
                return f"/v1{end}", name
        return f"{_BASE}{rest}", None  # which is refused by its own name
    return f"/v1/{rest.removeprefix('v1/')}", None
