"""The description of an engine of PyTorch's tensors; `torch.engines` has the table of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accordion_hvd.comm.communicator import Communicator


@dataclass(frozen=True)
class Engine:
    """An engine: it connects ranks, carries their tensors, or both.

    Attributes:
        name: name in `init(engine=...)` and ACCORDION_HVD_ENGINE.
        launched: whether the launcher of this process, or the script, connects ranks with it.
        installed: whether it can serve a process that no launcher has started.
        interface: returns the module with the interface of `horovod.torch`.
        init: connects the ranks; takes the arguments of `horovod.torch.init`.
        connect: returns a communicator of the ranks of a process set.
        process_set_of: returns the process set of ranks; the global one for None or if there is
            none.
        join: connects the ranks that another engine, of the given interface, has connected, to
            carry their tensors; None if the engine cannot do so.
    """

    name: str
    launched: Callable[[], bool]
    installed: Callable[[], bool]
    interface: Callable[[], Any]
    init: Callable[..., Any]
    connect: Callable[[Any], Communicator]
    process_set_of: Callable[[list[int] | None], Any]
    join: Callable[[Any], None] | None = None
