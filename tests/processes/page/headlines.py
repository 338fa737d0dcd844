"""Every amber and red headline as a reader of the page sees it, in the words of the situations that unit tests bring about.

`python -m tests.processes.page.headlines DIR` takes pictures of them to look at: light, dark, and as wide as a phone.
"""

import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chief.core.conditions import ROWS
from ps_protocol.roles.chief import Condition, Level
from tests.processes.page.showing import page_of
from tests.support.chief.chief_driver import Driver
from tests.support.processes.browser import MISSING, PROGRAM, Browser, opened
from tests.unit.chief.core import test_conditions as situations

# By name: how wide, and whether dark.
SIGHTS = {"light": (1200, False), "dark": (1200, True), "phone": (390, False)}


def headlines() -> dict[str, tuple[Condition, ...]]:
    """Returns what is said of a cluster that has each amber or red condition, that one first, by its name."""
    found: dict[str, tuple[Condition, ...]] = {}
    said = situations.said

    def noted(driver: Driver) -> tuple[Condition, ...]:
        conditions = said(driver)
        for one in conditions:
            if one.level is not Level.GREEN and (one.name not in found or conditions[0] is one):
                found[one.name] = (one, *(other for other in conditions if other is not one))
        return conditions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(situations, "said", noted)
        for name, test in [*vars(situations).items()]:
            if name.startswith("test_") and not inspect.signature(test).parameters:
                test()
    return {row.name: found[row.name] for row in ROWS if row.level is not Level.GREEN}


def shown(tab: Browser, every: dict[str, tuple[Condition, ...]]) -> Iterator[str]:
    """Has a page show them one after the other, and yields the name of each while it is shown."""
    with page_of(*next(iter(every.values()))) as url:
        tab.open(url)
        tab.await_text("live", selector="#link")
        # What the page would be told next is what it was told first.
        tab.evaluate("window.fetch = () => new Promise(() => {}); 0")
        for name, conditions in every.items():
            told = [
                {"name": one.name, "level": one.level.name.lower(), "line": one.line, "advice": one.advice, "commands": [*one.commands]}
                for one in conditions
            ]
            tab.evaluate(f"showConditions({json.dumps(told)})")
            yield name


def kept(tab: Browser, names: Iterator[str]) -> Iterator[str]:
    """Yields the names of what is shown one after the other, and keeps a copy of each to be shown together."""
    for name in names:
        tab.evaluate("(window.kept = window.kept || []).push(document.getElementById('now').cloneNode(true))")
        yield name


def show_together(tab: Browser) -> None:
    """Shows on one page all that was kept."""
    tab.evaluate("kept.forEach(one => one.querySelector('#figures').remove()); document.querySelector('main').replaceChildren(...kept)")


def main(directory: Path) -> int:
    """Takes a picture of all of them for each sight, and returns 0; 1 if there is no browser."""
    if PROGRAM is None:
        print(MISSING, file=sys.stderr)
        return 1
    every = headlines()
    with tempfile.TemporaryDirectory() as scratch, opened(Path(scratch)) as browser:
        for sight, (width, is_dark) in SIGHTS.items():
            with browser.tab() as tab:
                tab.resize(width, 900, is_dark=is_dark)
                for _ in kept(tab, shown(tab, every)):
                    pass
                show_together(tab)
                tab.resize(width, tab.evaluate("document.documentElement.scrollHeight"), is_dark=is_dark)
                tab.screenshot(directory / f"headlines-{sight}.png")
            print(directory / f"headlines-{sight}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
