"""Which commands there are: their groups, words, usage and examples, and the text of `lockstep --help`. Imports no command.

`COMMANDS` is in the order of that text. The name of an action follows its command's: "checkpoint save".
"""

from collections.abc import Sequence
from typing import NamedTuple

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.misspelling import did_you_mean


class Command(NamedTuple):
    """A command, an action of one, or a role. `module`: in `lockstep.cli`; a role: its package; empty: it has actions alone.

    `has_answer`: its function returns an `Answer`, so it takes --json.
    """

    group: str
    words: str
    module: str
    examples: tuple[str, ...]
    usage: str = "[flags]"
    has_answer: bool = False


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "start",
        "train on handwritten digits on this machine, and watch it",
        "clusters.demo",
        ("lockstep demo", "lockstep demo --workers 5 --backup-workers 2"),
    ),
    "up": Command(
        "start",
        "run your program as workers of a cluster on this machine",
        "clusters.up",
        (
            "lockstep up --workers 3 -- python train.py",
            "lockstep up --ps 2 --workers 3 --checkpoint-dir ckpt -- python train.py  # again: continues from ckpt",
            "lockstep up --dry-run -- python train.py",
        ),
        usage="[flags] -- python train.py …",
    ),
    "k8s": Command("start", "write manifests that run your program on Kubernetes", "", (), usage="ACTION"),
    "k8s render": Command(
        "",
        "write manifests that run your program as workers",
        "clusters.kubernetes",
        ("lockstep k8s render --name job --image job:1 --ps 2 --workers 4 --checkpoint-dir s3://bucket/job -- python train.py",),
        usage="--image IMAGE [flags] -- python train.py …",
    ),
    "systemd": Command(
        "start",
        "write units that run a cluster on hosts of your own",
        "clusters.systemd",
        (
            "lockstep systemd --address a:5000 --ps a:5001,b:5001 --workers 4 --checkpoint-dir s3://bucket/job --certs-dir /etc/lockstep",
            "lockstep systemd --address a:5000 --ps b:5001 --workers 2 --certs-dir /etc/job -- /opt/job/bin/python /opt/job/train.py",
        ),
        usage="--address HOST:PORT --ps HOST:PORT,… [flags] -- /path/to/python train.py …",
    ),
    "server": Command("start", "run one of the roles, for a cluster on several machines", "ps_server", (), usage=""),
    "chief": Command("start", "run one of the roles, for a cluster on several machines", "chief", (), usage=""),
    "relay": Command(
        "start",
        "follow a cluster's weights, and be followed in its place",
        "clusters.relay",
        (
            "lockstep relay chief.example:5000 --listen 127.0.0.1:6000 --wire bfloat16",
            "lockstep relay relay-a.example:6000 --listen unix:/tmp/weights --wire bfloat16",
        ),
        usage="[CHIEF] --listen ADDRESS [flags]",
    ),
    "status": Command(
        "watch",
        "show step, workers, servers, and what a cluster waits for",
        "watch.status",
        ("lockstep status", "lockstep status --chief chief.example:5000 --json"),
        has_answer=True,
    ),
    "why": Command(
        "watch", "say in few lines what a cluster waits for, and what to do", "watch.status", ("lockstep why",), has_answer=True
    ),
    "top": Command("watch", "show a cluster live", "watch.top", ("lockstep top", "lockstep top --chief chief.example:5000")),
    "ls": Command("watch", "list the clusters on this machine, with their pages", "watch.local", ("lockstep ls",), has_answer=True),
    "trace": Command(
        "watch",
        "record some seconds of steps, to look at them in Perfetto",
        "watch.recordings",
        ("lockstep trace", "lockstep trace --seconds 20 -o steps.json"),
        usage="[HOST:PORT] [flags]",
    ),
    "tensorboard": Command(
        "watch",
        "write event files for TensorBoard while a cluster trains",
        "watch.recordings",
        ("lockstep tensorboard events",),
        usage="DIR [flags]",
    ),
    "health": Command(
        "watch",
        "ask a server or the chief whether it is alive, or ready",
        "watch.health",
        ("lockstep health --address 127.0.0.1:5000", "lockstep health --address 127.0.0.1:5000 --ready"),
    ),
    "policy": Command(
        "change",
        "show or change how many contributions make a step",
        "clusters.change",
        (
            "lockstep policy",
            "lockstep policy sync --replicas-to-aggregate 4",
            "lockstep policy sync --backup-workers 1",
            "lockstep policy ssp --staleness 3",
        ),
        usage="[POLICY] [flags]",
        has_answer=True,
    ),
    "set": Command(
        "change",
        "change the learning rate, or another optimizer's number",
        "clusters.change",
        ("lockstep set learning_rate=0.01", "lockstep set learning_rate=0.01 momentum=0.8"),
        usage="NAME=VALUE … [flags]",
        has_answer=True,
    ),
    "finish": Command(
        "change",
        "end training as finished, with a last checkpoint",
        "clusters.change",
        ("lockstep finish", "lockstep finish --reason 'good enough'"),
        has_answer=True,
    ),
    "checkpoint": Command("files", "save one now; list, verify, export to NumPy, import", "", (), usage="ACTION"),
    "checkpoint save": Command(
        "",
        "have a running cluster save one now",
        "files.checkpoint",
        ("lockstep checkpoint save", "lockstep checkpoint save --chief chief.example:5000"),
        has_answer=True,
    ),
    "checkpoint ls": Command(
        "",
        "list those of a directory, the newest last",
        "files.checkpoint",
        ("lockstep checkpoint ls ckpt",),
        usage="[PLACE] [flags]",
        has_answer=True,
    ),
    "checkpoint verify": Command(
        "",
        "read every byte, and compare checksums",
        "files.checkpoint",
        ("lockstep checkpoint verify --checkpoint-dir ckpt", "lockstep checkpoint verify step-000000100 --checkpoint-dir ckpt"),
        usage="[TAG] [flags]",
        has_answer=True,
    ),
    "checkpoint export": Command(
        "",
        "write whole variables to one file, for NumPy or safetensors",
        "files.checkpoint",
        (
            "lockstep checkpoint export model.npz --checkpoint-dir ckpt",
            "lockstep checkpoint export all.safetensors --slots --checkpoint-dir ckpt",
        ),
        usage="FILE [flags]",
        has_answer=True,
    ),
    "checkpoint changes": Command(
        "",
        "write what each new one changed to a file of its own, for who serves tables",
        "files.checkpoint",
        ("lockstep checkpoint changes outbox --follow --checkpoint-dir ckpt",),
        usage="DIR [flags]",
        has_answer=True,
    ),
    "checkpoint import": Command(
        "",
        "create one from a file that was exported with --slots",
        "files.checkpoint",
        ("lockstep checkpoint import all.safetensors --checkpoint-dir elsewhere",),
        usage="FILE [flags]",
        has_answer=True,
    ),
    "store": Command(
        "files",
        "keep each step's weights in files that others follow",
        "files.store",
        ("lockstep store --to s3://bucket/weights --wire bfloat16", "lockstep store --chief chief.example:5000 --to /mnt/weights"),
        usage="--to PLACE [flags]",
    ),
    "certs": Command("files", "create certificates and tokens for a cluster", "", (), usage="ACTION"),
    "certs create": Command(
        "",
        "create an authority, and certificates, keys and tokens for all roles",
        "files.certs",
        ("lockstep certs create certs --cluster job-a --host ps0.example --host chief.example",),
        usage="DIR [flags]",
        has_answer=True,
    ),
    "audit": Command(
        "files",
        "compute a training again from its --history",
        "files.audit",
        ("lockstep audit history",),
        usage="DIR [flags]",
        has_answer=True,
    ),
    "doctor": Command(
        "before",
        "check this machine, its network, or a running cluster",
        "advice.doctor",
        ("lockstep doctor", "lockstep doctor --listen 0.0.0.0:5000", "lockstep doctor chief.example:5000"),
        usage="[HOST:PORT] [flags]",
        has_answer=True,
    ),
    "plan": Command(
        "before",
        "say how many backup workers pay off",
        "advice.plan",
        ("lockstep plan --record times.csv --for 60", "lockstep plan times.csv", "lockstep plan --workers 50 --latency lognormal:1.6,0.1"),
        usage="TIMES | --latency KIND | --record FILE [flags]",
        has_answer=True,
    ),
}
# What people type by habit.
_ALSO = {"list": "ls"}


