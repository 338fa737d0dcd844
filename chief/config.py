"""The chief's configuration from flags, LOCKSTEP_* variables and TF_CONFIG, in this order. Knows no socket and starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from chief.options import CheckpointConfig, CoordinationConfig
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process import options
from ps_protocol.process.listening import check_bind_address
from ps_protocol.process.options import Given
from ps_protocol.process.tf_config import TfConfig, parse_tf_config
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import MAX_SHARDS
from ps_protocol.roles.identity import parse_address
from ps_protocol.security.options import OPEN, Security


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ChiefConfig:
    """One chief. `ps` are the addresses of the parameter servers, by index; `announce` is a file for its own once it serves.

    `standbys` are those of their standbys, by index; an empty one, or none at all: there is none. `advertise`: where participants that have
    lost it find this chief (port 0: the one where it listens); empty: at `address`. `page`: where a browser finds its page; empty: nowhere.

    `checkpoint_dir`: a path or a URL, the same for all roles; empty: there are no checkpoints, and `coordination` has none either.
    `is_takeover`: it takes the servers from their present chief, whatever that one does. `history`: a directory for a record of all steps.
    `metrics`: where /metrics is served over HTTP; empty: nowhere.
    """

    ps: tuple[str, ...]
    standbys: tuple[str, ...] = ()
    coordination: CoordinationConfig = field(default_factory=CoordinationConfig)
    address: str = options.DEFAULT_ADDRESS
    advertise: str = ""
    announce: Path | None = None
    page: str = ""
    allow_insecure_network: bool = False
    security: Security = OPEN
    checkpoint_dir: str = ""
    is_takeover: bool = False
    history: Path | None = None
    history_max_bytes: int = options.HISTORY_MAX_BYTES.default
    metrics: str = ""
    enable_failpoints: bool = False

    def __post_init__(self) -> None:
        if not self.ps:
            raise InvalidSpec("which parameter servers? give --ps ADDRESS,ADDRESS (by index), or set LOCKSTEP_PS or TF_CONFIG")
        if len(self.ps) > MAX_SHARDS:
            raise InvalidSpec(f"--ps: {len(self.ps)} parameter servers, {MAX_SHARDS} at most")
        self._check_standbys()
        for index, address in enumerate(self.ps):
            parse_address(address)
            if address in self.ps[:index]:
                raise InvalidSpec(
                    f"--ps: {address} occurs twice, as ps {self.ps.index(address)} and ps {index}; each needs its own address"
                )
            if address in (self.address, self.advertise):
                raise InvalidSpec(f"--ps: {address} (of ps {index}) is the chief's; each needs its own address")
        parse_address(self.address, is_bind=True)
        if self.advertise:
            parse_address(self.advertise, is_bind=True)
        check_bind_address(self.address, is_insecure_network_allowed=self.allow_insecure_network, is_closed=self.security.is_closed)
        if self.page:
            if parse_address(self.page, is_bind=True).is_unix:
                raise InvalidSpec(f"--page {self.page}: a browser reaches no Unix socket; want HOST:PORT")
            check_bind_address(self.page, is_insecure_network_allowed=self.allow_insecure_network, is_closed=self.security.is_closed)

    def _check_standbys(self) -> None:
        if len(self.standbys) > len(self.ps):
            raise InvalidSpec(f"--standbys: {len(self.standbys)} for {len(self.ps)} parameter servers; want one for each at most, by index")
        given = [*self.ps, *filter(None, self.standbys)]
        for index, address in enumerate(self.standbys):
            if address:
                parse_address(address)
                if given.count(address) > 1:
                    raise InvalidSpec(f"--standbys: {address} (of ps {index}) occurs twice; each process needs its own address")


def parse_config(arguments: Sequence[str], *, environment: Mapping[str, str]) -> ChiefConfig:
    """Returns the configuration: each part from its flag, else LOCKSTEP_*, else TF_CONFIG, else its default. Raises InvalidSpec."""
    given = options.read_options(
        options.CHIEF,
        arguments,
        environment=environment,
        prog="lockstep chief",
        description="Runs the chief of a cluster until training is finished.",
        examples=("lockstep chief --ps 127.0.0.1:5001,127.0.0.1:5002 --workers 3",),
    )
    tf_config = parse_tf_config(environment.get("TF_CONFIG", ""))
    task = tf_config if tf_config is not None and tf_config.task_type == "chief" else None
    others = {
        "ps": tuple(address for address in given[options.PS_ADDRESSES] if address) or (task.ps if task else ()),
        "coordination": _coordination(given, task),
        "address": given[options.ADDRESS] or (task.bind_address if task else None) or options.DEFAULT_ADDRESS,
        "page": given[options.PAGE] or "",
        "security": options.security_of(given, is_server=True),
        "is_takeover": given[options.TAKEOVER],
    }
    config = ChiefConfig(**{**given.for_fields(ChiefConfig, options.CHIEF), **others})
    _check_size(config.coordination)
    return config


def _check_size(config: CoordinationConfig) -> None:
    """Raises InvalidSpec if nothing says how many contributions make a step: one would, and those of all other workers would be dropped."""
    if config.policy.has_common_steps and config.total_num_replicas is None and config.replicas_to_aggregate is None:
        raise InvalidSpec("how many workers take part? give --workers N, or --replicas-to-aggregate R: how many contributions make a step")


def _coordination(given: Given, task: TfConfig | None) -> CoordinationConfig:
    # A cluster that lists its workers has so many.
    num_workers = given[options.EXPECTED_WORKERS] or (len(task.workers) or None if task else None)
    policy = options.policy_of(given)
    config = CoordinationConfig(
        cluster=given[options.CLUSTER],
        replicas_to_aggregate=options.contributions_of(given, policy.name, num_workers=num_workers),
        total_num_replicas=num_workers,
        max_steps=given[options.MAX_STEPS],
        lease_s=given[options.LEASE],
        policy=policy,
        min_replicas=given[options.MIN_REPLICAS],
        checkpoints=_checkpoints(given),
        reject_nonfinite=given[options.REJECT_NONFINITE],
    )
    options.check_least(given, policy, num_required=config.num_required)
    return config


def _checkpoints(given: Given) -> CheckpointConfig | None:
    """Returns when checkpoints are made; None if there is no place for them. Raises InvalidSpec if a flag asks for what cannot be."""
    options.check_place(given)
    if not given[options.CHECKPOINT_DIR]:
        return None
    return CheckpointConfig(
        durability=Durability[given[options.DURABILITY].upper()],
        interval_s=given[options.CHECKPOINT_INTERVAL],
        every_steps=given[options.CHECKPOINT_STEPS],
        full_every=given[options.FULL_EVERY],
        keep=given[options.KEEP_CHECKPOINTS],
        restore=given[options.RESTORE],
    )
