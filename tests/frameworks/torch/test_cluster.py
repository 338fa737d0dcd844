"""A PyTorch model on a cluster of real processes computes what one process computes, also when processes are killed."""

import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")

from tests.support.processes.commands import read_until, up
from tests.support.sessions.trained_by_three import IN_THE_MIDDLE, alone, together

# What the program is on one process, and on three workers with a third of each batch.
MODEL = """
import sys
import numpy as np, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(1)
NUM_STEPS, BATCH, ROWS = 20, 48, 30

class Net(nn.Module):
    def __init__(self, bag):
        super().__init__()
        self.bag, self.hidden, self.out = bag, nn.Linear(12, 16), nn.Linear(16, 1)

    def forward(self, ids, x):
        return self.out(torch.tanh(self.hidden(torch.cat([self.bag(ids), x], dim=1))))

rows = torch.randn(ROWS, 4)

def made(model):
    decayed = [one for name, one in model.named_parameters() if name.endswith("weight") and "bag" not in name]
    others = [one for name, one in model.named_parameters() if name.endswith("bias")]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=0.01)

def scheduled(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)

def batch(step):
    random = np.random.default_rng(step)
    x = torch.from_numpy(random.normal(size=(BATCH, 8)).astype(np.float32))
    ids = torch.from_numpy(random.integers(0, ROWS, size=(BATCH, 3)))
    return ids, x, torch.sin(x.sum(dim=1, keepdim=True) + ids.sum(dim=1, keepdim=True))
"""
ALONE = (
    MODEL
    + """
model = Net(nn.EmbeddingBag(ROWS, 4, mode="sum", _weight=rows.clone()))
optimizer, table = made(model), torch.optim.SGD(model.bag.parameters(), lr=0.1)
scheduler = scheduled(optimizer)
for step in range(NUM_STEPS):
    ids, x, y = batch(step)
    optimizer.zero_grad(), table.zero_grad()
    nn.functional.mse_loss(model(ids, x), y).backward()
    optimizer.step(), table.step(), scheduler.step()
torch.save(model.state_dict(), sys.argv[1])
"""
)
TOGETHER = (
    MODEL
    + IN_THE_MIDDLE
    + """
import lockstep, lockstep.torch as lt
model = Net(lt.EmbeddingBag(ROWS, 4, mode="sum", _weight=rows.clone(), optimizer=lockstep.sgd(0.1)))
optimizer = lt.Optimizer(None, model, made(model))
scheduler = scheduled(optimizer)
optimizer.follow(scheduler)
while not optimizer.is_finished:
    part = slice(optimizer.worker_index, None, 3)
    ids, x, y = (one[part] for one in batch(optimizer.global_step))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(ids, x), y).backward()
    if optimizer.global_step == 8 and optimizer.worker_index == 0:
        in_the_middle()
    optimizer.step()
    optimizer.follow(scheduler)
if optimizer.worker_index == 0:
    lt.save_model(optimizer, model, sys.argv[1])
"""
)


RECOVERY = ("--checkpoint-steps", "5")


@pytest.mark.timeout(300)
def test_three_workers_with_a_third_of_each_batch_train_what_one_process_does(tmp_path: Path) -> None:
    of_one, found = _load(alone(ALONE, tmp_path)), _load(together(TOGETHER, tmp_path))
    assert found.keys() == of_one.keys()
    for name, value in of_one.items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _load(together(TOGETHER, tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.chaos
@pytest.mark.timeout(700)
@pytest.mark.parametrize("victim", ["worker", "ps_server", "chief"])
def test_a_killed_process_leaves_the_bits_as_they_are(victim: str, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    killed = _load(together(TOGETHER, tmp_path, victim=victim, recovery=RECOVERY))
    assert undisturbed.keys() == killed.keys()
    for name, value in undisturbed.items():
        assert value.numpy().tobytes() == killed[name].numpy().tobytes(), name


def _load(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(path, weights_only=True)
    return values


BATCHES = """
import sys, torch, lockstep.torch as lt
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1)
optimizer = lt.Optimizer(None, model, torch.optim.SGD(model.parameters(), lr=0.0))
data = torch.utils.data.TensorDataset(torch.arange(101.0)[:, None])
seen = []
for (x,) in optimizer.batches(data, 4, num_epochs=2, shuffle_seed=3):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.report(samples=float(len(x)))
    optimizer.step()
    if optimizer.last_push.is_accepted:  # what was dropped is given out again
        seen += x.flatten().tolist()
with open(sys.argv[1] + str(optimizer.worker_index), "w") as file:
    file.write(" ".join(str(int(one)) for one in seen))
"""


@pytest.mark.timeout(200)
def test_workers_go_through_each_sample_once_a_pass_and_end_by_themselves(tmp_path: Path) -> None:
    with up("--ps", "1", "--workers", "2", "--", str(tmp_path / "seen"), worker=BATCHES, run_dir=tmp_path / "run") as process:
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    seen = [[int(one) for one in (tmp_path / f"seen{index}").read_text().split()] for index in range(2)]
    assert all(seen), "both had some"
    assert sorted(seen[0] + seen[1]) == sorted([*range(101)] * 2)
    assert seen[0] != sorted(seen[0]), "shuffled"


WITHOUT_BLOCK = """
import torch, lockstep.torch as lt
model = torch.nn.Linear(2, 1)
optimizer = lt.Optimizer(None, model, torch.optim.SGD(model.parameters(), lr=0.1))
while not optimizer.is_finished:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print("step", optimizer.global_step, flush=True)
print("after the loop")
"""
AND_SAY_THE_CODE = "import subprocess, sys\nprint('code', subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode, flush=True)"


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_program_without_a_block_exits_with_an_error_only_if_its_training_was_interrupted(tmp_path: Path, is_interrupted: bool) -> None:
    flags = ["--workers", "1", *([] if is_interrupted else ["--max-steps", "5"])]
    with up(*flags, "--", WITHOUT_BLOCK, worker=AND_SAY_THE_CODE, run_dir=tmp_path / "run") as process:
        read_until(process, "step 3")
        if is_interrupted:
            process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert "[worker 0] after the loop" in out
    assert f"[worker 0] code {int(is_interrupted)}" in out, out
    assert ("TrainingInterrupted: training was interrupted at step" in out) is is_interrupted, out