def actions_of(name: str) -> list[str]:
    """Returns the full names of a command's actions; empty: it has none."""
    return [other for other in COMMANDS if other.startswith(f"{name} ")]


def find(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command or action that these words name, and the words after it. Raises InvalidSpec for an unknown one."""
    first = _ALSO.get(words[0], words[0])
    if first not in COMMANDS:
        near = did_you_mean(first, [name for name in COMMANDS if " " not in name])
        raise InvalidSpec(f"there is no command {first!r}{near} (see lockstep --help)")
    if not actions_of(first) or len(words) == 1 or words[1].startswith("-"):
        return first, [*words[1:]]
    action = _ALSO.get(words[1], words[1])
    if f"{first} {action}" not in COMMANDS:
        near = did_you_mean(action, [name.partition(" ")[2] for name in actions_of(first)])
        raise InvalidSpec(f"there is no `lockstep {first} {action}`{near} (see lockstep {first} --help)")
    return f"{first} {action}", [*words[2:]]


def overview() -> str:
    """Returns the text of `lockstep --help`, which fits a screen of 80 columns and 24 lines. Commands with the same words share one."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, command in COMMANDS.items():
        if command.group:
            names.setdefault((command.group, command.words), []).append(name)
    lines = [f"{'usage: lockstep COMMAND …, or version':<46}lockstep help COMMAND explains one"]
    group = ""
    for (its_group, words), named in names.items():
        lines.append(f"{its_group if its_group != group else '':<8}{', '.join(named):<14}{words}")
        group = its_group
    return "\n".join(lines)


def actions_text(name: str) -> str:
    """Returns the help of a command that has actions alone."""
    said = COMMANDS[name].words
    lines = [f"usage: lockstep {name} ACTION …", "", f"{said[0].upper()}{said[1:]}.", "", "actions:"]
    lines += [f"  {other.partition(' ')[2]:<9}{COMMANDS[other].words}" for other in actions_of(name)]
    lines += ["", "examples:", *(f"  {COMMANDS[other].examples[0]}" for other in actions_of(name))]
    return "\n".join(lines)
