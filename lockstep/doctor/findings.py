"""Findings of checks: as values, as lines for a terminal and as JSON. Checks nothing itself."""

import enum
from collections.abc import Iterator, Sequence

from ps_protocol.model.light_dataclass import light_dataclass


class Verdict(enum.Enum):
    """The result of a check: OK; WARN: training works, but something deserves attention; FAIL: training will not work like this."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `advice`: what to do; empty if all is well."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    """Returns the finding that all is well."""
    return Finding(check=check, verdict=Verdict.OK, text=text)


def warn(check: str, text: str, advice: str) -> Finding:
    """Returns a finding that deserves attention."""
    return Finding(check=check, verdict=Verdict.WARN, text=text, advice=advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """Returns a finding that keeps a cluster from working."""
    return Finding(check=check, verdict=Verdict.FAIL, text=text, advice=advice)


_COLOURS = {Verdict.OK: 32, Verdict.WARN: 33, Verdict.FAIL: 31}


def lines(finding: Finding, *, has_colours: bool) -> Iterator[str]:
    """Yields the lines of a finding for a terminal: the finding, and below it what to do."""
    word = f"{finding.verdict.value:4}"
    if has_colours:
        word = f"\x1b[{_COLOURS[finding.verdict]}m{word}\x1b[0m"
    yield f"{word}  {finding.check:<16} {finding.text}"
    if finding.advice:
        yield f"{'':22} -> {finding.advice}"


def summary(findings: Sequence[Finding]) -> str:
    """Returns the last line of a report."""
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)


def is_fit(findings: Sequence[Finding]) -> bool:
    """Whether nothing has failed."""
    return not any(one.verdict is Verdict.FAIL for one in findings)
