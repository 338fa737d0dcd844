"""Makes made-up changes in a copy of the tree and tries them: `python -m tests.repo.changes [NAME …]`.

So the table "What a change touches" in docs/contributing/design.md, which `made_docs` writes from `CHANGES`, is what a change really takes.
A change stands here as a contributor would make it, without its words in documents and its tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

_PROTO_PYTHON = ROOT / ".venv-proto" / "bin" / "python"
_PARAMETER_SERVICE, _CHIEF_SERVICE = (f"protos/ps_protocol/v1/{name}_service.proto" for name in ("parameter", "chief"))


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Writes `text` before a text that a file has once; a new file is its `text` alone."""

    path: str
    before: str = ""
    text: str

    def make(self, root: Path) -> None:
        """Makes the edit. Raises ValueError if the file does not have the place once."""
        path = root / self.path
        if not self.before:
            path.write_text(self.text)
            return
        content = path.read_text()
        if (count := content.count(self.before)) != 1:
            raise ValueError(f"{self.path} has {count} times {self.before!r}, want once: bring tests/repo/changes.py up to date")
        path.write_text(content.replace(self.before, self.text + self.before))


@dataclass(frozen=True, kw_only=True)
class Change:
    """A made-up change: `what` in a word or two, its edits, and a program that fails unless it works."""

    what: str
    edits: tuple[Edit, ...]
    proof: str

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are edited by hand, each once."""
        return tuple(dict.fromkeys(edit.path for edit in self.edits))

    @property
    def is_of_protocol(self) -> bool:
        """Whether `make proto` is part of it."""
        return any(path.startswith("protos/") for path in self.files)


_TRAIN = """
import numpy as np
import lockstep

with lockstep.local() as session:
    session.create_or_join({"w": np.ones(4, np.float32)}, optimizer=OPTIMIZER)
    session.read()
    session.step({"w": np.full(4, 3.0, np.float32)})
    w = session.read()["w"]
    status = session.status()
"""

# One step by real processes, with the last step saved.
_UP = """
import os, subprocess, sys

program = '''
import numpy as np
import lockstep

with lockstep.connect() as session:
    session.create_or_join({"w": np.ones(4, np.float32)}, optimizer=lockstep.sgd(0.25))
    session.read()
    session.step({"w": np.full(4, 1.0, np.float32)})
    print("w is", session.read()["w"][0])
'''
command = [sys.executable, "-m", "lockstep", "up", "--checkpoint-dir", "saved", "--", "python", "-c", program]
done = subprocess.run(command, env={**os.environ, ENVIRONMENT}, capture_output=True)
assert done.returncode == 0, done.stdout + done.stderr
"""

CHANGES = (
    Change(
        what="an optimizer",
        edits=(
            Edit(
                path="ps_protocol/model/optimizers.py",
                before="    # The authors' own, lion_pytorch.\n",
                text="""\
    "signum": OptimizerKind(hyperparameters={}, slots=lambda spec: {}, formula=lambda spec: "v = v - lr * sign(g)"),
""",
            ),
            Edit(
                path="worker_client/model/optimizers.py",
                before="@_naming_arguments\ndef lamb(",
                text='''\
@_naming_arguments
def signum(learning_rate: Rate) -> OptimizerSpec:
    """Returns the sign of the gradient as the step."""
    return _spec("signum", learning_rate)


''',
            ),
            Edit(path="worker_client/model/optimizers.py", before='    "lion",\n', text='    "signum",\n'),
        ),
        proof=_TRAIN.replace("OPTIMIZER", "lockstep.signum(0.25)") + "assert w.tolist() == [0.75] * 4, w\n",
    ),
    Change(
        what="a policy",
        edits=(
            Edit(
                path="chief/policies/eager.py",
                text='''\
"""A made-up policy: each contribution is a step, and nobody waits for its own to be applied."""

from chief.policies.ordered import OrderedPolicy


class EagerPolicy(OrderedPolicy):
    """Gives a token whenever one is asked for."""

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Gives the open step at once."""
        return self.step
