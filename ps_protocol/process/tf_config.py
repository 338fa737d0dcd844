"""TF_CONFIG, by which cluster engines give a TensorFlow process its cluster and task, read for our roles. Opens nothing."""

import json

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.identity import parse_address

# Those of the original; an evaluator has no role here.
_JOBS = ("chief", "master", "ps", "worker", "evaluator")
_EXAMPLE = '{"cluster": {"chief": ["host:port"], "ps": ["host:port"]}, "task": {"type": "ps", "index": 0}}'


@light_dataclass(frozen=True, slots=True, kw_only=True)
class TfConfig:
    """A cluster's addresses by job, and which task this process is; `task_type` is empty if it has none."""

    chief: str | None
    ps: tuple[str, ...]
    workers: tuple[str, ...]
    task_type: str
    task_index: int

    @property
    def bind_address(self) -> str | None:
        """The address that this process shall listen at; None if the cluster names none for its task.

        A name other than loopback is how others reach this machine, often through a service, so the process listens everywhere.
        """
        addresses = {"chief": (self.chief,) if self.chief else (), "ps": self.ps}.get(self.task_type, ())
        if self.task_index >= len(addresses):
            return None
        address = parse_address(addresses[self.task_index])
        return str(address) if address.is_loopback else f"0.0.0.0:{address.port}"


def parse_tf_config(text: str) -> TfConfig | None:
    """Returns the configuration; None if `text` is blank. Raises InvalidSpec saying which part is wrong."""
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidSpec(f"TF_CONFIG is not JSON: {error}; want {_EXAMPLE}") from None
    cluster, task = _object(config, "cluster"), _object(config, "task")
    task_type, task_index = _task(task)
    for job in cluster:
        if job not in _JOBS:
            raise InvalidSpec(f"TF_CONFIG: cluster.{job[:40]}: there is no such job; want {', '.join(_JOBS)}")
    chief = _addresses(cluster, "chief") or _addresses(cluster, "master")
    if len(chief) > 1:
        raise InvalidSpec(f"TF_CONFIG: cluster.chief has {len(chief)} addresses, want one")
    parsed = TfConfig(
        chief=chief[0] if chief else None,
        ps=_addresses(cluster, "ps"),
        workers=_addresses(cluster, "worker"),
        task_type=task_type,
        task_index=task_index,
    )
    _check_task(parsed)
    return parsed


def _object(config: object, key: str) -> dict[str, object]:
    if not isinstance(config, dict):
        raise InvalidSpec(f"TF_CONFIG: got {_kind(config)}, want an object such as {_EXAMPLE}")
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise InvalidSpec(f"TF_CONFIG: {key} is {_kind(value)}, want an object")
    return value


def _task(task: dict[str, object]) -> tuple[str, int]:
    task_type, index = task.get("type") or "", task.get("index", 0)
    if not isinstance(task_type, str):
        raise InvalidSpec(f"TF_CONFIG: task.type is {_kind(task_type)}, want a string")
    if task_type and task_type not in _JOBS:
        raise InvalidSpec(f"TF_CONFIG: task.type is {task_type[:40]!r}, want one of {', '.join(_JOBS)}")
    # Templates of cluster engines often can give strings only.
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) <= 9:
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise InvalidSpec(f"TF_CONFIG: task.index is {index!r}, want an integer from 0")
    return ("chief" if task_type == "master" else task_type), index


def _addresses(cluster: dict[str, object], job: str) -> tuple[str, ...]:
    value = cluster.get(job) or []
    if isinstance(value, dict):
        if sorted(value) != sorted(str(index) for index in range(len(value))):
            raise InvalidSpec(f"TF_CONFIG: cluster.{job} has the indices {', '.join(sorted(value))}, want 0 to {len(value) - 1}")
        value = [value[str(index)] for index in range(len(value))]
    if not isinstance(value, list):
        raise InvalidSpec(f"TF_CONFIG: cluster.{job} is {_kind(value)}, want a list of addresses")
    for index, address in enumerate(value):
        if not isinstance(address, str):
            raise InvalidSpec(f"TF_CONFIG: cluster.{job}[{index}] is {_kind(address)}, want an address")
        try:
            parse_address(address)
        except InvalidSpec as error:
            raise InvalidSpec(f"TF_CONFIG: cluster.{job}[{index}]: {error.message}") from None
    return tuple(value)


def _check_task(config: TfConfig) -> None:
    addresses = {"ps": config.ps, "worker": config.workers}.get(config.task_type)
    # A cluster without tasks of this job leaves the task's address to flags and other variables.
    if addresses and config.task_index >= len(addresses):
        raise InvalidSpec(
            f"TF_CONFIG: task is {config.task_type} {config.task_index}, but cluster.{config.task_type} has {len(addresses)} addresses"
        )


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}.get(type(value), "a number")
