"""What is simulated: a cluster's options and its faults, both from a seed alone. Knows numbers and words; runs nothing."""

import random
from dataclasses import dataclass, replace

from ps_protocol.model.data import DataSpec
from ps_protocol.model.merging import MEAN, merge_of
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import DEFAULT_POLICY
from tests.simulation.world import NetworkSpec

FAULTS_S = 5.0
# So large a norm that nothing is scaled: what matters is the way through PrepareStep.
MERGES = (MEAN, merge_of("bounded_mean:1e9"), merge_of("trimmed_mean:0.34"))
# By then every cluster has its first values.
_BEGUN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that befalls the cluster at `at` seconds; `target` is a process or a pair of them, `seconds` how long it lasts."""

    at: float
    kind: str
    target: tuple[str, ...] = ()
    seconds: float = 0.0
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated cluster and what befalls it. `num_records_kept`: in the history of each process, about; 0: all.

    `max_age`: after how many steps a row is gone (0: never); `admitted`: with which probability a step gives a key one (0: always);
    `admit_after`: or in its how manyth step it gets one (0: the first).
    """

    seed: int
    num_shards: int
    num_workers: int
    num_required: int
    durability: Durability | None
    every_steps: int
    lease_s: float
    compute_s: float
    min_replicas: int | None
    has_norms: bool
    network: NetworkSpec
    faults: tuple[Fault, ...]
    data: DataSpec | None = None
    policy: PolicySpec = DEFAULT_POLICY
    has_standbys: bool = False
    has_history: bool = False
    num_records_kept: int = 0
    max_steps: int | None = None
    full_every: int = 1
    max_age: int = 0
    admitted: float = 0.0
    admit_after: int = 0

    @property
    def is_for_a_standby(self) -> bool:
        """Whether nothing befalls it but the loss of one server, whose values another one has: nothing is rolled back then."""
        is_calm = not (self.network.drop or self.network.late or self.network.duplicate)
        if not self.has_standbys or self.policy.applies_on_arrival or not is_calm or len(self.faults) != 1:
            return False
        fault = self.faults[0]
        return fault.kind == "kill" and fault.target[0].startswith("ps-") and fault.at > _BEGUN_S

    @property
    def words(self) -> str:
        """The options in one line."""
        durability = self.durability.value if self.durability else "no storage"
        return (
            f"ps={self.num_shards} workers={self.num_workers} R={self.num_required} durability={durability} every={self.every_steps}"
            f" full={self.full_every} lease={self.lease_s:g} compute={self.compute_s:.3f} min={self.min_replicas} norms={self.has_norms}"
            f" policy={self.policy.text} standbys={self.has_standbys} network={self.network} data={self.data} max={self.max_steps}"
            f" age={self.max_age} admitted={self.admitted:g} after={self.admit_after}"
        )