''',
            ),
            Edit(path="chief/policies/__init__.py", before="`sync` and `fifo` are", text="`eager` has nobody wait; "),
            Edit(
                path="chief/policies/factory.py", before="from chief.policies.fifo", text="from chief.policies.eager import EagerPolicy\n"
            ),
            Edit(
                path="chief/policies/factory.py",
                before="PolicySpec\nfrom ps_protocol.model.spec import",
                text="PolicyName, ",
            ),
            Edit(
                path="chief/policies/factory.py",
                before="    if not spec.has_common_steps:\n",
                text="""\
    if spec.name is PolicyName.EAGER:
        return EagerPolicy(spec=spec, step=step, counted=counted, workers=workers)
""",
            ),
            Edit(path="ps_protocol/model/policy.py", before="    ASYNC = 3\n", text="    EAGER = 5\n"),
            Edit(
                path="ps_protocol/model/policy.py",
                before="    PolicyName.ASYNC: PolicyKind(",
                text='    PolicyName.EAGER: PolicyKind(parameters=frozenset(), text=lambda policy: "eager"),\n',
            ),
            Edit(
                path=_CHIEF_SERVICE,
                before="    // Nobody waits.\n",
                text="""\
    // Nobody waits at all.
    NAME_EAGER = 5;
""",
            ),
            Edit(
                path="worker_client/model/policies.py",
                before="def async_policy(",
                text='''\
def eager_policy() -> PolicySpec:
    """Returns the policy under which nobody waits."""
    return PolicySpec(name=PolicyName.EAGER)


''',
            ),
            Edit(path="worker_client/model/policies.py", before='    "moving_average",\n', text='    "eager_policy",\n'),
        ),
        proof="import lockstep\nfrom lockstep.cli.commands import COMMANDS\n"
        + _TRAIN.replace("lockstep.local()", "lockstep.local(policy=lockstep.eager_policy())").replace("OPTIMIZER", "lockstep.sgd(0.25)")
        + 'assert status.policy.text == "eager" and status.num_accepted == 1, status\n'
        + "from lockstep.__main__ import main\n"
        + 'assert not main("plan --latency constant:1 --workers 2 --steps 9 --compare eager".split())\n',
    ),
    Change(
        what="an option of a parameter server",
        edits=(
            Edit(
                path="ps_protocol/process/options.py",
                before="DATA_PORT = Option(\n",
                text="""\
MOOD = Option("--mood TEXT", "how the server feels", (SERVER, UP), Kind(_stripped, "calm"))
""",
            ),
            Edit(path="ps_server/config.py", before="    data_port: int = 0\n", text="    mood: str = options.MOOD.default\n"),
            Edit(
                path="ps_server/server.py",
                before="            apply_threads=self._apply_threads,\n",
                text="            mood=config.mood,\n",
            ),
            Edit(path="ps_server/shard/shard.py", before="        apply_threads: StripeRunner", text='        mood: str = "calm",\n'),
            Edit(
                path="ps_server/shard/shard.py",
                before="        self.process_incarnation = process",
                text="        self.mood = mood\n",
            ),
        ),
        proof="""
from ps_server.config import parse_config
from ps_server.server import ParameterServer

server = ParameterServer(parse_config(["--index", "0"], environment={"LOCKSTEP_MOOD": "glad"}))
assert server._shard.mood == "glad"
""",
    ),
    Change(
        what="an option of the chief",
        edits=(
            Edit(
                path="ps_protocol/process/options.py",
                before="DATA_PORT = Option(\n",
                text="""\
MOOD = Option("--mood TEXT", "how the chief feels", (CHIEF, UP), Kind(_stripped, "calm"))
""",
            ),
            Edit(path="chief/options.py", before="    reject_nonfinite: bool = False\n", text='    mood: str = "calm"\n'),
            Edit(
                path="chief/config.py",
                before="        reject_nonfinite=given[options.REJECT_NONFINITE],\n",
                text="        mood=given[options.MOOD],\n",
            ),
            Edit(
                path="chief/core/report.py",
                before="    found = conditions(cluster, now=now, patience_s=0.0)\n",
                text="""\
    if cluster.settings.config.mood == "sad":
        return "the chief is sad"
""",
            ),
        ),
        proof="""
from chief.config import parse_config
from tests.support.chief.chief_driver import Driver

config = parse_config(["--mood", "sad", "--workers", "1", "--ps", "127.0.0.1:1"], environment={})
assert config.coordination.mood == "sad"
driver = Driver(mood="sad")
assert driver.coordinator.cluster.explain(driver.now) == "the chief is sad"
""",
    ),
    Change(
        what="an RPC of the parameter server",
        edits=(
            Edit(
                path=_PARAMETER_SERVICE,
                before="  // Keeps the past that the chief's page shows",
                text="""\
  // Reports how many steps this process has applied. No effect.
  rpc CountSteps(CountStepsRequest) returns (CountStepsResponse);
""",
            ),
            Edit(
                path=_PARAMETER_SERVICE,
                before="// Asks for ReadMetrics.\n",
                text="""\
// Asks for CountSteps.
message CountStepsRequest {
  // Epoch of the cluster.
  uint64 epoch = 1;
}

// Answers CountSteps.
message CountStepsResponse {
  // Steps.
  uint64 num_steps = 1;
}

""",
            ),
            Edit(
                path="ps_protocol/roles/shard.py",
                before='@asks("ParameterService", "ReadMetrics", by=READERS | CHIEF)\n',
                text='''\
