"""The collectives of an engine, which work on tensors of one framework."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from accordion_hvd.core.base import Hosts, Tensor

Group = tuple[int, ...] | None


class Collectives(abc.ABC):
    """Interface of an engine for one of `size` processes; `rank` is its number.

    Attributes:
        xp: the operations of the framework whose tensors it carries.
        native_fp16_allreduce: whether the engine should add fp16, as NCCL does well; None while
            nobody has asked (`fp16_reduction.choose_reduction`), and it does not.
        hosts: who shares a host; () as long as nobody has asked (`hosts.discover_hosts`).
        extensible: whether `register` can add groups that the engine does not know.
        scratch: memory that serves again at the next step, by name; None where nothing can be kept.
    """

    rank: int
    size: int
    xp: ModuleType
    native_fp16_allreduce: bool | None = None
    hosts: Hosts = ()
    extensible: bool = True
    scratch: dict[str, Tensor] | None = None

    # ------------------------------------------------- the engine: return a handle without waiting
    @abc.abstractmethod
    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        """Start one combination of several tensors, whose memory it may use."""

    @abc.abstractmethod
    def allgather(self, name: str, tensor: Tensor, group: Group) -> Any:
        """Start gathering vectors, whose lengths may differ; the result is their concatenation."""

    @abc.abstractmethod
    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        """Start sending a vector from `root`."""

    @abc.abstractmethod
    def alltoall(
        self, name: str, tensor: Tensor, group: Group, splits: Sequence[int] | None = None
    ) -> Any:
        """Start sending equal parts of a vector to everybody; the result has the same length.

        With `splits`, send that many rows of a matrix to each; the result is the received rows, in
        rank order, and the number of rows from each.
        """

    @abc.abstractmethod
    def poll(self, handle: Any) -> bool:
        """Return whether `wait` would return at once."""

    @abc.abstractmethod
    def wait(self, handle: Any) -> Any:
        """Return the result of an operation; a list for `allreduce`."""

    # ------------------------------------------------------------------------------ who takes part
    def ranks(self, group: Group) -> int:
        """Return the number of members of `group`."""
        return self.size if group is None else len(group)

    def within_host(self, group: Group) -> bool:
        """Return whether all members of `group` are known to share a host."""
        members = range(self.size) if group is None else group
        return any(set(members) <= set(host) for host in self.hosts)

    def register(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Tell the engine of groups that requests will name; all ranks do so together."""
        return  # most engines take any group
