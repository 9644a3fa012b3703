"""What a compressor would send for a tensor, before it has sent anything.

Its conversation is held in NumPy, with normally distributed values, among ranks that all answer
what this one says; the packing counts the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.collectives import Group
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.core.base import Compressor, Info, Tensor
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops.random import normal
from accordion_hvd.ops.spec import Spec

LONGEST, SAMPLE = 10_000, 4096
"""Steps after which a method has no period; elements of a model that stands for all."""


class Echo(Communicator):
    """One of `size` ranks that are all alike; counts what it sends."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.xp = 0, size, xp
        self.traffic = Traffic()

    def launch(self, name: str, requests: Sequence[Any]) -> Any:
        """Count these."""
        pending = super().launch(name, requests)
        self.traffic.add(pending.traffic)
        return pending

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        """All have the same."""
        return [x * self.ranks(group) if op == "sum" else x for x in tensors]

    def allgather(self, name: str, tensor: Tensor, group: Group) -> Any:
        """All have the same."""
        return xp.concat([tensor] * self.ranks(group))

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        """All have the same."""
        return tensor

    def alltoall(
        self, name: str, tensor: Tensor, group: Group, splits: Sequence[int] | None = None
    ) -> Any:
        """What goes comes."""
        return tensor if splits is None else (tensor, list(splits))

    def poll(self, handle: Any) -> bool:
        """At once."""
        return True

    def wait(self, handle: Any) -> Any:
        """It is the result."""
        return handle


def bytes_sent(compressor: Compressor, shape: tuple[int, ...], dtype: str, ranks: int) -> float:
    """Bytes that a rank sends for a tensor in a step, once the compressor has settled.

    What depends on the values is that of normally distributed ones, and no two ranks are taken to
    share a machine.
    """
    if ranks == 1:
        return 0.0
    dtype = "float16" if dtype == "bfloat16" else dtype  # NumPy has none
    phase = compressor.variant(compressor.settling) if compressor.phases else 0
    info = Info(step=compressor.settling, size=ranks, name="price", phase=phase)
    echo, spec = Echo(ranks), Spec(shape, dtype, xp)
    grad = xp.cast(xp.asarray(normal(shape, "price")), dtype)
    with np.errstate(all="ignore"):
        echo.run("price", compressor.exchange(grad, compressor.init(spec, info), info))
    return echo.traffic.sent


def averaging_share(method: Averaging, ranks: int) -> float:
    """Bytes that a rank sends in a step for each byte of a model, on average over a period."""
    if ranks == 1:
        return 0.0
    period = next((step + 1 for step in range(LONGEST) if method.equal(step)), 1)
    echo, info = Echo(ranks), Info(size=ranks, name="price")
    model = xp.asarray(normal((SAMPLE,), "price"))
    state = method.start(model, info)
    for step in range(period):
        told = Info(step=step, size=ranks, name="price")
        model, state = echo.run("price", method.exchange(model, state, told))
    return echo.traffic.sent / period / (4 * SAMPLE)
