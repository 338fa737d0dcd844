"""The HTTP port of a role: answers, refusals, and the cost of strangers. Real sockets on port 0."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.http.messages import HTML, Response, Route, json_response
from ps_protocol.http.server import HttpServer
from ps_protocol.security.options import OPEN, Security
from tests.support.network.certificates import Files, make
from tests.support.waiting import wait_until

STATUS, REGISTER_MODEL = "/ps_protocol.v1.ChiefService/GetClusterStatus", "/ps_protocol.v1.ChiefService/RegisterModel"
BIG = b"x" * (8 << 20)


class Site:
    """A server of some routes."""

    def __init__(self, security: Security, *, address: str = "127.0.0.1:0", **options: Any) -> None:
        self.server = HttpServer(
            [
                Route(path="/", answer=lambda _: Response(body=b"hello", content_type=HTML)),
                Route(path="/big", answer=lambda _: Response(body=BIG, content_type=HTML)),
                Route(path="/status", rpc=STATUS, answer=lambda request: json_response({"query": dict(request.query)})),
                Route(path="/model", rpc=REGISTER_MODEL, answer=lambda _: json_response({})),
                Route(path="/broken", answer=lambda _: json_response({"a": 1 / 0})),
            ],
            address=address,
            cluster="job",
            security=security,
            **options,
        )
        self.server.start()
        self.port = int(self.server.url.rstrip("/").rpartition(":")[2])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def ask(self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> http.client.HTTPResponse:
        return asked(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10), path, method, headers)

    def say(self, text: bytes) -> bytes:
        """What comes back for bytes."""
        with self.connect() as connection:
            connection.sendall(text)
            return b"".join(iter(lambda: connection.recv(65536), b""))


def asked(connection: http.client.HTTPConnection, path: str, method: str, headers: Mapping[str, str] | None) -> http.client.HTTPResponse:
    given = dict(headers or {})
    connection.putrequest(method, path, skip_host="Host" in given)
    for name, value in given.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.words = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


def words(response: http.client.HTTPResponse) -> dict[str, str]:
    value: dict[str, str] = json.loads(response.words)  # type: ignore[attr-defined]
    return value


@contextlib.contextmanager
def serving(security: Security = OPEN, **options: Any) -> Iterator[Site]:
    site = Site(security, **options)
    try:
        yield site
    finally:
        site.server.stop()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("job"))


def token(files: Files, role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {(files.directory / f'{role}.token').read_text().split()[-1]}"}


def test_a_route_is_answered(site: Site) -> None:
    response = site.ask("/status?since=3&x=%41")
    assert response.status == 200
    assert dict[str, object](words(response)) == {"query": {"since": "3", "x": "A"}}


def test_every_answer_forbids_framing_guessing_and_loading(site: Site) -> None:
    for path in ("/", "/nowhere", "/broken"):
        headers = site.ask(path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Server" not in headers and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("path", ["/nowhere", "/../etc/passwd", "/%2e%2e/etc/passwd", "/status/", "/STATUS"])
def test_other_paths_are_not_found(site: Site, path: str) -> None:
    assert site.ask(path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_what_is_not_asked_by_get_is_refused(site: Site, method: str) -> None:
    assert site.ask("/status", method=method).status == 405


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "LOCALHOST", "[::1]:1234", "10.1.2.3"])
def test_hosts_that_can_only_be_this_server_are_answered(site: Site, host: str) -> None:
    assert site.ask("/", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "evil.example#127.0.0.1", "a@127.0.0.1", "", "[::1", "127.0.0.1:x"]
)
def test_a_name_that_leads_here_is_not_answered(site: Site, host: str) -> None:
    response = site.ask("/", headers={"Host": host})
    assert response.status == 421
    assert "as localhost" in words(response)["error"]


def test_any_name_of_the_certificate_is_answered(tmp_path: Path) -> None:
    with serving(make(tmp_path, hosts=("h1", "*.pods.example")).server("chief")) as site:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        for name in ("h1", "chief.pods.example"):
            with site.connect() as plain, context.wrap_socket(plain, server_hostname=name) as connection:
                connection.sendall(f"GET / HTTP/1.1\r\nHost: {name}:8080\r\n\r\n".encode())
                assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_the_url_of_a_port_that_listens_everywhere_names_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make(tmp_path, hosts=("h1", "h2"))
    monkeypatch.setattr(socket, "gethostname", lambda: "h2")
    with serving(files.server("chief"), address="0.0.0.0:0") as site:
        assert site.server.url == f"https://h2:{site.port}/"
        monkeypatch.setattr(socket, "gethostname", lambda: "container-7")
        assert site.server.url == f"https://h1:{site.port}/", "the certificate does not have the host's own name"
    with serving(address="0.0.0.0:0", allow_insecure_network=True) as site:
        assert site.server.url == f"http://container-7:{site.port}/"
        assert site.ask("/", headers={"Host": "container-7"}).status == 200


def test_a_defect_says_nothing_about_itself(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    response = site.ask("/broken")
    assert response.status == 500
    assert words(response) == {"error": "internal error (see the log of this process)", "reason": "INTERNAL"}
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET //evil.example HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /\t/evil.example HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /\t/x[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"garbage\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\nc: d\r\n\r\n", 400),
        (b"POST /status HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 405),
        (b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n" + b"x" * 100_000, 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(100)) + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /?" + b"a=b&" * 100 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    ],
)
def test_an_invalid_request_gets_a_status_for_it(site: Site, text: bytes, status: int) -> None:
    assert site.say(text).startswith(b"HTTP/1.1 %d " % status)


def test_tokens_decide_which_callers_may_request_which_paths(files: Files) -> None:
    with serving(Security(token_file=files.directory / "tokens")) as site:
        assert site.ask("/").status == 200, "the page itself has nothing to hide"
        refused = site.ask("/status")
        assert refused.status == 401
        assert refused.headers["WWW-Authenticate"].startswith("Bearer")
        assert words(refused)["reason"] == "UNAUTHENTICATED"
        assert site.ask("/status", headers={"Authorization": "Bearer " + "0" * 64}).status == 401
        assert site.ask("/status", headers=token(files, "observer")).status == 200
        assert site.ask("/model", headers=token(files, "worker")).status == 200
        assert site.ask("/model", headers=token(files, "observer")).status == 403


def test_a_token_in_the_address_counts_for_nothing(files: Files) -> None:
    with serving(Security(token_file=files.directory / "tokens")) as site:
        secret = token(files, "admin")["Authorization"].removeprefix("Bearer ")
        assert site.ask(f"/status?token={secret}").status == 401


def test_with_certificates_there_is_tls_and_both_are_checked(files: Files) -> None:
    with serving(files.server("chief", verify_clients=True)) as site:
        for holder, proof, status in (("observer", "observer", 200), ("observer", "admin", 200), ("ps", "observer", 200)):
            context = ssl.create_default_context(cafile=str(files.directory / "ca.pem"))
            context.load_cert_chain(files.directory / f"{holder}.pem", files.directory / f"{holder}.key")
            connection = http.client.HTTPSConnection("localhost", site.port, timeout=10, context=context)
            assert asked(connection, "/status", "GET", token(files, proof)).status == status
        context = ssl.create_default_context(cafile=str(files.directory / "ca.pem"))
        connection = http.client.HTTPSConnection("localhost", site.port, timeout=10, context=context)
        with pytest.raises(OSError):
            asked(connection, "/status", "GET", token(files, "admin"))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_an_http_port_that_other_machines_reach_without_protection_is_refused(address: str) -> None:
    with pytest.raises(InvalidSpec, match="others than this machine can reach it"):
        HttpServer([], address=address, cluster="job")


def test_an_address_that_is_taken_is_named(site: Site) -> None:
    with pytest.raises(InvalidSpec, match=r"cannot listen at 127\.0\.0\.1:\d+: another process listens there"):
        HttpServer([], address=f"127.0.0.1:{site.port}", cluster="job").start()


def test_readers_that_read_nothing_are_cut_and_others_are_answered() -> None:
    with serving() as site, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(site.connect()).sendall(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        assert site.ask("/").status == 200
        # The readers are cut after 10 s: it has not waited for that.
        assert time.monotonic() - began < 8.0


def test_idle_connections_keep_nobody_from_being_answered() -> None:
    with serving() as site, contextlib.ExitStack() as stack:
        for _ in range(400):
            connection = socket.socket()
            stack.enter_context(connection)
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect(("127.0.0.1", site.port))
        assert site.ask("/").status == 200


@pytest.mark.timeout(120)
def test_ten_thousand_connections_keep_nobody_from_being_answered() -> None:
    with serving() as site, contextlib.ExitStack() as stack:
        is_over = threading.Event()
        num_connected = 0

        def flood() -> None:
            nonlocal num_connected
            held: deque[socket.socket] = deque(maxlen=500)
            while num_connected < 10_000 and not is_over.is_set():
                connection = socket.socket()
                connection.setblocking(False)
                with contextlib.suppress(OSError):
                    connection.connect(("127.0.0.1", site.port))
                with contextlib.suppress(OSError):
                    connection.send(b"GET / HTTP/1.1\r\n")
                num_connected += 1
                if len(held) == held.maxlen:
                    held.popleft().close()
                held.append(connection)
            for connection in held:
                connection.close()

        attacker = threading.Thread(target=flood)
        attacker.start()
        stack.callback(attacker.join)
        stack.callback(is_over.set)
        num_threads, answered = threading.active_count(), 0
        while attacker.is_alive() or not answered:
            with contextlib.suppress(OSError, http.client.HTTPException):
                answered += site.ask("/").status == 200
            assert threading.active_count() <= num_threads + 8
        assert num_connected == 10_000
        wait_until(lambda: site.ask("/").status == 200, timeout_s=20, what="an answer after the flood")


def test_stop_closes_the_port_and_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with serving() as site, site.connect():
        pass
    assert threading.active_count() <= before
    with pytest.raises(ConnectionRefusedError):
        site.connect()
