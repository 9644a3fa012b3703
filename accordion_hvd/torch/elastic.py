"""Drop-in replacement for `horovod.torch.elastic`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic as _horovod
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic import *  # noqa: F403
from horovod.torch.elastic import state as _state

from accordion_hvd.comm.horovod import engine
from accordion_hvd.engine.membership import FollowsRanks, replaced
from accordion_hvd.torch import engines
from accordion_hvd.torch.functions import broadcast_optimizer_state


class TorchState(FollowsRanks, _horovod.TorchState):
    """Horovod's `TorchState`, extended by the state of compression and of model averaging.

    Raises:
        RuntimeError: if torch.distributed carries the gradients.
    """

    interrupt = HostsUpdatedInterrupt

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        if engines.carrier() == "torch":
            raise RuntimeError(
                "TorchState: the engine is 'torch', but elastic jobs need engine='horovod'; unset "
                f"{engines.VARIABLE}."
            )
        super().__init__(model, optimizer, **kwargs)

    def sync(self) -> None:
        """Broadcast the leader's state to all ranks, and share the residuals; collective."""
        with replaced(
            _state,
            broadcast_parameters=self.from_leader(_state.broadcast_parameters),
            broadcast_object=self.from_leader(_state.broadcast_object),
            # Horovod's function takes an optimizer step, which changes weights under weight decay.
            broadcast_optimizer_state=self.from_leader(broadcast_optimizer_state),
        ):
            super().sync()

    def _gather(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value, name="accordion.elastic")

    def _optimizers(self) -> Iterable[Any]:
        return [handler.value for handler in self._handlers.values()]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the training function; see `horovod.torch.elastic.run`.

    After a failure, all connections of Horovod are closed, so that other ranks notice the failure.
    """
    return engine.decorated(_horovod, hvd, function)


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)
