"""The documented command of Open MPI, as it is printed, and with a mistake."""

from pathlib import Path

import pytest

from tests.engines.mpi import Mpi
from tests.support.processes.commands import TRAIN
from tests.support.repository import printed

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("engine", ["mpi"], indirect=True)]


def documented() -> str:
    (line,) = [line for line in printed("mpirun").splitlines() if "mpirun" in line]
    return line


def test_the_documented_command_trains_with_eight_ranks_on_two_hosts(engine: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    code = engine.run_printed(documented().replace("--ps 2", "--ps 2 --max-steps 20"), out=tmp_path / "out")
    said = (tmp_path / "out").read_text()
    assert code == 0 and said.count("value -10.0") == 8 and "[lockstep] training finished" in said and "Traceback" not in said, said


def test_a_wrong_flag_is_named_in_a_sentence_and_ends_the_run(engine: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    code = engine.run_printed(documented().replace("--ps 2", "--psx 2"), out=tmp_path / "out")
    said = (tmp_path / "out").read_text()
    assert code and "lockstep up: no such argument: --psx; did you mean '--ps'?" in said and "Traceback" not in said, said
