"""An exchange whose state lives in variables, so that a graph can carry it from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import tensorflow as tf

from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.core.base import Info, Tensor
from accordion_hvd.core.observer import Observer
from accordion_hvd.engine.bucket_state import BucketState
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.saved_state import SavedState
from accordion_hvd.engine.step import Step
from accordion_hvd.ops import tensorflow as xp
from accordion_hvd.policies import Policy


class TensorFlowExchange(Exchange):
    """Runs the same conversations eagerly or as part of a graph (`traced`).

    What a graph computes, Python does not see: the clock is a variable, and what a step moves is
    noted when it is traced and multiplied by the steps that were executed.

    Attributes:
        version: changes when graphs made so far are out of date (a level or phase has changed).
    """

    group_bytes = math.inf  # all gradients are there at once, and a graph finds its own order

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock: tf.Variable | None = None
        self._lost: tf.Variable | None = None  # of the clock's steps, those that were skipped
        self._skipped = 0
        self._steps = 0
        self._counted = 0  # steps whose bytes have been counted
        self._ticked = 0  # steps that the policy knows of
        self._now: Tensor | None = None  # the clock's value within the step being traced
        self._per_step: tuple[Traffic, float] = (Traffic(), 0.0)
        self._rates: dict[str, float] = {}
        self._held: dict[Any, tf.Variable] = {}
        self._outline: Any = None
        self.version = 0
        super().__init__(*args, **options)
        self.evidence.always = True

    # ----------------------------------------------------------------------------------- the clock
    @property
    def steps(self) -> int:  # type: ignore[override]
        """Exchanges so far, those within graphs included."""
        if self._clock is None:
            return self._steps
        with tf.init_scope():
            return int(self._clock.numpy())

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = self._counted = self._ticked = value
        if self._clock is not None:
            with tf.init_scope():
                self._clock.assign(value)

    @property
    def skipped(self) -> int:  # type: ignore[override]
        """Exchanges that a non-finite gradient has spoilt, those within graphs included."""
        if self._lost is None:
            return self._skipped
        with tf.init_scope():
            return int(self._lost.numpy())

    @skipped.setter
    def skipped(self, value: int) -> None:
        self._skipped = value
        if self._lost is not None:
            with tf.init_scope():
                self._lost.assign(value)

    def info(self, entry: BucketState, step: Any = None) -> Info:
        """Return the `Info` for a entry's algorithm; within a graph the clock is a tensor."""
        return super().info(entry, self._now if step is None else step)

    @property
    def switching(self) -> bool:
        """Return whether the Python side changes during training: levels, phases."""
        compressors = [level for entry in self.bucket_states for level in entry.levels]
        phases = any(compressor.phases for compressor in compressors)
        decides = type(self.policy).due is not Policy.due
        others = any(type(x).due is not Observer.due for x in self.policy.observers)
        return phases or decides or others

    # ---------------------------------------------------------------------------- between the steps
    def prepare_trace(self) -> None:
        """Put all state into variables; eager. Afterwards `version` says whether to trace anew."""
        with tf.init_scope():
            if self._clock is None:
                self._clock = tf.Variable(self._steps, trainable=False, dtype=tf.int64)
                self._lost = tf.Variable(self._skipped, trainable=False, dtype=tf.int64)
            for index in range(len(self.bucket_states)):
                self._settle(index)
            now = [
                (s.level, self.phase(s), sorted(s.evidence), s.carried is None)
                for s in self.bucket_states
            ]
            outline = [self.policy.observers.weight, *now]
            if outline != self._outline:
                self.version += 1
                self._outline = outline

    def tick(self, lr: float) -> None:
        """Tell the policy that one step, which a graph will execute, is about to begin."""
        super()._tick(self.rates(lr))
        self._ticked += 1

    def catch_up(self, lr: float) -> None:
        """Between executions of a graph: tell the policy of steps done; decide. Collective.

        Where one execution has several steps, a decision due between two of them is taken now.

        Args:
            lr: the learning rate from now on.
        """
        self.account()
        for _ in range(self.steps - self._ticked):
            self.decide(lr)
            self.policy.tick(self._rates or self.rates(lr))
        self._ticked = self.steps
        self._rates = self.rates(lr)
        self.decide(lr)
        self.prepare_trace()

    def load_bucket_state(
        self, entry: BucketState, saved: SavedState, made: Info | None = None
    ) -> None:
        """Put a entry back as it was, in the variables that graphs know."""
        super().load_bucket_state(entry, saved, made)
        if self._clock is not None:
            self.prepare_trace()

    def _settle(self, index: int) -> None:
        entry = self.bucket_states[index]
        entry.prepare(self.info(entry))
        entry.evidence = {
            x.key: x.zeros(entry) for x in self.evidence.wanted(entry)
        } | entry.evidence
        assert entry.state is not None
        for key in [k for k in self._held if k[0] == index and k[1] not in (entry.level, None)]:
            del self._held[key]  # another level's: what it still needs is inactive
        held = {k: self._hold((index, entry.level, k), value) for k, value in entry.state.items()}
        entry.state = held
        entry.evidence = {
            k: self._hold((index, None, k), value) for k, value in entry.evidence.items()
        }
        entry.carried = self._hold((index, None, "carried"), entry.carried)

    def _hold(self, key: Any, value: Any) -> tf.Variable | None:
        known = self._held.get(key)
        if value is None or value is known:
            return value
        if known is not None and known.shape == value.shape and known.dtype == value.dtype:
            known.assign(value)
            return known
        self.version += 1
        self._held[key] = tf.Variable(tf.identity(value), trainable=False)
        return self._held[key]

    # ------------------------------------------------------------------------------ within a graph
    def traced(
        self, grads: Sequence[Tensor], lr: Tensor, weights: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Run one exchange in a graph, after `prepare_trace`; return the means by tensor."""
        assert self._clock is not None and self._lost is not None
        kept = [(entry.state or {}, entry.evidence, entry.carried) for entry in self.bucket_states]
        self._now = self._clock.read_value()
        with tf.control_dependencies([self._now]):  # after the step before
            grads = [tf.identity(grad) for grad in grads]
        try:
            for entry in self.bucket_states:
                entry.state = {
                    key: tf.identity(value) for key, value in (entry.state or {}).items()
                }
                entry.evidence = {key: tf.identity(value) for key, value in entry.evidence.items()}
                entry.carried = None if entry.carried is None else tf.identity(entry.carried)
            bad = self._trace_step(grads, lr, weights)
            means = self.bucket_batches.means()
            with tf.control_dependencies(means):  # what does not decode changes nothing
                for entry, known in zip(self.bucket_states, kept, strict=True):
                    _store(entry, *known, bad)
            with tf.control_dependencies(means):  # before the step that follows
                self._clock.assign(self._now + 1)
                if bad is not False:
                    self._lost.assign_add(tf.cast(bad, tf.int64))
            return means
        finally:
            self._now = None
            self.abort()
            for entry, (state, evidence, carried) in zip(self.bucket_states, kept, strict=True):
                entry.state, entry.evidence, entry.carried = state, evidence, carried

    def _trace_step(self, grads: Sequence[Tensor], lr: Any, weights: Sequence[Tensor]) -> Any:
        step = self.open(self.rates(lr))
        self.bucket_batches.give(grads, weights)
        while not self.advance():
            pass
        self.close()
        return step.bad

    def _tick(self, rates: dict[str, float]) -> None:
        if self._now is None:
            super()._tick(rates)
        else:
            self._lr = rates

    def _count(self, step: Step) -> None:
        if self._now is None:
            super()._count(step)
        else:
            self._per_step = (step.traffic, self.accounts.each_step)

    # ---------------------------------------------------------------------------------- accounting
    def account(self) -> None:
        """Count the bytes of steps that graphs have executed."""
        steps = self.steps
        traffic, dense = self._per_step
        done = steps - self._counted
        moved = [done * bytes_ for bytes_ in astuple(traffic)]
        self.accounts.traffic.add(Traffic(*moved))
        self.accounts.dense_bytes += dense * done
        self._counted = steps

    def stats(self) -> dict[str, Any]:
        """Bytes and seconds of this rank; steps within graphs have no seconds."""
        self.account()
        return super().stats()


def _store(entry: BucketState, state: Any, kept: Any, carried: Any, bad: Any) -> None:
    assert entry.state is not None
    for key, variable in state.items():
        variable.assign(entry.state[key])
    for key, variable in kept.items():
        new = entry.evidence[key]
        variable.assign(new if bad is False else xp.where(bad, variable, new))
    if carried is not None:
        nothing = tf.zeros_like(carried)
        carried.assign(nothing if bad is False else xp.where(bad, carried, nothing))
