"""A dataset whose batches grow with `Accordion(batch_size=...)`, for `fit`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.tensorflow.keras.optimizer import is_distributed


class AccordionDataset(keras.utils.PyDataset):
    """Dataset of a rank's examples with the batch sizes that `Accordion(batch_size=...)` chooses.

    ```python
    model.fit(AccordionDataset((x, y), optimizer), callbacks=[...])
    ```
    With this dataset, each batch is one step and no gradients are accumulated. The batch size
    changes only between epochs: at the beginning of an epoch, the policy takes a decision that is
    due. The optimizer's `iterations` still count small batches, so that learning rate schedules do
    not change. `fit` also shuffles the order of the batches by default.

    Args:
        arrays: this rank's inputs and targets, and optionally sample weights; the same number of
            examples on all ranks.
        optimizer: the result of `DistributedOptimizer`.
        shuffle: whether to shuffle the examples at the beginning of each epoch.
        seed: seed of the shuffling; ranks shuffle differently.
        drop_last: whether to drop the last, incomplete batch of an epoch. If False, the last batch
            is smaller and counts like the others.

    Raises:
        ValueError: if the optimizer's policy does not choose batch sizes, or the arrays have
            different lengths.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        optimizer: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        growth: Any = optimizer.growth if is_distributed(optimizer) else None
        if growth is None:
            allowed = "a DistributedOptimizer with compression=Accordion(batch_size=(small, large))"
            check.refuse(self, "optimizer", type(optimizer).__name__, allowed)
        self.arrays, self.optimizer = tuple(np.asarray(array) for array in arrays), optimizer
        lengths = [len(array) for array in self.arrays]
        if len(set(lengths)) != 1:
            check.refuse(self, "number of examples", lengths, "the same in all arrays")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._growth = growth
        self._growth.loader = True
        self._epoch = 0
        self._order = np.arange(lengths[0])

    @property
    def batch_size(self) -> int:
        """Return the present number of examples per batch on this rank."""
        ranks = self.optimizer.process_set.size()
        return self._growth.share(ranks) * self._growth.micro_batches

    @property
    def num_batches(self) -> int:
        """Return the number of batches per epoch at the present batch size."""
        count, size = len(self._order), self.batch_size
        return count // size if self.drop_last else -(-count // size)

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        size = self.batch_size
        chosen = self._order[index * size : (index + 1) * size]
        return tuple(array[chosen] for array in self.arrays)

    def on_epoch_begin(self) -> None:
        """Take a decision that is due, and shuffle the examples."""
        self.optimizer.resize()
        _update_fit(self.num_batches)
        if self.shuffle:
            rng = np.random.default_rng([self.seed, hvd.rank(), self._epoch])
            self._order = rng.permutation(len(self._order))
        self._epoch += 1


def _update_fit(count: int) -> None:
    # `fit` reads the number once, when it begins. A later epoch with fewer batches would end in
    # the middle of a step, because the dataset is exhausted.
    frame: Any = sys._getframe(2)
    for _ in range(4):
        owner = frame.f_locals.get("self")
        if hasattr(owner, "_num_batches") and hasattr(owner, "data_adapter"):
            owner._num_batches = count
            return
        frame = frame.f_back
        if frame is None:
            return
