"""The servers for the table of bad input, as processes of their own, and raw calls to them. Knows no row of the table."""

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from google.protobuf.message import Message

from ps_protocol.errors import PsError
from ps_protocol.rpc.channel import Access, Metadata
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.status import status_of
from ps_protocol.security.options import Security
from ps_protocol.v1 import chief_service_pb2 as cpb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire import codec
from tests.support.chief.eras import LIFE
from tests.support.chief.running_chief import Worker
from tests.support.network.certificates import Files, make
from tests.support.network.talk import converse
from tests.support.parameter_servers.raw_shard import Outcome, RawShard, Server, outcome
from tests.support.parameter_servers.shards import Trainer
from tests.support.parameter_servers.whole_shard import WholeGrpcShard
from tests.support.processes.processes import Process, announced, start_role
from tests.wire.bad_input import test_rows as table_cases

CHIEF_SERVICE = "ps_protocol.v1.ChiefService"
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Scene:
    """All servers at once. `shard` and `table` have a model and no chief; the chief's cluster has one step behind it."""

    directory: Path
    files: Files
    files_b: Files
    processes: dict[str, Process]
    addresses: dict[str, str]
    shard: Server
    table: table_cases.Server
    era: tensor_pb2.Era
    secrets: Mapping[int, int]

    def chief(self, method: str, message: Message | bytes, *, timeout_s: float = TIMEOUT_S, metadata: Metadata = ()) -> Outcome:
        """Calls the chief with bytes. Cases are written before the cluster's life is known, there it is LIFE; and the secrets."""
        for part in (message, getattr(message, "commit", None), getattr(message, "token", None)):
            participant: Any = getattr(part, "participant", None)
            if participant is not None and participant.era.life == LIFE:
                participant.era.life = self.era.life
                participant.secret = self.secrets.get(participant.index, participant.secret)
        data = message if isinstance(message, bytes) else message.SerializeToString()
        if method == "Converse":
            with Access().open_channel(self.addresses["chief"]) as channel:
                return converse(channel, data, metadata=metadata)
        return self.call("chief", f"/{CHIEF_SERVICE}/{method}", data, timeout_s=timeout_s, metadata=metadata)

    def call(
        self,
        server: str,
        path: str,
        data: bytes = b"",
        *,
        access: Access | None = None,
        timeout_s: float = TIMEOUT_S,
        metadata: Metadata = (),
    ) -> Outcome:
        """Calls any server with bytes; with `access`, by it."""
        address = self.addresses[server]
        access, given = access or Access(), access.metadata_for(address)() if access else metadata
        with access.open_channel(address) as channel:
            invoke: Any = channel.unary_stream(path)
            return outcome(invoke(data, timeout=timeout_s, metadata=given))

    def of_cluster_b(self) -> Access:
        """A worker of the cluster whose server is "tls"."""
        own = self.files_b.directory
        return Access(Security(tls_ca=self.files.directory / "ca.pem", tls_cert=own / "worker.pem", tls_key=own / "worker.key"))

    def status(self) -> cpb.GetClusterStatusResponse:
        """The chief's status."""
        return cpb.GetClusterStatusResponse.FromString(self.chief("GetClusterStatus", b"").messages[0])

    def measured(self) -> dict[str, tuple[int, int, int]]:
        """Threads, descriptors and resident bytes of each process; of this one, where some servers are, no bytes: it makes the messages."""
        gc.collect()
        here = psutil.Process()
        found = {"here": (here.num_threads(), here.num_fds(), 0)}
        for name, process in self.processes.items():
            about = psutil.Process(process.pid)
            found[name] = about.num_threads(), about.num_fds(), about.memory_info().rss
        return found


def greet(address: str, access: Access) -> Outcome:
    """What the SDK makes of a handshake, as an outcome."""
    return told(lambda: _handshake(address, access))


def _handshake(address: str, access: Access) -> None:
    with contextlib.closing(WholeGrpcShard(address, access=access)) as shard:
        shard.handshake(timeout_s=10)


def told(act: Any) -> Outcome:
    """What an action of the SDK, or of a command, says to the user, as an outcome."""
    try:
        act()
    except PsError as error:
        return Outcome(status_of(error), error.reason, error.message, ())
    return Outcome(grpc.StatusCode.OK, "", "", ())


@contextlib.contextmanager
def scene(directory: Path) -> Iterator[Scene]:
    """Starts all servers, until the block ends."""
    files, files_b = make(directory / "certs", cluster="job-a"), make(directory / "certs-b", cluster="job-b")
    # Who asks for certificates by both authorities tells clusters apart by what the certificates say.
    both = directory / "both.pem"
    both.write_bytes((files.directory / "ca.pem").read_bytes() + (files_b.directory / "ca.pem").read_bytes())
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}
        addresses: dict[str, str] = {}

        def start(name: str, module: str, *words: object) -> str:
            processes[name] = start_role(stack, module, "--cluster", "job-a", *words, announce=directory / name)
            addresses[name] = announced(processes[name], directory / name)
            return addresses[name]

        certs, checkpoints = files.directory, directory / "checkpoints"
        checkpoints.mkdir()
        start("shard", "ps_server", "--index", 0, "--checkpoint-dir", checkpoints)
        start("table", "ps_server", "--index", 0)
        start("tokens", "ps_server", "--index", 0, "--token-file", certs / "tokens")
        # Its certificate is of the first authority, so that callers of both clusters believe that they talk to whom they mean.
        tls = ["--tls-cert", certs / "ps.pem", "--tls-key", certs / "ps.key", "--tls-ca", both]
        start("tls", "ps_server", "--index", 0, *tls, "--verify-clients", "--cluster", "job-b")
        start("ps", "ps_server", "--index", 0)
        start("chief", "chief", "--ps", addresses["ps"], "--replicas-to-aggregate", 1, "--workers", 3, "--lease", 600)
        raw = {name: stack.enter_context(RawShard(addresses[name])) for name in ("shard", "table")}
        clients = {name: stack.enter_context(contextlib.closing(WholeGrpcShard(addresses[name]))) for name in raw}
        trainer = Trainer(clients["shard"])
        trainer.create()
        trainer.train(0)
        chief = stack.enter_context(contextlib.closing(GrpcChief(addresses["chief"])))
        first, second = stack.enter_context(Worker(chief)), stack.enter_context(Worker(chief))
        first.join_model()
        assert first.wait(first.push()).step == 1
        yield Scene(
            directory=directory,
            files=files,
            files_b=files_b,
            processes=processes,
            addresses=addresses,
            shard=Server(raw["shard"], trainer),
            table=table_cases.Server(raw["table"], clients["table"]),
            era=codec.encode(first.participant.era),
            secrets={one.participant.index: one.participant.secret for one in (first, second)},
        )


def plain(token: str) -> Access:
    """A caller with a token and without TLS."""
    return Access(Security(token=token))
