"""The exchange, which runs the compressors of all buckets with their states and levels."""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor, check_narrow
from accordion_hvd.engine.layout import (
    Batch,
    BucketState,
    Layout,
    TensorInfo,
    make_buckets,
    reports,
)
from accordion_hvd.engine.ledger import Ledger
from accordion_hvd.engine.policy_sync import PolicySync, sync_of
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.engine.step import Accounts, Step
from accordion_hvd.ops import namespace, numpy
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule, needs_weights
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.displacement import USUAL_GAIN
from accordion_hvd.policies.evidence import Evidence
from accordion_hvd.policies.gate import Advice, Gating

logger = logging.getLogger(__name__)

IN_A_ROW = 10
"""Skipped steps in succession after which finite gradients, too, are no accident."""


class Exchange:
    """Averages gradients over the ranks, bucket by bucket, under a policy.

    For each step, call `begin`, then `start` for each batch of `layout` in any order, then
    `finish`. `layout.batches[i].unpack()` then returns the means of batch i. The exchange notifies
    the policy's observers (`core.observer`) when tensors are added, before and after each step, and
    when decisions may be due.

    Args:
        tensors: tensors to exchange, in the order in which their gradients are expected.
        skip: patterns of the names of tensors to send uncompressed.
        name: prefix of the names of collectives; equal on all ranks, unique in a process.
        ledger: record of the steps; None for one in memory.
        residual_dtype: dtype in which residuals are stored between steps.

    Attributes:
        steps: number of exchanges so far, skipped ones included.
        skipped: number of exchanges that were skipped because a gradient was not finite, or its
            norm was `ops.spec.LARGEST` or more.
        lost: each element of the means of a skipped exchange. It is 0 if all gradients were finite,
            so that a single huge one, which clipping would tame, costs a step and not the training;
            else, and from step `IN_A_ROW` in succession on, it is NaN, so that a loss scaler lowers
            its scale.
        device: device of the first bucket.
        replicas: function that returns the weights by the tensors' names, for evidence that depends
            on the weights.
        gains: function that returns the gains of the optimizer (`policies.displacement`) for
            tensors, by their names.
        hyper: settings of each parameter group, as compressors receive them (`Info.hyper`).
        entry_of: bucket state of each tensor, by the tensor's number.
        tensors: all tensors; positions in this list are the tensors' numbers.
        running: the present step; None between steps.
        starts: tensors, by number, of each batch of the last step, in the order in which batches
            were started, and the times at which its start began and ended.
        absent: tensors, by number, of which no rank had a gradient in the last closed step. Their
            state stays as it was, and callers do not apply their means.
        notes_absence: whether `absent` is also known if nothing keeps state.
        loss_scale: function that returns the loss scale by which gradients were divided; None if
            there is none.
        total: whether means are multiplied by the number of ranks before they are applied.
    """

    group_bytes: float | None = None

    def __init__(
        self,
        communicator: Communicator,
        policy: Policy,
        tensors: Sequence[TensorInfo],
        *,
        skip: Sequence[str] = (),
        name: str = "accordion",
        ledger: Ledger | None = None,
        residual_dtype: str = "float32",
    ) -> None:
        self.communicator, self.policy, self.name = communicator, policy, name
        self.residual_dtype = residual_dtype
        self.ledger = Ledger() if ledger is None else ledger
        self.xp = communicator.xp
        self.skip = tuple(skip)
        self.steps = self.skipped = 0
        self.lost: Any = math.nan  # symbolic in a graph
        self.in_a_row: Any = 0  # skipped steps; symbolic in a graph
        self._skipped_here = 0  # skipped steps of this process
        self.device: Any = None
        self.replicas: Callable[[], Mapping[str, Tensor]] = _no_replicas
        self.gains: Callable[[Sequence[str]], Mapping[str, float]] = usual_gains
        self.hyper: Mapping[str, Mapping[str, Any]] = {}
        self.bucket_states: list[BucketState] = []
        self.entry_of: dict[int, BucketState] = {}
        self.tensors: list[TensorInfo] = []
        self._layout: Layout | None = None
        self._earlier: Layout | None = None  # the layout before
        self._payloads: dict[tuple[str, int], float] = {}  # (bucket, level) -> bytes
        self._weighed = False  # whether the last step has recorded payloads
        self.sync: PolicySync | None = sync_of(self)
        self.accounts = Accounts()
        self.running: Step | None = None
        self.starts: list[tuple[Sequence[int], float, float]] = []
        self.absent: dict[int, Any] = {}
        self.notes_absence = self.total = False
        self.loss_scale: Callable[[], Any] | None = None
        self._lr: dict[str, float] = {}
        self.ledger.attach(self)
        self.extend(tensors)

    # --------------------------------------------------------------------------------- the layout
    def extend(self, tensors: Sequence[TensorInfo]) -> None:
        """Add tensors to the exchange, in buckets of their own.

        Every rank must add the same tensors before the same exchange.

        Raises:
            ValueError: if a compressor does not support one of the tensors (`Compressor.accept`),
                or keeps a residual that cannot be stored in `residual_dtype`.
        """
        scope, scopes = self.policy.scope, self.policy.scopes
        buckets = make_buckets(tensors, scope=scope, skip=self.skip, scopes=scopes)
        specs = [
            Spec(b.shape, b.dtype, self.xp, tensors[b.members[0]].kind or None) for b in buckets
        ]
        for observer in self.policy.observers:
            observer.extending(self, [*(entry.bucket for entry in self.bucket_states), *buckets])
        for bucket, spec in zip(buckets, specs, strict=True):
            for choice in self.policy.choices(bucket):
                choice.accept(spec, bucket.name)
                if self.residual_dtype == "bfloat16":
                    ranks, hosts = self.communicator.size, self.communicator.hosts
                    info = Info(size=ranks, name=bucket.name, hosts=hosts, shape=bucket.shape)
                    # NumPy's zeros take no memory before they are written.
                    check_narrow(choice, Spec(bucket.shape, bucket.dtype, numpy), info)
        self.policy.bind(self, [bucket.name for bucket in buckets if bucket.compress])
        for bucket, spec in zip(buckets, specs, strict=True):
            level = self.policy.choice(bucket)
            moved = tuple(len(self.tensors) + member for member in bucket.members)
            entry = BucketState(
                replace(bucket, members=moved), self.policy.choices(bucket), spec, level,
                self.residual_dtype == "bfloat16",
            )  # fmt: skip
            entry.served_from = self.counted
            self.bucket_states.append(entry)
            self.entry_of |= dict.fromkeys(moved, entry)
        self.tensors.extend(tensors)
        self.ledger.extended(self.bucket_states)
        self.device = self.bucket_states[0].spec.device if self.bucket_states else None
        self.accounts.each_step = sum(entry.bucket.dense_bytes for entry in self.bucket_states)
        self.outdate()

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            evidence = [x for x in self.policy.evidence if x.follows]
            self._layout = Layout(
                self.bucket_states, self.tensors, self.xp, evidence, self.lasting_phase,
                self._payloads, self.group_bytes, self._earlier,
            )  # fmt: skip
            self._earlier = None
        return self._layout

    def outdate(self) -> None:
        """Discard the layout because buckets or levels have changed."""
        # Batches of the earlier layout serve on where they are equal, with their states in place.
        self._layout, self._earlier = None, self._layout or self._earlier

    def forget(self) -> None:
        """Discard the layout and the measured payloads, which other ranks may not have."""
        self.outdate()
        self._payloads.clear()

    def _fresh_layout(self) -> Layout:
        # Payloads were measured in the last step, or phases have changed since.
        if self._weighed or not self.layout.holds(self.lasting_phase):
            self.outdate()
            self._weighed = False
        return self.layout

    def _weigh(self, step: Step) -> None:
        for index, batch in enumerate(step.layout.batches):
            size = max(sum(entry.bucket.size for entry in batch.entries), 1)
            for entry in batch.entries:
                share = step.payload(index) * entry.bucket.size / size
                self._payloads[entry.bucket.name, entry.level] = share
        self._weighed = True

    # ----------------------------------------------------------------------------------- one step
    def begin(self, lr: float | Mapping[str, float] = 0.0) -> None:
        """Begin an exchange, after the decisions that are due; these wait for the other ranks."""
        self.decide(lr)
        self.open(lr)

    def decide(self, lr: float | Mapping[str, float]) -> None:
        """Take the decisions that are due; collective."""
        if self.sync is not None:
            self.sync.decide(self.rates(lr))

    def open(self, lr: float | Mapping[str, float] = 0.0) -> Step:
        """Begin an exchange without taking decisions."""
        self._tick(self.rates(lr))
        observers = self.policy.observers
        if observers and observers.weight != 1:  # the optimizer's rate is larger
            self._lr = {name: rate * observers.weight for name, rate in self._lr.items()}
        layout, name = self._fresh_layout(), self.name
        if layout.period > 1:  # messages of one name have one size
            name = f"{name}.{self.turn}"
        step = Step(self.communicator, layout, name, self.guarded)
        step.measuring = bool(observers) and observers.any("measures")
        step.telling = self.notes_absence
        self.ledger.open(self)
        self.running = step
        return step

    @property
    def guarded(self) -> bool:
        """Return whether messages carry flags, for bad and for absent gradients."""
        if self.notes_absence:
            return True
        for evidence in self.sync.followed if self.sync is not None else ():
            if not evidence.tolerates_nonfinite:
                return True
        return self.layout.keeps_state or any(batch.carries for batch in self.layout.batches)

    def _tick(self, rates: dict[str, float]) -> None:
        self._lr = rates
        if self.sync is not None:
            self.sync.tick(rates)

    def start(
        self, index: int, grad: Tensor, parameter: Tensor = None, present: Tensor = None
    ) -> None:
        """Start the exchange of one batch.

        Args:
            grad: gradients from `Batch.pack`; their memory may be overwritten.
            parameter: weights from `Batch.pack`, if the compressor `needs_weights`.
            present: fp32 vector with 1 for each of the batch's tensors whose gradient this rank
                has, or 0 if its state must stay as it is unless another rank has one; None if all
                are there.
        """
        assert self.running is not None
        batch = self.running.layout.batches[index]
        first = batch.first
        wanted = self.sync.wanted(first) if self.sync is not None else []
        detects_nonfinite = first.compressor.detects_nonfinite and not batch.carries
        if any([x.looks_before and not x.tolerates_nonfinite for x in wanted]):
            detects_nonfinite = False  # this evidence must not see a bad gradient
        opening = functools.partial(self._opening, batch, wanted, parameter, present)
        self.running.start(index, grad, opening, detects_nonfinite, present)

    def _opening(
        self, batch: Batch, wanted: Sequence[Evidence], parameter: Tensor,
        present: Tensor, grad: Tensor,
    ) -> ExchangeGenerator:  # fmt: skip
        first = batch.first
        info = self.info(first)
        if parameter is not None:
            info = replace(info, parameter=parameter)
        batch.open(info, wanted)
        if present is not None:
            batch.set_aside()  # tensors that no rank has keep their part of the state
        if self.sync is not None and wanted:
            self.sync.before(batch, wanted, grad)
        if self.ledger.samples.measuring:
            self.ledger.samples.before(self, batch, grad)
        carried = batch.carried()
        if carried is not None and not first.compressor.additive:
            return _beside(first.compressor.exchange(grad, batch.state, info), carried)
        if carried is not None:
            grad = grad + self.xp.cast(carried, first.bucket.dtype)
        return first.compressor.exchange(grad, batch.state, info)

    def observe(self, grads: Sequence[Tensor], lr: float | Mapping[str, float]) -> None:
        """Update policy and evidence without an exchange; `grads` are in the order of `tensors`."""
        if self.sync is not None:
            for entry in self.bucket_states:
                self.sync.observe(entry, grads)
        self._tick(self.rates(lr))

    def finish(self) -> bool:
        """Wait until the step's exchanges have ended, and close the step.

        Returns:
            False if the step was skipped because a gradient of some rank was not finite or too
            large. Callers then return `lost` as means.
        """
        assert self.running is not None
        self.running.finish()
        return self.close()

    def close(self) -> bool:
        """Store the results and states of a completed step; returns as `finish` does."""
        step, closing = self.running, time.perf_counter()
        assert step is not None
        self.absent = {}
        if step.bad is not False:
            self.lost = self._lost(step)
        for index, batch in enumerate(step.layout.batches):
            absent = step.absent(index)
            flags = zip(batch.members, absent, strict=False)
            self.absent |= {m: flag for m, flag in flags if flag is not False}
            if step.bad is True:
                batch.take_back()
            else:
                mean, state = step.result(index)
                batch.mean = self._store(batch, mean, state, step.bad, absent)
        if not step.layout.complete:
            self._weigh(step)
        for observer in self.policy.observers:
            observer.closed(self, step)
        batches = step.layout.batches
        self.starts = [(batches[i].members, began, end) for i, began, end in step.starts]
        self._count(step, closing)
        if step.bad is True:
            self.skipped += 1
            self.ledger.event("skipped", self.steps - 1)
            self._report_skipped(1)
        # In a graph, a variable counts them (`TensorFlowExchange`).
        if step.bad is True or step.bad is False:
            self.in_a_row = self.in_a_row + 1 if step.bad else 0
        self.running = None
        return step.bad is not True

    def _lost(self, step: Step) -> Any:
        # Zeros would change the weights: only NaN says that the step was skipped.
        if any(isinstance(entry.compressor, UpdateRule) for entry in self.bucket_states):
            return math.nan
        return self.xp.where(step.broken | (self.in_a_row >= IN_A_ROW), math.nan, 0.0)

    def _store(
        self, batch: Batch, mean: Tensor, state: State, bad: Any, absent: list[Any]
    ) -> Tensor:
        xp, old = self.xp, batch.stored
        if batch.first.narrow:
            state = batch.narrowed(state, self.info(batch.first))
        if bad is not False:  # in a graph: a tensor; `close` took back what is True
            mean = xp.filled_if(bad, self.lost, mean)
            state = {key: xp.where(bad, old[key], value) for key, value in state.items()}
        batch.keep(state, absent)
        if self.sync is not None:
            self.sync.after(batch, mean, bad)
        return mean

    def _count(self, step: Step, began: float) -> None:
        self.accounts.count(step)
        self.steps += 1
        if self.ledger.samples.measuring:
            self.ledger.samples.after(self)
        self.ledger.add("decode", time.perf_counter() - began)
        self.ledger.close(self, step)

    def _report_skipped(self, count: int) -> None:
        before, self._skipped_here = self._skipped_here, self._skipped_here + count
        # After 1, 2, 4, 8, ... skipped steps: loss scalers skip some regularly.
        if before.bit_length() < self._skipped_here.bit_length() and self.communicator.rank == 0:
            logger.warning(
                "accordion_hvd: a gradient of some rank was not finite, or its norm was above "
                "1e15, in %d of %d steps so far; the exchanges of these steps were skipped, and "
                "their means are NaN, or zeros where all gradients were finite.",
                self.skipped, self.steps,
            )  # fmt: skip

    def advance(self) -> bool:
        """Continue the step without waiting; return True once `close` may be called."""
        assert self.running is not None
        return self.running.advance()

    def abort(self) -> None:
        """Undo a step that cannot be finished (after an error).

        Residuals and evidence are as before the step, unless later rounds have begun.
        """
        if self.running is not None:
            step, self.running = self.running, None
            step.take_back()
            for batch in step.layout.batches:
                batch.take_back()

    def give(
        self, grads: Sequence[Tensor], weights: Sequence[Tensor] = (), present: Tensor = None
    ) -> None:
        """Start every batch, given all `grads` and `weights` in the order of the tensors.

        Args:
            present: as in `start`, for all tensors.
        """
        assert self.running is not None
        for index, batch in enumerate(self.running.layout.batches):
            parameter = there = None
            if weights and batch.first.needs_weights:
                parameter = batch.pack([weights[m] for m in batch.members])
            if present is not None:
                there = self.xp.stack([present[m] for m in batch.members])
            grad = batch.pack([grads[m] for m in batch.members])
            self.start(index, grad, parameter, there)

    def means(self) -> list[Tensor]:
        means: dict[int, Tensor] = {}
        for batch in self.layout.batches:
            means |= dict(zip(batch.members, batch.unpack(), strict=True))
        return [means[member] for member in range(len(self.tensors))]

    @property
    def any_needs_weights(self) -> bool:
        return any(needs_weights(level) for entry in self.bucket_states for level in entry.levels)

    # ------------------------------------------------------------------- step numbers and rates
    def info(self, entry: BucketState, step: Any = None) -> Info:
        return Info(
            step=self.steps if step is None else step,
            rank=self.communicator.rank,
            size=self.communicator.size,
            name=entry.name,
            lr=self._lr.get(entry.bucket.name, 0.0),
            hosts=self.communicator.hosts,
            phase=self.phase(entry),
            sizes=entry.bucket.sizes,
            hyper=self.hyper.get(entry.bucket.group, {}),
            shape=entry.bucket.shape,
            loss_scale=None if self.loss_scale is None else self.loss_scale(),
        )

    @property
    def counted(self) -> int:
        return self.steps - self.skipped

    def phase(self, entry: BucketState) -> int:
        compressor = entry.compressor
        return compressor.variant(self.counted - entry.served_from) if entry.phased else 0

    def lasting_phase(self, entry: BucketState) -> int:
        """Return the phase of a bucket; if phases repeat, that in the first step of the period."""
        compressor = entry.compressor
        if compressor.period > 1:
            return compressor.variant(-entry.served_from % compressor.period)
        return self.phase(entry)

    @property
    def turn(self) -> int:
        """Return the position of the present step within `Layout.period`."""
        return self.counted % self.layout.period

    def rates(self, lr: float | Mapping[str, float]) -> dict[str, float]:
        if isinstance(lr, Mapping):
            return dict(lr)
        return {entry.bucket.name: lr for entry in self.bucket_states}

    # -------------------------------------------------------------------------------------- levels
    def switch(self, entry: BucketState, level: int) -> None:
        if level != entry.level:
            entry.record_switch(level, self.counted)
            entry.switch(level, self.info(entry))
            if gone := {x.key for x in self.policy.evidence if x.of_level} & entry.evidence.keys():
                entry.evidence = {k: x for k, x in entry.evidence.items() if k not in gone}
            self.ledger.switched(entry, self.steps)
            self.outdate()

    def load_bucket_state(
        self, entry: BucketState, saved: SavedState, made: Info | None = None
    ) -> BucketState:
        """Return a bucket's state with a saved one in it; `entry` stays as it is.

        Args:
            saved: saved state, in NumPy.
            made: the `Info` with which the saved state was made (`BucketState.created_with`).

        Raises:
            ValueError: if the state does not fit the bucket; the message has the reason.
        """
        evidence = {x.key: x.zeros(entry) for x in self.policy.evidence if x.follows}
        info = self.info(entry)
        if made is not None:
            info = replace(info, rank=made.rank, size=made.size, hosts=made.hosts)
        saved = saved.widened()
        saved.check(entry.levels, entry.spec, info, evidence)
        loaded = copy.copy(entry)
        loaded.load(saved.map(lambda array: self.xp.asarray(array, entry.spec.device)), info)
        loaded.created_with = made
        return loaded

    def replace_bucket_states(self, loaded: Sequence[BucketState]) -> None:
        """Put the results of `load_bucket_state` in the place of all buckets' states."""
        for entry, new in zip(self.bucket_states, loaded, strict=True):
            # In place, because `entry_of`, layouts and batches refer to these objects.
            vars(entry).update(vars(new))
        self.outdate()
        for entry in self.bucket_states:
            if entry.bucket.compress:  # measurements of a gate are no longer valid
                self.switch(entry, self.policy.choice(entry.bucket))

    # --------------------------------------------------------------------------------- accounting
    def account(self) -> None:
        """Count the steps that have been executed without notice; here, each step is counted."""

    def stats(self) -> dict[str, Any]:
        """Return counts of bytes and seconds of this rank since the start of training.

        Returns:
            A dict with these keys:

            - "steps": number of exchanges.
            - "dense": bytes of the uncompressed gradients.
            - "dense_sent": bytes that a ring allreduce of the gradients would send.
            - "payload": bytes of this rank's messages.
            - "sent", "received": bytes that this rank sends and receives for its messages, by the
              model of ring collectives in `comm.collectives`.
            - "between": "sent" without the bytes known to have stayed within a host.
            - "ratio": "dense_sent" / "sent".
            - "seconds": seconds spent in encoding (before the first requests), waiting, and
              decoding (after the first requests).
            - "reports": reports of the compressors by bucket (`Compressor.report`).
            - "privacy": privacy spent so far (`PrivacyBudget.stats`), if there is a budget.
            - "batch_size": number of examples of all ranks in a step, if the policy controls it.
        """
        counts = {"steps": self.steps} | self.accounts.stats(self.communicator.size)
        own = {"reports": reports(self.bucket_states), "privacy": {}}
        return counts | own | self.policy.observers.stats()

    def levels(self) -> dict[str, str]:
        """Return the compressor that serves each bucket now, by bucket name."""
        return {entry.bucket.name: repr(entry.compressor) for entry in self.bucket_states}

    def advice(self) -> Advice:
        """Return the gate's advice whether compression saves time in this job (on rank 0).

        Raises:
            RuntimeError: if the policy has no gate.
        """
        gating = self.policy.observers.find(Gating)
        if gating is None:
            raise RuntimeError(
                "exchange.advice() needs a gate: pass, for example, "
                "Fixed(PowerSGD(1), gate='auto')."
            )
        return gating.advice(self)


def _beside(generator: ExchangeGenerator, carried: Tensor) -> ExchangeGenerator:
    mean, state = yield from generator
    owed, xp = (yield Allreduce(carried)), namespace(mean)
    return mean + xp.cast(owed, xp.dtype(mean)), state


def usual_gains(names: Sequence[str]) -> dict[str, float]:
    return dict.fromkeys(names, USUAL_GAIN)


def _no_replicas() -> Mapping[str, Tensor]:
    raise RuntimeError("weights: the policy needs them; with simulated ranks, pass them to step().")
