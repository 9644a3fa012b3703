"""Batches that grow, for loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from accordion_hvd import check


class AccordionBatchSampler:
    """Batches for a `DataLoader(batch_sampler=...)`, as large as `Accordion(batch_size=...)` says.

    ```python
    sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
    batches = hvd.AccordionBatchSampler(sampler, optimizer)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    ```
    Each batch is a step then, and nothing is accumulated. Sizes change between epochs only: when
    an epoch begins, the decision that is due is taken (so that `end_window()` and schedules should
    have been called before) and its batches are of the size that is in force.

    Args:
        sampler: gives this rank's indices, equally many on all ranks.
        optimizer: what `DistributedOptimizer` returned.
        drop_last: leave out what does not fill a batch; else the last batch of an epoch is smaller
            and counts like the others.

    Raises:
        ValueError: the optimizer's policy has no say in batch sizes.
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
        """Examples of this rank in a batch, now."""
        ranks = self.optimizer.process_set.size()
        return self._growth.share(ranks) * self._growth.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Take the decision that is due; then this epoch's batches."""
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
        """Batches in an epoch, at the present size."""
        count, size = len(self.sampler), self.batch_size  # type: ignore[arg-type]
        return count // size if self.drop_last else -(-count // size)
