"""nginx and haproxy before bridges, with the files of `deploy/proxy`: what comes through is what the bridge says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
import trustme
from pages import ROOT
from ports import reserved_port
from serving import Serve, Served, serving, until
from websockets.sync.client import connect

HOST = "llm.example.org"
MAIN = """
daemon off;
pid {0}/nginx.pid;
error_log {0}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {0}/body;
    proxy_temp_path {0}/proxy;
    fastcgi_temp_path {0}/fastcgi;
    uwsgi_temp_path {0}/uwsgi;
    scgi_temp_path {0}/scgi;
    include {0}/site.conf;
}}
"""
pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx")


@pytest.fixture
def served(serve: Serve, tiny_model: Path) -> Served:
    arguments = ("--dtype", "float32", "--served-model-name", "tiny", "--cors-origins", f"https://{HOST}")
    return serve(str(tiny_model), *arguments)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA) -> ssl.SSLContext:
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    return trusted


@pytest.fixture
def proxy(served: Served, tmp_path: Path, authority: trustme.CA, trusted: ssl.SSLContext) -> Iterator[httpx2.Client]:
    """A client of nginx, which knows it by its name and certificate."""
    folder = tmp_path / "nginx"
    folder.mkdir()
    authority.issue_cert(HOST, "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
    port = reserved_port()
    site = (ROOT / "deploy" / "proxy" / "nginx.conf").read_text("utf-8")
    for own, here in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/certs/llm.example.org.pem", str(folder / "both.pem")),
        ("/etc/ssl/private/llm.example.org.key", str(folder / "both.pem")),
        ("127.0.0.1:8000", served.url.removeprefix("http://")),
    ):
        assert own in site
        site = site.replace(own, here)
    (folder / "site.conf").write_text(site)
    (folder / "nginx.conf").write_text(MAIN.format(folder))
    with subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE, text=True) as nginx:
        with httpx2.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=60, trust_env=False) as client:
            client.headers["host"] = HOST
            until(lambda: nginx.poll() is None and _listens(port))
            yield client
        nginx.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as looking:
        return looking.connect_ex(("127.0.0.1", port)) == 0


def _text(lines: Iterable[str]) -> str:
    """That of a streamed answer, which must have ended."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def test_what_comes_through_nginx_is_what_the_bridge_says(
    served: Served, proxy: httpx2.Client, trusted: ssl.SSLContext
) -> None:
    body = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": 400, "ignore_eos": True}
    whole = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert proxy.post("/v1/completions", json=body).json()["choices"][0]["text"] == whole
    page = proxy.get("/")
    assert page.status_code == 200 and "Penstock" in page.text
    from_page = {"origin": f"https://{HOST}", "sec-fetch-site": "same-origin"}
    assert proxy.post("/v1/completions", json={**body, "max_tokens": 1}, headers=from_page).status_code == 200
    closing = {"connection": "close"}  # nginx closes it anyway, after an answer that does not say so
    large = proxy.post("/v1/completions", json={**body, "prompt": "x" * (8 << 20)}, headers=closing)
    assert large.status_code == 413 and large.json()["error"]["message"]

    given = {"model": "tiny", "input": "Once", "temperature": 0, "max_output_tokens": 20}
    over_http = proxy.post("/v1/responses", json=given).json()
    to_nginx = socket.create_connection(("127.0.0.1", proxy.base_url.port))
    with connect(f"wss://{HOST}/v1/responses", sock=to_nginx, ssl=trusted, proxy=None) as ours:
        ours.send(json.dumps({"type": "response.create", **given}))
        events = iter(lambda: json.loads(ours.recv(timeout=60)), None)
        last = next(
            event for event in events if event["type"] in ("response.completed", "response.incomplete", "error")
        )
    assert last["response"]["output"][0]["content"] == over_http["output"][0]["content"]

    with proxy.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        lines = stream.iter_lines()
        begun = [next(lines)]
        family = psutil.Process(served.process.pid).children()
        (worker,) = (process for process in family if "worker" in process.cmdline())
        worker.kill()
        assert _text([*begun, *lines]) == whole, "with another worker's tokens, none missing"
    with proxy.stream("POST", "/v1/completions", json={**body, "max_tokens": 1900, "stream": True}) as stream:
        next(stream.iter_lines())
    until(lambda: "disconnected=True" in served.process.output)


