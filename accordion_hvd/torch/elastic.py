"""Stands in for `horovod.torch.elastic`."""

from __future__ import annotations

from typing import Any

import horovod.torch.elastic as _horovod
from horovod.torch.elastic import *  # noqa: F403
from horovod.torch.elastic import state as _state

from accordion_hvd import checkpoint
from accordion_hvd.torch.functions import broadcast_optimizer_state


class TorchState(_horovod.TorchState):
    """Horovod's, except that synchronising an optimizer leaves the weights alone."""

    def sync(self) -> None:
        """Give every rank what rank 0 has; ranks that have just come know of no plan."""
        for owner in checkpoint.owners():
            if getattr(owner, "_exchange", None) is not None:
                owner._exchange.forget_plan()
        plain = _state.broadcast_optimizer_state
        _state.broadcast_optimizer_state = broadcast_optimizer_state
        try:
            super().sync()
        finally:
            _state.broadcast_optimizer_state = plain


def __getattr__(name: str) -> Any:
    """Whatever else Horovod has."""
    return getattr(_horovod, name)
