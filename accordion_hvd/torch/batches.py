"""A batch sampler whose batches grow with `Accordion(batch_size=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from accordion_hvd import check


class AccordionBatchSampler:
    """Batch sampler for `DataLoader` with the batch sizes that `Accordion(batch_size=...)` chooses.

    ```python
    sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
    batches = hvd.AccordionBatchSampler(sampler, optimizer)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    ```
    With this sampler, each batch is one step and no gradients are accumulated. The batch size
    changes only between epochs: at the beginning of an epoch, the policy takes a decision that is
    due, and all batches of the epoch have the resulting size. Call `end_window()` and learning rate
    schedulers before the next epoch begins.

    Args:
        sampler: iterable of this rank's indices; the same number on all ranks.
        optimizer: the result of `DistributedOptimizer`.
        drop_last: whether to drop the last, incomplete batch of an epoch. If False, the last batch
            is smaller and counts like the others.

    Raises:
        ValueError: if the optimizer's policy does not choose batch sizes.
    """

    def __init__(self, sampler: Iterable[int], optimizer: Any, drop_last: bool = False) -> None:
        growth: Any = getattr(optimizer, "growth", None)
        if growth is None:
            allowed = "a DistributedOptimizer with compression=Accordion(batch_size=(small, large))"
            check.refuse(self, "optimizer", type(optimizer).__name__, allowed)
        self.sampler, self.optimizer, self.drop_last = sampler, optimizer, drop_last
        self._growth = growth
        self._growth.loader = True

    @property
    def batch_size(self) -> int:
        """Return the present number of examples per batch on this rank."""
        ranks = self.optimizer.process_set.size()
        return self._growth.share(ranks) * self._growth.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Take a decision that is due, and iterate over the batches of one epoch."""
        self.optimizer.resize()
        size, batch = self.batch_size, []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def __len__(self) -> int:
        """Return the number of batches per epoch at the present batch size."""
        count, size = len(self.sampler), self.batch_size  # type: ignore[arg-type]
        return count // size if self.drop_last else -(-count // size)
