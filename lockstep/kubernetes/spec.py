"""What a user asks for when a cluster is to run on Kubernetes, checked. Knows names and quantities; makes no object."""

import re
from collections.abc import Mapping, Sequence

from lockstep.kubernetes.yaml_text import Verbatim
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import MAX_SHARDS

# Where a pod has files of its own.
_TAKEN = ("", "/", "/secrets", "/tmp", "/dev/shm")
_NEEDED = ("name", "image", "worker-gpus", "user")
_OBJECT, _SPACE = r"(?!.{254})[a-z0-9]([-a-z0-9.]*[a-z0-9])?", r"(?!.{64})[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_QUANTITY = r"(?=.*[1-9])\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?"
_LABEL = r"[A-Za-z0-9][-\w./]*=(?!.{64})([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)?"
# The flags: what each text must look like, what it is called, and words. Names of pods begin with --name, and have 63 characters at most.
FLAGS = {
    "name": (r"(?!.{41})[a-z]([-a-z0-9]*[a-z0-9])?", "NAME", "what all names begin with: small letters, digits and - (default lockstep)"),
    "image": (r"\S+", "IMAGE", "image that has Lockstep and your program"),
    "namespace": (_SPACE, "NAME", "namespace (default: that of kubectl)"),
    "checkpoint-claim": (_OBJECT, "CLAIM", "PersistentVolumeClaim of a --checkpoint-dir that is no URL"),
    "checkpoint-size": (_QUANTITY, "SIZE", "make that claim, too, such as 10Gi"),
    "ps-cpu": (_QUANTITY, "N", "processors of each parameter server"),
    "ps-memory": (_QUANTITY, "SIZE", "memory of each parameter server, such as 16Gi"),
    "worker-cpu": (_QUANTITY, "N", "processors of each worker"),
    "worker-memory": (_QUANTITY, "SIZE", "memory of each worker, such as 16Gi"),
    "worker-gpus": (r"\d{1,6}", "N", "GPUs of each worker (nvidia.com/gpu)"),
    "worker-node": (_LABEL, "KEY=VALUE", "label of nodes for workers; may be repeated"),
    "env": (r"[A-Za-z_]\w*=[^\0]*", "NAME=VALUE", "variable of workers; may be repeated"),
    "env-secret": (_OBJECT, "SECRET", "Secret whose keys are variables of all pods"),
    "mount": (rf"{_OBJECT}=/[^:]+", "CLAIM=/PATH", "volume of workers; may be repeated"),
    "user": (r"\d{1,9}", "UID", "user of all pods (default 10001)"),
    "cert-manager": (rf"((Cluster)?Issuer/)?{_OBJECT}", "ISSUER", "have cert-manager make certificates: an Issuer, or ClusterIssuer/NAME"),
    "metrics-namespace": (_SPACE, "NAME", "namespace whose pods may read /metrics"),
}


@light_dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSpec:
    """A cluster on Kubernetes, with `command` as its workers. Raises InvalidSpec, which names the flag, for what makes none.

    A field has the name of its flag. `server_variables`, `chief_variables`: what these roles are told beside their places, by LOCKSTEP_*
    variable. An empty text was not given. A `Verbatim` stands for what is not known yet. `kind`: "job", "jobset" or "trainjob".
    """

    command: Sequence[str]
    ps: int
    workers: int | Verbatim
    checkpoint_dir: str
    server_variables: Mapping[str, str]
    chief_variables: Mapping[str, str]
    name: str = "lockstep"
    image: str = ""
    namespace: str = ""
    checkpoint_claim: str = ""
    checkpoint_size: str = ""
    ps_cpu: str = ""
    ps_memory: str = ""
    worker_cpu: str = ""
    worker_memory: str = ""
    worker_gpus: str = "0"
    worker_node: Sequence[str] = ()
    spot: bool = False
    env: Sequence[str] = ()
    env_secret: str = ""
    mount: Sequence[str] = ()
    user: str = "10001"
    cert_manager: str = ""
    metrics_namespace: str = ""
    kind: str = "job"

    @property
    def is_jobset(self) -> bool:
        """Whether all roles are jobs of one JobSet, which a TrainJob has, too."""
        return self.kind != "job"

    def __post_init__(self) -> None:
        if not self.command or self.command[0].startswith("-"):
            raise InvalidSpec("what should the workers run? lockstep k8s render … -- python train.py")
        for flag, (form, metavar, words) in FLAGS.items():
            given = getattr(self, flag.replace("-", "_"))
            for text in given if not isinstance(given, str) else [given] if given or flag in _NEEDED else []:
                if not re.fullmatch(form, text, re.DOTALL | re.ASCII):
                    raise InvalidSpec(f"--{flag}: got {text[:80]!r}, want {metavar}: {words}")
        if self.ps > MAX_SHARDS:
            raise InvalidSpec(f"--ps: got {self.ps}, want {MAX_SHARDS} at most")
        paths = [path.rstrip("/") for path in pairs(self.mount).values()]
        if {*paths} & {*_TAKEN} or len({*paths}) < len(self.mount):
            raise InvalidSpec(f"--mount: got {' and '.join(self.mount)}, want each claim once, each at a path of its own, which no pod has")
        place = self.checkpoint_dir
        if not place:
            raise InvalidSpec(
                "--checkpoint-dir: give one; Kubernetes moves pods, and a parameter server that is moved reads its values there"
            )
        if "://" in place:
            if self.checkpoint_claim or self.checkpoint_size:
                raise InvalidSpec(f"--checkpoint-claim: {place} needs no volume; give one of the two")
        elif not place.startswith("/") or place.rstrip("/") in _TAKEN:
            raise InvalidSpec(f"--checkpoint-dir: got {place!r}, want a directory of its own, such as /checkpoints, or a URL")
        elif not self.checkpoint_claim:
            raise InvalidSpec(f"--checkpoint-dir {place}: give --checkpoint-claim, a claim that all nodes may write to (ReadWriteMany)")


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Returns the values of texts NAME=VALUE by name."""
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}
