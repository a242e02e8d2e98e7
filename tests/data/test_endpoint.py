"""Whether anybody listens at an endpoint, found out before anything is asked."""

import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from draftsmith.data import endpoint
from draftsmith.data.endpoint import check_server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listening():
    """A socket whose connections are accepted by the system and answered by nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture(params=["http", "https"])
def served(request, tmp_path):
    """(scheme, port) of a real server."""
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    if request.param == "https":
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        try:
            subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("needs openssl to make a certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield request.param, server.server_port
    server.shutdown()
    server.server_close()


def refused(url, **arguments):
    began = time.monotonic()
    with pytest.raises(ConnectionError) as error:
        check_server(url, **arguments)
    assert time.monotonic() - began < 5 and "\n" not in str(error.value)
    return str(error.value)


def test_a_server_that_answers(served):
    scheme, port = served
    if scheme == "http":
        check_server(f"http://127.0.0.1:{port}/v1")
        assert "it does not use TLS" in refused(f"https://127.0.0.1:{port}/v1")
    else:
        assert "its certificate is not trusted: self" in refused(f"https://localhost:{port}/v1")
        assert "it uses TLS: the URL begins with https://" in refused(f"http://127.0.0.1:{port}/v1")


def test_a_server_that_is_slow_to_answer_is_reachable(listening):
    check_server(f"http://127.0.0.1:{listening}/v1")


def test_a_server_that_drops_connections():
    """A full queue of connections swallows whatever comes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(server.getsockname())
        try:
            said = refused(f"http://127.0.0.1:{server.getsockname()[1]}/v1", seconds=0.5)
        finally:
            for each in waiting:
                each.close()
    assert "no connection within 0.5 seconds" in said or "timed out" in said


def test_a_server_that_only_listens_speaks_no_tls(listening):
    assert "no connection within 0.5 seconds" in refused(f"https://127.0.0.1:{listening}/v1", seconds=0.5)


def test_a_resolver_that_hangs(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: time.sleep(3) or [])
    assert "no connection within 0.3 seconds" in refused("http://somewhere.example/v1", seconds=0.3)


@pytest.mark.parametrize(
    "url, message",
    [
        ("http://no-such-host.invalid/v1", "no server answers at no-such-host.invalid:80"),
        ("https://no-such-host.invalid/v1", "no server answers at no-such-host.invalid:443"),
        (f"http://{'a' * 70}.example/v1", "no server answers at aaa"),
        ("http://127.0.0.1:99999/v1", "it names no host and port"),
        ("http://127.0.0.1:x/v1", "it names no host and port"),
        ("http://[::1/v1", "it names no host and port"),
    ],
)
def test_urls_without_a_valid_host(url, message):
    assert message in refused(url)


def test_a_proxy_is_checked_in_place_of_the_server(monkeypatch, listening):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listening}")
    check_server("http://no-such-host.invalid/v1")
    monkeypatch.setenv("no_proxy", "no-such-host.invalid")
    refused("http://no-such-host.invalid/v1")


def test_the_check_is_bounded_in_time():
    assert endpoint.CONNECT < 5
