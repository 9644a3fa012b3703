"""Stands in for `horovod.torch.elastic`."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic as _horovod
from horovod.torch.elastic import *  # noqa: F403
from horovod.torch.elastic import state as _state

from accordion_hvd.engine.gradient_averager import gradient_averagers
from accordion_hvd.torch.functions import broadcast_optimizer_state


class TorchState(_horovod.TorchState):
    """Horovod's state of a training, which also keeps what compression remembers."""

    def reset(self) -> None:
        """Connect optimizers to the ranks that there are now."""
        for averager in gradient_averagers():
            averager.ranks_changed()
        super().reset()

    def sync(self) -> None:
        """Give every rank what rank 0 has; residuals remain with the ranks that have them."""
        plain = _state.broadcast_optimizer_state  # which takes a step that changes the weights
        _state.broadcast_optimizer_state = broadcast_optimizer_state
        try:
            super().sync()
        finally:
            _state.broadcast_optimizer_state = plain
        for averager in gradient_averagers(h.value for h in self._handlers.values()):
            averager.follow_rank_zero(hvd.broadcast_object)


def __getattr__(name: str) -> Any:
    """Return other names from Horovod."""
    return getattr(_horovod, name)
