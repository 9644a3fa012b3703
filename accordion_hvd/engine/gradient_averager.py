"""Average gradients over the ranks: everything in which PyTorch and TensorFlow do not differ."""

from __future__ import annotations

import abc
import copy
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

import accordion_hvd
from accordion_hvd.comm import hosts
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Tensor
from accordion_hvd.engine import checkpoint, drift, fp16_reduction
from accordion_hvd.engine.buckets import TensorInfo
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.guard import Guard
from accordion_hvd.policies import Policy

E = TypeVar("E", bound=Exchange)
Key = Any  # hashable

_numbers: Counter[int] = Counter()  # by process set: members count alike, others do not count


class GradientAverager(abc.ABC, Generic[E]):
    """Average a model's gradients over the ranks of a process set.

    A framework's adapter says when gradients are there and hands over tensors. Whatever ranks must
    do alike is here: names of collectives, the agreement before the first step, the exchange and
    what belongs to it, comparisons of the replicas, checkpoints, a change of the ranks.

    Args:
        policy: decides which compressor serves which tensor.
        process_set: the ranks that average.
        total: whether the result is the sum instead of the average.
        sparse_as_dense: whether sparse gradients are exchanged like dense ones; otherwise they are
            gathered, beside any compression.
        skip: patterns of names that travel dense.
        guard: compares replicas now and then.
        with_settings: whether exchanges are told the optimizer's settings (`Info.hyper`), as
            compressed optimizers want; these exchange on one rank, too.

    Attributes:
        framework: name in messages.
        device: where numbers go that accompany the gradients, as `ops.asarray` takes it.
        name: prefix of the collectives; equal on all ranks, unique in a process.
        keys: the exchange's tensors by number: what the adapter knows them by.
        number: the inverse of `keys`.
        sparse: keys of the tensors whose gradients are gathered.
        agreed: whether ranks know that they are set up alike.
    """

    framework: ClassVar[str]
    device: Any = None

    def __init__(
        self,
        policy: Policy,
        process_set: Any,
        *,
        total: bool = False,
        sparse_as_dense: bool = False,
        skip: Sequence[str] = (),
        guard: Guard | None = None,
        with_settings: bool = False,
    ) -> None:
        self.policy, self.process_set, self.skip = policy, process_set, tuple(skip)
        self.total, self.with_settings = total, with_settings
        self.sparse_as_dense = sparse_as_dense or policy.observers.any("needs_dense")
        self.guard = guard or Guard("off")
        self.communicator = self.connect()
        self.keys: list[Key] = []
        self.number: dict[Key, int] = {}
        self.sparse: list[Key] = []
        number = getattr(process_set, "process_set_id", None) or 0
        self.name = f"accordion.{number}.{_numbers[number]}"
        _numbers[number] += 1
        self._exchange: E | None = None
        self._unused = copy.deepcopy(policy.state_dict())
        self.agreed = False
        self._own = True  # the state that was adopted was this rank's
        self._compared = 0  # the last step whose replicas were compared

    # ------------------------------------------------------------------- what an adapter supplies
    @abc.abstractmethod
    def connect(self) -> Communicator:
        """Return a new communicator among the ranks of the process set."""

    @abc.abstractmethod
    def make_exchange(self, tensors: Sequence[TensorInfo]) -> E:
        """Return a new exchange of these tensors."""

    @abc.abstractmethod
    def tensors(self) -> Mapping[Key, TensorInfo]:
        """Return all tensors with gradients to be averaged, in an order equal on all ranks."""

    @abc.abstractmethod
    def replicas(self) -> Mapping[str, Tensor]:
        """Return the weights that must be equal on all ranks, by name."""

    # ---------------------------------------------------------------------------- the exchange
    @property
    def exchange(self) -> E:
        """Return the exchange of all tensors but the sparse ones; it is made at the first use.

        Raises:
            RuntimeError: no tensors are known yet.
        """
        if self._exchange is None:
            self._renew_exchange()
        assert self._exchange is not None
        return self._exchange

    def expect_sparse(self, keys: Sequence[Key]) -> None:
        """Gather the gradients of these tensors; an exchange that has them is made anew.

        Raises:
            RuntimeError: they have been exchanged already.
        """
        if self._exchange is not None and list(keys) != self.sparse:
            if self._exchange.steps:
                raise RuntimeError(
                    "sparse gradients appeared after dense ones had been exchanged; pass "
                    "sparse_as_dense=True where gradients are not always of one kind."
                )
            self.sparse = list(keys)
            self._renew_exchange()
        self.sparse = list(keys)

    def _renew_exchange(self) -> None:
        tensors = self.tensors()
        if not tensors and self.sparse:
            raise RuntimeError("no variables are known yet, so there is nothing to exchange.")
        dense = {key: info for key, info in tensors.items() if key not in set(self.sparse)}
        if self._exchange is not None:  # made before sparse gradients appeared
            self.policy._bound = None
        self.keys, self.number = [], {}
        self._exchange = self.make_exchange(list(dense.values()))
        mine = weakref.ref(self)  # averagers are alive as long as their optimizers are
        self._exchange.replicas = lambda: mine().replicas()  # type: ignore[union-attr]
        self._number(list(dense))

    def _number(self, keys: Sequence[Key]) -> None:
        self.number |= {key: len(self.keys) + i for i, key in enumerate(keys)}
        self.keys.extend(keys)

    def extend(self, tensors: Mapping[Key, TensorInfo]) -> None:
        """Exchange these tensors, too, if the exchange is made already."""
        if self._exchange is not None and tensors:
            self._exchange.extend(list(tensors.values()))
            self._number(list(tensors))

    def serving(self, key: Key) -> Compressor:
        """Return the compressor that serves a tensor now."""
        return self.exchange.entry_of[self.number[key]].compressor

    @property
    def idle(self) -> bool:
        """Return whether gradients stay local: there is no other rank, and no other need.

        A policy that returns updates, is private or grows batches is needed on one rank, too, and
        so is every policy where ranks may join.
        """
        policy = self.policy
        needed = policy.output == "update" or policy.observers.any("needed_alone")
        needed |= os.environ.get("HOROVOD_ELASTIC") == "1"
        needed = self.with_settings or (needed and self.process_set.included())
        return self.communicator.size == 1 and not needed

    # ---------------------------------------------------------------------------------- agreement
    def agree(self, *lines: str) -> None:
        """See that all ranks are set up alike, before the first exchange; collective.

        Args:
            lines: what they must agree on besides policy, settings and tensors.

        Raises:
            RanksDisagree: on all ranks, they are not; names the ranks and the difference.
        """
        settings = f"sum={self.total} skip={self.skip}"
        followed = [observer.agreement() for observer in self.policy.observers]
        known = [f"{x.name} {x.shape} {x.dtype}" for x in self.tensors().values()]
        version = f"accordion_hvd {accordion_hvd.__version__}, {self.framework}, {self.name}"
        text = "\n".join([version, repr(self.policy), settings, *followed, *lines, *known])
        require_agreement(self.communicator, text, self.device)
        self.discover()
        if self.with_settings:
            checkpoint.agree_on_origin(self.exchange, self._own, self.device)
            self._own = True
        self.agreed = True

    def discover(self) -> None:
        """Find out about hosts and link what the policy needs to know; collective, once."""
        hosts.discover_hosts(self.communicator, self.policy.topology_aware, self.device)
        fp16_reduction.choose_reduction(self.communicator, self.policy, self.device)

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether some rank has set it; collective."""
        mine = self.communicator.xp.asarray(np.array(flags, np.int32), self.device)
        found = self.communicator.run(f"{self.name}.flags", _largest(mine))
        return [bool(flag) for flag in self.communicator.xp.to_numpy(found)]

    def doubt(self) -> None:
        """Have ranks agree again before the next exchange."""
        self.agreed = False

    # -------------------------------------------------------------------------- elastic jobs
    def ranks_changed(self) -> None:
        """Connect to the ranks that there are now, after Horovod has started again."""
        self.communicator = self.connect()
        if self._exchange is not None:
            checkpoint.move(self._exchange, self.communicator)
        self._own = False
        self.doubt()

    def follow_rank_zero(self, broadcast: Callable[[Any], Any]) -> None:
        """Take over policy, levels and clock of rank 0, if this rank has just come; collective.

        A rank that has taken part in as many steps as rank 0 keeps what it has. Another one begins
        without a residual.

        Args:
            broadcast: returns rank 0's object on all ranks.
        """
        begun = self._exchange is not None and self._exchange.steps > 0
        leads = self.communicator.rank == 0
        mine = checkpoint.shared(self.exchange) if leads and begun else None
        self.name, saved = broadcast((self.name, mine))
        if saved is not None and not (begun and self.exchange.steps == saved["about"]["steps"]):
            self.expect(saved["about"]["tensors"])
            checkpoint.join(self.exchange, saved)
        if self._exchange is not None:
            self._exchange.name = self.name
        self.doubt()

    # -------------------------------------------------------------------------------- checkpoints
    def expect(self, names: Sequence[str]) -> None:
        """Before a restore: take tensors of other names for sparse ones, as they were then."""
        if self._exchange is None:
            self.sparse = [
                key
                for key, info in self.tensors().items()
                if not any(checkpoint.same_name(info.name, name) for name in names)
            ]

    def adopt(self, saved: dict[str, Any] | None) -> None:
        """Go on from a `checkpoint.snapshot`, before the next exchange.

        Ranks then find out whether each had its own: if not, all drop per-rank state.

        Args:
            saved: the snapshot; None for the beginning.

        Raises:
            ValueError: it does not fit.
        """
        if saved is None:
            self._exchange = None
            self.policy._bound = None
            self.policy.load_state_dict(copy.deepcopy(self._unused))
        else:
            self._own = checkpoint.adopt(self.exchange, saved)
        self.doubt()

    # ----------------------------------------------------------------------------------- replicas
    def comparison_due(self, step: int) -> bool:
        """Return whether a step since the last comparison asks for one.

        While models are averaged or an algorithm lets weights differ for some steps
        (`drift.span` is 0), comparisons wait.
        """
        if not drift.span(self.exchange.bucket_states, self.exchange.counted):
            return False
        due = any(self.guard.due(earlier) for earlier in range(self._compared + 1, step + 1))
        self._compared = step
        return due

    def checksums(self) -> Tensor:
        """Return this rank's checksums of the replicas and its levels, as int64."""
        xp = self.communicator.xp
        level = xp.asarray(np.array(self.exchange.bucket_batches.number()), self.device)
        return xp.stack([*map(xp.checksum, self.replicas().values()), level])

    def compare(self, step: int, checksums: Tensor) -> None:
        """Compare checksums with the other ranks'; collective.

        Raises:
            ReplicasDiffer: they differ, and the guard's mode is "error".
        """
        names = [*self.replicas(), "compression levels"]
        self.guard.compare(self.communicator, step, names, checksums)


def gradient_averagers(optimizers: Iterable[Any] | None = None) -> list[GradientAverager[Any]]:
    """Return the averagers of these optimizers, in order; of the whole process if None."""
    if optimizers is None:
        owners = checkpoint.owners()
    else:
        found = [getattr(item, "exchange_owner", None) for item in optimizers]
        owners = [owner for x in found for owner in (x if isinstance(x, tuple) else (x,))]
    return [owner for owner in owners if isinstance(owner, GradientAverager)]


def _largest(flags: Tensor) -> ExchangeGenerator:
    result = yield Allreduce(flags, op="max")
    return result  # type: ignore[return-value]
