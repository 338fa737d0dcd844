"""Chiefs with a parameter server that gives wrong answers: they wait for it, say so, and train once it answers well."""

from collections.abc import Callable
from typing import Any

import pytest

from ps_protocol.errors import PsError
from ps_protocol.roles.chief import TokenResult
from ps_protocol.v1 import parameter_service_pb2 as pb
from tests.support.chief.running_chief import RunningChief, Worker, client_of, parameter_server
from tests.support.network.tampering import Tampering
from tests.support.waiting import wait_until

MOST = (1 << 64) - 1
_MESSAGES: dict[str, Any] = {"AdoptShard": pb.AdoptShardResponse, "GetShardStatus": pb.GetShardStatusResponse}


def with_fields(change: Callable[[Any], object]) -> Callable[[Any], list[bytes]]:
    def changed(message: Any) -> list[bytes]:
        change(message)
        return [message.SerializeToString()]

    return changed


def that_is_adopted(**fence: int) -> Callable[[Any], list[bytes]]:
    def change(message: pb.GetShardStatusResponse) -> None:
        life, epoch, chief = (fence.get(name, 1) for name in ("life", "epoch", "chief"))
        message.fence.era.life, message.fence.era.epoch, message.fence.chief_incarnation = life, epoch, chief

    return with_fields(change)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("GetShardStatus", lambda message: [b"\xff\xff"]),
        ("GetShardStatus", with_fields(lambda message: message.ClearField("report"))),
        ("GetShardStatus", that_is_adopted(chief=MOST)),
        ("GetShardStatus", that_is_adopted(epoch=MOST)),
        ("GetShardStatus", that_is_adopted(life=0)),
        ("GetShardStatus", with_fields(lambda message: setattr(message, "settings_version", MOST))),
        ("AdoptShard", lambda message: []),
        ("AdoptShard", lambda message: [b"\xff\xff"]),
        ("AdoptShard", with_fields(lambda message: message.last_apply.ranges.append(1))),
        ("AdoptShard", with_fields(lambda message: message.last_apply.contributors.add(incarnation=MOST))),
        ("AdoptShard", with_fields(lambda message: message.last_apply.attached.user_states.add(json="{"))),
    ],
)
def test_a_chief_waits_for_a_server_that_gives_wrong_answers(
    method: str, change: Callable[[Any], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chief.shards.calls._FIRST_NOTICE_S", 0.1)
    monkeypatch.setattr("chief.core.joining._ARRIVAL_S", 0.1)
    is_hostile = True

    def tampered(called: str, answer: bytes, number: int) -> list[bytes]:
        return change(_MESSAGES[method].FromString(answer)) if is_hostile and called == method else [answer]

    with parameter_server() as server, Tampering(server.address, tampered) as between:
        with RunningChief(between.address, total_num_replicas=1) as chief, client_of(chief) as client:

            def is_said() -> bool:
                try:
                    Worker(client, 0).__exit__()
                except PsError as error:
                    return "cannot understand ps 0" in error.message
                return False

            wait_until(is_said, timeout_s=20, what="a worker is told what is waited for")
            is_hostile = False
            wait_until(lambda: client.status().shards[0].is_reachable, timeout_s=20, what="it answers as it should")

            def is_trained() -> bool:
                try:
                    with Worker(client, 0) as worker:
                        worker.join_model()
                        return worker.wait(worker.push(value=1.0)).result is TokenResult.TOKEN
                except PsError:
                    return False

            wait_until(is_trained, timeout_s=20, what="training continues")
