"""Horovod's own compression objects, run as conversations so that they keep their meaning."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd.base import (
    Allreduce,
    Compressor,
    Conversation,
    Info,
    NotForStockHorovod,
    Spec,
    State,
)
from accordion_hvd.compressors import Dense
from accordion_hvd.policy import Fixed, Policy, as_policy


@dataclass(frozen=True)
class Stock(Compressor):
    """An object with `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)`."""

    scope: ClassVar[str] = "each"
    compression: Any = None

    def accept(self, spec: Spec, name: str) -> None:
        """Whatever Horovod takes."""

    def exchange(self, grad: Any, state: State, info: Info) -> Conversation:
        """Compress, one allreduce, decompress."""
        small, context = self.compression.compress(grad)
        mean = yield Allreduce(small)
        return self.compression.decompress(mean, context), state

    def __repr__(self) -> str:
        """Equal on all ranks, without addresses."""
        kind = self.compression if isinstance(self.compression, type) else type(self.compression)
        return f"Stock({kind.__qualname__})"


def is_ours(compression: Any) -> bool:
    """Whether `compression` is a compressor, a policy, one's class or a word for one."""
    if isinstance(compression, str):
        return True
    if isinstance(compression, type):
        return issubclass(compression, NotForStockHorovod)
    return isinstance(compression, NotForStockHorovod)


def policy_of(compression: Any) -> Policy:
    """The policy that `DistributedOptimizer(compression=)` means.

    `hvd.Compression.none`, Horovod's default, means the word in the environment variable
    ACCORDION_HVD_COMPRESSION where there is one.
    """
    if _is_none(compression):
        word = os.environ.get("ACCORDION_HVD_COMPRESSION")
        return as_policy(word) if word else Fixed(Dense())
    if is_ours(compression):
        return as_policy(compression)
    if callable(getattr(compression, "compress", None)):
        return Fixed(Stock(compression))
    return as_policy(compression)  # says what is allowed


def default_guard(compression: Any) -> str:
    """Return what the guard does by default: "warn" with Horovod's own compression, else "error".

    Horovod compares no replicas, and scripts written for it may never broadcast their weights.
    Compressors and policies of ours need equal replicas, so training stops without them.
    """
    none = _is_none(compression)
    ours = os.environ.get("ACCORDION_HVD_COMPRESSION") if none else is_ours(compression)
    return "error" if ours else "warn"


def _is_none(compression: Any) -> bool:
    """Whether it is `hvd.Compression.none` of one of Horovod's modules."""
    module = str(getattr(compression, "__module__", ""))
    return (
        module.startswith("horovod.") and getattr(compression, "__name__", "") == "NoneCompressor"
    )
