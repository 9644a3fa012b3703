"""Runs the conversations: state, levels, bytes and checkpoints of everything that is exchanged."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.core.base import Compressor, Conversation, Info, State, Tensor
from accordion_hvd.engine.buckets import Bucket, TensorInfo, fingerprint, make_buckets
from accordion_hvd.engine.decisions import Decisions, level_of, levels_of
from accordion_hvd.engine.plan import Plan, dense_bytes, make_plan
from accordion_hvd.engine.prices import averaging_share, bytes_sent
from accordion_hvd.engine.slots import Memory, Slot
from accordion_hvd.engine.step import Step
from accordion_hvd.ops.spec import Spec
from accordion_hvd.policies.advice import Advice
from accordion_hvd.policies.base import Policy


class Exchange:
    """Averages gradients over the ranks, bucket by bucket, under a policy.

    Use: `begin`, then `start` for each unit of the plan in any order, then `finish`; `unpack(i)`
    then gives each unit's results. One clock: `steps` counts exchanges, skipped ones included;
    `skipped` counts those alone.

    Args:
        communicator: carries requests.
        policy: decides which compressor serves which bucket.
        tensors: what is exchanged, in the order in which gradients are expected.
        skip: patterns of tensor names that travel dense.
        name: prefix of its collectives; the same on all ranks, unique in a process.
    """

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
        self.observe_always = False  # for graphs, where a sum that stops means a new trace
        self.keep_buffers = False  # if nobody looks at a step's means when the next one begins
        self.traffic = Traffic()
        self.dense_bytes = 0.0
        self._each_step = 0.0  # bytes of all tensors
        self.seconds = {"encode": 0.0, "wait": 0.0, "decode": 0.0}
        self.slots: list[Slot] = []
        self.slot_of: dict[int, Slot] = {}  # by number of the tensor
        self.tensors: list[TensorInfo] = []
        self._plan: Plan | None = None
        self._memory: list[Memory] = []  # one for each unit of the plan
        self._number = 0  # of the plan
        self._payloads: dict[tuple[int, int], float] = {}  # bucket and level -> bytes
        self._weighing = False  # this step tells how many bytes the first requests have
        self._outdated = False  # the plan, from the next step on
        self._phases: list[int] = []  # when the plan was made, of those
        self._phased: list[Slot] = []  # that have some
        self._step: Step | None = None
        self._decisions = Decisions(self)
        self._lr: dict[str, float] = {}
        self.hyper: Mapping[str, Mapping[str, Any]] = {}  # parameter group -> its settings
        self._means: dict[int, Tensor] = {}
        self.extend(tensors)

    # --------------------------------------------------------------------------------- the layout
    def extend(self, tensors: Sequence[TensorInfo]) -> None:
        """Exchange these tensors too, from now on.

        Every rank must do so before the same exchange. What is there stays as it is.

        Raises:
            ValueError: one of them cannot be exchanged (`Compressor.accept`).
        """
        buckets = make_buckets(tensors, scope=self.policy.scope, skip=self.skip)
        if self.policy.private:
            check_private(self.policy, [*(slot.bucket for slot in self.slots), *buckets], self.skip)
        for bucket in buckets:
            spec = self._spec(bucket, tensors)
            for level in self._levels(bucket):
                level.accept(spec, bucket.name)
        if self.policy.capped:
            self._price([*(slot.bucket for slot in self.slots), *buckets])
        self.policy.bind(self, [bucket.name for bucket in buckets if bucket.compress])
        self.slots += [self._slot(bucket, self._spec(bucket, tensors)) for bucket in buckets]
        self.tensors.extend(tensors)
        self._each_step = sum(dense_bytes(slot.bucket) for slot in self.slots)
        self._plan = None

    def _price(self, buckets: Sequence[Bucket]) -> None:
        """Tell the policy what each of its levels sends."""
        prices = {
            bucket.name: [self._bytes(level, bucket) for level in self._levels(bucket)]
            for bucket in buckets
            if bucket.compress
        }
        rest = [self._bytes(self._levels(b)[0], b) for b in buckets if not b.compress]
        method, models = self.policy.method, 0.0
        if method is not None:
            models = averaging_share(method, self.communicator.size) * sum(
                map(dense_bytes, buckets)
            )
        self.policy.price(prices, sum(rest), models)

    def _bytes(self, level: Compressor, bucket: Bucket) -> float:
        return bytes_sent(level, bucket.shape, bucket.dtype, self.communicator.size)

    def _spec(self, bucket: Bucket, tensors: Sequence[TensorInfo]) -> Spec:
        """What a bucket of these tensors is like."""
        device = tensors[bucket.members[0]].kind or None
        return Spec(bucket.shape, bucket.dtype, self.xp, device)

    def _levels(self, bucket: Bucket) -> tuple[Compressor, ...]:
        """What may serve a bucket."""
        if bucket.compress:
            return levels_of(self.policy, bucket.name)
        return (self.policy.plain() if bucket.size else Dense(),)

    def _slot(self, bucket: Bucket, spec: Spec) -> Slot:
        """For a bucket of tensors that come after those that are there."""
        level = level_of(self.policy, bucket.name) if bucket.compress else 0
        moved = tuple(len(self.tensors) + member for member in bucket.members)
        slot = Slot(replace(bucket, members=moved), self._levels(bucket), spec, level)
        slot.since = self.counted
        self.slot_of |= dict.fromkeys(moved, slot)
        return slot

    @property
    def plan(self) -> Plan:
        """Which buckets share a conversation and which leave together, at the present levels."""
        if self._plan is None:
            buckets = [slot.bucket for slot in self.slots]
            kinds = [(s.compressor.stacks, self._common(s)) for s in self.slots]
            self._plan = make_plan(buckets, kinds, self._sizes(), self._limit())
            self._memory = [
                Memory([self.slots[i] for i in unit.buckets], unit.stacked, self.xp)
                for unit in self._plan.units
            ]
            self._phased = [slot for slot in self.slots if slot.compressor.phases]
            self._phases = [self.phase(slot) for slot in self._phased]
            levels = [(s.bucket.name, s.bucket.shape, s.level) for s in self.slots]
            self._number = fingerprint(levels, self._phases, self._plan.units, self._plan.groups)
        return self._plan

    def _common(self, slot: Slot) -> Hashable:
        """What buckets must have in common to share a conversation."""
        bucket = slot.bucket
        kind = repr(slot.compressor), self.phase(slot)
        return *kind, bucket.dtype, str(slot.spec.device), bucket.group, bucket.compress

    def _sizes(self) -> list[float]:
        """About how many bytes each bucket's first requests have."""
        known, self._weighing = [], False
        for i, slot in enumerate(self.slots):
            self._weighing |= (i, slot.level) not in self._payloads
            known.append(self._payloads.get((i, slot.level), dense_bytes(slot.bucket)))
        return known

    def forget_plan(self) -> None:
        """Plan as at the beginning: other ranks may not know what this one has learned."""
        self._plan = None
        self._payloads.clear()

    def _limit(self) -> float | None:
        """Bytes after which a group is closed; None for the plan's own rule."""
        return None

    def layout(self) -> str:
        """What ranks must agree on, in words: names, shapes, levels."""
        rows = []
        for slot in self.slots:
            bucket = slot.bucket
            rows.append(f"{bucket.name} {bucket.shape} {bucket.dtype} {slot.levels!r}")
        return "\n".join([f"{self.policy!r} skip={self.skip!r}", *rows])

    def number(self) -> int:
        """A number that is equal on ranks that are about to exchange the same things."""
        return self._number if self.plan else 0

    # ----------------------------------------------------------------------------------- one step
    def begin(self, lr: float | Mapping[str, float] = 0.0) -> None:
        """A new exchange. Runs the policy's decision first, if one is due (then it waits)."""
        self.decide(lr)
        self.open(lr)

    def decide(self, lr: float | Mapping[str, float]) -> None:
        """Take a decision if one is due; collective."""
        rates = self.rates(lr)
        if self.due(rates):
            self.communicator.run(f"{self.name}.policy", self.decision(rates))

    def open(self, lr: float | Mapping[str, float] = 0.0) -> Step:
        """A new exchange, whose decisions have been taken."""
        self._lr = self.rates(lr)
        self._tick()
        times = self.policy.micro_batches
        if times != 1:  # which is the rate that this step will be taken with
            self._lr = {name: rate * times for name, rate in self._lr.items()}
        guarded = self._guarded()
        if self._outdated or self._phases != [self.phase(slot) for slot in self._phased]:
            self._plan, self._outdated = None, False
        groups = self.plan.groups
        self._step = Step(self.communicator, groups, self.name, self.number(), guarded)
        self._step.measuring = self.policy.gate is not None and self.policy.gate.measuring
        return self._step

    def _guarded(self) -> bool:
        """Whether something is kept that a non-finite gradient would spoil; equal on all ranks."""
        if self.policy.signal is not None and (self.observe_always or self.policy.observing()):
            return True
        return any(s.compressor.stacks != "any" or s.owed is not None for s in self.slots)

    @property
    def running(self) -> Step | None:
        """The step under way."""
        return self._step

    def start(self, index: int, grad: Tensor, parameter: Tensor = None) -> None:
        """Give unit `index` its gradients (as `pack` returns them), whose memory may be used.

        And its weights (as `pack_weights` returns them), if it `reads` them.
        """
        assert self._step is not None
        opening = functools.partial(self._open_talk, index, parameter)
        self._step.start(index, grad, opening, self._checks(index))

    def finish(self) -> bool:
        """Wait for the end; False if a rank's gradient was not finite: all means are NaN then."""
        assert self._step is not None
        self._step.finish()
        return self.close()

    def close(self) -> bool:
        """Keep what a step that is done has brought; see `finish`."""
        step = self._step
        assert step is not None
        self._means = {}
        for index, memory in enumerate(self._memory):
            if step.bad is not True:
                self._means[index] = self._keep(memory, *step.result(index), step.bad)
            elif memory.unseen is not None:
                memory.seen = memory.unseen
            memory.unseen = None
        if self._weighing:
            self._weigh(step)
        if step.measuring:
            self._decisions.measure(step)
        self._count(step)
        if step.bad is True:
            self.skipped += 1
        self._step = None
        return step.bad is not True

    def _weigh(self, step: Step) -> None:
        """Plan anew, now that it is known how many bytes the first requests have."""
        for index, unit in enumerate(self.plan.units):
            size = sum(self.slots[i].bucket.size for i in unit.buckets)
            for i in unit.buckets:
                slot = self.slots[i]
                share = step.payload(index) * slot.bucket.size / max(size, 1)
                self._payloads[i, slot.level] = share
        self._weighing, self._outdated = False, True

    def advance(self) -> bool:
        """Move on without waiting; True when the step is done and `close` may be called."""
        assert self._step is not None
        return self._step.advance()

    def pack(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Unit `index`'s tensors (in the order of its `members`) as its conversation sees them."""
        if self.plan.units[index].stacked != "alike" or not self.keep_buffers:
            return self._packed(index, parts)
        memory = self._memory[index]
        memory.buffer = self._packed(index, parts, memory.buffer)
        return memory.buffer

    def observe(self, grads: Sequence[Tensor], lr: float | Mapping[str, float]) -> None:
        """A step that exchanges nothing: the policy is told of it, and of this rank's gradients.

        Args:
            grads: in the order of `tensors`.
            lr: as in `begin`.
        """
        xp = self.xp
        self._lr = self.rates(lr)
        for slot in self.slots:
            if self._observes(slot, "local"):
                parts = [xp.reshape(grads[member], (-1,)) for member in slot.bucket.members]
                grad = self._weighted(xp.reshape(xp.concat(parts), slot.bucket.shape))
                seen = slot.spec.zeros(slot.bucket.shape) if slot.seen is None else slot.seen
                slot.seen = xp.accumulate(seen, grad)
        self._tick()

    def reads(self, index: int) -> bool:
        """Whether unit `index`'s conversation is told the weights."""
        return self.slots[self.plan.units[index].buckets[0]].compressor.reads

    @property
    def reading(self) -> bool:
        """Whether any conversation, of any level, is told the weights."""
        return any(level.reads for slot in self.slots for level in slot.levels)

    def pack_weights(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Unit `index`'s weights as its conversation sees them."""
        return self._packed(index, parts)

    def _packed(self, index: int, parts: Sequence[Tensor], buffer: Tensor = None) -> Tensor:
        unit = self.plan.units[index]
        if self.policy.several:
            return self.xp.beside([_rows(self.xp, part) for part in parts])
        if unit.stacked == "alike":
            return self.xp.stack(parts, buffer)
        if unit.stacked or self.slots[unit.buckets[0]].bucket.packed:
            return self.xp.concat([self.xp.reshape(part, (-1,)) for part in parts])
        return parts[0]

    def unpack(self, index: int) -> list[Tensor]:
        """The means of unit `index`'s tensors (its `members`), in their shapes and dtype."""
        unit = self.plan.units[index]
        bucket = self.slots[unit.buckets[0]].bucket
        mean = self.xp.cast(self._means[index], bucket.dtype)
        if unit.stacked == "alike":
            return self.xp.unstack(mean)
        shapes = [self.tensors[member].shape for member in unit.members]
        pieces = [mean]
        if unit.stacked or bucket.packed:
            pieces = self.xp.split(mean, [self.tensors[member].size for member in unit.members])
        return [self.xp.reshape(p, shape) for p, shape in zip(pieces, shapes, strict=True)]

    def give(self, grads: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> None:
        """Start every unit with its part of `grads` and `weights` (in the order of `tensors`)."""
        for index, unit in enumerate(self.plan.units):
            told = None
            if weights and self.reads(index):
                told = self.pack_weights(index, [weights[m] for m in unit.members])
            self.start(index, self.pack(index, [grads[m] for m in unit.members]), told)

    def means(self) -> list[Tensor]:
        """What the step that was closed has brought, tensor by tensor."""
        found: dict[int, Tensor] = {}
        for index, unit in enumerate(self.plan.units):
            found |= dict(zip(unit.members, self.unpack(index), strict=True))
        return [found[member] for member in range(len(self.tensors))]

    def release(self) -> None:
        """Let go of the last step's means, which else stay in memory until the next ones come."""
        self._means.clear()

    def shares(self, index: int) -> bool:
        """Whether the means of unit `index` share their memory."""
        unit = self.plan.units[index]
        return bool(unit.stacked) or self.slots[unit.buckets[0]].bucket.packed

    def abort(self) -> None:
        """Forget a step that was begun and cannot be finished (an error on the way).

        Errors and sums are as before it, unless later rounds had begun.
        """
        if self._step is None:
            return
        self._step.take_back()
        self._step = None
        for memory in self._memory:
            if memory.unseen is not None:
                memory.seen, memory.unseen = memory.unseen, None

    # ------------------------------------------------------------------------------------- within
    def _checks(self, index: int) -> bool:
        """Whether the conversation finds non-finite gradients, and nothing is done before it."""
        memory = self._memory[index]
        first = memory.slots[0]
        return first.compressor.checks and not memory.owes and not self._observes(first, "local")

    def _open_talk(self, index: int, parameter: Tensor, grad: Tensor) -> Conversation:
        memory = self._memory[index]
        first = memory.slots[0]
        info = replace(self.info(first), parameter=parameter)
        observe = self._observes(first, self.policy.signal)
        memory.open(info, observe)
        if observe and self.policy.signal == "local":
            memory.unseen = memory.seen
            memory.seen = self.xp.accumulate(memory.seen, self._weighted(grad))
        owed = memory.owed()
        if owed is not None:
            grad = grad + self.xp.cast(owed, first.bucket.dtype)
        return first.compressor.exchange(grad, memory.state, info)

    def info(self, slot: Slot, step: Any = None) -> Info:
        """What slot's algorithm is told."""
        return Info(
            step=self.steps if step is None else step,
            rank=self.communicator.rank,
            size=self.communicator.size,
            name=slot.name,
            lr=self._lr.get(slot.bucket.name, 0.0),
            machines=self.communicator.machines,
            phase=self.phase(slot),
            sizes=slot.bucket.sizes,
            hyper=self.hyper.get(slot.bucket.group, {}),
        )

    @property
    def counted(self) -> int:
        """Exchanges that were not skipped."""
        return self.steps - self.skipped

    def phase(self, slot: Slot) -> int:
        """What the slot's algorithm calls the phase that it is in."""
        compressor = slot.compressor
        return compressor.variant(self.counted - slot.since) if compressor.phases else 0

    @property
    def drifting(self) -> list[Slot]:
        """Slots under whose methods the ranks' weights differ at times."""
        plain = Compressor.synchronous
        return [s for s in self.slots if type(s.compressor).synchronous is not plain]

    @property
    def span(self) -> int:
        """Exchanges at whose end the ranks' weights are alike now and were not before: 0 if not.

        1 with methods that keep them alike; else the number of those since they last were, without
        skipped ones. A function of the clock alone, so equal on all ranks.
        """
        drifting = self.drifting

        def alike(back: int) -> bool:
            turns = ((s.compressor, self.counted - s.since - back) for s in drifting)
            return all(method.synchronous(max(turn, 0)) for method, turn in turns)

        if not drifting:
            return 1
        return next(n for n in itertools.count(1) if alike(n)) if alike(0) else 0

    def prepare(self, slot: Slot) -> None:
        """Make the memory that a slot lacks."""
        slot.prepare(self.info(slot))
        if slot.seen is None and self._observes(slot, self.policy.signal):
            slot.seen = slot.spec.zeros(slot.bucket.shape)

    def _observes(self, slot: Slot, signal: str | None) -> bool:
        """Whether this rank sums such gradients of the slot for the policy now."""
        if signal is None or self.policy.signal != signal or self.communicator.rank != 0:
            return False
        chosen = slot.bucket.compress or self.policy.whole
        return chosen and (self.observe_always or self.policy.observing())

    def _weighted(self, grad: Tensor) -> Tensor:
        """A gradient as often as it counts in a window's sum: for each of its small batches."""
        times = self.policy.micro_batches
        return grad if times == 1 else grad * times

    def _keep(self, memory: Memory, mean: Tensor, state: State, bad: Any) -> Tensor:
        """What follows when a step is done; `bad` may be symbolic. Returns the mean."""
        if bad is not False:
            xp, old = self.xp, memory.state
            mean = xp.either(bad, xp.nans_like(mean), mean)
            state = {key: xp.either(bad, old[key], value) for key, value in state.items()}
        if self._observes(memory.slots[0], "reduced"):
            seen = self.xp.accumulate(memory.seen, self._weighted(mean))
            memory.seen = seen if bad is False else self.xp.either(bad, memory.seen, seen)
        memory.keep(state)
        return mean

    def rates(self, lr: float | Mapping[str, float]) -> dict[str, float]:
        """Each bucket's learning rate, from one for all or one each."""
        if isinstance(lr, Mapping):
            return dict(lr)
        return {slot.bucket.name: lr for slot in self.slots}

    def _tick(self) -> None:
        self.policy.tick(self._lr)
        if self.policy.gate is not None:
            self.policy.gate.tick(self.steps)

    def _count(self, step: Step) -> None:
        self.traffic.add(step.traffic)
        self.dense_bytes += self._each_step
        for key, value in step.seconds.items():
            self.seconds[key] += value
        self.steps += 1

    # ---------------------------------------------------------------------------------- decisions
    def due(self, rates: Mapping[str, float]) -> bool:
        """Whether a `decision` must come before the next exchange; equal on all ranks."""
        return self._decisions.due(rates)

    def decision(self, rates: Mapping[str, float]) -> Conversation:
        """The conversation in which rank 0 decides, by policy and gate, and all ranks follow."""
        yield from self._decisions.conversation(rates)
        return None, {}

    def advice(self) -> Advice:
        """Where compression pays in this job, with the figures (on rank 0).

        Raises:
            RuntimeError: the policy has no gate.
        """
        return self._decisions.advice()

    def switch(self, slot: Slot, level: int) -> None:
        """Let another level serve."""
        if level != slot.level:
            slot.turn(level, self.counted)
            slot.switch(level, self.info(slot))
            self._plan = None

    def load_slot(
        self, slot: Slot, level: int, arrays: Mapping[str, np.ndarray], made: Info | None = None
    ) -> None:
        """Put a slot back as it was: `arrays` by the names of `Slot.tensors`; see `Slot.made`."""
        slot.load(level, {k: self.xp.asarray(a, slot.spec.device) for k, a in arrays.items()})
        slot.made = made
        self._plan = None
        if slot.bucket.compress:
            self.switch(
                slot, level_of(self.policy, slot.bucket.name)
            )  # what a gate found holds no more

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
        ranks = self.communicator.size
        dense_sent = 2 * (ranks - 1) / ranks * self.dense_bytes
        sent = self.traffic.sent
        return {
            "steps": self.steps,
            "dense": self.dense_bytes,
            "dense_sent": dense_sent,
            "payload": self.traffic.payload,
            "sent": sent,
            "received": self.traffic.received,
            "between": sent - self.traffic.within,
            "ratio": dense_sent / sent if sent else math.nan,
            "seconds": dict(self.seconds),
            "reports": self._reports(),
            "privacy": self.policy.budget.stats() if self.policy.budget is not None else {},
        } | self._batch()

    def _batch(self) -> dict[str, int]:
        policy = self.policy
        if policy.batch_size is None:
            return {}
        return {"batch_size": policy.batch_size[0] * policy.micro_batches}

    def _reports(self) -> dict[str, dict[str, float]]:
        reports = {s.bucket.name: s.compressor.report(s.state or {}) for s in self.slots}
        return {
            bucket: {key: float(self.xp.to_numpy(x).reshape(-1)[0]) for key, x in report.items()}
            for bucket, report in reports.items()
            if report
        }

    def levels(self) -> dict[str, str]:
        """Which compressor serves each bucket now."""
        return {slot.bucket.name: repr(slot.compressor) for slot in self.slots}


def check_private(policy: Policy, buckets: Sequence[Bucket], skip: Sequence[str]) -> None:
    """Raise ValueError where something would travel beside the one vector that is protected."""
    if skip:
        raise ValueError(
            f"skip is {tuple(skip)!r}, but must be () with {policy!r}: what it names would travel "
            "unprotected."
        )
    if len(buckets) > 1:
        kinds = ", ".join(f"{bucket.name} ({bucket.dtype})" for bucket in buckets)
        raise ValueError(
            f"{policy!r} takes the whole model as one vector, but there are {len(buckets)}: "
            f"{kinds}. All its parameters must be of one dtype, on one device, and there from the "
            "beginning."
        )


def _rows(xp: ModuleType, part: Tensor) -> Tensor:
    """Several contributors' gradients of one tensor, as a matrix."""
    count, *shape = xp.shape(part)
    return xp.reshape(part, (count, math.prod(shape)))
