"""Computing times of workers: named distributions with parameters, or measured times. Draws numbers; knows no cluster, clock or file."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass

Times = NDArray[np.float64]

# In the time of a computation: each of them is drawn.
_MAX_FAILURES = 1000


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The time that one gradient computation of a worker takes, in seconds: a distribution, `text` in a few words.

    `draw(random, count, worker)` returns the times of so many computations of a worker, `mean_s(worker)` their mean, failures left out.
    `num_workers`: how many workers were measured; None: it is no measurement.
    """

    text: str
    draw: Callable[[np.random.Generator, int, int], Times]
    mean_s: Callable[[int], float]
    num_workers: int | None = None


def constant(time_s: float) -> Latency:
    """Always the same time."""
    _check(time_s=time_s)
    return Latency(text=f"constant {time_s:g} s", draw=lambda random, count, worker: np.full(count, time_s), mean_s=lambda worker: time_s)


def lognormal(median_s: float, sigma: float) -> Latency:
    """The logarithm is normal: around `median_s`, with standard deviation `sigma` (0.1: about 10 % of the time)."""
    _check(median_s=median_s)
    if not (math.isfinite(sigma) and 0 <= sigma <= 5):
        raise InvalidSpec(f"sigma of the lognormal times: got {sigma:g}, want 0 to 5")
    return Latency(
        text=f"lognormal, median {median_s:g} s, sigma {sigma:g}",
        draw=lambda random, count, worker: median_s * np.exp(sigma * random.standard_normal(count)),
        mean_s=lambda worker: median_s * math.exp(sigma**2 / 2),
    )


def shifted_exponential(least_s: float, extra_s: float) -> Latency:
    """`least_s` plus an exponential time with the mean `extra_s`."""
    _check(extra_s=extra_s)
    if not (math.isfinite(least_s) and least_s >= 0):
        raise InvalidSpec(f"least time of the exponential times: got {least_s:g}, want 0 or more seconds")
    return Latency(
        text=f"{least_s:g} s and exponential {extra_s:g} s more",
        draw=lambda random, count, worker: least_s + extra_s * random.standard_exponential(count),
        mean_s=lambda worker: least_s + extra_s,
    )


def with_stragglers(usual: Latency, *, probability: float, factor: float) -> Latency:
    """The times of `usual`, but each computation of any worker takes `factor` times as long with `probability`."""
    if not 0 <= probability <= 1:
        raise InvalidSpec(f"probability of a straggler: got {probability:g}, want 0 to 1")
    if not (math.isfinite(factor) and factor >= 1):
        raise InvalidSpec(f"factor of a straggler: got {factor:g}, want 1 or more")

    def draw(random: np.random.Generator, count: int, worker: int) -> Times:
        times = usual.draw(random, count, worker)
        return np.where(random.random(count) < probability, factor * times, times)

    return Latency(
        text=f"{usual.text}; {100 * probability:g} % of them take {factor:g} times as long",
        draw=draw,
        mean_s=lambda worker: usual.mean_s(worker) * (1 + probability * (factor - 1)),
    )


def with_failures(usual: Latency, *, between_s: float, restart_s: float) -> Latency:
    """The times of `usual` and of the restarts within them: a worker fails every `between_s` on average, at any time independently.

    Each time it stands still for `restart_s`; another failure has these begin anew. So it computes for the share
    exp(-restart_s / between_s) of the time.
    """
    for name, value, most_s in (("time between failures", between_s, sys.float_info.max), ("time of a restart", restart_s, 5 * between_s)):
        if not 0 < value <= most_s:
            raise InvalidSpec(f"{name}: got {value:g}, want more than 0 seconds; a restart takes at most 5 times the time between failures")
    if between_s < (least_s := usual.mean_s(0) / _MAX_FAILURES):
        raise InvalidSpec(
            f"time between failures: got {between_s:g} s, want at least {least_s:g} s, {_MAX_FAILURES} of them in a computation"
        )
    share = math.exp(-restart_s / between_s)

    def draw(random: np.random.Generator, count: int, worker: int) -> Times:
        times = usual.draw(random, count, worker)
        num_failures = random.poisson(times / between_s)
        num_cut = random.geometric(share, num_failures.sum()) - 1
        cut_s = -between_s * np.log1p(-(1 - share) * random.random(num_cut.sum()))
        whose = np.repeat(np.repeat(np.arange(count), num_failures), num_cut)
        return times + num_failures * restart_s + np.bincount(whose, cut_s, minlength=count)

    return Latency(
        text=f"{usual.text}; a failure every {between_s:g} s, {restart_s:g} s to restart",
        draw=draw,
        mean_s=usual.mean_s,
        num_workers=usual.num_workers,
    )


def measured(times: Mapping[int, Sequence[float]]) -> Latency:
    """Measured times: each worker draws at random from its own. More workers than were measured use those again, in order."""
    if not times or not all(times.values()):
        raise InvalidSpec("no times: want at least one computation of each worker")
    of_workers = [np.asarray(times[worker], np.float64) for worker in sorted(times)]
    means = [float(own.mean()) for own in of_workers]

    def draw(random: np.random.Generator, count: int, worker: int) -> Times:
        own = of_workers[worker % len(of_workers)]
        return own[random.integers(len(own), size=count)]

    return Latency(
        text=f"{sum(map(len, of_workers))} measured times of {len(of_workers)} workers",
        draw=draw,
        mean_s=lambda worker: means[worker % len(means)],
        num_workers=len(of_workers),
    )


def latency_of(text: str) -> Latency:
    """Returns the distribution that words like "lognormal:1.9,0.1" name. Raises InvalidSpec."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise InvalidSpec(f"latency {text[:40]!r}: want {' or '.join(usage for usage, _, _ in _KINDS.values())}")
    usage, num_numbers, make = _KINDS[kind]
    return make(*numbers_of(rest, count=num_numbers, what=f"latency {text[:40]!r}", usage=usage))


def numbers_of(text: str, *, count: int, what: str, usage: str) -> list[float]:
    """Returns the numbers of words like "1.9,0.1". Raises InvalidSpec unless there are `count`, all finite."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise InvalidSpec(f"{what}: want {usage}")
    return numbers


_KINDS: dict[str, tuple[str, int, Callable[..., Latency]]] = {
    "constant": ("constant:SECONDS", 1, constant),
    "lognormal": ("lognormal:MEDIAN,SIGMA", 2, lognormal),
    "exponential": ("exponential:LEAST,MEAN_OF_THE_REST", 2, shifted_exponential),
}


def _check(**times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidSpec(f"{name.removesuffix('_s')} of the computing times: got {value:g}, want more than 0 seconds")
