"""HTTP requests and answers as values, how bytes become a request, and which requests are refused. Opens no socket, reads no token."""

import ipaddress
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ps_protocol.errors import PsError, Unauthenticated, printable
from ps_protocol.model.light_dataclass import light_dataclass

MAX_HEAD_BYTES, MAX_HEADERS = 16 << 10, 64
JSON, HTML = "application/json; charset=utf-8", "text/html; charset=utf-8"
# Nothing may be loaded, framed or guessed at. A page names what it needs by its own Content-Security-Policy.
_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Connection": "close",
}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
# No control character: a line break in a header would begin another one.
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")
# By the gRPC status that the error has elsewhere. A caller that may look is answered; anything else is a defect.
_STATUSES = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request; a body that follows is not read. Names of headers are in small letters."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer; `headers` are added to those that every answer has, or take the place of one of them."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path, for GET. `answer` changes nothing, returns at once (nobody is answered meanwhile), and may raise BadRequest.

    `rpc`: who may call this RPC ("/service/method") may ask for the path; empty: everybody, without a token.
    """

    path: str
    answer: Callable[[Request], Response]
    rpc: str = ""


class BadRequest(Exception):
    """A request that gets this status and these words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


def json_response(value: Any, *, status: int = 200) -> Response:
    """Returns a value as JSON. Raises ValueError if a number in it is not finite, which JSON does not have."""
    return Response(status=status, body=json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def error_response(error: PsError | BadRequest) -> Response:
    """Returns an error as JSON, with its reason if it has one."""
    if isinstance(error, BadRequest):
        return json_response({"error": error.words}, status=error.status)
    headers = {"WWW-Authenticate": 'Bearer realm="lockstep"'} if isinstance(error, Unauthenticated) else {}
    status = _STATUSES.get(error.status, 500)
    answer = json_response({"error": error.message, "reason": error.reason}, status=status)
    return Response(status=status, body=answer.body, headers=headers)


def encode(response: Response) -> bytes:
    """Returns the bytes of an answer."""
    headers = {**_ALWAYS, "Content-Type": response.content_type, "Content-Length": str(len(response.body)), **response.headers}
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + response.body


def parse_head(head: bytes) -> Request:
    """Returns the request of a head that ends in an empty line. Raises BadRequest."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not _TOKEN.match(words[0]):
        raise BadRequest(400, "the first line is not: METHOD /path HTTP/1.1")
    path, query = _target(words[1])
    return Request(method=words[0], path=path, query=query, headers=_headers(lines[1:]))


def check_host(request: Request, *, names: Collection[str]) -> None:
    """Raises BadRequest unless the request is for this server: a page of another site whose name leads here would name that site.

    Behind TLS there is no need: a browser has compared the name with the certificate.
    """
    host = host_of(request.headers.get("host", ""))
    if host == "localhost" or host in names:
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        words = f"no such host here: {printable(host[:60]) or 'none is named'}; ask for it by its IP address or as localhost"
        raise BadRequest(421, words) from None


def host_of(text: str) -> str:
    """Returns the host in a header Host, without its port and brackets, in small letters; empty if it is none."""
    if set(text) & set("/\\@?# \t"):
        return ""
    try:
        parts = urlsplit(f"//{text}")
        # Raises for a port that is none.
        return (parts.hostname or "") if parts.port is None or parts.port else ""
    except ValueError:
        return ""


def _target(text: str) -> tuple[str, dict[str, str]]:
    # Control characters, some of which are left out when a target is taken apart: what begins with one slash then begins with two.
    if not text.startswith("/") or text.startswith("//") or not text.isprintable():
        raise BadRequest(400, "the target is not a path")
    parts = urlsplit(text)
    try:
        return parts.path, dict(parse_qsl(parts.query, max_num_fields=16))
    except ValueError:
        raise BadRequest(400, "more than 16 fields in the query") from None


def _headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > MAX_HEADERS:
        raise BadRequest(431, f"more than {MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not (colon and _TOKEN.match(name) and _VALUE.match(value)):
            raise BadRequest(400, "a header is not: Name: value")
        if headers.setdefault(name.lower(), value.strip(" \t")) != value.strip(" \t"):
            # Which of them counts would be anybody's guess.
            raise BadRequest(400, f"the header {name} comes twice")
    return headers
