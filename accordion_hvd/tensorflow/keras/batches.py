"""Batches that grow, for `fit`."""

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
    """A rank's examples, in batches as large as `Accordion(batch_size=...)` says, for `fit`.

    ```python
    model.fit(AccordionDataset((x, y), optimizer), callbacks=[...])
    ```
    Each batch is a step then, and nothing is accumulated. Sizes change between epochs only: when
    one begins, the decision that is due is taken. The optimizer's `iterations` go on to count small
    batches, so that schedules keep their pace. `fit` shuffles batches unless told not to.

    Args:
        arrays: this rank's inputs and targets (and sample weights), equally many on all ranks.
        optimizer: what `DistributedOptimizer` returned.
        shuffle: whether examples have another order in each epoch.
        seed: of these orders, which differ between ranks.
        drop_last: leave out what does not fill a batch; else the last batch of an epoch is smaller
            and counts like the others.

    Raises:
        ValueError: the optimizer's policy has no say in batch sizes, or arrays differ in length.
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
        """Examples of this rank in a batch, now."""
        ranks = self.optimizer.process_set.size()
        return self._growth.share(ranks) * self._growth.micro_batches

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, at the present size."""
        count, size = len(self._order), self.batch_size
        return count // size if self.drop_last else -(-count // size)

    def __len__(self) -> int:
        """Batches in an epoch, at the present size."""
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Return a batch."""
        size = self.batch_size
        chosen = self._order[index * size : (index + 1) * size]
        return tuple(array[chosen] for array in self.arrays)

    def on_epoch_begin(self) -> None:
        """Take the decision that is due; shuffle."""
        self.optimizer.resize()
        _tell_keras(self.num_batches)
        if self.shuffle:
            rng = np.random.default_rng([self.seed, hvd.rank(), self._epoch])
            self._order = rng.permutation(len(self._order))
        self._epoch += 1


def _tell_keras(count: int) -> None:
    """Let the `fit` that calls know how many batches this epoch has.

    It asks when it begins and never again; an epoch with fewer of them would end by running out,
    in the middle of a step.
    """
    frame: Any = sys._getframe(2)
    for _ in range(4):
        owner = frame.f_locals.get("self")
        if hasattr(owner, "_num_batches") and hasattr(owner, "data_adapter"):
            owner._num_batches = count
            return
        frame = frame.f_back
        if frame is None:
            return
