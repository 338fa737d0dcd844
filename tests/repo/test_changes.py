"""The made-up changes of the page of the design still have their places. `make check-changes` makes and tries them."""

from pathlib import Path

import pytest

from tests.repo.changes import CHANGES, Change, Edit
from tests.support.repository import ROOT


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.what)
def test_a_made_up_change_finds_its_places(change: Change) -> None:
    for edit in change.edits:
        assert not edit.before or (ROOT / edit.path).read_text().count(edit.before) == 1, edit.path


def test_a_change_whose_place_has_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\n")
    with pytest.raises(ValueError, match=r"a\.py has 0 times 'two'"):
        Edit(path="a.py", before="two", text="three\n").make(tmp_path)
