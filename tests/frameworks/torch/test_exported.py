"""A checkpoint as a state_dict that loads without Lockstep, and a state_dict as the first values of another training."""

from pathlib import Path

import pytest

from lockstep.__main__ import main
from tests.support.processes.commands import run_up

pytestmark = pytest.mark.timeout(120)
PROGRAM = """
import sys
import numpy as np, safetensors.torch, torch
import lockstep, lockstep.torch as lt

torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2).to(torch.bfloat16))
if len(sys.argv) > 1:
    model.load_state_dict(safetensors.torch.load_file(sys.argv[1]))
with lockstep.connect() as session:
    optimizer = lt.Optimizer(session, model, torch.optim.AdamW(model.parameters(), lr=0.05))
    print("BEGAN WITH", float(model[0].weight.detach().sum()))
    while not session.is_finished:
        optimizer.zero_grad()
        hidden = model[1](model[0](torch.ones(4, 6)))
        model[2](hidden.to(torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
print("ENDED WITH", float(model[0].weight.detach().sum()))
"""


def test_an_exported_checkpoint_is_a_state_dict_and_begins_another_training(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make test-frameworks")
    from safetensors import safe_open
    from safetensors.torch import load_file

    place, exported = tmp_path / "ckpt", tmp_path / "model.safetensors"
    code, out = run_up("--max-steps", "3", "--checkpoint-dir", str(place), worker=PROGRAM, run_dir=tmp_path / "run")
    assert code == 0, out
    assert main(["checkpoint", "export", str(exported), "--checkpoint-dir", str(place)]) == 0
    with safe_open(exported, framework="pt") as file:
        assert file.metadata()["format"] == "pt"  # transformers asks for it
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2).to(torch.bfloat16))
    model.load_state_dict(load_file(exported))  # strict: no name is missing, and none is unexpected
    total = float(model[0].weight.detach().sum())
    assert f"ENDED WITH {total}" in out and int(model[1].num_batches_tracked) == 3
    code, out = run_up("--max-steps", "1", "--", str(exported), worker=PROGRAM, run_dir=tmp_path / "another")
    assert code == 0 and f"BEGAN WITH {total}" in out, out