def scenario_of(seed: int) -> Scenario:
    """Returns the scenario of a seed: always the same one."""
    chance = random.Random(f"scenario {seed}")
    num_shards, num_workers = chance.choice((1, 2, 2, 2, 3)), chance.choice((1, 2, 2, 3, 3, 4))
    durability = chance.choice((Durability.STEP, Durability.STEP, Durability.INTERVAL, Durability.INTERVAL, Durability.NONE, None))
    is_rough = chance.random() < 0.5
    network = NetworkSpec(
        drop=chance.choice((0.0, 0.01, 0.05)) if is_rough else 0.0,
        duplicate=chance.choice((0.0, 0.02, 0.1)) if is_rough else 0.0,
        late=chance.choice((0.0, 0.01, 0.04)) if is_rough else 0.0,
    )
    scenario = Scenario(
        seed=seed,
        num_shards=num_shards,
        num_workers=num_workers,
        num_required=chance.randint(1, num_workers) if chance.random() < 0.3 else num_workers,
        durability=durability,
        every_steps=chance.randint(1, 6),
        lease_s=chance.choice((1.5, 3.0)),
        compute_s=chance.uniform(0.05, 0.25),
        min_replicas=1 if chance.random() < 0.2 else None,
        has_norms=chance.random() < 0.25,
        network=network,
        faults=_in_order(
            *_faults(chance, num_shards=num_shards, num_workers=num_workers, has_storage=durability is not None),
            *_new_workers(random.Random(f"new workers {seed}"), num_workers=num_workers),
            *_slow_beginnings(random.Random(f"slow beginnings {seed}"), num_workers=num_workers),
            *_total_losses(random.Random(f"total losses {seed}")),
            *_forgeries(random.Random(f"forgeries {seed}"), num_workers=num_workers),
            *_impostors(random.Random(f"impostors {seed}"), num_workers=num_workers),
            *_hoarders(random.Random(f"hoarders {seed}"), num_workers=num_workers),
            *_rollouts(random.Random(f"rollouts {seed}"), num_shards=num_shards, num_workers=num_workers),
            *_half_steps(random.Random(f"half steps {seed}"), num_shards=num_shards),
            *_orders(random.Random(f"orders {seed}"), has_storage=durability is not None),
        ),
        data=_data(random.Random(f"data {seed}")),
        policy=_outer(random.Random(f"outer {seed}")) or _policy(random.Random(f"policy {seed}")),
    )
    scenario = _with_standbys(scenario, random.Random(f"standbys {seed}"))
    history = random.Random(f"history {seed}")
    scenario = replace(scenario, has_history=history.random() < 0.3, num_records_kept=history.choice([0, 20, 60, 200]))
    few = random.Random(f"few workers {seed}")
    if scenario.policy == DEFAULT_POLICY and few.random() < 0.1:
        scenario = replace(scenario, num_required=num_workers + few.randint(1, 2))
    scenario = replace(scenario, full_every=random.Random(f"deltas {seed}").choice((1, 1, 2, 3, 8)))
    rows = random.Random(f"rows {seed}")
    scenario = replace(scenario, max_age=rows.choice((0, 0, 1, 2, 5)), admitted=rows.choice((0.0, 0.0, 0.3, 0.7)))
    if not scenario.admitted:
        admission = random.Random(f"admission {seed}")
        scenario = replace(scenario, admit_after=admission.choice((0, 2)) and admission.randint(2, 4))
    last = random.Random(f"last step {seed}")
    return replace(scenario, max_steps=last.randint(3, 40)) if last.random() < 0.08 else scenario


UNLOCKED = PolicySpec(name=PolicyName.ASYNC, use_locking=False)


def unlocked(scenario: Scenario) -> Scenario:
    """Returns the same with servers that apply contributions as they arrive; then no step is saved before it is told, and no norm is known.

    There is no training data: its ranges are not done with a step, so a checkpoint cannot say of all of them whether its values have them.
    Nor can a worker keep places that it does not use, nor the policy be changed; and the oracle knows one rate of
    what is applied on arrival. Nor is training finished: what servers apply after that has the number of the last step, too. Rows do not
    age while a process lives.
    """
    durability = Durability.INTERVAL if scenario.durability is Durability.STEP else scenario.durability
    faults = tuple(fault for fault in scenario.faults if fault.kind not in ("hoard", "policy", "numbers", "finish"))
    return replace(scenario, policy=UNLOCKED, has_norms=False, data=None, durability=durability, faults=faults, max_steps=None, max_age=0)


def _with_standbys(scenario: Scenario, chance: random.Random) -> Scenario:
    """Sometimes each server has a standby, and half of what befalls a server befalls that instead."""
    if chance.random() < 0.75:
        return scenario

    def other(name: str) -> str:
        return f"{name}-standby" if name.startswith("ps-") and chance.random() < 0.5 else name

    faults = (replace(fault, target=tuple(map(other, fault.target))) for fault in scenario.faults)
    lies = _lies(random.Random(f"lies {scenario.seed}"), num_workers=scenario.num_workers)
    return replace(scenario, has_standbys=True, faults=_in_order(*faults, *lies))


def _policy(chance: random.Random) -> PolicySpec:
    """Every policy under which servers apply what the chief tells them to."""
    kind = chance.choice(("strict", "strict", "strict", "fifo", "ssp", "async"))
    if kind == "strict":
        return DEFAULT_POLICY
    if kind == "fifo":
        return PolicySpec(tokens=TokenMode.FIFO)
    name = PolicyName.SSP if kind == "ssp" else PolicyName.ASYNC
    max_staleness, too_stale = chance.choice((None, 0, 1, 2)), chance.choice((*TooStale,))
    return PolicySpec(
        name=name,
        staleness=chance.choice((0, 1, 2, 3)) if name is PolicyName.SSP else 0,
        max_staleness=max_staleness,
        too_stale=too_stale if max_staleness is not None else TooStale.DROP,
    )


