"""An exchange whose state is stored in variables, so that graphs preserve it between steps."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import tensorflow as tf

from accordion_hvd.comm import timeouts
from accordion_hvd.comm.agreement import largest
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.core.base import Info, State, Tensor
from accordion_hvd.core.observer import Observer
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import BucketState
from accordion_hvd.engine.step import Step
from accordion_hvd.ops import tensorflow as xp
from accordion_hvd.policies import Policy
from accordion_hvd.tensorflow.variables import create

TracedStep = tuple[list[Tensor], list[tuple[State, State, Any]], Any]
"""Means by tensor; new state, evidence and carried residual by bucket; whether the step is bad."""


def _beginning(exchange: weakref.ref[TensorFlowExchange]) -> float:  # for a thread of `timeouts`
    alive = exchange()
    return 0.0 if alive is None or alive._began is None else float(alive._began.numpy())


class TensorFlowExchange(Exchange):
    """Exchange that runs the same exchange generators eagerly or as part of a graph (`traced`).

    Python does not observe the execution of a graph. Therefore the step count is a variable, and so
    is the time from the last gradient of a step to its last mean. The bytes of a step are recorded
    during tracing and multiplied by the number of executed steps.
    If phases repeat, a graph contains the step once for each turn (`Exchange.turn`).

    Attributes:
        version: number that changes when existing graphs are out of date, because a level or a
            phase has changed.
    """

    group_bytes = math.inf  # all gradients are ready at the same time, and graphs order operations

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock: tf.Variable | None = None
        self._lost_steps: tf.Variable | None = None  # number of skipped steps
        self._row: tf.Variable | None = None  # of them, number of the last ones in succession
        self._seconds: tf.Variable | None = None  # time of all exchanges in graphs
        self._began: tf.Variable | None = None  # when the present one began; 0 between exchanges
        self._recorded = 0.0  # part of it that the ledger knows
        self._skipped = 0  # number of skipped steps that `account` has counted
        self._steps = 0
        self._counted = 0  # steps whose bytes have been counted
        self._ticked = 0  # steps that the policy has counted
        self._now: Tensor | None = None  # step count within the step that is being traced
        self._turn: int | None = None  # turn that is being traced
        self._per_step: dict[int, tuple[Traffic, float]] = {}  # turn -> bytes of a traced step
        self._rates: dict[str, float] = {}
        self._variables: dict[Any, tf.Variable] = {}
        self._outline: Any = None
        self.version = 0
        super().__init__(*args, **options)
        if self.sync is not None:
            self.sync.always = True

    # ----------------------------------------------------------------------------------- the clock
    @property
    def steps(self) -> int:  # type: ignore[override]
        if self._clock is None:
            return self._steps
        # Eagerly, also while a graph is traced.
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
        if self._lost_steps is None:
            return self._skipped
        with tf.init_scope():
            return int(self._lost_steps.numpy())

    @skipped.setter
    def skipped(self, value: int) -> None:
        self._skipped = value
        if self._lost_steps is not None:
            with tf.init_scope():
                self._lost_steps.assign(value)

    def info(self, entry: BucketState, step: Any = None) -> Info:
        return super().info(entry, self._now if step is None else step)

    @property
    def switching(self) -> bool:
        """Return whether levels or phases may change during training."""
        compressors = [level for entry in self.bucket_states for level in entry.levels]
        phases = not all(compressor.period for compressor in compressors)
        policy_decides = type(self.policy).due is not Policy.due
        observer_decides = any(type(x).due is not Observer.due for x in self.policy.observers)
        return phases or policy_decides or observer_decides

    @property
    def turn(self) -> int:
        return super().turn if self._turn is None else self._turn

    def phase(self, entry: BucketState) -> int:
        period = entry.compressor.period
        if self._turn is None or period <= 1:
            return super().phase(entry)
        return entry.compressor.variant((self._turn - entry.served_from) % period)

    # ---------------------------------------------------------------------------- between the steps
    def prepare_trace(self) -> None:
        """Store all state in variables, eagerly; increase `version` if graphs are out of date."""
        with tf.init_scope():
            if self._clock is None:
                self._clock = create(self._steps, tf.int64)
                self._lost_steps = create(self._skipped, tf.int64)
                self._row = create(0, tf.int64)
                self._seconds = create(0.0, tf.float64)
                self._began = create(0.0, tf.float64)
                self.communicator.watch(functools.partial(_beginning, weakref.ref(self)))
            for index in range(len(self.bucket_states)):
                self._store_in_variables(index)
            buckets = [
                (s.level, self.lasting_phase(s), sorted(s.evidence), s.carried is None)
                for s in self.bucket_states
            ]
            outline = [self.policy.observers.weight, *buckets]
            if outline != self._outline:
                self.version += 1
                self._outline = outline

    def tick(self, lr: float) -> None:
        """Have the policy count a step that a graph is about to execute."""
        super()._tick(self.rates(lr))
        self._ticked += 1

    def catch_up(self, lr: float) -> None:
        """Have the policy count the executed steps, and take decisions that are due; collective.

        Call this method between executions of a graph. If one execution contained several steps, a
        decision that was due between two of them is taken now.
        """
        self.account()
        for _ in range(self.steps - self._ticked):
            self.decide(lr)
            self.policy.tick(self._rates or self.rates(lr))
        self._ticked = self.steps
        self._rates = self.rates(lr)
        self.decide(lr)
        self.prepare_trace()

    def decide(self, lr: float | Mapping[str, float]) -> None:
        """Take the decisions that are due; collective.

        Residuals that have gone beside a message are discarded, since graphs would repeat them.
        """
        super().decide(lr)
        states = self.bucket_states
        sent = [x for x in states if x.carried is not None and not x.compressor.additive]
        if sent:  # one that is zero on this rank may be due on another
            left = [np.any(xp.to_numpy(tf.convert_to_tensor(x.carried))) for x in sent]
            most = largest(xp.asarray(np.array(left, np.float32)))
            flags = xp.to_numpy(self.communicator.run(f"{self.name}.carried", most))
            for entry in (x for x, flag in zip(sent, flags, strict=True) if not flag):
                entry.carried = None

    def replace_bucket_states(self, loaded: Sequence[BucketState]) -> None:
        super().replace_bucket_states(loaded)
        if self._clock is not None:
            self.prepare_trace()

    def _store_in_variables(self, index: int) -> None:
        entry = self.bucket_states[index]
        entry.prepare(self.info(entry))
        wanted = self.sync.wanted(entry) if self.sync is not None else ()
        entry.evidence = {x.key: x.zeros(entry) for x in wanted} | entry.evidence
        stored = entry.stored
        assert stored is not None
        levels = (entry.level, None)
        for key in [k for k in self._variables if k[0] == index and k[1] not in levels]:
            del self._variables[key]  # variables of another level
        entry.stored = {k: self._as_variable((index, entry.level, k), x) for k, x in stored.items()}
        entry.evidence = {
            k: self._as_variable((index, None, k), value) for k, value in entry.evidence.items()
        }
        entry.carried = self._as_variable((index, None, "carried"), entry.carried)

    def _as_variable(self, key: Any, value: Any) -> tf.Variable | None:
        known = self._variables.get(key)
        if value is None or value is known:
            return value
        if known is not None and known.shape == value.shape and known.dtype == value.dtype:
            known.assign(value)
            return known
        # Existing graphs hold the old variable.
        self.version += 1
        self._variables[key] = create(tf.identity(value))
        return self._variables[key]

    # ------------------------------------------------------------------------------ within a graph
    def traced(
        self,
        grads: Sequence[Tensor],
        lr: Tensor,
        weights: Sequence[Tensor] = (),
        present: Tensor | None = None,
    ) -> list[Tensor]:
        """Trace one exchange into a graph, after `prepare_trace`; return the means by tensor.

        Args:
            present: fp32 vector as in `start`, for all tensors. If it is given, the last result is
                a vector of bools: whether each tensor is absent.
        """
        assert self._clock is not None and self._lost_steps is not None
        assert self._seconds is not None and self._began is not None and self._row is not None
        variables = [(s.stored or {}, s.evidence, s.carried) for s in self.bucket_states]
        self._now, lost = self._clock.read_value(), self._lost_steps.read_value()
        self.in_a_row = row = self._row.read_value()
        with tf.control_dependencies([self._now, row]):  # after the previous step
            grads = [tf.identity(grad) for grad in grads]
        with tf.control_dependencies(grads):
            began = tf.timestamp()
            self._began.assign(began)
        self._per_step = {}
        period = self._fresh_layout().period
        try:
            if period == 1:
                means, changed, bad = self._trace_step(grads, lr, weights, present)
            else:
                turns = [functools.partial(self._trace_turn, i, grads, lr, weights, present)
                         for i in range(period)]  # fmt: skip
                turn = tf.cast((self._now - lost) % period, tf.int32)
                means, changed, bad = tf.switch_case(turn, turns)
            with tf.control_dependencies(means):  # an invalid payload must not change the state
                for new, stored in zip(changed, variables, strict=True):
                    _store(*new, *stored, bad)
            with tf.control_dependencies(means):  # before the next step
                self._clock.assign(self._now + 1)
                seconds = tf.timestamp() - began  # of a clock that somebody may have set
                known = (seconds >= 0) & (seconds <= timeouts.seconds())
                self._seconds.assign_add(tf.where(known, seconds, 0.0))
                self._began.assign(0.0)
                if bad is not False:
                    self._lost_steps.assign_add(tf.cast(bad, tf.int64))
                    self._row.assign(tf.where(bad, row + 1, tf.zeros_like(row)))
            return means
        finally:
            self._now, self.in_a_row, self.lost = None, 0, math.nan
            self.abort()
            self._put_back(variables)

    def _put_back(self, variables: Sequence[tuple[Any, Any, Any]]) -> None:
        for entry, stored in zip(self.bucket_states, variables, strict=True):
            entry.stored, entry.evidence, entry.carried = stored

    def _trace_step(
        self, grads: Sequence[Tensor], lr: Any, weights: Sequence[Tensor], present: Tensor | None
    ) -> TracedStep:
        for entry in self.bucket_states:
            entry.stored = {key: tf.identity(value) for key, value in (entry.stored or {}).items()}
            entry.evidence = {key: tf.identity(value) for key, value in entry.evidence.items()}
            entry.carried = None if entry.carried is None else tf.identity(entry.carried)
        step = self.open(self.rates(lr))
        self.give(grads, weights, present)
        while not self.advance():
            pass
        self.close()
        self.starts = []  # these are times of the tracing
        changed = [(dict(s.stored or {}), dict(s.evidence), s.carried) for s in self.bucket_states]
        means = self.means()
        if present is not None:
            means.append(tf.stack([self.absent.get(i, False) for i in range(len(self.tensors))]))
        return means, changed, step.bad

    def _trace_turn(
        self,
        turn: int,
        grads: Sequence[Tensor],
        lr: Any,
        weights: Sequence[Tensor],
        present: Tensor | None,
    ) -> TracedStep:
        variables = [(s.stored or {}, s.evidence, s.carried) for s in self.bucket_states]
        self._turn = turn
        try:
            means, changed, bad = self._trace_step(grads, lr, weights, present)
            return means, changed, tf.convert_to_tensor(bad)
        finally:
            self._turn = None
            self.abort()
            self._put_back(variables)  # the next turn is traced from the same variables

    def _tick(self, rates: dict[str, float]) -> None:
        if self._now is None:
            super()._tick(rates)
        else:
            self._lr = rates

    def _count(self, step: Step, began: float) -> None:
        if self._now is None:
            super()._count(step, began)
        else:
            self._per_step[self.turn] = step.traffic, self.accounts.each_step

    # ---------------------------------------------------------------------------------- accounting
    def account(self) -> None:
        steps, skipped = self.steps, self.skipped
        first = self._counted - skipped
        executed, before = steps - self._counted, self.accounts.traffic.sent
        for turn, (traffic, dense) in self._per_step.items():
            period = len(self._per_step)
            # How many of the executed steps, from `first` on, had this turn.
            times = (executed + period - 1 - (turn - first) % period) // period
            self.accounts.traffic.add(Traffic(*(times * bytes_ for bytes_ in astuple(traffic))))
            self.accounts.dense_bytes += dense * times
        self._counted = steps
        self._report_skipped(skipped - self._skipped)
        self._skipped = skipped
        if executed and self._seconds is not None:
            self._record(executed, self.accounts.traffic.sent - before)

    def _record(self, steps: int, sent: float) -> None:
        assert self._seconds is not None
        with tf.init_scope():
            seconds = float(self._seconds.numpy())
        self.ledger.executed(self, steps, sent, seconds - self._recorded)
        self._recorded = seconds

    def stats(self) -> dict[str, Any]:
        """Return bytes and seconds of this rank; seconds do not include steps in graphs."""
        self.account()
        return super().stats()


def _store(
    state: State, evidence: State, kept: Any, variables: Any, followed: Any, carried: Any, bad: Any
) -> None:
    for key, variable in variables.items():
        variable.assign(state[key])
    for key, variable in followed.items():
        new = evidence[key]
        variable.assign(new if bad is False else xp.where(bad, variable, new))
    if carried is not None:
        kept = tf.zeros_like(carried) if kept is None else kept
        carried.assign(kept if bad is False else xp.where(bad, carried, kept))
