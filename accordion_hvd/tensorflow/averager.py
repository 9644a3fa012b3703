"""Averaging of TensorFlow gradients: eagerly, traced into a graph, or called from a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import tensorflow as tf

from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.horovod.tensorflow import HorovodCommunicator
from accordion_hvd.comm.local import connect
from accordion_hvd.core.base import Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine import guard as guards
from accordion_hvd.engine.gradient_averager import GradientAverager
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo, drifting
from accordion_hvd.engine.membership import Gather, Regrouping
from accordion_hvd.engine.rehearsal import Pass, in_steps
from accordion_hvd.ops import tensorflow as xp
from accordion_hvd.policies import Policy
from accordion_hvd.policies.accordion import Alternation
from accordion_hvd.policies.displacement import USUAL_GAIN
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.exchange import TensorFlowExchange
from accordion_hvd.tensorflow.variables import (
    call_back,
    describe,
    few_threads,
    in_turn,
    key_of,
    multiplied,
    references,
)

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
Tensors: TypeAlias = Sequence[Tensor]
Gradients: TypeAlias = list[Any]
Rate = Callable[[], Any]
Weights = Sequence[Any]
Marks = list[float] | None
"""1 for each tensor whose gradient this rank has, else 0; None if it has all."""


class TensorFlowGradientAverager(GradientAverager[TensorFlowExchange]):
    """Average the gradients of variables over the ranks.

    An exchange takes one of three paths:

    - Eagerly, it runs as a function that is traced once for each combination of levels.
    - In a graph, the same function is called. The graph freezes the levels, so this path is taken
      only if levels never change, or if a callback (`managed`) retraces the graph when they do.
    - Otherwise, the graph calls Python (`tf.py_function`), which runs the exchange eagerly.

    Its other arguments are those of `GradientAverager`.

    Args:
        variables: function that returns all variables that may have gradients; an empty list as
            long as none are known.
        scale_local: whether to divide the gradients of local variables by the number of ranks.
        hyper: settings of the optimizer, by group, for exchange generators (`Info.hyper`).

    Attributes:
        agrees: whether ranks compare their set-ups before the first exchange.
        managed: whether a callback retraces graphs after a change of levels.
        train_function: the train function of the previous `fit`, stored by a callback, or None.
        scaler: function that returns the loss scale, if there is one.
    """

    framework = "TensorFlow"

    def __init__(
        self,
        policy: Policy,
        process_set: Any,
        variables: Callable[[], Sequence[Any]],
        *,
        total: bool = False,
        sparse_as_dense: bool = False,
        skip: Sequence[str] = (),
        guard: Guard | None = None,
        ledger: Any = None,
        scale_local: bool = True,
        hyper: Mapping[str, Mapping[str, Any]] | None = None,
        residual_dtype: str = "float32",
    ) -> None:
        self.variables, self.scale_local = variables, scale_local
        self.hyper = hyper
        self.group_of: Callable[[Any], str] = lambda variable: ""  # all share their settings
        self.agrees, self.managed = True, False
        self.local: set[int] = set()  # keys (`key_of`) of variables that are not exchanged
        self.gain: Callable[[Any], float] = lambda variable: USUAL_GAIN
        self.rate: Rate | None = None  # the optimizer's, if there is one
        self.scaler: Rate | None = None
        self._elsewhere: set[int] = set()  # keys of variables with gradients on some ranks only
        self._functions: dict[bool, Any] = {}  # by whether gradients may be absent
        self._traced_version = -1
        self._traceable = True
        self.train_function: Any = None
        self._private = policy.observers.any("private")
        super().__init__(
            policy, process_set, total=total,
            sparse_as_dense=sparse_as_dense or policy.observers.find(Alternation) is not None,
            skip=skip, guard=guard, ledger=ledger, with_settings=hyper is not None,
            residual_dtype=residual_dtype,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------ variables
    def take_in(self, variables: Sequence[Any]) -> None:
        """Exchange the gradients of these variables, too; all ranks call it before one step."""
        known = set(map(key_of, self.variables()))
        added = [variable for variable in variables if key_of(variable) not in known]
        self.variables = references([*self.variables(), *added])
        if self._exchange is not None:
            self._exchange.account()
        infos = self.tensors()
        self.extend({key: infos[key] for key in map(key_of, added) if key in infos})
        self.doubt()

    def connect(self) -> Communicator:
        return connect(self.process_set, HorovodCommunicator, xp)

    def make_exchange(self, tensors: Sequence[TensorInfo]) -> TensorFlowExchange:
        checkpoint.register(self)  # not before there are variables
        exchange = TensorFlowExchange(
            self.communicator, self.policy, tensors, skip=self.skip, name=self.name,
            ledger=self.ledger, residual_dtype=self.residual_dtype,
        )  # fmt: skip
        exchange.hyper, exchange.loss_scale = self.hyper or {}, self.scaler
        return exchange

    def tensors(self) -> dict[Any, TensorInfo]:
        """Return descriptions of all variables except the local ones.

        Raises:
            RuntimeError: if no variables are known yet.
        """
        if not self.variables():
            raise RuntimeError("no variables are known yet, so there is nothing to exchange.")
        return {key_of(v): replace(row, group=self.group_of(v)) for v, row in self._described()}

    def gains(self, names: Sequence[str]) -> dict[str, float]:
        named = {row.name: v for v, row in self._described()}
        return {name: self.gain(named[name]) for name in names}

    def replicas(self) -> dict[str, Tensor]:
        return {row.name: tf.convert_to_tensor(v) for v, row in self._described()}

    def _described(self) -> list[tuple[Any, TensorInfo]]:
        variables = [v for v in self.variables() if key_of(v) not in self.local]
        return list(zip(variables, describe(variables), strict=True))

    def rates(self) -> Tensor | None:
        return None if self.rate is None else tf.cast(tf.reshape(self.rate(), (1,)), tf.float32)

    def ranks_changed(self) -> None:
        super().ranks_changed()
        self._retrace()

    def regroup(self, gather: Gather, leader: int) -> Regrouping | None:
        group = super().regroup(gather, leader)
        self._retrace()
        return group

    def roll_back(self) -> None:
        super().roll_back()
        self._retrace()

    def _retrace(self) -> None:
        # Existing graphs may be those of other ranks.
        self._traced_version = -1
        if self._exchange is not None:
            self._exchange.version += 1

    # ------------------------------------------------------------------------------------ one step
    @tf.autograph.experimental.do_not_convert
    def average(self, grads: Sequence[Gradient], variables: Sequence[Any], rate: Rate) -> Gradients:
        """Return the averages of `grads`, one for each variable; None if no rank has a gradient.

        State and residual of variables without a gradient stay as they are.

        Args:
            grads: this rank's gradients; None counts as zeros if another rank has a gradient.
            rate: function that returns the learning rate, as a float or (in a graph) a tensor.
        """
        validation.check_context()
        if self.idle:
            return list(grads)
        if self._private:
            validation.check_private_gradients(self.policy, grads, variables, self.local)
        grads = [self._densified(grad) for grad in grads]
        if not self.agreed:
            self._set_up(grads, variables)
        # The guard acts before a step: scripts broadcast the weights after the first step.
        if tf.executing_eagerly():
            self.check()
        elif self.guard.mode != "off" and not self.managed:
            self._guard_within()
        present = {key_of(v): g for v, g in zip(variables, grads, strict=True) if g is not None}
        means = self._exchanged(present, rate)
        results = [self._result(v, g, means) for v, g in zip(variables, grads, strict=True)]
        return self._with_sparse(results, variables, grads)

    def decide(self, lr: float) -> None:
        """Take a decision that is due, before a step whose batch size may change; collective."""
        if self._exchange is not None and not self.idle:
            self.exchange.catch_up(lr)

    def _densified(self, grad: Gradient) -> Gradient:
        sparse = isinstance(grad, tf.IndexedSlices)
        return tf.convert_to_tensor(grad) if sparse and self.sparse_as_dense else grad

    def _exchanged(self, present: dict[int, Gradient], rate: Rate) -> list[Tensor]:
        if not self.number:
            return []
        tensors = self.exchange.tensors
        stacked = self.policy.scope == "samples"
        count = [tf.shape(g)[0] for g in present.values()][:1] if stacked else []
        full = [
            tf.convert_to_tensor(present[key]) if key in present
            else tf.zeros((*count, *tensors[i].shape), tensors[i].dtype)
            for key, i in self.number.items()
        ]  # fmt: skip
        full = [tf.cast(g, t.dtype) for g, t in zip(full, tensors, strict=True)]
        there = [float(key in present or key in self._elsewhere) for key in self.keys]
        weights, marks = self._weights(), None
        if not all(there) and self.exchange.guarded:
            marks = there
        if tf.executing_eagerly():
            means = self._eagerly(full, float(rate()), weights, marks)
        elif self.policy.observers.any("every_step"):  # decisions precede it, in Python
            means = self._called_back(full, rate, weights, marks)
        # A graph freezes the levels: it serves if these never change, or if a callback retraces.
        elif self._lasting and (self.managed or not self.exchange.switching):
            means = self._within(full, rate, weights, marks)
        else:
            means = self._called_back(full, rate, weights, marks)
        return [multiplied(mean, self.communicator.size) for mean in means] if self.total else means

    def _weights(self) -> list[Tensor]:
        if not self.exchange.any_needs_weights:
            return []
        values = {key_of(v): v for v in self.variables()}
        return [tf.convert_to_tensor(values[key]) for key in self.keys]

    def _result(self, variable: Any, grad: Gradient, means: Sequence[Tensor]) -> Gradient:
        key = key_of(variable)
        if key in self.number:
            return means[self.number[key]]
        if key in self.local and grad is not None and self.scale_local:
            return multiplied(grad, 1.0 / self.communicator.size)
        return grad

    # -------------------------------------------------------------------------- the three paths
    def _eagerly(
        self, grads: Sequence[Tensor], lr: float, weights: Weights, marks: Marks,
        directly: bool = False,
    ) -> Gradients:  # fmt: skip
        exchange = self.exchange
        self._run_directly(directly)
        exchange.decide(lr)
        if self.policy.observers.any("withholds"):
            exchange.observe(grads, lr)
            return list(grads)
        if self._lasting and not (directly or self._private) and self._ready(marks):
            exchange.tick(lr)
            means = self._call(grads, tf.constant(lr, tf.float32), weights, marks)
            exchange.account()
            if marks is None:
                return means
            *means, absent = means
            return [None if gone else x for x, gone in zip(means, absent.numpy(), strict=True)]
        # Operation by operation, for exchange generators that read values.
        return self._unfused(grads, lr, weights, marks)

    def _call(self, grads: Tensors, lr: Tensor, weights: Weights, marks: Marks) -> list[Tensor]:
        more = [] if marks is None else [tf.constant(marks, tf.float32)]
        return list(self._functions[bool(more)](list(grads), lr, list(weights), *more))

    @property
    def _lasting(self) -> bool:
        return self._traceable and not drifting(self.exchange.bucket_states)

    def _run_directly(self, directly: bool) -> None:
        if isinstance(self.communicator, HorovodCommunicator):
            self.communicator.directly = directly

    def _unfused(self, grads: Tensors, lr: float, weights: Weights, marks: Marks) -> Gradients:
        exchange = self.exchange
        exchange.open(lr)
        exchange.give(grads, weights, marks and tf.constant(marks, tf.float32))
        if exchange.finish():
            means = exchange.means()
        else:
            means = [xp.filled(grad, exchange.lost) for grad in grads]
        return [None if i in exchange.absent else mean for i, mean in enumerate(means)]

    def _within(self, grads: Tensors, rate: Rate, weights: Weights, marks: Marks) -> Gradients:
        with tf.init_scope():
            ready = self._ready(marks)
        if not ready:
            return self._called_back(grads, rate, weights, marks)
        means = self._call(grads, tf.cast(rate(), tf.float32), weights, marks)
        if marks is None:
            return means
        *means, absent = means
        mine = [i for i, mark in enumerate(marks) if not mark]
        check = tf.debugging.Assert(tf.reduce_all(tf.gather(absent, mine)), [self._missing(mine)])
        with tf.control_dependencies([check]):
            return [tf.identity(x) if mark else None for x, mark in zip(means, marks, strict=True)]

    def _called_back(self, grads: Tensors, rate: Rate, weights: Weights, marks: Marks) -> Gradients:
        there = marks or [1.0] * len(grads)

        def run(lr: Tensor, *inputs: Tensor) -> list[Tensor]:
            count = len(grads)
            found = self._eagerly(inputs[:count], float(lr), inputs[count:], marks, few_threads())
            wanted = [i for i, x in enumerate(found) if x is not None and not there[i]]
            if wanted:
                raise RuntimeError(self._missing(wanted))
            return [x for x, mark in zip(found, there, strict=True) if mark]

        kinds = [grad.dtype for grad, mark in zip(grads, there, strict=True) if mark]
        means = iter(call_back(run, [tf.cast(rate(), tf.float32), *grads, *weights], kinds))
        tensors = zip(self.exchange.tensors, there, strict=True)
        return [tf.ensure_shape(next(means), t.shape) if mark else None for t, mark in tensors]

    def _missing(self, numbers: Sequence[int]) -> str:
        names = [self.exchange.tensors[i].name for i in numbers]
        return (
            f"{self.owner}: the gradient of {names[0]!r} is None in this rank's graph, but another "
            "rank has one; pass zeros (tf.zeros_like) instead of None, or take the step eagerly."
        )

    def _ready(self, marks: Marks) -> bool:
        exchange, marked = self.exchange, marks is not None
        exchange.prepare_trace()
        if self._traced_version != exchange.version:
            self._functions.clear()
        if marked in self._functions:
            return True
        try:
            self._functions[marked] = _traced(exchange, marked)
        except xp.UntraceableError:
            self._traceable = False
            return False
        self._traced_version = exchange.version
        return True

    def prepare(self, side: TensorFlowExchange) -> Pass:
        """Return the pass of an exchange that is rehearsed, traced as the job's own."""
        side.prepare_trace()
        try:
            function = _traced(side, False)
        except xp.UntraceableError:
            return in_steps(side)

        def run(grads: list[Tensor], ready: Mapping[int, float]) -> None:
            means = function(grads, tf.constant(0.0), [])
            means[-1].numpy()  # wait for an accelerator

        return run

    # --------------------------------------------------------------------------- sparse gradients
    def _with_sparse(
        self, results: Gradients, variables: Sequence[Any], grads: Sequence[Gradient]
    ) -> Gradients:
        if not self.sparse:
            return results
        index_of = {key_of(v): i for i, v in enumerate(variables)}
        factor = 1.0 if self.total else 1.0 / self.communicator.size
        for number, key in enumerate(self.sparse):
            i = index_of.get(key)
            grad = grads[i] if i is not None else None
            if i is None or not isinstance(grad, tf.IndexedSlices):
                raise RuntimeError(
                    f"variable number {number} had sparse gradients and has {grad!r} now; pass "
                    "sparse_as_dense=True if gradients are sparse in some steps only."
                )
            name = f"{self.exchange.name}.sparse.{number}"
            values, indices = in_turn(functools.partial(self._gather, name, grad))
            results[i] = tf.IndexedSlices(values * factor, indices, grad.dense_shape)
        return results

    def _gather(self, name: str, grad: tf.IndexedSlices) -> list[Tensor]:
        return [
            self.communicator.allgather(f"{name}.values", grad.values, None),
            self.communicator.allgather(f"{name}.indices", grad.indices, None),
        ]

    # ------------------------------------------------------------------------------------- set-up
    def _set_up(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
        pairs = list(zip(variables, grads, strict=True))
        sparse = [key_of(v) for v, g in pairs if isinstance(g, tf.IndexedSlices)]
        self.expect_sparse([key for key in sparse if key not in self.local])
        infos, present = self.tensors(), {key_of(v) for v, g in pairs if g is not None}
        with tf.init_scope():
            tensors = self.exchange.tensors
            if not self.agrees:
                self.agreed = True
                return
            named = [infos[key].name for key in self.sparse]
            self.agree(f"sparse gradients: {named}", f"loss scale: {self.scaler is not None}")
            if tensors:
                mine = [key in present for key in self.keys]
                flags = self.on_any_rank([*mine, *(not own for own in mine)])
                rows = list(zip(self.keys, flags[: len(mine)], flags[len(mine) :], strict=True))
                self._elsewhere = {key for key, there, lacking in rows if there and lacking}
                self.exchange.notes_absence = any(not there for _, there, _ in rows)

    # -------------------------------------------------------------------------------------- guard
    def check(self) -> None:
        """Compare replicas if a comparison is due since the last call; eager, collective."""
        if self._exchange is None or not self.agreed or self.idle:
            return
        steps = self.exchange.steps
        if self.comparison_due(steps):
            self.compare(steps, self.checksums())

    def _guard_within(self) -> None:
        with tf.init_scope():
            self.exchange.prepare_trace()
        assert self.exchange._clock is not None
        clock = self.exchange._clock.read_value()
        matches = [tf.equal(clock, step) for step in guards.EARLY]
        matches.append((clock > 0) & tf.equal(clock % self.guard.every, 0))
        due = tf.reduce_any(tf.stack(matches))
        irregular = drifting(self.exchange.bucket_states) or self.policy.observers.any("every_step")
        if irregular:  # comparisons may be postponed, which only Python knows
            due = call_back(lambda step: self.comparison_due(int(step)), [clock], [tf.bool])[0]

        def compare(step: Tensor, sums: Tensor) -> Tensor:
            self._run_directly(few_threads())
            self.rehearses = False  # operations take another time within this call
            self.compare(int(step), sums)
            return step

        def call_compare() -> Tensor:
            return call_back(compare, [clock, self.checksums()], [tf.int64])[0]

        tf.cond(due, call_compare, lambda: clock)


def _traced(exchange: TensorFlowExchange, marked: bool) -> Any:
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in exchange.tensors]
    function = tf.function(lambda *given: exchange.traced(*given), autograph=False)
    weights = specs if exchange.any_needs_weights else []
    more = [tf.TensorSpec((len(specs),), tf.float32)] if marked else []
    return function.get_concrete_function(specs, tf.TensorSpec((), tf.float32), weights, *more)