def _outer(chance: random.Random) -> PolicySpec | None:
    """Steps that wait a while for late contributions, and take still later ones; None, mostly: another policy."""
    if chance.random() < 0.88:
        return None
    return PolicySpec(
        name=PolicyName.OUTER,
        grace_s=chance.choice((0.0, 0.05, 0.3, 1.0)),
        max_staleness=chance.choice((None, None, 1, 3)),
        merge=chance.choice(MERGES),
    )


def _data(chance: random.Random) -> DataSpec | None:
    if chance.random() < 0.4:
        return None
    return DataSpec(
        name="train",
        num_samples=chance.randint(4, 40),
        range_size=chance.randint(1, 4),
        num_epochs=chance.choice((0, 1, 1, 2, 3)),
        shuffle_seed=chance.choice((None, 1)),
    )


def _faults(chance: random.Random, *, num_shards: int, num_workers: int, has_storage: bool) -> tuple[Fault, ...]:
    shards = [f"ps-{index}" for index in range(num_shards)]
    workers = [f"worker-{index}" for index in range(num_workers)]
    kinds = ["kill"] * 6 + ["stop"] * 3 + ["cut"] * 3 + ["new chief"] * 2 + ["storm", "kill all"]
    if has_storage:
        kinds += ["kill in save"] * 3 + ["full", "rot", "unreadable"]
    faults = []
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        kind, at = chance.choice(kinds), chance.uniform(0.0, FAULTS_S)
        target: tuple[str, ...] = (chance.choice([chance.choice(shards), "chief", chance.choice(workers)]),)
        if kind == "cut":
            pair = chance.choice(
                [("chief", chance.choice(shards)), (chance.choice(workers), chance.choice(shards)), ("chief", chance.choice(workers))]
            )
            target = pair if chance.random() < 0.5 else pair[::-1]
        seconds = chance.choice((0.05, 0.5, 2.0, 5.0))
        faults.append(Fault(at=at, kind=kind, target=target, seconds=seconds, number=chance.randint(1, 12)))
    return tuple(faults)


def _new_workers(chance: random.Random, *, num_workers: int) -> tuple[Fault, ...]:
    if chance.random() < 0.85:
        return ()
    target, seconds = (f"worker-{chance.randrange(num_workers)}",), chance.choice((0.05, 0.5, 2.0, 5.0))
    return (Fault(at=chance.uniform(0.0, FAULTS_S), kind="new worker", target=target, seconds=seconds, number=chance.randint(1, 12)),)


def _slow_beginnings(chance: random.Random, *, num_workers: int) -> tuple[Fault, ...]:
    """A worker stands still when it may just have been told to initialise the model, longer than most leases."""
    if chance.random() < 0.9:
        return ()
    target = (f"worker-{chance.randrange(num_workers)}",)
    return (Fault(at=chance.uniform(0.04, 0.09), kind="stop", target=target, seconds=4.0),)


# What a running training can be told to go on with: a fault has the number of one, so new ones stand at the end.
POLICIES = (
    DEFAULT_POLICY,
    PolicySpec(replicas_to_aggregate=1),
    PolicySpec(tokens=TokenMode.FIFO),
    PolicySpec(name=PolicyName.ASYNC),
    PolicySpec(name=PolicyName.ASYNC, max_staleness=1),
    PolicySpec(name=PolicyName.SSP, staleness=1),
    PolicySpec(name=PolicyName.SSP, staleness=2, max_staleness=0, too_stale=TooStale.SCALE),
    PolicySpec(name=PolicyName.OUTER, grace_s=0.1),
    PolicySpec(name=PolicyName.OUTER, replicas_to_aggregate=1, max_staleness=1),
    PolicySpec(merge=MERGES[-1]),
    PolicySpec(name=PolicyName.OUTER, merge=MERGES[1]),
)
RATES = (0.5, 0.25, 0.125)


