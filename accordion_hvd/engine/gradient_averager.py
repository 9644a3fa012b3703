"""Averaging of gradients over the ranks: the part that PyTorch and TensorFlow share."""

from __future__ import annotations

import abc
import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

import accordion_hvd
from accordion_hvd import check
from accordion_hvd.comm import agreement, fp16_reduction
from accordion_hvd.comm.agreement import largest, require_agreement
from accordion_hvd.core.base import Compressor, Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.exchange import usual_gains
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo, span
from accordion_hvd.engine.ledger import as_ledger
from accordion_hvd.engine.membership import E, Member
from accordion_hvd.engine.rehearsal import Pass, Rehearsals, in_steps
from accordion_hvd.policies import Policy

ParameterKey = Any  # hashable

FIRST, EVERY = 10, 100
"""Step from which on exchanges are rehearsed, since early steps are slow, and steps in between."""

_numbers: Counter[int] = Counter()  # averagers made so far, by process set; equal on its members


class GradientAverager(Member[E]):
    """Averages a model's gradients over the ranks of a process set.

    The adapter of a framework decides when gradients are ready and passes the tensors. This class
    does what all ranks must do in the same order: it names the collectives, compares the settings
    of the ranks before the first step, owns the exchange, and compares replicas. Checkpoints and
    changes of the ranks are the part of its base class, `Member`.

    Args:
        total: whether the result is the sum instead of the average.
        sparse_as_dense: whether sparse gradients are exchanged like dense ones. Otherwise they are
            gathered without compression.
        skip: patterns of the names of tensors to send uncompressed.
        guard: guard that compares the replicas; None: no comparisons.
        ledger: record of the steps, or what `as_ledger` accepts.
        with_settings: whether compressors receive the optimizer's settings (`Info.hyper`), which
            compressed optimizers need. These also exchange on a single rank.
        residual_dtype: dtype in which residuals are stored between steps.

    Attributes:
        framework: name of the framework in messages.
        owner: name of the function that the user has called, in messages.
        device: device of numbers that accompany the gradients, as for `ops.asarray`.
        name: prefix of the names of collectives; equal on all ranks, unique in a process.
        rehearses: whether exchanges are rehearsed as fast as they run in the training.
        keys: the adapter's keys of the exchange's tensors, by number.
        number: number of each tensor, by key; the inverse of `keys`.
        sparse: keys of the tensors whose gradients are gathered.
        ledger: record of the steps, which the exchange keeps.
    """

    framework: ClassVar[str]
    owner: ClassVar[str] = "DistributedOptimizer"
    device: Any = None
    rehearses: bool = True

    def __init__(
        self,
        policy: Policy,
        process_set: Any,
        *,
        total: bool = False,
        sparse_as_dense: bool = False,
        skip: Sequence[str] = (),
        guard: Guard | None = None,
        ledger: Any = None,
        with_settings: bool = False,
        residual_dtype: str = "float32",
    ) -> None:
        self.ledger = as_ledger(ledger)
        self._rehearsals = Rehearsals()
        self.policy, self.process_set, self.skip = policy, process_set, check.patterns(skip)
        self.total, self.with_settings = total, with_settings
        self.residual_dtype = residual_dtype
        self.sparse_as_dense = sparse_as_dense or policy.observers.any("private")
        self.guard = guard or Guard("off")
        self.communicator = self.connect()
        self.keys: list[ParameterKey] = []
        self.number: dict[ParameterKey, int] = {}
        self.sparse: list[ParameterKey] = []
        number = getattr(process_set, "process_set_id", None) or 0
        self.name = f"accordion.{number}.{_numbers[number]}"
        _numbers[number] += 1
        self.keep_start()
        self._next_comparison = self.guard.next_after(0)  # number of the step
        self._shared = 0  # number of the last step after which ranks showed each other their sums

    # ----------------------------------------------------------------- supplied by the adapter
    @abc.abstractmethod
    def make_exchange(self, tensors: Sequence[TensorInfo]) -> E:
        """Return a new exchange of `tensors`."""

    @abc.abstractmethod
    def replicas(self) -> Mapping[str, Tensor]:
        """Return the weights that must be equal on all ranks, by name."""

    def gains(self, names: Sequence[str]) -> dict[str, float]:
        """Return the optimizer's gains (`policies.displacement`) for tensors, by their names."""
        return usual_gains(names)

    def rates(self) -> Tensor | None:
        """Return the learning rates, which must be equal on all ranks; None if they are unknown."""
        return None

    # ---------------------------------------------------------------------------- the exchange
    @property
    def exchange(self) -> E:
        """Return the exchange of all tensors except the sparse ones; made at the first use.

        Raises:
            RuntimeError: if no tensors are known yet.
        """
        if self._exchange is None:
            self._renew_exchange()
        assert self._exchange is not None
        return self._exchange

    def expect_sparse(self, keys: Sequence[ParameterKey]) -> None:
        """Gather the gradients of these tensors, and replace an exchange that contains them.

        Raises:
            RuntimeError: if dense gradients have been exchanged already.
        """
        if self._exchange is not None and list(keys) != self.sparse:
            if self._exchange.steps:
                raise RuntimeError(
                    "sparse gradients appeared after dense ones had been exchanged. If a tensor's "
                    "gradients are not always of one kind, pass sparse_as_dense=True."
                )
            self.sparse = list(keys)
            self._renew_exchange()
        self.sparse = list(keys)

    def check_patterns(self) -> None:
        """Refuse name patterns that match nothing, which would be without effect.

        Raises:
            ValueError: if a pattern in `skip` or in the policy's overrides matches no weight.
        """
        names = list(self.replicas())
        for argument, patterns in (("skip", self.skip), ("overrides", self.policy.overrides)):
            for pattern in patterns:
                if names and not any(check.matches(name, [pattern]) for name in names):
                    allowed = f"a pattern of names such as {names[0]!r} and {names[-1]!r}"
                    check.refuse(self.owner, argument, pattern, allowed)

    def _renew_exchange(self) -> None:
        self.check_patterns()
        tensors = self.tensors()
        if not tensors and self.sparse:
            raise RuntimeError("no variables are known yet, so there is nothing to exchange.")
        dense = {key: info for key, info in tensors.items() if key not in set(self.sparse)}
        if self._exchange is not None:  # made before sparse gradients appeared
            self.policy._bound = None
        self.keys, self.number = [], {}
        self._exchange = self.make_exchange(list(dense.values()))
        reference = weakref.ref(self)  # the optimizer keeps this averager alive
        self._exchange.replicas = lambda: reference().replicas()  # type: ignore[union-attr]
        self._exchange.gains = lambda names: reference().gains(names)  # type: ignore[union-attr]
        self._exchange.total = self.total
        self._number(list(dense))

    def _number(self, keys: Sequence[ParameterKey]) -> None:
        self.number |= {key: len(self.keys) + i for i, key in enumerate(keys)}
        self.keys.extend(keys)

    def extend(self, tensors: Mapping[ParameterKey, TensorInfo]) -> None:
        """Add tensors to the exchange, if it exists already."""
        if self._exchange is not None and tensors:
            self._exchange.extend(list(tensors.values()))
            self._number(list(tensors))

    def serving(self, key: ParameterKey) -> Compressor:
        return self.exchange.entry_of[self.number[key]].compressor

    @property
    def idle(self) -> bool:
        """Return whether gradients need no exchange, because there is a single rank.

        A single rank still needs policies that return updates, are private or grow batches. It
        needs every policy in elastic jobs, where other ranks may join.
        """
        if self.communicator.size > 1:
            return False
        policy = self.policy
        needed = policy.output == "update" or policy.observers.any("needed_alone")
        needed |= os.environ.get("HOROVOD_ELASTIC") == "1"
        return not (self.with_settings or (needed and self.process_set.included()))

    # ---------------------------------------------------------------------------------- agreement
    def agree(self, *lines: str) -> None:
        """Check that all ranks have the same set-up, before the first exchange; collective.

        Args:
            lines: descriptions that must be equal, besides policy, settings and tensors.

        Raises:
            RanksDisagree: on all ranks, if set-ups differ; the message has the ranks and the
                difference.
        """
        settings = f"sum={self.total} skip={self.skip} residual_dtype={self.residual_dtype}"
        settings += f" guard_every={self.guard.every if self.guard.compares else None}"
        observers = [observer.agreement() for observer in self.policy.observers]
        tensors = [f"{x.name} {x.shape} {x.dtype}" for x in self.tensors().values()]
        version = f"accordion_hvd {accordion_hvd.__version__}, {self.framework}, {self.name}"
        text = "\n".join([version, repr(self.policy), settings, *observers, *lines, *tensors])
        require_agreement(self.communicator, text, self.device)
        # Not before: what follows are collectives that depend on the settings.
        self.discover()
        if self.with_settings:
            checkpoint.agree_on_origin(self.exchange, self._own_state, self.device)
            self._own_state = True
        self.agreed = True

    def discover(self) -> None:
        """Discover hosts and measure the link, if the policy needs them; collective, once."""
        agreement.discover_hosts(self.communicator, self.policy.topology_aware, self.device)
        fp16_reduction.choose_reduction(self.communicator, self.policy.fp16_reduction, self.device)

    def prepare(self, side: E) -> Pass:
        """Return the pass of an exchange that is rehearsed, as fast as the job's own."""
        return in_steps(side)

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether some rank has set it; collective."""
        local = self.communicator.xp.asarray(np.array(flags, np.int32), self.device)
        found = self.communicator.run(f"{self.name}.flags", largest(local))
        return [bool(flag) for flag in self.communicator.xp.to_numpy(found)]

    def resumed(self) -> None:
        self._shared = self.exchange.steps
        self._next_comparison = self.guard.next_after(self._shared)

    # ----------------------------------------------------------------------------------- replicas
    def comparison_due(self, step: int) -> bool:
        """Return whether the guard schedules a comparison for a step since the last one.

        Comparisons are delayed while models are averaged, and while an algorithm lets weights
        differ for some steps (`layout.span` is 0).
        """
        if step < self._next_comparison:
            return False
        if not span(self.exchange.bucket_states, self.exchange.counted):
            return False
        self._next_comparison = self.guard.next_after(step)
        return True

    def checksums(self) -> Tensor:
        """Return this rank's checksums of learning rates, replicas and levels, as int64."""
        xp = self.communicator.xp
        level = xp.asarray(np.array(self.exchange.layout.number), self.device)
        rates = self.rates()
        numbers = xp.zeros((1,), "float32", self.device) if rates is None else rates
        return xp.stack([*map(xp.checksum, (numbers, *self.replicas().values())), level])

    def compare(self, step: int, checksums: Tensor) -> None:
        """Compare checksums with those of the other ranks; collective.

        With the checksums travel the sums of the ledger, so that they cost no message of their own.
        At some comparisons, exchanges are rehearsed for the ledger's estimates.

        Raises:
            ReplicasDiffer: if checksums differ and the guard's mode is "error".
        """
        names = ["learning rates", *self.replicas(), "compression levels"]
        ledger = self.exchange.ledger
        self.exchange.account()
        began, xp = time.perf_counter(), self.communicator.xp
        costs = xp.asarray(ledger.sums().view(np.int64), self.device)  # their bits, as checksums
        both = xp.concat([checksums, costs])
        warned = self.guard.warned
        table = self.guard.compare(self.communicator, step, names, both)
        if self.guard.warned and not warned:
            ledger.event("guard", step)
        due = step >= FIRST and (self._shared < FIRST or step // EVERY > self._shared // EVERY)
        self._shared = step
        ledger.share(step, np.ascontiguousarray(table).view(np.float64))
        measuring = time.perf_counter()
        ledger.add("decide", measuring - began)
        if due and self.communicator.size > 1:
            # If it is None on one rank, none rehearses (`Rehearsals._agreed`).
            prepare = self.prepare if self.rehearses and ledger.rehearses else None
            self._rehearsals.hold(self.exchange, ledger, prepare)
            ledger.add("measure", time.perf_counter() - measuring)
