"""The calls behind the table of bad input that no other test makes: each does one wrong thing and returns how it ended."""

import contextlib
import socket
from collections.abc import Callable

import grpc

from chief.config import parse_config
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.roles.chief import DequeueTokenRequest
from ps_protocol.v1 import chief_service_pb2 as cpb
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from tests.support.chief.eras import fence
from tests.support.chief.running_chief import Worker, client_of, cluster
from tests.support.parameter_servers.raw_shard import WHOLE, Outcome, Server, cut_push_off, frame, push_stream
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, layout_of
from tests.support.waiting import wait_until
from tests.wire.bad_input import test_chief as chief_cases
from tests.wire.bad_input.scenes import Scene, told

OK, CANCELLED = grpc.StatusCode.OK, grpc.StatusCode.CANCELLED
SHARD = "/ps_protocol.v1.ParameterService"


def usage(*words: str) -> Callable[[Scene], Outcome]:
    return lambda scene: told(lambda: parse_config(["--ps", "127.0.0.1:1", *words], environment={}))


def model(*slices: VariableSlice) -> Callable[[Server], Outcome]:
    def act(server: Server) -> Outcome:
        trainer = Trainer(server.trainer.shard, layout_of(*slices))
        spec = codec.encode(trainer.spec())
        return server.create(spec, frame(0, bytes(trainer.layout.nbytes)) if trainer.layout.nbytes < 1 << 20 else frame(0, b""))

    return act


def many(count: int) -> Callable[[Scene], Outcome]:
    """A model of the same slice, again and again."""

    def act(scene: Scene) -> Outcome:
        spec = scene.shard.encoded_spec()
        del spec.slices[1:]
        spec.slices.extend([spec.slices[0]] * (count - 1))
        # The hash of what is sent: it shall be refused for what it is.
        spec.layout_hash = Layout([codec.decode(VariableSlice, spec.slices[0])] * count).hash
        return scene.shard.create(spec)

    return act


def full(scene: Scene) -> Outcome:
    taken: list[Outcome] = []
    while True:
        ended = scene.chief("RegisterWorker", chief_cases.register(request_id=5_000 + len(taken), index=None))
        if ended.code is not OK:
            break
        taken.append(ended)
    for each in taken:
        leave(scene, each)
    return ended


def too_many(scene: Scene) -> Outcome:
    server = scene.shard
    for _ in range(20):
        ended = server.push(WHOLE, worker=41)
        if ended.code is not OK:
            break
    server.apply_one()
    return ended


def twice(scene: Scene) -> Outcome:
    messages = push_stream(scene.shard.trainer.header(step=scene.shard.step, worker=43), WHOLE)
    first = scene.shard.raw.push(*messages)
    assert first.code is OK
    ended = scene.shard.raw.push(*messages)
    assert pb.PushResponse.FromString(ended.messages[0]).reply.result == pb.PUSH_RESULT_DUPLICATE
    return ended


def cut_off(scene: Scene) -> Outcome:
    """The caller knows that it has cancelled; what counts is that the server gives everything back."""
    server = scene.shard
    before = server.trainer.shard.status()
    cut_push_off(server, push_stream(server.trainer.header(step=server.step, worker=44), frame(0, bytes(64))))

    def is_as_before() -> bool:
        now = server.trainer.shard.status()
        held, held_before = now.report, before.report
        return (held.allocated_bytes, held.num_staged, now.step) == (held_before.allocated_bytes, held_before.num_staged, before.step)

    wait_until(is_as_before, timeout_s=10, what="what was cut off is forgotten")
    return Outcome(CANCELLED, "", "", ())


def creates(server: Server) -> bool:
    """Whether the model is created, as it would have been at first."""
    return server.trainer.create()


def answers(server: Server) -> bool:
    """Whether the status is told, and there is a model in it."""
    return server.trainer.shard.status().step is not None


def draining(server: Server) -> Outcome:
    server.trainer.create()
    server.trainer.shard.shutdown(fence(EPOCH, CHIEF), reason="training is finished")
    return server.raw.push(*push_stream(server.trainer.header(), WHOLE))


def nonfinite(scene: Scene) -> Outcome:
    server = scene.shard
    before = server.trainer.shard.status().report.num_nonfinite
    header = server.trainer.header(step=server.step)
    content = server.trainer.arena(float("nan")).tobytes()
    ended = server.raw.push(*push_stream(header, frame(0, content)))
    server.trainer.apply(header.push_id, step=server.step)
    assert server.trainer.shard.status().report.num_nonfinite > before
    return ended