def _orders(chance: random.Random, *, has_storage: bool) -> tuple[Fault, ...]:
    """People change the policy or an optimizer's rate while training runs, have it saved, or finish it."""
    if chance.random() < 0.8:
        return ()
    kinds = ["policy"] * 4 + ["numbers"] * 3 + ["save"] * 2 * has_storage
    orders = [
        Fault(at=chance.uniform(0.1, FAULTS_S), kind=chance.choice(kinds), number=chance.randrange(len(POLICIES)))
        for _ in range(chance.choice((1, 2, 4)))
    ]
    if chance.random() < 0.2:
        orders.append(Fault(at=chance.uniform(FAULTS_S / 2, FAULTS_S), kind="finish"))
    return tuple(orders)


def _forgeries(chance: random.Random, *, num_workers: int) -> tuple[Fault, ...]:
    """A worker commits what it has given to some shards only, or to none."""
    count = chance.choice((0,) * 8 + (1, 2))
    return tuple(
        Fault(at=chance.uniform(0.1, FAULTS_S), kind="forge", target=(f"worker-{chance.randrange(num_workers)}",), number=1)
        for _ in range(count)
    )


def _lies(chance: random.Random, *, num_workers: int) -> tuple[Fault, ...]:
    """A worker gives the two servers of each shard different gradients."""
    count = chance.choice((0,) * 8 + (1, 3))
    targets = [(f"worker-{chance.randrange(num_workers)}",) for _ in range(count)]
    return tuple(Fault(at=chance.uniform(0.1, FAULTS_S), kind="lie", target=target, number=chance.randint(0, 1)) for target in targets)


def _impostors(chance: random.Random, *, num_workers: int) -> tuple[Fault, ...]:
    """Somebody who has a worker's token speaks in the name of a worker."""
    count = chance.choice((0,) * 8 + (1, 3))
    return tuple(
        Fault(at=chance.uniform(0.1, FAULTS_S), kind="impostor", target=(f"worker-{chance.randrange(num_workers)}",)) for _ in range(count)
    )


def _hoarders(chance: random.Random, *, num_workers: int) -> tuple[Fault, ...]:
    """A worker gives more contributions than servers take, and commits none of them."""
    count = chance.choice((0,) * 8 + (1, 2))
    return tuple(
        Fault(at=chance.uniform(0.1, FAULTS_S), kind="hoard", target=(f"worker-{chance.randrange(num_workers)}",)) for _ in range(count)
    )


def _total_losses(chance: random.Random) -> tuple[Fault, ...]:
    """Nothing but workers is left, sometimes twice."""
    count = chance.choice((0,) * 8 + (1, 2))
    return tuple(Fault(at=chance.uniform(0.1, FAULTS_S), kind="lose all", seconds=chance.choice((0.05, 0.5, 2.0))) for _ in range(count))


def _rollouts(chance: random.Random, *, num_shards: int, num_workers: int) -> tuple[Fault, ...]:
    """The chief is asked to end; sometimes every process is, one after the other, in any order."""
    kind, at = chance.choice(("none",) * 8 + ("chief", "all")), chance.uniform(0.0, FAULTS_S / 2)
    everybody = ["chief", *(f"ps-{index}" for index in range(num_shards)), *(f"worker-{index}" for index in range(num_workers))]
    chance.shuffle(everybody)
    targets = {"none": [], "chief": ["chief"], "all": everybody}[kind]
    return tuple(
        Fault(at=at + number * FAULTS_S / 2 / len(everybody), kind="end", target=(name,), seconds=chance.choice((0.05, 0.5, 2.0)))
        for number, name in enumerate(targets)
    )


def _half_steps(chance: random.Random, *, num_shards: int) -> tuple[Fault, ...]:
    """A parameter server fails half-way through a step; sometimes the chief ends meanwhile, and another one finds it so."""
    if chance.random() < 0.85:
        return ()
    at, name = chance.uniform(0.1, FAULTS_S), f"ps-{chance.randrange(num_shards)}"
    half = Fault(at=at, kind="half", target=(name,))
    return (
        (half, Fault(at=at + chance.uniform(0.0, 0.3), kind="kill", target=("chief",), seconds=0.05)) if chance.random() < 0.5 else (half,)
    )


def _in_order(*faults: Fault) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))
