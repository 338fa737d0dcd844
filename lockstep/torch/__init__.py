"""Lockstep for PyTorch: the parameter servers run the optimizer, and the training loop does not change.

PyTorch programs import this module.

import lockstep.torch as lt                     # pip install 'lockstep-ps[torch]'

optimizer = lt.Optimizer(lockstep.connect(), model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for x, y in optimizer.batches(dataset, batch_size=32):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()                            # averaged over the workers; the parameters are those of the next step

`optimizer` has that class, `model` makes variables of a module's parameters, `recognition` turns a torch optimizer into one for the
servers, `tensors` copies between tensors and arrays, `embedding` has modules whose weights are tables on the servers, `data` distributes a
data set over the workers, `diloco` has workers step by themselves in between, `saving` writes a state_dict, `following` keeps a module at
the newest weights of a training elsewhere.
In programs of others, `transformers` publishes a Trainer's weights, and `torchrl` and `vllm` follow.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("lockstep.torch needs PyTorch: pip install 'lockstep-ps[torch]'") from error

from lockstep.torch.data import Sampler
from lockstep.torch.diloco import DiLoCo
from lockstep.torch.embedding import Embedding, EmbeddingBag
from lockstep.torch.following import ModuleFollower, follow
from lockstep.torch.optimizer import Optimizer
from lockstep.torch.saving import save_model

__all__ = ["DiLoCo", "Embedding", "EmbeddingBag", "ModuleFollower", "Optimizer", "Sampler", "follow", "save_model"]