def nonfinite_refused(server: Server) -> Outcome:
    trainer = server.trainer
    trainer.create()
    trainer.configure(1, rejects_nonfinite=True)
    ended = server.raw.push(*push_stream(trainer.header(worker=2), frame(0, trainer.arena(float("nan")).tobytes())))
    assert trainer.shard.status().report.num_staged == 0
    return ended


def stages(server: Server) -> bool:
    """Whether a gradient of zeros is taken, and with it the step made."""
    header = server.trainer.header(worker=2)
    server.trainer.push(header, server.trainer.arena(0.0))
    return server.trainer.apply(header.push_id).step == 1


def finished(scene: Scene) -> Outcome:
    with cluster(total_num_replicas=1) as running, client_of(running) as client, Worker(client) as worker:
        worker.join_model()
        client.finish(reason="the test")
        reply = client.dequeue_token(worker.participant, local_step=0, request_id=1, max_wait_s=1.0)
        return Outcome(OK, "", reply.result.name, ())


def http(scene: Scene) -> Outcome:
    host, _, port = scene.addresses["shard"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(4096):
                received += piece
    assert b"200" not in received
    return Outcome(OK, "", "closed", ())


def unregistered(scene: Scene) -> Outcome:
    return scene.chief("Heartbeat", cpb.HeartbeatRequest(participant=chief_cases.participant(2, incarnation=999)))


def escaped(scene: Scene) -> Outcome:
    ended = scene.chief("RegisterWorker", chief_cases.register(request_id=6_000, host="evil\n\x1b[2J2026 ERROR"))
    status = scene.status()
    assert not any("\n" in worker.host or "\x1b" in worker.host for worker in status.participants)
    leave(scene, ended)
    return ended


def leave(scene: Scene, registered: Outcome) -> None:
    reply = cpb.RegisterWorkerResponse.FromString(registered.messages[0])
    participant = reply.participant
    ended = scene.chief("DeregisterWorker", cpb.DeregisterWorkerRequest(participant=participant))
    assert ended.code is OK, ended.text


def wait(scene: Scene) -> Outcome:
    request = cpb.DequeueTokenRequest(participant=chief_cases.participant(1), local_step=1, request_id=8)
    assert codec.decode(DequeueTokenRequest, request).max_wait_s == 20.0, "who names no limit gets this one"
    request.max_wait.FromMilliseconds(10)
    ended = scene.chief("Converse", cpb.ConverseRequest(token=request))
    assert cpb.ConverseResponse.FromString(ended.messages[0]).token.result == cpb.TOKEN_RESULT_WAIT
    return ended


def hyperparameters(scene: Scene) -> Outcome:
    change = cpb.HyperparameterChange(variable="ww", hyperparameters={"x": 1.0})
    return scene.chief("ChangeSettings", cpb.ChangeSettingsRequest(hyperparameters=change, request_id=9))


def save(tag: str) -> Callable[[Scene], Outcome]:
    def act(scene: Scene) -> Outcome:
        request = pb.SaveShardRequest(fence=codec.encode(fence(EPOCH, CHIEF)), step=scene.shard.step, tag=tag, num_shards=1)
        return scene.shard.raw.call("SaveShard", request.SerializeToString())

    return act


def restore(tag: str) -> Callable[[Scene], Outcome]:
    def act(scene: Scene) -> Outcome:
        spec = codec.encode(scene.shard.trainer.spec())
        settings = pb.ShardSettings(fence=codec.encode(fence(EPOCH, CHIEF)), version=1)
        request = pb.RestoreShardRequest(fence=settings.fence, spec=spec, tag=tag, manifest_sha256="0" * 64, settings=settings)
        request.max_wait.FromSeconds(10)
        return scene.shard.raw.call("RestoreShard", request.SerializeToString())

    return act


def saved_twice(scene: Scene) -> Outcome:
    first = save("step-again")(scene)
    assert first.code is OK, first.text
    return save("step-again")(scene)


def deadline(scene: Scene) -> Outcome:
    return scene.call("shard", f"{SHARD}/GetShardStatus", timeout_s=-1.0)


def big_metadata(scene: Scene) -> Outcome:
    return scene.call("shard", f"{SHARD}/GetShardStatus", metadata=(("x-large", "x" * 40_000),))