@asks("ParameterService", "CountSteps", by=READERS | CHIEF)
class CountStepsRequest:
    """Asks how many steps the process has applied."""

    epoch: int
    answer: ClassVar[type[int]] = int
    awaited: ClassVar[str] = "the number of steps"


''',
            ),
            Edit(path="ps_server/shard/shard.py", before="    KeepRecordRequest,\n", text="    CountStepsRequest,\n"),
            Edit(
                path="ps_server/shard/shard.py",
                before="            ReadMetricsRequest: self._read_metrics,\n",
                text="            CountStepsRequest: lambda request: self.applied()[0],\n",
            ),
            Edit(path="worker_client/shards/shards.py", before="    Metric,\n", text="    CountStepsRequest,\n"),
            Edit(
                path="worker_client/shards/shards.py",
                before="    def metrics(self)",
                text='''\
    def count_steps(self) -> int:
        """Returns how many steps shard 0 has applied."""
        return self._one(0, "count the steps", lambda _: self._shards[0].call(CountStepsRequest(epoch=self.epoch)))

''',
            ),
        ),
        proof="""
from ps_protocol.roles.shard import CountStepsRequest
from ps_protocol.rpc.shard import GrpcShard
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer

server = ParameterServer(ParameterServerConfig(index=0))
server.start()
assert GrpcShard(server.address).call(CountStepsRequest(epoch=0)) == 0
server.stop()
""",
    ),
    Change(
        what="an RPC of the chief",
        edits=(
            Edit(
                path=_CHIEF_SERVICE,
                before="  // Ends training: every waiting worker",
                text="""\
  // Reports how many workers live. No effect.
  rpc CountWorkers(CountWorkersRequest) returns (CountWorkersResponse);
""",
            ),
            Edit(
                path=_CHIEF_SERVICE,
                before="// Asks for FinishTraining.\n",
                text="""\
// Asks for CountWorkers.
message CountWorkersRequest {
}

// Answers CountWorkers.
message CountWorkersResponse {
  // Workers that live.
  uint32 num_workers = 1;
}

""",
            ),
            Edit(
                path="ps_protocol/roles/chief.py",
                before='@asks("ChiefService", "FinishTraining", by=OPERATORS)\n',
                text='''\
@asks("ChiefService", "CountWorkers", by=READERS)
class CountWorkersRequest:
    """Asks how many workers live."""

    answer: ClassVar[type[int]] = int
    awaited: ClassVar[str] = "the number of workers"


''',
            ),
            Edit(path="chief/core/coordinator.py", before="    DequeueTokenRequest,\n", text="    CountWorkersRequest,\n"),
            Edit(
                path="chief/core/coordinator.py",
                before="            FinishTrainingRequest: cluster",
                text="""\
            CountWorkersRequest: lambda call, _, now: cluster.out.reply(call, cluster.members.num_known_workers),
""",
            ),
            Edit(
                path="worker_client/session/session.py",
                before="FinishTrainingRequest, InnerSteps, Registration",
                text="CountWorkersRequest, ",
            ),
            Edit(
                path="worker_client/session/session.py",
                before='    def finish(self, reason: str = ""',
                text='''\
    def count_workers(self) -> int:
        """Returns how many workers live."""
        return self._member.link.ask(CountWorkersRequest(), what="how many workers live")

