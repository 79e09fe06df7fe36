"""What a client and the log hear of an error that nobody foresaw."""

from __future__ import annotations

import orjson
import pytest
from asgi import ask
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from penstock.api.http.middleware.failures import Failures


async def test_where_there_are_no_more_threads_clients_come_back_and_the_log_names_the_limits() -> None:
    async def starved(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("can't start new thread")

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(RuntimeError):  # what a server of ASGI applications logs
            await Failures(starved)(scope, receive, send)

    with capture_logs() as logs:
        response = await ask(server, "POST", "/v1/chat/completions", {})
    assert (response.status, response.headers["retry-after"]) == (503, "5")
    assert orjson.loads(response.body)["error"]["code"] == "threads_exhausted"
    (line,) = logs
    assert all(limit in line["reason"] for limit in ("ulimit -u", "pids.max", "TasksMax"))
