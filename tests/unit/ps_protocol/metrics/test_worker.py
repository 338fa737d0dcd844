"""What a worker exports for Prometheus: the reference names all of it."""

import re

from ps_protocol.metrics.exposition import exposition
from ps_protocol.metrics.worker import session_families
from ps_protocol.roles.chief import WorkerTraffic
from tests.support.formats.prometheus import parsed
from tests.support.repository import ROOT


def test_reference_names_what_is_exported_and_nothing_else() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(lockstep_session_[a-z_]+)`", text))
    families = session_families(WorkerTraffic(), worker=1, step=2, num_pushes=3, num_rollbacks=4)
    assert documented == {*parsed(exposition(families).decode())}
