"""The OpenAPI page is the truth: whatever is sent to its paths, what comes back is what it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx2
import orjson
import requests
from applications import Applications, Script
from asgi import ask
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, checks, openapi
from schemathesis.core.result import Ok

SMALL = {"model": "echo", "max_tokens": 8, "timeout": 5}
FEW = settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ENDLESS = ("/models/sse", "/server/events")  # they answer for as long as the client reads
NAMES = ["status_code_conformance", "content_type_conformance", "response_schema_conformance", "not_a_server_error"]


async def page(app: Any) -> dict[str, Any]:
    response = await ask(app, "GET", "/openapi.json", None, {"Authorization": "Bearer sk-0123456789"})
    assert response.status == 200
    found: dict[str, Any] = orjson.loads(response.body)
    return found


async def send(app: Any, case: Case[Any]) -> httpx2.Response:
    sent = requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()
    body: Any = sent.body.encode() if isinstance(sent.body, str) else sent.body
    headers: Any = sent.headers
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as client:
        return await client.request(str(sent.method), str(sent.url), headers=headers, content=body)


def test_every_answer_is_documented(applications: Applications) -> None:
    """No failure of ours; no status, media type or error body that the page does not have."""
    *conformance, not_ours = checks.CHECKS.get_by_names(NAMES)
    seen: Counter[int] = Counter()
    for result in openapi.from_dict(applications.run(page(applications.apps[0]))).get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if operation.path in ENDLESS:
            continue

        @FEW
        @given(st.one_of(*map(operation.as_strategy, GenerationMode)), st.booleans())
        def check(case: Case[Any], served: bool) -> None:
            body: Any = case.body
            if served and isinstance(body, dict):
                case.body = body | {name: value for name, value in SMALL.items() if name in body}
            response = applications.run(send(applications.apps[0], case))
            seen[response.status_code] += 1
            wanted: Any = conformance if response.status_code == 503 else [*conformance, not_ours]
            case.validate_response(response, checks=wanted)

        check()
    assert seen.keys() >= {200, 400, 404}, seen


async def test_a_key_is_documented_where_one_is_asked_for() -> None:
    for keys in (None, "sk-0123456789"):
        found, needed = await page((await Script.start(api_keys=keys)).app), keys is not None
        for path, methods in found["paths"].items():
            for operation in methods.values():
                asks = needed and not path.startswith("/health")
                assert ("401" in operation["responses"], "security" in operation) == (asks, asks)
        assert ("securitySchemes" in found["components"]) == needed


def test_every_body_and_every_refusal_is_written_out(applications: Applications) -> None:
    found = applications.run(page(applications.apps[0]))
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"]
            assert operation["description"], path
            if method == "post" and not path.endswith(("/cancel", "/retry")):
                assert operation["requestBody"]["content"], path
                assert "default" in operation["responses"] or {"400", "413"} <= operation["responses"].keys(), path
            for status, response in operation["responses"].items():
                if (status == "default" or int(status) >= 400) and not path.startswith("/health"):
                    schema = response["content"]["application/json"]["schema"]
                    assert "error" in str(schema).lower(), (path, status)
