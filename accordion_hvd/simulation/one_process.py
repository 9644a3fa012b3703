"""Simulation of N ranks in one process, without a network: for tests, notebooks and studies.

```python
world = simulate(Accordion(low=PowerSGD(4), high=PowerSGD(1), window=10), ranks=4)
means = world.step([{"weight": gradient_of_rank} for gradient_of_rank in gradients])
world.exchanges[0].stats()
```
The algorithms, the exchange and the packing are those of a real job; only the collectives are
simulated. Tensors may be NumPy's, PyTorch's or TensorFlow's.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm import local
from accordion_hvd.comm.collectives import Group, Sizes
from accordion_hvd.comm.communicator import Communicator, Pending
from accordion_hvd.core.base import Compressor, Hosts, Tensor, consecutive
from accordion_hvd.core.running import Running
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops import namespace
from accordion_hvd.policies import Policy
from accordion_hvd.policies.accordion import Alternation
from accordion_hvd.policies.displacement import gain_of_sgd
from accordion_hvd.resolve import as_policy

Key = tuple[str, Group]


class Hub:
    """Storage of the tensors of a collective until all members have sent theirs."""

    def __init__(self, ranks: int, hosts: Hosts = ()) -> None:
        self.ranks, self.hosts = ranks, hosts
        self.sent: dict[Key, dict[int, Any]] = {}
        self.fetched: dict[Key, int] = {}
        self.events = 0  # number of tensors sent and fetched so far

    def members(self, group: Group) -> tuple[int, ...]:
        # In ascending order, in which engines number the members of a group.
        return tuple(range(self.ranks)) if group is None else tuple(sorted(group))

    def fetch(self, key: Key) -> list[Any]:
        """Return all members' tensors, in rank order; the last member's fetch deletes them."""
        self.events += 1
        members = self.members(key[1])
        parts = [self.sent[key][member] for member in members]
        self.fetched[key] = self.fetched.get(key, 0) + 1
        if self.fetched[key] == len(members):
            del self.sent[key], self.fetched[key]
        return parts

    def advance_all(self, advances: Sequence[Callable[[], bool]]) -> None:
        """Call the functions that advance each rank until all return True.

        Raises:
            RuntimeError: if no rank makes progress, because ranks wait in different collectives.
        """
        events = -1
        while not all([advance() for advance in advances]):
            if events == self.events:
                waiting = ", ".join(sorted(name for name, _ in self.sent))
                raise RuntimeError(f"simulated ranks wait for each other in {waiting}.")
            events = self.events


class SimulatedCommunicator(Communicator):
    """Communicator of one of the ranks that share a `Hub`."""

    label = "simulated ranks"

    def __init__(self, hub: Hub, rank: int, xp: ModuleType) -> None:
        self.hub, self.rank, self.size, self.xp = hub, rank, hub.ranks, xp
        self.hosts = hub.hosts
        self._events = -1

    def _put(self, name: str, group: Group, value: Any, combine: Any) -> Any:
        self.hub.events += 1
        self.hub.sent.setdefault((name, group), {})[self.rank] = value
        return (name, group), combine

    def allreduce(self, name: str, tensors: list[Tensor], op: str, group: Group) -> Any:
        def combine(parts: list[list[Tensor]]) -> list[Tensor]:
            return [local.reduce(self.xp, same, op) for same in zip(*parts, strict=True)]

        return self._put(name, group, [self.xp.copy(x) for x in tensors], combine)

    def allgather(self, name: str, tensor: Tensor, group: Group, lengths: Sizes = None) -> Any:
        return self._put(name, group, self.xp.copy(tensor), self.xp.concat)

    def broadcast(self, name: str, tensor: Tensor, root: int, group: Group) -> Any:
        place = self.hub.members(group).index(root)
        return self._put(
            name, group, self.xp.copy(tensor), lambda parts: self.xp.copy(parts[place])
        )

    def alltoall(self, name: str, tensor: Tensor, group: Group, splits: Sizes = None) -> Any:
        members = self.hub.members(group)
        place = members.index(self.rank)
        pieces = local.deal(self.xp, self.xp.copy(tensor), len(members), splits)

        def combine(parts: list[list[Tensor]]) -> Any:
            mine = [part[place] for part in parts]
            received = self.xp.concat(mine)
            return received if splits is None else (received, [self.xp.shape(x)[0] for x in mine])

        return self._put(name, group, pieces, combine)

    def poll(self, handle: Any) -> bool:
        key = handle[0]
        return len(self.hub.sent[key]) == len(self.hub.members(key[1]))

    def wait(self, handle: Any) -> Any:
        key, combine = handle
        return combine(self.hub.fetch(key))

    def pause(self, waited: float) -> None:
        """Check that waiting makes sense: other ranks cannot advance while this rank blocks.

        Raises:
            RuntimeError: if no rank has sent or fetched a tensor since the last call.
        """
        if self._events == self.hub.events:
            raise RuntimeError(
                "a simulated rank waits for other ranks; advance all ranks by World.step."
            )
        self._events = self.hub.events


class World:
    """Simulated ranks that exchange named gradients; made by `simulate`.

    Attributes:
        exchanges: the `Exchange` of each rank; empty before the first step.
    """

    def __init__(
        self,
        compression: Any,
        ranks: int,
        skip: Sequence[str] = (),
        local_size: int = 1,
        momentum: float = 0.9,
        gain: Callable[[str], float] | None = None,
    ) -> None:
        self._policies = [copy.deepcopy(as_policy(compression)) for _ in range(ranks)]
        if self._policies[0].output == "model":
            allowed = "one that averages gradients; `simulate_job` takes others"
            check.refuse("simulate", "compression", compression, allowed)
        if self._policies[0].observers.find(Alternation) is not None:
            allowed = "one that never averages models; `simulate_job` takes others"
            check.refuse("simulate", "compression", compression, allowed)
        self._hub, self._skip = Hub(ranks, consecutive(ranks, local_size)), skip
        self._gain = gain or (lambda name: gain_of_sgd(momentum))
        self._links: list[SimulatedCommunicator] = []
        self.exchanges: list[Exchange] = []

    def step(
        self,
        gradients: Sequence[Mapping[str, Tensor | None]],
        lr: float = 0.0,
        weights: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[dict[str, Tensor] | None]:
        """Run one exchange on all ranks.

        Args:
            gradients: for each rank, name -> tensor. Names and shapes are the same on all ranks
                (except the first dimension, for a method that takes gradients of single examples).
                The memory of the tensors may be overwritten. After the first step, None stands for
                the gradient of a tensor that a rank has not used.
            lr: the current learning rate.
            weights: for each rank, name -> tensor, for methods and policies that read weights.

        Returns:
            For each rank, name -> averaged gradient, or None if no rank has used the tensor. If
            the step was skipped, zeros (`Exchange.lost`), or None for each rank if a gradient was
            not finite.

        Raises:
            ValueError: if gradients are missing, or differ in name, shape or dtype from those of
                the first step. In this case no state has changed.
        """
        if len(gradients) != len(self._policies):
            ranks = len(self._policies)
            check.refuse(self, "number of gradients", len(gradients), f"{ranks}, one per rank")
        if not self.exchanges:
            self._build(gradients[0])
        for mine in gradients:
            self._compare(mine)
        replicas = weights or [{} for _ in gradients]
        for exchange, replica in zip(self.exchanges, replicas, strict=True):
            if weights:
                exchange.replicas = functools.partial(dict, replica)
        self._decide(lr)
        for exchange, mine, replica in zip(self.exchanges, gradients, replicas, strict=True):
            exchange.open(lr)
            names = [tensor.name for tensor in exchange.tensors]
            values = [replica[name] for name in names] if weights else []
            there = [mine[name] is not None for name in names]
            xp = exchange.xp
            given = [
                xp.zeros(x.shape, x.dtype, exchange.device) if mine[x.name] is None
                else mine[x.name]
                for x in exchange.tensors
            ]  # fmt: skip
            marks = np.array(there, np.float32)
            present = None if all(there) else xp.asarray(marks, exchange.device)
            exchange.give(given, values, present)
        self._hub.advance_all([exchange.advance for exchange in self.exchanges])
        return [self._means(exchange) for exchange in self.exchanges]

    def micro_batches(self, lr: float = 0.0) -> int:
        """Make due decisions; return the number of small batches that the next step averages."""
        if self.exchanges:
            self._decide(lr)
        return self._policies[0].observers.accumulated

    def end_window(self) -> None:
        """End the current window on all ranks."""
        for exchange in self.exchanges:
            exchange.policy.end_window()

    def _build(self, gradients: Mapping[str, Tensor]) -> None:
        xp = namespace(next(iter(gradients.values())))
        tensors = [TensorInfo(name, *self._kind(x)) for name, x in gradients.items()]
        ranks = range(self._hub.ranks)
        self._links = [SimulatedCommunicator(self._hub, rank, xp) for rank in ranks]
        self.exchanges = [
            Exchange(link, policy, tensors, skip=self._skip)
            for link, policy in zip(self._links, self._policies, strict=True)
        ]
        for exchange in self.exchanges:
            exchange.gains = lambda names: {name: self._gain(name) for name in names}

    def _compare(self, gradients: Mapping[str, Tensor]) -> None:
        known = self.exchanges[0].tensors
        if set(gradients) != {tensor.name for tensor in known}:
            names = [tensor.name for tensor in known]
            check.refuse(self, "names of gradients", list(gradients), f"those of rank 0, {names}")
        for tensor in known:
            if gradients[tensor.name] is None:
                continue
            kind = self._kind(gradients[tensor.name])
            if kind != (tensor.shape, tensor.dtype, tensor.kind):
                given, first = (
                    f"{dtype} {shape}{device and ' on '}{device}"
                    for shape, dtype, device in (kind, (tensor.shape, tensor.dtype, tensor.kind))
                )
                allowed = f"{first}, as in the first step"
                check.refuse(self, f"gradient of {tensor.name}", given, allowed)

    def _kind(self, gradient: Tensor) -> tuple[tuple[int, ...], str, str]:
        """Return the shape, the dtype and the device of a gradient ("": there is none)."""
        spec = namespace(gradient).spec(gradient)
        shape = spec.shape[1 if self._policies[0].scope == "samples" else 0 :]
        return shape, spec.dtype, "" if spec.device is None else str(spec.device)

    def _decide(self, lr: float) -> None:
        synced = [(e.sync, e.rates(lr)) for e in self.exchanges if e.sync is not None]
        if synced and all([sync.due(rates) for sync, rates in synced]):
            lockstep(self._links, [sync.take(rates) for sync, rates in synced])

    def _means(self, exchange: Exchange) -> dict[str, Tensor] | None:
        if not exchange.close():
            zeros = functools.partial(exchange.xp.zeros, device=exchange.device)
            lost = {x.name: zeros(x.shape, x.dtype) for x in exchange.tensors}
            return lost if exchange.lost == 0 else None
        rows = enumerate(zip(exchange.tensors, exchange.means(), strict=True))
        return {x.name: None if i in exchange.absent else mean for i, (x, mean) in rows}


def simulate(
    compression: Compressor | Policy | type[Compressor] | type[Policy] | str,
    ranks: int,
    *,
    skip: Sequence[str] = (),
    local_size: int = 1,
    momentum: float = 0.9,
    gain: Callable[[str], float] | None = None,
) -> World:
    """Return simulated ranks that exchange gradients with one compression.

    Args:
        compression: compressor, policy or spec string, as in `DistributedOptimizer(compression=)`.
        ranks: number of ranks.
        skip: name patterns of tensors that are exchanged without compression.
        local_size: number of ranks per host (`TwoLevel` depends on it).
        momentum: momentum of SGD, for policies that depend on it.
        gain: for optimizers other than SGD, function that returns the gain (see
            `accordion_hvd.policies.displacement`) for the tensor of a name.
    """
    return World(compression, ranks, skip, local_size, momentum, gain)


def lockstep(
    communicators: Sequence[SimulatedCommunicator], exchanges: Sequence[Generator[Any, Any, Any]]
) -> list[Any]:
    """Run one exchange generator per rank, all in step; return the result of each."""
    running = [Running(exchange) for exchange in exchanges]
    for round_ in itertools.count():
        pending = [
            (exchange, Pending(communicator, f"lockstep.{round_}", exchange.requests))
            for communicator, exchange in zip(communicators, running, strict=True)
            if not exchange.done
        ]
        if not pending:
            break
        communicators[0].hub.advance_all([work.ready for _, work in pending])
        for exchange, work in pending:
            exchange.answer(work.result())
    return [exchange.result for exchange in running]