def test_half_an_answer_is_not_whole_behind_nginx_with_its_defaults(served: Served, tmp_path: Path) -> None:
    """It speaks HTTP/1.0 to the bridge, where an answer ends with its connection, as one does whose bridge died."""
    folder = tmp_path / "nginx"
    folder.mkdir()
    port = reserved_port()
    (folder / "site.conf").write_text(
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {served.url}; }} }}\n"
    )
    (folder / "nginx.conf").write_text(MAIN.format(folder))
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE, text=True) as nginx:
        try:
            until(lambda: nginx.poll() is None and _listens(port))
            address = f"http://127.0.0.1:{port}/v1/completions"
            with httpx2.stream("POST", address, json=body, timeout=60, trust_env=False) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: {")
                family = psutil.Process(served.process.pid).children()
                (front,) = (process for process in family if "front" in process.cmdline())
                front.kill()
                with pytest.raises(httpx2.RemoteProtocolError):
                    list(lines)
        finally:
            nginx.terminate()


@pytest.fixture
def staying(tmp_path: Path) -> Iterator[Served]:
    """Another server, behind the same proxy."""
    arguments = ("--backend", "echo", "--echo-rate", "20", "--cors-origins", f"https://{HOST}")
    with serving(tmp_path / "staying", *arguments) as served:
        yield served


@pytest.mark.skipif(not shutil.which("haproxy"), reason="needs haproxy")
def test_a_bridge_behind_haproxy_stops_without_a_failed_request(serve: Serve, staying: Served, tmp_path: Path) -> None:
    leaving = serve("--backend", "echo", "--cors-origins", f"https://{HOST}", "--stop-delay", "4")
    authority = trustme.CA()
    authority.issue_cert(HOST, "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    port = reserved_port()
    configuration = (ROOT / "deploy" / "proxy" / "haproxy.cfg").read_text("utf-8")
    line = configuration.splitlines()[-1]
    lines = [line.replace("127.0.0.1:8000", one.url.removeprefix("http://")) for one in (leaving, staying)]
    for own, here in (
        ("bind :443", f"bind 127.0.0.1:{port}"),
        ("/etc/haproxy/certs/llm.example.org.pem", str(tmp_path / "both.pem")),
        (line, lines[0] + "\n" + lines[1].replace("bridge-1", "bridge-2")),
    ):
        assert own in configuration
        configuration = configuration.replace(own, here)
    (tmp_path / "haproxy.cfg").write_text(configuration)
    body = {"model": "echo", "prompt": "Once", "stream": True}
    with subprocess.Popen(["haproxy", "-f", str(tmp_path / "haproxy.cfg")], stderr=subprocess.DEVNULL) as haproxy:
        try:
            until(lambda: haproxy.poll() is None and _listens(port))
            address = f"https://127.0.0.1:{port}"
            with httpx2.Client(base_url=address, verify=trusted, timeout=60, trust_env=False) as client:
                client.headers["host"] = HOST
                os.kill(leaving.process.pid, signal.SIGTERM)
                while leaving.process.alive:
                    with client.stream("POST", "/v1/completions", json=body) as stream:
                        assert stream.status_code == 200, stream.read()
                        assert _text(stream.iter_lines()) == "Once"
                assert client.get("/v1/models").status_code == 200
                with pytest.raises(httpx2.ReadTimeout):
                    client.post("/v1/completions", json={**body, "prompt": "x" * 2000, "stream": False}, timeout=1)
                until(lambda: "disconnected=True" in staying.process.output)
        finally:
            haproxy.terminate()
