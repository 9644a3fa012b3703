"""Runs the compressors: state, levels, bytes and checkpoints of everything that is exchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.core.base import ExchangeGenerator, Info, State, Tensor
from accordion_hvd.engine.accounting import Accounts, reports
from accordion_hvd.engine.bucket_batches import BucketBatches
from accordion_hvd.engine.bucket_state import BatchState, BucketState
from accordion_hvd.engine.buckets import TensorInfo, make_buckets
from accordion_hvd.engine.decisions import Decisions
from accordion_hvd.engine.evidence_collector import EvidenceCollector
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.engine.step import Step
from accordion_hvd.ops.spec import Spec
from accordion_hvd.policies.advice import Advice
from accordion_hvd.policies.base import Policy
from accordion_hvd.policies.evidence import Evidence
from accordion_hvd.policies.gating import Gating


class Exchange:
    """Averages gradients over the ranks, bucket by bucket, under a policy.

    Use: `begin`, then `start` for each batch of the plan in any order, then `finish`;
    `batches.unpack(i)` then gives each batch's results. The policy's observers are told when
    tensors
    are added, when a step begins and when it is done, and whether there is something to decide
    (`core.observer`).

    Args:
        communicator: carries requests.
        policy: decides which compressor serves which bucket.
        tensors: what is exchanged, in the order in which gradients are expected.
        skip: patterns of tensor names that travel dense.
        name: prefix of its collectives; the same on all ranks, unique in a process.

    Attributes:
        steps: exchanges so far, skipped ones included.
        skipped: exchanges that a gradient spoilt which was not finite.
        device: of the first bucket.
        evidence: what the policy has asked for.
        replicas: returns the weights, by the tensors' names, for evidence that looks at them.
        hyper: parameter group -> its settings, as compressors are told them (`Info.hyper`).
        batches: which buckets share a call; packs and unpacks tensors.
        decisions: of the policy and its observers.
        accounts: bytes and seconds.
        results: of the step that was closed, by batch.
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
    ) -> None:
        self.communicator, self.policy, self.name = communicator, policy, name
        self.xp = communicator.xp
        self.skip = tuple(skip)
        self.steps = self.skipped = 0
        self.device: Any = None
        self.replicas: Callable[[], Mapping[str, Tensor]] = _unknown
        self.hyper: Mapping[str, Mapping[str, Any]] = {}
        self.bucket_states: list[BucketState] = []
        self.entry_of: dict[int, BucketState] = {}  # by number of the tensor
        self.tensors: list[TensorInfo] = []
        self.bucket_batches = BucketBatches(self, self.group_bytes)
        self.evidence = EvidenceCollector(self)
        self.decisions = Decisions(self)
        self.accounts = Accounts()
        self.running: Step | None = None  # the current step
        self.results: dict[int, Tensor] = {}
        self._lr: dict[str, float] = {}
        self.extend(tensors)

    # --------------------------------------------------------------------------------- the layout
    def extend(self, tensors: Sequence[TensorInfo]) -> None:
        """Exchange these tensors too, from now on.

        Every rank must do so before the same exchange. What is there stays as it is.

        Raises:
            ValueError: one of them cannot be exchanged (`Compressor.accept`).
        """
        buckets = make_buckets(tensors, scope=self.policy.scope, skip=self.skip)
        specs = [
            Spec(b.shape, b.dtype, self.xp, tensors[b.members[0]].kind or None) for b in buckets
        ]
        for observer in self.policy.observers:
            observer.extending(self, [*(entry.bucket for entry in self.bucket_states), *buckets])
        for bucket, spec in zip(buckets, specs, strict=True):
            for choice in self.policy.choices(bucket):
                choice.accept(spec, bucket.name)
        self.policy.bind(self, [bucket.name for bucket in buckets if bucket.compress])
        for bucket, spec in zip(buckets, specs, strict=True):
            level = self.policy.choice(bucket)
            moved = tuple(len(self.tensors) + member for member in bucket.members)
            entry = BucketState(
                replace(bucket, members=moved), self.policy.choices(bucket), spec, level
            )
            entry.served_from = self.counted
            self.bucket_states.append(entry)
            self.entry_of |= dict.fromkeys(moved, entry)
        self.tensors.extend(tensors)
        self.device = self.bucket_states[0].spec.device if self.bucket_states else None
        self.accounts.each_step = sum(entry.bucket.dense_bytes for entry in self.bucket_states)
        self.bucket_batches.outdate()

    # ----------------------------------------------------------------------------------- one step
    def begin(self, lr: float | Mapping[str, float] = 0.0) -> None:
        """Begin an exchange. Runs the policy's decision first, if one is due (then it waits)."""
        self.decide(lr)
        self.open(lr)

    def decide(self, lr: float | Mapping[str, float]) -> None:
        """Take a decision if one is due; collective."""
        rates = self.rates(lr)
        if self.decisions.due(rates):
            self.communicator.run(f"{self.name}.policy", self.decisions.take(rates))

    def open(self, lr: float | Mapping[str, float] = 0.0) -> Step:
        """Begin an exchange whose decisions have been taken."""
        self._tick(self.rates(lr))
        observers = self.policy.observers
        if observers.weight != 1:  # which is the rate that this step will be taken with
            self._lr = {name: rate * observers.weight for name, rate in self._lr.items()}
        guarded = bool(self.evidence.followed)
        guarded |= any(
            s.compressor.batching != "any" or s.carried is not None for s in self.bucket_states
        )
        plan, number = self.bucket_batches.refresh(), self.bucket_batches.number()
        step = Step(self.communicator, plan.groups, self.name, number, guarded)
        step.measuring = observers.any("measures")
        self.running = step
        return step

    def _tick(self, rates: dict[str, float]) -> None:
        self._lr = rates
        self.policy.tick(rates)
        for observer in self.policy.observers:
            observer.opening(self, rates)

    def start(self, index: int, grad: Tensor, parameter: Tensor = None) -> None:
        """Start the exchange of one bucket batch.

        Args:
            index: of the batch.
            grad: the gradients, from `BucketBatches.pack`; their memory may be overwritten.
            parameter: the weights, from `BucketBatches.pack_weights`, if the compressor
                `needs_weights`.
        """
        assert self.running is not None
        memory = self.bucket_batches.memory[index]
        first, wanted = memory.entries[0], self.evidence.wanted(memory.entries[0])
        detects_nonfinite = first.compressor.detects_nonfinite and memory.carried() is None
        detects_nonfinite = detects_nonfinite and not any(one.looks_before for one in wanted)
        opening = functools.partial(self._opening, memory, wanted, parameter)
        self.running.start(index, grad, opening, detects_nonfinite)

    def _opening(
        self, memory: BatchState, wanted: Sequence[Evidence], parameter: Tensor, grad: Tensor
    ) -> ExchangeGenerator:
        """Collect evidence; return the compressor's generator."""
        first = memory.entries[0]
        info = replace(self.info(first), parameter=parameter)
        memory.open(info, wanted)
        if wanted:
            self.evidence.before(memory, wanted, grad)
        carried = memory.carried()
        if carried is not None:
            grad = grad + self.xp.cast(carried, first.bucket.dtype)
        return first.compressor.exchange(grad, memory.state, info)

    def observe(self, grads: Sequence[Tensor], lr: float | Mapping[str, float]) -> None:
        """Tell policy and evidence of this rank's gradients in a step without an exchange.

        Args:
            grads: in the order of `tensors`.
            lr: as in `begin`.
        """
        for entry in self.bucket_states:
            self.evidence.observe(entry, grads)
        self._tick(self.rates(lr))

    def finish(self) -> bool:
        """Wait for the end; False if a rank's gradient was not finite: all means are NaN then."""
        assert self.running is not None
        self.running.finish()
        return self.close()

    def close(self) -> bool:
        """Keep what a step that is done has brought; see `finish`."""
        step = self.running
        assert step is not None
        self.results = {}
        for index, memory in enumerate(self.bucket_batches.memory):
            if step.bad is True:
                memory.take_back()
            else:
                self.results[index] = self._keep(memory, *step.result(index), step.bad)
        self.bucket_batches.weigh(step)
        for observer in self.policy.observers:
            observer.closed(self, step)
        self._count(step)
        if step.bad is True:
            self.skipped += 1
        self.running = None
        return step.bad is not True

    def _keep(self, memory: BatchState, mean: Tensor, state: State, bad: Any) -> Tensor:
        """Keep a batch's state and evidence; `bad` may be symbolic. Returns the mean."""
        if bad is not False:
            xp, old = self.xp, memory.state
            mean = xp.where(bad, xp.nans_like(mean), mean)
            state = {key: xp.where(bad, old[key], value) for key, value in state.items()}
        memory.keep(state)
        self.evidence.after(memory, mean, bad)
        return mean

    def _count(self, step: Step) -> None:
        self.accounts.count(step)
        self.steps += 1

    def advance(self) -> bool:
        """Move on without waiting; True when the step is done and `close` may be called."""
        assert self.running is not None
        return self.running.advance()

    def abort(self) -> None:
        """Forget a step that was begun and cannot be finished (after an error).

        Errors and sums are as before it, unless later rounds had begun.
        """
        if self.running is not None:
            self.running.take_back()
            self.running = None
            for memory in self.bucket_batches.memory:
                memory.take_back()

    # ----------------------------------------------------------------------------------- the clock
    def info(self, entry: BucketState, step: Any = None) -> Info:
        """Return what a entry's compressor is told."""
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
        )

    @property
    def counted(self) -> int:
        """Exchanges that were not skipped."""
        return self.steps - self.skipped

    def phase(self, entry: BucketState) -> int:
        """Return the phase that a entry's compressor is in (`Compressor.variant`)."""
        compressor = entry.compressor
        return compressor.variant(self.counted - entry.served_from) if compressor.phases else 0

    def rates(self, lr: float | Mapping[str, float]) -> dict[str, float]:
        """Return each bucket's learning rate, from one for all or one each."""
        if isinstance(lr, Mapping):
            return dict(lr)
        return {entry.bucket.name: lr for entry in self.bucket_states}

    # -------------------------------------------------------------------------------------- levels
    def switch(self, entry: BucketState, level: int) -> None:
        """Let another level serve."""
        if level != entry.level:
            entry.record_switch(level, self.counted)
            entry.switch(level, self.info(entry))
            self.bucket_batches.outdate()

    def load_bucket_state(
        self, entry: BucketState, saved: SavedState, made: Info | None = None
    ) -> None:
        """Put a entry back as it was saved, in NumPy; see `BucketState.created_with`."""
        entry.load(saved.map(lambda array: self.xp.asarray(array, entry.spec.device)))
        entry.created_with = made
        self.bucket_batches.outdate()
        if entry.bucket.compress:  # what a gate found holds no more
            self.switch(entry, self.policy.choice(entry.bucket))

    # --------------------------------------------------------------------------------- accounting
    def stats(self) -> dict[str, Any]:
        """Bytes and seconds of this rank since the beginning.

        steps: exchanges; dense: bytes of the gradients; dense_sent: what a ring allreduce of them
        would send; payload, sent, received: see `traffic`; between: `sent` without what is known
        to have stayed within a machine (see `machines`); ratio: dense_sent / sent; seconds: in
        encoding (until the first request), waiting, and decoding (after it); reports: for each
        bucket whose method has something to say of itself, what (`Compressor.report`); privacy:
        what has been spent (`PrivacyBudget.stats`), if there is a budget; batch_size: examples of
        all ranks in a step now, if the policy has a say in that.
        """
        known = self.accounts.stats(self.communicator.size)
        found = {
            "steps": self.steps,
            **known,
            "reports": reports(self.bucket_states),
            "privacy": {},
        }
        return found | self.policy.observers.stats()

    def levels(self) -> dict[str, str]:
        """Return which compressor serves each bucket now."""
        return {entry.bucket.name: repr(entry.compressor) for entry in self.bucket_states}

    def advice(self) -> Advice:
        """Return where compression pays in this job, with the figures (on rank 0).

        Raises:
            RuntimeError: the policy has no gate.
        """
        gating = self.policy.observers.find(Gating)
        if gating is None:
            raise RuntimeError(
                "exchange.advice() needs a gate: pass for example Fixed(PowerSGD(1), gate='auto')."
            )
        return gating.advice(self)


def _unknown() -> Mapping[str, Tensor]:
    raise RuntimeError("weights: the policy looks at them; simulated ranks give them to step().")
