"""gRPC by a client that protoc made from the shipped file, with a real server and its processes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import psutil
import pytest
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc
from serving import START_TIMEOUT, Process, Served, serving, until

PROTO = Path(__file__).parents[3] / "api" / "grpc" / "penstock.proto"
KEYS = {"ada": "sk-ada-secret", "bob": "sk-bob-secret", "slow": "sk-slow-secret"}
RATE = 50  # tokens a second
TEXT = "the quick brown fox jumps over the lazy dog. " * 4


class Client:
    """The stub of one tenant."""

    def __init__(self, module: Any, messages: Any, channel: grpc.Channel, key: str | None) -> None:
        self._stub, self._messages = module.PenstockStub(channel), messages
        self._metadata = [("authorization", f"Bearer {key}")] if key else []

    def call(self, method: str, fields: dict[str, Any], timeout: float | None = START_TIMEOUT) -> Any:
        message = getattr(self._messages, f"{method}Request")(**fields)
        return getattr(self._stub, method)(message, metadata=self._metadata, timeout=timeout, wait_for_ready=True)

    def submit(self, tokens: int = 8, fields: dict[str, Any] | None = None, **body: Any) -> Any:
        whole = {"prompt": TEXT, "max_tokens": tokens, "model": "echo"} | body
        return self.call("Submit", {"body": json.dumps(whole), "endpoint": "/v1/completions"} | (fields or {}))

    def follow(self, request: str, after: str = "") -> Any:
        return self.call("Follow", {"request": request, "after": after})

    def cancel(self, request: str) -> bool:
        """Whether it was running."""
        return bool(self.call("Cancel", {"request": request}).cancelled)


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Served]:
    keys = ",".join(f"{name}={key}{' max_priority=normal' * (name == 'bob')}" for name, key in KEYS.items())
    arguments = ("--backend", "echo", "--echo-rate", str(RATE), "--grpc-port", str(port), "--api-keys", keys)
    limits = ("--tenant-requests-per-minute", "slow=1")
    with serving(tmp_path_factory.mktemp("grpc") / "state", *arguments, *limits) as served:
        yield served


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """What protoc makes of the shipped file: the stubs and the messages."""
    folder = tmp_path_factory.mktemp("generated")
    library = protoc.__file__.rpartition("/")[0] + "/_proto"
    words = [f"-I{PROTO.parent}", f"-I{library}", f"--python_out={folder}", f"--grpc_python_out={folder}", str(PROTO)]
    assert protoc.main(["protoc", *words]) == 0
    sys.path.insert(0, str(folder))
    yield importlib.import_module("penstock_pb2_grpc"), importlib.import_module("penstock_pb2")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def channel(served: Served, port: int) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


@pytest.fixture
def ada(generated: tuple[Any, Any], channel: grpc.Channel) -> Client:
    return Client(*generated, channel, KEYS["ada"])


def refused(call: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
    """How a call ended, with what its trailers say."""
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    trailers: Any = raised.value.trailing_metadata()
    return raised.value.code(), dict(trailers)


def kill_front(served: Served) -> None:
    (front,) = [child for child in psutil.Process(served.process.pid).children() if "front" in child.cmdline()]
    os.kill(front.pid, signal.SIGKILL)


def text_of(events: list[Any]) -> str:
    return "".join(event.token.text for event in events)


def ids_of(events: list[Any]) -> list[int]:
    return [id for event in events for id in event.token.token_ids]


def test_a_request_is_answered_as_over_http(ada: Client, served: Served) -> None:
    call = ada.submit(24)
    events = list(call)
    body = {"model": "echo", "prompt": TEXT, "max_tokens": 24}
    headers = {"Authorization": f"Bearer {KEYS['ada']}"}
    answer = httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers).raise_for_status().json()
    assert text_of(events) == answer["choices"][0]["text"]
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1]) == ("accepted", "done")
    assert dict(call.initial_metadata())["penstock-request"] == events[0].accepted.request
    assert events[-1].done.usage.completion_tokens == answer["usage"]["completion_tokens"] == 24
    assert list(events[-1].done.finish_reasons) == ["length"]


def test_follow_goes_on_after_any_event_and_repeats_none(ada: Client) -> None:
    events = [event for event in ada.submit(12, n=2) if event.WhichOneof("event") != "queued"]  # which is not stored
    request = events[0].accepted.request
    for place in range(len(events)):
        rest = list(ada.follow(request, events[place].id))
        for choice in (0, 1):
            own = [[event for event in part if event.token.choice == choice] for part in (events[place + 1 :], rest)]
            assert ids_of(own[0]) == ids_of(own[1]) and text_of(own[0]) == text_of(own[1])
        assert [event.WhichOneof("event") for event in rest[-1:]] == ["done"] * (place + 1 < len(events))
    assert list(ada.follow(request)) == events


def test_after_a_kill_of_the_front_follow_goes_on_with_the_next_token(ada: Client, served: Served) -> None:
    whole = list(ada.submit(150))
    call, seen, killed = ada.submit(150), list[Any](), False
    with pytest.raises(grpc.RpcError) as broken:
        for event in call:
            seen.append(event)
            if len(ids_of(seen)) >= 10 and not killed:
                killed = True
                kill_front(served)
    assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(ids_of(seen)) < 150

    def rest() -> list[Any]:
        try:
            return list(ada.follow(seen[0].accepted.request, seen[-1].id))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return []

    seen += until(rest)
    assert ids_of(seen) == ids_of(whole) and text_of(seen) == text_of(whole)
    assert seen[-1].done.usage.completion_tokens == 150


def test_cancel_stops_a_request_and_a_second_time_it_had_ended(ada: Client) -> None:
    call = ada.submit(2_000)
    first = next(call)
    assert ada.cancel(first.accepted.request)
    rest, status = [], None
    try:
        rest.extend(call)
    except grpc.RpcError as error:
        status = error.code()
    assert status is grpc.StatusCode.CANCELLED
    again = list[Any]()
    with pytest.raises(grpc.RpcError):
        again.extend(iter(ada.follow(first.accepted.request)))
    assert not ada.cancel(first.accepted.request)


@pytest.mark.parametrize("resumable", [False, True])
def test_who_leaves_cancels_unless_the_request_is_resumable(ada: Client, resumable: bool) -> None:
    call = ada.submit(100, fields={"resumable": resumable})
    request = next(call).accepted.request
    next(call)
    call.cancel()
    status, events = grpc.StatusCode.OK, list[Any]()
    try:
        for event in ada.follow(request):
            events.append(event)
    except grpc.RpcError as error:
        status = error.code()
    last = events[-1].WhichOneof("event")
    assert (status, last) == ((grpc.StatusCode.OK, "done") if resumable else (grpc.StatusCode.CANCELLED, "cancelled"))


def test_the_same_idempotency_key_is_the_same_request(ada: Client) -> None:
    one, other = (list(ada.submit(5, fields={"idempotency_key": "once"})) for _ in range(2))
    assert one[0].accepted.request == other[0].accepted.request and ids_of(one) == ids_of(other)
    status, trailers = refused(ada.submit(6, fields={"idempotency_key": "once"}))
    assert (status, trailers["penstock-code"]) == (grpc.StatusCode.ALREADY_EXISTS, "idempotency_key_reused")


FAULTS: dict[str, tuple[dict[str, Any], grpc.StatusCode, dict[str, str]]] = {
    "range": ({"temperature": -1}, grpc.StatusCode.INVALID_ARGUMENT, {"penstock-param": "temperature"}),
    "model": ({"model": "no"}, grpc.StatusCode.NOT_FOUND, {"penstock-code": "model_not_found"}),
    "endpoint": ({"fields": {"endpoint": "/v1/x"}}, grpc.StatusCode.INVALID_ARGUMENT, {"penstock-param": "endpoint"}),
    "json": ({"fields": {"body": "{"}}, grpc.StatusCode.INVALID_ARGUMENT, {"penstock-code": "invalid_json"}),
    "array": ({"fields": {"body": "[]"}}, grpc.StatusCode.INVALID_ARGUMENT, {"penstock-code": "invalid_type"}),
    "timeout": ({"fields": {"timeout": -1.0}}, grpc.StatusCode.INVALID_ARGUMENT, {"penstock-param": "timeout"}),
    "late": ({"fields": {"timeout": 0.3}, "tokens": 900}, grpc.StatusCode.OK, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refusal_is_a_status_with_its_code(ada: Client, fault: str) -> None:
    body, status, trailers = FAULTS[fault]
    call = ada.submit(**body)
    if status is grpc.StatusCode.OK:  # what a running request has made by its deadline stands
        assert list(list(call)[-1].done.finish_reasons) == ["deadline"]
        return
    found, said = refused(call)
    assert found is status
    assert trailers.items() <= said.items()


def test_keys_are_as_on_http(generated: tuple[Any, Any], channel: grpc.Channel, ada: Client) -> None:
    for key in (None, "sk-of-nobody"):
        status, said = refused(Client(*generated, channel, key).submit())
        assert (status, said["penstock-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
    bob = Client(*generated, channel, KEYS["bob"])
    both = Client(*generated, channel, KEYS["bob"])
    both._metadata.append(("authorization", f"Bearer {KEYS['ada']}"))
    status, said = refused(both.submit())
    assert (status, said["penstock-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "Authorization")
    status, said = refused(bob.submit(priority="high"))
    assert (status, said["penstock-code"]) == (grpc.StatusCode.PERMISSION_DENIED, "priority_not_allowed")
    events = list(ada.submit(3))
    status, said = refused(bob.follow(events[0].accepted.request, events[0].id))
    assert (status, said["penstock-code"]) == (grpc.StatusCode.NOT_FOUND, "stream_not_found")
    status, said = refused(ada.follow("other", events[0].id))
    assert (status, said["penstock-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_event_id")


def test_too_much_is_told_with_the_seconds_to_wait(generated: tuple[Any, Any], channel: grpc.Channel) -> None:
    slow = Client(*generated, channel, KEYS["slow"])
    list(slow.submit(1))
    status, said = refused(slow.submit(1))
    assert (status, said["penstock-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
    assert 0 < float(said["retry-after"]) <= 60


def test_models_health_and_reflection(
    ada: Client, channel: grpc.Channel, generated: tuple[Any, Any], served: Served
) -> None:
    assert [model.id for model in ada.call("ListModels", {}).models] == ["echo"]
    health: Any = health_pb2_grpc.HealthStub(channel)
    for name in ("", "penstock.v1.Penstock"):  # without a key
        request = health_pb2.HealthCheckRequest(service=name)
        assert until(lambda: health.Check(request).status) == health_pb2.HealthCheckResponse.SERVING  # noqa: B023
    with pytest.raises(grpc.RpcError) as raised:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED

    class Key(grpc.StreamStreamClientInterceptor):
        def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
            named = details._replace(metadata=[("x-api-key", KEYS["ada"])])
            return continuation(named, requests)

    database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, Key()))
    assert "penstock.v1.Penstock" in database.get_services()
    file = database.FindFileContainingSymbol("penstock.v1.Penstock")
    assert [method.name for method in file.service[0].method] == ["Submit", "Follow", "Cancel", "ListModels"]


def test_an_unknown_method_and_a_broken_message_are_refused(channel: grpc.Channel) -> None:
    headers = [("x-api-key", KEYS["ada"])]
    for method, status in (("No", grpc.StatusCode.UNIMPLEMENTED), ("Cancel", grpc.StatusCode.INVALID_ARGUMENT)):
        call: Any = channel.unary_unary(
            f"/penstock.v1.Penstock/{method}",
            request_serializer=lambda _: b"\xff\xff",
            response_deserializer=empty_pb2.Empty.FromString,
        )
        with pytest.raises(grpc.RpcError) as raised:
            call(b"", metadata=headers, timeout=60)
        assert raised.value.code() is status


def test_the_example_reads_on_after_a_kill(
    served: Served, port: int, generated: tuple[Any, Any], ada: Client, tmp_path: Path
) -> None:
    program = PROTO.parents[2] / "deploy" / "examples" / "grpc_client.py"
    folder = Path(generated[0].__file__).parent
    prompt = "one two three four five six seven eight nine ten " * 5
    process = subprocess.Popen(
        [sys.executable, "-u", program, f"127.0.0.1:{port}", "echo", prompt],
        cwd=folder,
        env=os.environ | {"PENSTOCK_KEY": KEYS["ada"]},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        said = process.stdout.read(20)
        kill_front(served)
        said += process.stdout.read()
    assert process.returncode == 0
    body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": prompt}], "temperature": 0})
    assert said == text_of(list(ada.submit(fields={"body": body, "endpoint": ""}))) + "\n"


def test_one_that_does_not_read_is_cut_off(tmp_path: Path, generated: tuple[Any, Any]) -> None:
    """Its events would otherwise fill the server's memory."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    words = ("--backend", "echo", "--grpc-port", address.rpartition(":")[2], "--write-timeout", "1")
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    with serving(tmp_path / "state", *words) as served, grpc.insecure_channel(address, options) as channel:
        call = Client(*generated, channel, None).submit(100_000, prompt="x" * 1_000, ignore_eos=True, logprobs=5)
        next(call)
        served.process.wait_for("gRPC call.*method=Submit.*status=CANCELLED")
        with pytest.raises(grpc.RpcError):
            list(call)


def test_a_port_that_is_taken_is_named(tmp_path: Path, port: int, served: Served) -> None:
    words = ("serve", "--backend", "echo", "--port", "0", "--grpc-port", str(port), "--state-dir", str(tmp_path))
    process = Process(*words)
    with contextlib.closing(_Ending(process)):
        assert process.wait() == 2
        assert f"gRPC cannot listen on 127.0.0.1:{port}" in process.output


class _Ending:
    def __init__(self, process: Process) -> None:
        self.close = process.end
