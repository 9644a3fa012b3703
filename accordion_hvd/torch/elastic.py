"""Drop-in replacement for `horovod.torch.elastic`."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic as _horovod
from horovod.torch.elastic import *  # noqa: F403
from horovod.torch.elastic import state as _state

from accordion_hvd.engine.gradient_averager import gradient_averagers
from accordion_hvd.torch.functions import broadcast_optimizer_state


class TorchState(_horovod.TorchState):
    """Horovod's `TorchState`, extended by the state of compression: residuals, levels, policy."""

    def reset(self) -> None:
        """Connect the optimizers to the present ranks."""
        for averager in gradient_averagers():
            averager.ranks_changed()
        super().reset()

    def sync(self) -> None:
        """Broadcast the state of rank 0 to all ranks; each rank keeps its own residuals."""
        # Horovod's function takes an optimizer step, which changes weights under weight decay.
        original = _state.broadcast_optimizer_state
        _state.broadcast_optimizer_state = broadcast_optimizer_state
        try:
            super().sync()
        finally:
            _state.broadcast_optimizer_state = original
        for averager in gradient_averagers(h.value for h in self._handlers.values()):
            averager.follow_rank_zero(hvd.broadcast_object)


def __getattr__(name: str) -> Any:
    """Return any other name from `horovod.torch.elastic`."""
    return getattr(_horovod, name)