''',
            ),
        ),
        proof=_UP.replace("lockstep.sgd(0.25))", "lockstep.sgd(0.25))\n    print('workers:', session.count_workers())", 1).replace(
            "ENVIRONMENT", ""
        )
        + "assert b'workers: 1' in done.stdout, done.stdout\n",
    ),
    Change(
        what="a number of a parameter server",
        edits=(
            Edit(
                path=_PARAMETER_SERVICE,
                before="  // Repeated push ids since then.\n",
                text="""\
  // Workers that have pushed.
  uint64 num_givers = 40;
""",
            ),
            Edit(path="ps_protocol/roles/shard.py", before="    num_duplicates: int = 0\n", text="    num_givers: int = 0\n"),
            Edit(
                path="ps_server/shard/shard.py",
                before="                    num_duplicates=inbox.num_duplicates if inbox else 0,\n",
                text="                    num_givers=inbox.num_pushes and 1 if inbox else 0,\n",
            ),
        ),
        proof=_TRAIN.replace("OPTIMIZER", "lockstep.sgd(0.25)")
        + "assert status.shards[0].report.num_givers == 1, status.shards\nfrom lockstep.cli.watch import view\n",
    ),
    Change(
        what="a number of a worker",
        edits=(
            Edit(
                path=_CHIEF_SERVICE,
                before="  // What is known of it, in words.\n",
                text="""\
  // Its contributions, counted or not.
  uint64 num_given = 40;
""",
            ),
            Edit(path="ps_protocol/roles/chief.py", before='    transport: str = ""\n    traffic', text="    num_given: int = 0\n"),
            Edit(
                path="chief/core/cluster/members.py",
                before="        is_waiting=is_waiting,\n",
                text="        num_given=member.num_accepted + member.num_stale + member.num_late,\n",
            ),
        ),
        proof=_TRAIN.replace("OPTIMIZER", "lockstep.sgd(0.25)") + "assert status.participants[0].num_given == 1, status.participants\n",
    ),
    Change(
        what="a number of the cluster",
        edits=(
            Edit(
                path=_CHIEF_SERVICE,
                before="  // Contributions that a step needs at least, however",
                text="""\
  // Variables of the model.
  uint64 num_variables = 40;
""",
            ),
            Edit(
                path="ps_protocol/roles/chief.py",
                before="    num_rollbacks: int = 0\n    last_rollback: str",
                text="    num_variables: int = 0\n",
            ),
            Edit(
                path="chief/core/report.py",
                before="        num_rollbacks=recovery.num_rollbacks,\n",
                text="        num_variables=len(cluster.model.model.variables) if cluster.model.model else 0,\n",
            ),
        ),
        proof=_TRAIN.replace("OPTIMIZER", "lockstep.sgd(0.25)") + "assert status.num_variables == 1, status\n",
    ),
    Change(
        what="an encoding",
        edits=(
            Edit(
                path="ps_protocol/encodings/signs.py",
                text='''\
"""A made-up encoding: each element as +1 or -1, in a byte."""

import numpy as np

from ps_protocol.model.variables import Array


def encode_signs(values: Array, encoded: Array) -> None:
    """Writes a byte for each element."""
    encoded[:] = values >= 0


def decode_signs(encoded: Array, values: Array) -> None:
    """Writes an element for each byte."""
    values[:] = encoded.astype(np.float32) * 2 - 1
