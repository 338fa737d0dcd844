"""Findings of checks: as values, as lines for a terminal and as JSON. Checks nothing itself."""

import enum
from collections.abc import Iterator, Sequence

from ps_protocol.model.light_dataclass import light_dataclass


class Severity(enum.Enum):
    """The result of a check: OK; WARN: training works, but something deserves attention; FAIL: training will not work like this."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `advice`: what to do; empty if all is well."""

    check: str
    severity: Severity
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    """Returns the finding that all is well."""
    return Finding(check=check, severity=Severity.OK, text=text)


def warn(check: str, text: str, advice: str) -> Finding:
    """Returns a finding that deserves attention."""
    return Finding(check=check, severity=Severity.WARN, text=text, advice=advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """Returns a finding that keeps a cluster from working."""
    return Finding(check=check, severity=Severity.FAIL, text=text, advice=advice)


_COLOURS = {Severity.OK: 32, Severity.WARN: 33, Severity.FAIL: 31}


def lines(finding: Finding, *, has_colours: bool) -> Iterator[str]:
    """Yields the lines of a finding for a terminal: the finding, and below it what to do."""
    word = f"{finding.severity.value:4}"
    if has_colours:
        word = f"\x1b[{_COLOURS[finding.severity]}m{word}\x1b[0m"
    yield f"{word}  {finding.check:<16} {finding.text}"
    if finding.advice:
        yield f"{'':22} -> {finding.advice}"


def summary(findings: Sequence[Finding]) -> str:
    """Returns the last line of a report."""
    counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    return ", ".join(f"{counts[severity]} {severity.value}" for severity in Severity)


def is_fit(findings: Sequence[Finding]) -> bool:
    """Whether nothing has failed."""
    return not any(one.severity is Severity.FAIL for one in findings)
