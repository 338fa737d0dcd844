"""The directory of checkpoints belongs to one cluster of this machine at a time."""

from pathlib import Path

import pytest

from lockstep.launcher.cluster import kept_directories
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import LaunchFailed
from tests.support.processes.commands import lockstep


def test_two_clusters_at_a_time_cannot_have_the_same_checkpoints(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with kept_directories(ClusterSpec(checkpoint_dir=str(place), history=tmp_path / "history")):
        assert place.is_dir() and (tmp_path / "history").is_dir()
        result = lockstep("up", "--run-dir", str(tmp_path / "run"), "--checkpoint-dir", str(place), "--", "true")
        assert (result.returncode, result.stdout) == (2, "")
        assert f"--checkpoint-dir: another cluster on this machine is using {place}" in result.stderr
        with kept_directories(ClusterSpec(checkpoint_dir=str(tmp_path / "other"))):
            pass
    with kept_directories(ClusterSpec(checkpoint_dir=str(place))):
        pass


@pytest.mark.parametrize("name", ["~/my runs", "{home}/my runs", "file://{home}/my%20runs", "file://localhost{home}/my%20runs"])
def test_one_directory_is_the_same_by_each_of_its_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    kept = kept_directories(ClusterSpec(checkpoint_dir=name.format(home=home)))
    with kept_directories(ClusterSpec(checkpoint_dir="~/my runs")), pytest.raises(LaunchFailed, match="another cluster"), kept:
        pass
    assert (home / "my runs").is_dir() and not any(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["", "s3://bucket/run", "memory://run", "file://host/run"])
def test_a_checkpoint_directory_on_another_machine_is_not_created_here(name: str) -> None:
    assert ClusterSpec(checkpoint_dir=name).directory is None


def test_a_checkpoint_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = kept_directories(ClusterSpec(checkpoint_dir=str(tmp_path / "file")))
    with pytest.raises(LaunchFailed, match="choose another --checkpoint-dir"), kept:
        pass
