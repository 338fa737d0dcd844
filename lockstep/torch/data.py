"""Distributes a data set over the workers: each gets ranges of samples that the chief leases. Knows data sets; no model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from worker_client import Session


def batches(
    session: Session,
    dataset: Any,
    batch_size: int,
    *,
    num_epochs: int = 1,
    shuffle_seed: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    name: str = "train",
    timeout_s: float | None = None,
) -> Iterator[Any]:
    """Yields batches of a map-style data set: all workers together get each sample of each pass once, even if some are lost.

    Samples that a worker got and that no applied contribution was made from are yielded again. `shuffle_seed`: gives each pass another
    order of the samples; must be the same on all workers. `num_epochs` 0: without end. `collate_fn`: as for a DataLoader. Ends when all
    passes are done, or with training.
    """
    collate = collate_fn or default_collate
    for indices in _ranges(session, dataset, batch_size, num_epochs, shuffle_seed, name, timeout_s):
        fetch = getattr(dataset, "__getitems__", None)
        yield collate(fetch(indices) if fetch is not None else [dataset[index] for index in indices])


class Sampler(torch.utils.data.Sampler):  # type: ignore[misc]  # PyTorch may not be installed where types are checked
    """A batch sampler over a data set: `DataLoader(dataset, batch_sampler=Sampler(optimizer, dataset, 32))`.

    The indices of a batch count as done with the next step, so a loader must not fetch ahead: num_workers=0. `batches_per_step`: the number
    of batches in one step, if gradients are accumulated. The other options are those of `Optimizer.batches`.
    """

    def __init__(
        self,
        optimizer: Any,
        dataset: Any,
        batch_size: int,
        *,
        num_epochs: int = 1,
        shuffle_seed: int | None = None,
        batches_per_step: int = 1,
        name: str = "train",
        timeout_s: float | None = None,
    ) -> None:
        self._optimizer, self._batches_per_step = optimizer, batches_per_step
        self._arguments = (dataset, batch_size, num_epochs, shuffle_seed, name, timeout_s)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the indices of each batch; at the end, the parameters get the values of the last step.

        Raises RuntimeError if a loader requests them ahead of the steps.
        """
        optimizer, num_since, at = self._optimizer, 0, self._optimizer.num_steps
        for indices in _ranges(optimizer.session, *self._arguments):
            if optimizer.num_steps != at:
                num_since, at = 0, optimizer.num_steps
            num_since += 1
            if num_since > self._batches_per_step:
                raise RuntimeError(
                    f"{num_since} batches were requested, and no step was made: this loader fetches ahead, so samples would count with"
                    " a step that they were not used for. Use num_workers=0, optimizer.batches(…), or batches_per_step= where gradients"
                    " accumulate"
                )
            yield indices
        optimizer.refresh()

    def __len__(self) -> int:
        """The approximate number of batches that this worker gets in all passes."""
        dataset, batch_size, num_epochs = self._arguments[:3]
        num_batches: int = -(-len(dataset) * max(1, num_epochs) // (batch_size * max(1, self._optimizer.num_workers)))
        return num_batches


def _ranges(
    session: Session, dataset: Any, batch_size: int, num_epochs: int, shuffle_seed: int | None, name: str, timeout_s: float | None
) -> Iterator[list[int]]:
    try:
        num_samples = len(dataset)
    except TypeError:
        raise TypeError(f"a {type(dataset).__name__} has no length: ranges of samples need a map-style data set") from None
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"a {type(dataset).__name__} has no samples by index: give the data set itself, such as loader.dataset")
    if not (shuffle_seed is None or (isinstance(shuffle_seed, int) and abs(shuffle_seed) < 1 << 32)):
        raise TypeError(f"shuffle_seed = {shuffle_seed!r}, want None, or a whole number of up to 32 bits that is the same on all workers")
    order: list[int] = []
    epoch = -1
    leased = session.batches(name, num_samples=num_samples, batch_size=batch_size, num_epochs=num_epochs, timeout_s=timeout_s)
    for one in leased:
        if shuffle_seed is None:
            yield list(range(one.start, one.stop))
            continue
        if one.epoch != epoch:
            epoch = one.epoch
            generator = torch.Generator().manual_seed(shuffle_seed * 1_000_003 + epoch)
            order = torch.randperm(num_samples, generator=generator).tolist()
        yield order[one.start : one.stop]
