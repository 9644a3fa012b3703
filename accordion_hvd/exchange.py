"""Runs the conversations: state, levels, bytes and checkpoints of everything that is exchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from accordion_hvd.base import Broadcast, Conversation, Info, Spec, State, Tensor
from accordion_hvd.buckets import TensorInfo, fingerprint, make_buckets, make_groups
from accordion_hvd.communicator import Communicator
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.policy.base import Policy
from accordion_hvd.slots import Slot
from accordion_hvd.step import Step
from accordion_hvd.traffic import ITEMSIZE, Traffic


class Exchange:
    """Averages gradients over the ranks, bucket by bucket, under a policy.

    Use: `begin`, then `start` for each bucket in any order, then `finish`; `unpack(i)` then gives
    each bucket's result. One clock: `steps` counts exchanges, skipped ones included.

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
        self.steps = 0
        self.observe_always = False  # for graphs, where a sum that stops means a new trace
        self.traffic = Traffic()
        self.dense_bytes = 0.0
        self.seconds = {"encode": 0.0, "wait": 0.0, "decode": 0.0}
        self.slots: list[Slot] = []
        self.groups: list[list[int]] = []
        self.tensors: list[TensorInfo] = []
        self._step: Step | None = None
        self._lr: dict[str, float] = {}
        self._means: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self.extend(tensors)

    # --------------------------------------------------------------------------------- the layout
    def extend(self, tensors: Sequence[TensorInfo]) -> list[int]:
        """Exchange these tensors too, from now on; returns their buckets' positions.

        Every rank must do so before the same exchange. What is there stays as it is.
        """
        offset, first = len(self.tensors), len(self.slots)
        self.tensors.extend(tensors)
        buckets = make_buckets(tensors, scope=self.policy.scope, skip=self.skip)
        self.policy.bind(self, [bucket.name for bucket in buckets if bucket.compress])
        for bucket in buckets:
            levels = self.policy.levels(bucket.name) if bucket.compress else (Dense(),)
            level = self.policy.level(bucket.name) if bucket.compress else 0
            moved = tuple(offset + member for member in bucket.members)
            self._bucket_of |= dict.fromkeys(moved, len(self.slots))
            device = tensors[bucket.members[0]].kind or None
            spec = Spec(bucket.shape, bucket.dtype, self.xp, device)
            self.slots.append(Slot(replace(bucket, members=moved), levels, spec, level))
        self.groups += [[first + i for i in group] for group in make_groups(buckets)]
        return list(range(first, len(self.slots)))

    def bucket_of(self, member: int) -> int:
        """The bucket in which tensor number `member` travels."""
        return self._bucket_of[member]

    def layout(self) -> str:
        """What ranks must agree on, in words: names, shapes, levels."""
        rows = []
        for slot in self.slots:
            bucket = slot.bucket
            rows.append(f"{bucket.name} {bucket.shape} {bucket.dtype} {slot.levels!r}")
        return "\n".join([f"{self.policy!r} skip={self.skip!r}", *rows])

    def plan(self) -> int:
        """A number that is equal on ranks that are about to exchange the same things."""
        return fingerprint([(s.bucket.name, s.bucket.shape, s.level) for s in self.slots])

    # ----------------------------------------------------------------------------------- one step
    def begin(self, lr: float | Mapping[str, float] = 0.0) -> None:
        """A new exchange. Runs the policy's decision first, if one is due (then it waits)."""
        rates = self.rates(lr)
        if self.policy.due(rates):
            self.communicator.run(f"{self.name}.policy", self.decision(rates))
        self.open(rates)

    def open(self, lr: float | Mapping[str, float] = 0.0) -> Step:
        """A new exchange, whose decisions have been taken."""
        self._lr = self.rates(lr)
        self._tick()
        guarded = any(slot.levels != (Dense(),) for slot in self.slots)
        self._step = Step(self.communicator, self.groups, self.name, self.plan(), guarded)
        return self._step

    @property
    def running(self) -> Step | None:
        """The step under way."""
        return self._step

    def start(self, index: int, grad: Tensor) -> None:
        """Give bucket `index` its gradient (in the bucket's shape), whose memory may be used."""
        assert self._step is not None
        self._step.start(index, grad, lambda clean: self._open_talk(index, clean))

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
        for index, slot in enumerate(self.slots):
            if step.bad is not True:
                self._means[index] = self._keep(slot, *step.result(index), step.bad)
            elif slot.unseen is not None:
                slot.seen = slot.unseen
            slot.unseen = None
        self._count(step)
        self._step = None
        return step.bad is not True

    def advance(self) -> bool:
        """Move on without waiting; True when the step is done and `close` may be called."""
        assert self._step is not None
        return self._step.advance()

    def pack(self, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Bucket `index`'s tensors as its conversation sees them."""
        if not self.slots[index].bucket.packed:
            return parts[0]
        return self.xp.concat([self.xp.reshape(part, (-1,)) for part in parts])

    def unpack(self, index: int) -> list[Tensor]:
        """The means of bucket `index`'s tensors, in their shapes and dtype."""
        bucket = self.slots[index].bucket
        mean = self.xp.cast(self._means[index], bucket.dtype)
        shapes = [self.tensors[member].shape for member in bucket.members]
        pieces = self.xp.split(mean, bucket.sizes) if bucket.packed else [mean]
        return [self.xp.reshape(p, shape) for p, shape in zip(pieces, shapes, strict=True)]

    def abort(self) -> None:
        """Forget a step that was begun and cannot be finished (an error on the way).

        Errors and sums are as before it, unless later rounds had begun.
        """
        if self._step is None:
            return
        self._step.take_back()
        self._step = None
        for slot in self.slots:
            if slot.unseen is not None:
                slot.seen, slot.unseen = slot.unseen, None

    # ------------------------------------------------------------------------------------- within
    def _open_talk(self, index: int, grad: Tensor) -> Conversation:
        slot = self.slots[index]
        self.prepare(slot)
        assert slot.state is not None
        if self._observes(slot, "local"):
            slot.unseen, slot.seen = slot.seen, self.xp.accumulate(slot.seen, grad)
        if slot.owed is not None:
            owed = self.xp.reshape(slot.owed, slot.bucket.shape)
            grad = grad + self.xp.cast(owed, slot.bucket.dtype)
        return slot.compressor.exchange(grad, slot.state, self.info(slot))

    def info(self, slot: Slot, step: Any = None) -> Info:
        """What slot's algorithm is told."""
        return Info(
            step=self.steps if step is None else step,
            rank=self.communicator.rank,
            size=self.communicator.size,
            name=slot.bucket.name,
            lr=self._lr.get(slot.bucket.name, 0.0),
            machines=self.communicator.machines,
        )

    def prepare(self, slot: Slot) -> None:
        """Make the state that a slot lacks."""
        slot.prepare(self.info(slot))
        if slot.seen is None and self._observes(slot, self.policy.signal):
            slot.seen = slot.spec.zeros(slot.bucket.shape)

    def _observes(self, slot: Slot, signal: str | None) -> bool:
        """Whether this rank sums such gradients of the slot for the policy now."""
        if signal is None or self.policy.signal != signal or self.communicator.rank != 0:
            return False
        return slot.bucket.compress and (self.observe_always or self.policy.observing())

    def _keep(self, slot: Slot, mean: Tensor, state: State, bad: Any) -> Tensor:
        """What follows when a step is done; `bad` may be symbolic. Returns the mean."""
        if bad is not False:
            xp, old = self.xp, slot.state
            assert old is not None
            mean = xp.either(bad, xp.nans_like(mean), mean)
            state = {key: xp.either(bad, old[key], value) for key, value in state.items()}
        if self._observes(slot, "reduced"):
            seen = self.xp.accumulate(slot.seen, mean)
            slot.seen = seen if bad is False else self.xp.either(bad, slot.seen, seen)
        slot.state, slot.owed = state, None
        return mean

    def rates(self, lr: float | Mapping[str, float]) -> dict[str, float]:
        """Each bucket's learning rate, from one for all or one each."""
        if isinstance(lr, Mapping):
            return dict(lr)
        return {slot.bucket.name: lr for slot in self.slots}

    def _tick(self) -> None:
        self.policy.tick(self._lr)

    def _count(self, step: Step) -> None:
        self.traffic.add(step.traffic)
        self.dense_bytes += self._dense()
        for key, value in step.seconds.items():
            self.seconds[key] += value
        self.steps += 1

    def _dense(self) -> float:
        return sum(s.bucket.size * ITEMSIZE[s.bucket.dtype] for s in self.slots)

    # ---------------------------------------------------------------------------------- decisions
    def decision(self, lr: Mapping[str, float]) -> Conversation:
        """The conversation at the end of a window: rank 0 decides, all ranks follow."""
        rows = self.policy.decide(self._norms(), lr) if self.communicator.rank == 0 else []
        text = np.frombuffer(json.dumps(rows).encode(), np.uint8)
        length = yield Broadcast(self._tensor(np.array([text.size], np.int64)))
        if self.communicator.rank != 0:
            text = np.zeros(int(self.xp.to_numpy(length)[0]), np.uint8)
        text = yield Broadcast(self._tensor(text))
        self.policy.apply(json.loads(self.xp.to_numpy(text).tobytes()))
        for slot in self.slots:
            if slot.bucket.compress:
                self.switch(slot, self.policy.level(slot.bucket.name))
                slot.seen = None
        return None, {}

    def _norms(self) -> dict[str, float]:
        """Of the sums over the window; read from the device once, together."""
        seen = [s for s in self.slots if s.seen is not None]
        if not seen:
            return {}
        norms = self.xp.to_numpy(self.xp.stack([self.xp.norm(s.seen) for s in seen]))
        return {s.bucket.name: float(n) for s, n in zip(seen, norms, strict=True)}

    def _tensor(self, values: np.ndarray) -> Tensor:
        return self.xp.asarray(values, self.slots[0].spec.device if self.slots else None)

    def switch(self, slot: Slot, level: int) -> None:
        """Let another level serve."""
        slot.switch(level, self.info(slot))

    def load_slot(
        self, slot: Slot, level: int, arrays: Mapping[str, np.ndarray], made: Info | None = None
    ) -> None:
        """Put a slot back as it was: `arrays` by the names of `Slot.tensors`; see `Slot.made`."""
        slot.load(level, {k: self.xp.asarray(a, slot.spec.device) for k, a in arrays.items()})
        slot.made = made

    # --------------------------------------------------------------------------------- accounting
    def stats(self) -> dict[str, Any]:
        """Bytes and seconds of this rank since the beginning.

        steps: exchanges; dense: bytes of the gradients; dense_sent: what a ring allreduce of them
        would send; payload, sent, received: see `traffic`; between: `sent` without what is known
        to have stayed within a machine (see `machines`); ratio: dense_sent / sent; seconds: in
        encoding (until the first request), waiting, and decoding (after it).
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
        }

    def levels(self) -> dict[str, str]:
        """Which compressor serves each bucket now."""
        return {slot.bucket.name: repr(slot.compressor) for slot in self.slots}
