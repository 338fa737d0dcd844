"""A worker that sums gradients by torch.distributed's all_reduce over gloo and applies SGD itself. Runs in torch's environment.

There is no server: every worker has all variables. With the argument "flat", all gradients lie in one tensor, reduced by one call, like
DistributedDataParallel's buckets; without it, each variable's gradient is reduced by a call of its own, all at once.
"""

import sys

import torch
import torch.distributed as dist

from benchmarks.peers.role import measure, read_work


def main() -> None:
    """Trains until the process is ended."""
    work, is_flat = read_work(), "flat" in sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work.directory}/rendezvous", rank=work.index, world_size=work.num_workers)
    torch.manual_seed(1)
    values = [torch.randn(work.num_elements) for _ in range(work.num_variables)]
    flat = torch.zeros(work.num_elements * work.num_variables)
    gradients = list(flat.split(work.num_elements)) if is_flat else [torch.zeros(work.num_elements) for _ in values]
    reduced = [flat] if is_flat else gradients
    rate = -0.1 / work.num_workers  # all_reduce sums

    def step() -> None:
        for value, gradient in zip(values, gradients, strict=True):
            torch.mul(value, 0.001, out=gradient)
        for under_way in [dist.all_reduce(tensor, async_op=True) for tensor in reduced]:
            under_way.wait()
        for value, gradient in zip(values, gradients, strict=True):
            value.add_(gradient, alpha=rate)

    measure(work, step)


if __name__ == "__main__":
    main()
