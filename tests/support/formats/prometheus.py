"""Prometheus' text format 0.0.4, read strictly: text that a scraper would refuse raises AssertionError. Knows no role."""

import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL},?)*)\}})? (\S+)")

Series = dict[tuple[tuple[str, str], ...], float]


@dataclass(slots=True)
class Read:
    """One family: its kind and its samples, by the full name and the labels, sorted."""

    kind: str
    words: str
    samples: dict[str, Series] = field(default_factory=dict)


def parsed(text: str) -> dict[str, Read]:
    """Returns the families by name."""
    families: dict[str, Read] = {}
    assert text.endswith("\n"), "the last line must end"
    name = words = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert re.fullmatch(_NAME, name) and words and name not in families, f"{name}: its lines must stand together, once"
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert typed == name and kind in ("counter", "gauge", "summary"), line
            assert (kind == "counter") == name.endswith("_total"), f"{name}: counters, and only they, end in _total"
            # promtool refuses these.
            assert kind == "summary" or not name.endswith(("_sum", "_count", "_bucket")), f"{name}: only parts of a summary are named so"
            families[name] = Read(kind, words)
        else:
            _add(families[name], name, line)
    return families


def value(families: dict[str, Read], name: str, **labels: str) -> float:
    """Returns one sample of a family."""
    return families[name].samples[name][tuple(sorted(labels.items()))]


def _add(family: Read, name: str, line: str) -> None:
    match = _SAMPLE.fullmatch(line)
    assert match, line
    sample, labels, number = match[1], match[2] or "", match[5]
    suffixes = ("_count", "_sum") if family.kind == "summary" else ("",)
    assert sample in [f"{name}{suffix}" for suffix in suffixes], f"{sample} is not of {name}"
    found = tuple(sorted((one[1], one[2]) for one in re.finditer(_LABEL, labels)))
    assert len({key for key, _ in found}) == len(found), f"a label twice: {line}"
    series = family.samples.setdefault(sample, {})
    assert found not in series, f"the same series twice: {line}"
    series[found] = float(number)
    assert family.kind != "counter" or series[found] >= 0, line
