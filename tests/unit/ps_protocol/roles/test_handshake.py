"""Handshakes: identity and version of the process at an address."""

from dataclasses import replace

import pytest

from ps_protocol.errors import ProtocolMismatch, WrongCluster, WrongRole
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeRequest, Identity, ProtocolVersion, Role, answer

PS = Identity(cluster="job-a", role=Role.PARAMETER_SERVER, index=0, process_incarnation=99)
ANYBODY = HandshakeRequest(cluster="", expected_role=None, expected_index=None, version=PROTOCOL_VERSION)


def test_a_caller_that_expects_nothing_or_the_right_server_is_answered() -> None:
    exact = replace(ANYBODY, cluster="job-a", expected_role=Role.PARAMETER_SERVER, expected_index=0)
    for request in (ANYBODY, exact):
        reply = answer(request, identity=PS, epoch=4)
        assert (reply.identity, reply.epoch, reply.warning) == (PS, 4, "")


def test_a_handshake_that_expects_another_cluster_is_refused() -> None:
    with pytest.raises(WrongCluster, match="this is ps 0 of cluster 'job-a', not 'job-b'; check LOCKSTEP_CLUSTER"):
        answer(replace(ANYBODY, cluster="job-b"), identity=PS, epoch=0)


@pytest.mark.parametrize(
    ("role", "index", "words"),
    [
        (Role.CHIEF, None, "this is ps 0, not the chief"),
        (Role.PARAMETER_SERVER, 1, "this is ps 0, not ps 1"),
        (None, 1, "this is ps 0, not ps 1"),
    ],
)
def test_a_handshake_that_expects_another_role_or_index_is_refused(role: Role | None, index: int | None, words: str) -> None:
    with pytest.raises(WrongRole, match=words) as caught:
        answer(replace(ANYBODY, expected_role=role, expected_index=index), identity=PS, epoch=0)
    assert caught.value.facts == {"cluster": "job-a", "role": "PARAMETER_SERVER", "index": "0"}


def test_chief_is_named_as_such() -> None:
    with pytest.raises(WrongRole, match="this is the chief, not a parameter server"):
        answer(replace(ANYBODY, expected_role=Role.PARAMETER_SERVER), identity=replace(PS, role=Role.CHIEF), epoch=0)


@pytest.mark.shows("F31")
def test_another_major_version_is_refused_and_a_newer_minor_version_gets_a_warning() -> None:
    with pytest.raises(ProtocolMismatch, match=r"client speaks protocol 1.x, server 4.x; install"):
        answer(replace(ANYBODY, version=ProtocolVersion(major=1, minor=0)), identity=PS, epoch=0)
    newer = replace(ANYBODY, version=ProtocolVersion(major=4, minor=9))
    assert "client speaks protocol 4.9, server only 4.0" in answer(newer, identity=PS, epoch=0).warning
