"""Lightning, accelerate and the Trainer of Hugging Face run their own loops over Lockstep's optimizer: two workers of a tiny model."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")

from tests.support.processes.commands import up

BEGIN = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, lockstep, lockstep.torch as lt
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
X = torch.randn(64, 4, generator=generator)
Y = X.sum(dim=1, keepdim=True)
"""
END = """
values = torch.cat([one.detach().flatten() for one in model.parameters()])
if optimizer.worker_index == 0:
    torch.save((values, optimizer.global_step), sys.argv[1])
"""
LIGHTNING = (
    BEGIN
    + """
import pytorch_lightning as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        global optimizer
        optimizer = lt.Optimizer(None, self, torch.optim.SGD(self.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

model = Module()
index = int(os.environ["LOCKSTEP_WORKER_INDEX"])
data = torch.utils.data.TensorDataset(X[index::2], Y[index::2])
loader = torch.utils.data.DataLoader(data, batch_size=8)
trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False, use_distributed_sampler=False, gradient_clip_val=1.0)
trainer.fit(model, loader)
"""
    + END
)
ACCELERATE = (
    BEGIN
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Linear(4, 1)
optimizer = inner = lt.Optimizer(None, model, torch.optim.SGD(model.parameters(), lr=0.1))
index = optimizer.worker_index
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[index::2], Y[index::2]), batch_size=4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
model, prepared, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
optimizer = inner
"""
    + END
)
# A model that the Trainer of transformers takes.
NET = """
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.layer(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}
"""
TRAINER = (
    BEGIN
    + NET
    + """
model = Net()
optimizer = lt.Optimizer(None, model, torch.optim.SGD(model.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
index = optimizer.worker_index
samples = [{"x": x, "labels": y} for x, y in zip(X[index::2], Y[index::2])]
arguments = TrainingArguments(output_dir=sys.argv[1] + f".out{index}", max_steps=12, per_device_train_batch_size=8, max_grad_norm=1.0,
                              use_cpu=True, report_to=[], save_strategy="steps", save_steps=6, disable_tqdm=True, logging_strategy="no")
Trainer(model=model, args=arguments, train_dataset=samples, optimizers=(optimizer, scheduler)).train()
"""
    + END
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("library", "program"),
    [("pytorch_lightning", LIGHTNING), ("accelerate", ACCELERATE), ("transformers", TRAINER)],
    ids=["lightning", "accelerate", "transformers"],
)
def test_a_loop_of_others_trains_on_two_workers(library: str, program: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: `make test-frameworks` has it")
    with up("--ps", "1", "--workers", "2", "--", str(tmp_path / "out"), worker=program, run_dir=tmp_path / "run") as process:
        said, _ = process.communicate(timeout=250)
    assert process.returncode == 0, said
    values, step = torch.load(tmp_path / "out", weights_only=True)
    assert step == 12, "each step is one of both workers"
    torch.manual_seed(0)
    first = torch.nn.Linear(4, 1).weight.detach().flatten()
    assert torch.linalg.norm(values[:4] - 1) < 0.97 * torch.linalg.norm(first - 1), "the loss is that of weights of 1"
