"""Protos, code and documents agree: each RPC has a client, and a comment on repetition; each service and each error has its row."""

import functools
import inspect
import re

from google.protobuf.descriptor import MethodDescriptor

from ps_protocol import errors
from ps_protocol.errors import PsError
from ps_protocol.roles.request import RPCS
from ps_protocol.rpc import accumulators, board, chief, commands, memory, payloads, shard
from ps_protocol.rpc import client as handshake_client
from ps_protocol.v1 import accumulator_service_pb2, board_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2
from tests.support.repository import ROOT

METHODS: list[MethodDescriptor] = [
    method
    for module in (handshake_service_pb2, parameter_service_pb2, accumulator_service_pb2, board_service_pb2, chief_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ERRORS = sorted(
    (value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PsError) and value is not PsError),
    key=lambda error: error.__name__,
)
CLIENTS = {
    "HandshakeService": handshake_client,
    "ParameterService": shard,
    "AccumulatorService": accumulators,
    "BoardService": board,
    "ChiefService": chief,
}
ELSEWHERE = {"ShareMemory": memory, "OpenDataSocket": payloads, "Command": commands}
# What every connection can ask, because a value says so.
ASKED = {(rpc.service, rpc.name) for rpc in RPCS.values()}


ERRORS_PAGE = "how-to/troubleshoot.md"


@functools.cache
def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _rows(page: str, first_cell: str) -> list[str]:
    return re.findall(rf"^\| `{re.escape(first_cell)}` \|(.*)\|$", _page(page), flags=re.MULTILINE)


def test_every_service_of_the_protos_is_known_here() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "protos").rglob("*.proto"))
    assert set(re.findall(r"^service (\w+)", text, flags=re.MULTILINE)) == set(CLIENTS)


def test_every_rpc_has_a_client_call() -> None:
    wrong = []
    for method in METHODS:
        if (method.containing_service.name, method.name) in ASKED:
            continue
        client = ELSEWHERE.get(method.name, CLIENTS[method.containing_service.name])
        if not re.search(rf"\b{method.name}\b", inspect.getsource(client)):
            wrong.append(f"{client.__name__} never calls {method.name}")
    assert not wrong, "\n".join(wrong)


def test_every_service_has_a_row_in_the_protocol_page_with_its_file() -> None:
    rows = dict(re.findall(r"^\| `(\w+)`: .* \| `protos/(\S+)` \|$", _page("contributing/protocol.md"), flags=re.MULTILINE))
    assert rows == {method.containing_service.name: method.containing_service.file.name for method in METHODS}


def test_the_comment_of_every_rpc_says_what_a_repeated_call_does() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "protos").rglob("*.proto"))
    comments = {name: comment for comment, name in re.findall(r"((?:^  //.*\n)+)  rpc (\w+)", text, flags=re.MULTILINE)}
    silent = [method.name for method in METHODS if not re.search(r"(?i)idempotent|no effect|repe(at|tit)", comments.get(method.name, ""))]
    assert not silent, f"protos: say what happens when it is sent twice: {silent}"


def test_no_row_outlives_its_error() -> None:
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", _page(ERRORS_PAGE), flags=re.MULTILINE)) == {error.reason for error in ERRORS}


def test_every_error_has_a_status_and_a_row() -> None:
    wrong = [
        f"ps_protocol/errors.py: {error.__name__} has no status"
        for error in ERRORS
        if error.status == "INTERNAL" and error is not errors.InternalError
    ]
    for error in ERRORS:
        rows = _rows(ERRORS_PAGE, error.reason)
        if len(rows) != 1:
            wrong.append(f"docs/{ERRORS_PAGE}: want one row '| `{error.reason}` | …'")
        elif f"`{error.status}`" not in rows[0]:
            wrong.append(f"docs/{ERRORS_PAGE}: {error.reason} travels as {error.status}")
    assert not wrong, "\n".join(wrong)


def test_reasons_are_stable_and_unique() -> None:
    reasons = [error.reason for error in ERRORS]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[A-Z]+(_[A-Z]+)*", reason) for reason in reasons)
    assert set(errors.ERRORS) == set(ERRORS)


def test_reasons_that_the_protos_name_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "protos").rglob("*.proto"))
    reasons = {error.reason for error in ERRORS}
    named = {word for line in re.findall(r"Errors?: (.*)", text) for word in re.findall(r"\b[A-Z]+_[A-Z_]+\b", line)}
    codes = {error.status for error in ERRORS}
    assert named <= reasons | codes, named - reasons - codes
