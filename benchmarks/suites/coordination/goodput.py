"""Which share of a million chips' time counts when chips fail, by how the chips are coordinated: the chief's coordinator, simulated."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.arguments import add_json, at_least_one, show
from benchmarks.report.figures import as_row, head_rows
from lockstep.planning.latencies import constant, with_failures
from lockstep.planning.simulation import simulate
from ps_protocol.model.policy import PolicyName, PolicySpec

DESCRIPTION = __doc__
_HOUR_S = 3600.0
_YEAR_S = 8766 * _HOUR_S
_COLUMNS = ("chips", "learners", "policy", "R", "goodput", "published", "mean staleness")
# Decoupled DiLoCo, arXiv 2604.21428: of what is called so here, by the number of learners.
_PUBLISHED = {("all stop", 1): 0.27, ("elastic", 1): 0.58, ("outer", 8): 0.88, ("outer", 16): 0.93}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chips:
    """What fails, and what that costs. The paper's are the number of chips and the years between a chip's failures; the others are ours.

    A failed chip takes the `slice_chips` that it belongs to out for `repair_s`, and those that compute with it stand still for `restart_s`
    if spare ones take its place, or for `regroup_s` if the others go on without it.
    """

    num: int = 1_200_000
    between_s: float = _YEAR_S
    slice_chips: int = 64
    repair_s: float = 5.5 * _HOUR_S
    restart_s: float = 34.4
    regroup_s: float = 13.3
    phase_s: float = 60.0

    @property
    def share_there(self) -> float:
        """The share of the chips that is not under repair."""
        return 1 - self.slice_chips * self.repair_s / self.between_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to coordinate, and the share of the chips' time that counts."""

    chips: str
    learners: int
    policy: str
    num_required: int
    goodput: float
    published: float | None
    mean_staleness: float


def rows(chips: Chips, *, learners: tuple[int, ...] = (8, 16), num_phases: int = 2000, seed: int = 0) -> Iterator[Row]:
    """Yields all chips as one learner, which stop or regroup, and then so many learners by sync and by outer with R of 1, half and all."""
    sync = PolicySpec()
    yield _row(chips, "all stop", sync, 1, 1, num_phases, seed)
    yield _row(chips, "elastic", sync, 1, 1, num_phases, seed)
    for number in learners:
        yield _row(chips, "sync", sync, number, number, num_phases, seed)
        for num_required in (number // 2, 1):
            yield _row(chips, "outer", PolicySpec(name=PolicyName.OUTER), number, num_required, num_phases, seed)


def _row(chips: Chips, name: str, policy: PolicySpec, num_learners: int, num_required: int, num_phases: int, seed: int) -> Row:
    stops = name == "all stop"
    latency = with_failures(
        constant(chips.phase_s),
        between_s=chips.between_s / chips.num * num_learners,
        restart_s=chips.restart_s if stops else chips.regroup_s,
    )
    result = simulate(policy=policy, num_workers=num_learners, num_required=num_required, latency=latency, num_rounds=num_phases, seed=seed)
    return Row(
        chips="all stop" if stops else "elastic",
        learners=num_learners,
        policy="" if num_learners == 1 else policy.text,
        num_required=num_required,
        goodput=result.efficiency * (1.0 if stops else chips.share_there),
        published=_PUBLISHED.get((name, num_learners)) if num_required == 1 else None,
        mean_staleness=result.mean_staleness,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    chips = Chips()
    parser.add_argument("--chips", type=at_least_one, default=chips.num, help="(default %(default)s)")
    parser.add_argument("--years", type=float, default=1.0, help="between the failures of a chip (default 1)")
    parser.add_argument("--slice", type=at_least_one, default=chips.slice_chips, help="chips repaired together (default %(default)s)")
    parser.add_argument("--repair-hours", type=float, default=chips.repair_s / _HOUR_S, help="(default %(default)s)")
    parser.add_argument("--restart-s", type=float, default=chips.restart_s, help="with spare chips (default %(default)s)")
    parser.add_argument("--regroup-s", type=float, default=chips.regroup_s, help="without the failed chips (default %(default)s)")
    parser.add_argument("--phase-s", type=float, default=chips.phase_s, help="inner steps of a contribution (default %(default)s)")
    parser.add_argument("--learners", type=at_least_one, nargs="+", default=[8, 16], help="(default 8 16)")
    parser.add_argument("--phases", type=at_least_one, default=2000, help="contributions of each learner (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Prints a row for each way; returns 0."""
    chips = Chips(
        num=options.chips,
        between_s=options.years * _YEAR_S,
        slice_chips=options.slice,
        repair_s=options.repair_hours * _HOUR_S,
        restart_s=options.restart_s,
        regroup_s=options.regroup_s,
        phase_s=options.phase_s,
    )
    if not options.json:
        print(head_rows(_COLUMNS), flush=True)
    for row in rows(chips, learners=tuple(options.learners), num_phases=options.phases, seed=options.seed):
        show(asdict(row), _in_words, options)
    return 0


def _in_words(row: dict[str, Any]) -> str:
    published = "" if row["published"] is None else f"{row['published']:.0%}"
    figures = [f"{row['goodput']:.1%}", published, f"{row['mean_staleness']:.1f}"]
    return as_row([row["chips"], str(row["learners"]), row["policy"], str(row["num_required"]), *figures])