''',
            ),
            Edit(path="ps_protocol/encodings/__init__.py", before="`halves`, `integers`", text="`signs`, "),
            Edit(
                path="ps_protocol/encodings/formats.py",
                before="from ps_protocol.encodings import halves, integers, top_k\n",
                text="from ps_protocol.encodings import signs as signs\n",
            ),
            Edit(path="ps_protocol/encodings/formats.py", before="    TOP_K = 4\n", text="    SIGNS = 6\n"),
            Edit(
                path="ps_protocol/encodings/formats.py",
                before="    Format(\n        encoding=FloatEncoding.TOP_K,\n",
                text="""\
    Format(
        encoding=FloatEncoding.SIGNS,
        name="signs",
        coding=Units(encode=signs.encode_signs, decode=signs.decode_signs, element_bits=8),
        feeds_errors_back=True,
    ),
""",
            ),
            Edit(
                path=_PARAMETER_SERVICE,
                before="  // Only the elements of largest magnitude of each chunk",
                text="""\
  // A byte for each element: 1 is +1, 0 is -1.
  FLOAT_ENCODING_SIGNS = 6;
""",
            ),
        ),
        proof=_UP.replace("ENVIRONMENT", '"LOCKSTEP_WIRE": "signs", "LOCKSTEP_TRANSPORT": "grpc"')
        + "assert b'w is 0.75' in done.stdout, done.stdout\n",
    ),
    Change(
        what="a field of checkpoints",
        edits=(
            Edit(
                path=_CHIEF_SERVICE,
                before="  // When it was saved, by the chief's clock, for people.\n",
                text="""\
  // Workers that lived.
  uint32 num_workers = 40;
""",
            ),
            Edit(
                path="ps_protocol/roles/checkpoint.py",
                before="    pushes: tuple[WorkerPushes, ...] = ()\n\n    @property\n    def num_bytes",
                text="    num_workers: int = 0\n",
            ),
            Edit(
                path="chief/core/epoch/training.py",
                before="            num_shards=len(self._servers),\n            record=",
                text="            num_workers=self._members.num_known_workers,\n",
            ),
            Edit(
                path="chief/core/recovery.py",
                before="        self._branch = Branch(epoch=self._members.epoch, base=checkpoint",
                text="""\
        self._out.note(f"workers at the save: {checkpoint.num_workers}", is_warning=True)
""",
            ),
        ),
        proof=_UP.replace("ENVIRONMENT", "")
        + """
from pathlib import Path

manifest = sorted(Path("saved").glob("*/*.json"))[-1].read_text()
assert '"num_workers": 1' in manifest, manifest
again = subprocess.run(command, capture_output=True, text=True)
assert "workers at the save: 1" in again.stdout + again.stderr, again.stdout + again.stderr
""",
    ),
)


def touched() -> Iterator[tuple[str, str, str]]:
    """Yields a row for each change: what it is, the files that it takes, and what makes others from them."""
    for change in CHANGES:
        made = "`make proto`" if change.is_of_protocol else ""
        options = "`make fix-docs`" if "option" in change.what else ""
        new = {edit.path for edit in change.edits if not edit.before}
        files = (f"a new file in `{Path(path).parent}`" if path in new else f"`{path}`" for path in change.files)
        yield change.what, f"{len(change.files)}: {', '.join(files)}", made or options


def try_change(change: Change) -> str:
    """Makes a change in a copy of the tree, with what is generated, and runs mypy on its files and its proof; returns what failed."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _copy_tree(root)
        try:
            for edit in change.edits:
                edit.make(root)
        except ValueError as error:
            return str(error)
        commands = [[sys.executable, "-m", "mypy", "--no-error-summary", *(path for path in change.files if path.endswith(".py"))]]
        commands.append([sys.executable, "-c", change.proof])
        if change.is_of_protocol:
            protos = sorted(str(path.relative_to(root)) for path in (root / "protos").rglob("*.proto"))
            protoc = [str(_PROTO_PYTHON), "-m", "grpc_tools.protoc", "-I", "protos", "--python_out=.", "--pyi_out=.", *protos]
            commands = [protoc, [sys.executable, "-m", "ps_protocol.wire.generator"], *commands]
        for command in commands:
            done = subprocess.run(
                command, cwd=root, env={**_environment(), "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                return f"{' '.join(command[1:4])[:80]}: {(done.stdout + done.stderr)[-2000:]}"
    return ""


def _copy_tree(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (source := ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, root / name)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}


def main(names: Sequence[str]) -> int:
    """Tries the changes of these names, or all, and prints how each went; returns 1 if one failed."""
    if not _PROTO_PYTHON.exists():
        sys.exit(
            f"{_PROTO_PYTHON.relative_to(ROOT)} is missing, which generates code from protos: run `make check-changes`, which makes it"
        )
    failures = 0
    for change in CHANGES:
        if not names or change.what in names:
            problem = try_change(change)
            failures += bool(problem)
            print(f"{change.what}: {problem or f'works, with {len(change.files)} files'}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
