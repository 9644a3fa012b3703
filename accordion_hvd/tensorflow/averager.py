"""From a model's gradients to their averages: eagerly, traced into a graph, or called from one."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

import accordion_hvd
from accordion_hvd import checkpoint, halves, machines
from accordion_hvd import guard as guards
from accordion_hvd.base import Compressor, Tensor
from accordion_hvd.comm.agreement import gather, require_agreement
from accordion_hvd.communicator import Communicator
from accordion_hvd.guard import Guard
from accordion_hvd.ops import tensorflow as xp
from accordion_hvd.policy import Policy
from accordion_hvd.simulate import Hub, SimulatedCommunicator
from accordion_hvd.tensorflow import refusals
from accordion_hvd.tensorflow.communicator import HorovodCommunicator
from accordion_hvd.tensorflow.exchange import TensorFlowExchange
from accordion_hvd.tensorflow.graph import call_back, few_threads, in_turn
from accordion_hvd.tensorflow.variables import describe, key_of, name_of

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
Rate = Callable[[], Any]
Weights = Sequence[Any]

_numbers: Counter[int] = Counter()  # by process set: members count alike, others do not count


class Averager:
    """Averages the gradients of variables over the ranks.

    Three ways lead through an exchange. Eagerly it runs as a function that is traced once for
    each choice of levels. Within a graph the same function is called, which freezes the levels,
    so this is only done where they never change or where somebody (`managed`) makes the graph
    anew when they do. Otherwise the graph calls Python (`tf.py_function`), which runs it eagerly.

    Args:
        policy: decides which compressor serves which tensor.
        process_set: who exchanges.
        variables: gives all variables whose gradients may ever come; [] as long as none are known.
        total: whether the result is the sum instead of the average.
        sparse_as_dense: whether `tf.IndexedSlices` are exchanged like dense gradients.
        skip: patterns of names that travel dense.
        guard: compares replicas now and then.
        scale_local: whether gradients of local variables are divided by the number of ranks.
        hyper: what conversations are told of the optimizer's settings (`Info.hyper`), by group.

    Attributes:
        managed: whether somebody makes graphs anew after a switch.
    """

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
        scale_local: bool = True,
        hyper: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.hyper, self.group_of = hyper, _no_group
        self.policy, self.skip, self.guard = policy, tuple(skip), guard or Guard("off")
        self.process_set, self.variables = process_set, variables
        self.total, self.scale_local = total, scale_local
        self.sparse_as_dense = sparse_as_dense or policy.private or policy.method is not None
        self.communicator = communicator_of(process_set)
        number = getattr(process_set, "process_set_id", None) or 0
        self.name = f"accordion.{number}.{_numbers[number]}"
        _numbers[number] += 1
        self.managed = False
        self.local: set[int] = set()  # keys (`key_of`) of variables that are not exchanged
        self._exchange: TensorFlowExchange | None = None
        self._member: dict[int, int] = {}  # key of a variable -> number of the exchange's tensor
        self._sparse: list[int] = []  # keys of variables with sparse gradients, in order
        self._idle: set[int] = set()  # keys of variables without a gradient on any rank
        self._agreed = False
        self._function: Any = None
        self._traced_version = -1
        self._traceable = True
        self._guarded = 0  # the step that the guard has looked at
        self._enlisted = False
        self.kept: Any = None  # a callback's, from one fit to the next

    # -------------------------------------------------------------------------------- what it knows
    @property
    def exchange(self) -> TensorFlowExchange:
        """What runs the conversations.

        Raises:
            RuntimeError: no variables are known yet.
        """
        if self._exchange is None:
            self._watch(self._sparse)
        assert self._exchange is not None
        return self._exchange

    def enlist(self) -> None:
        """Be among what `save_state` saves, now that there are variables."""
        if not self._enlisted:
            checkpoint.register(self)
        self._enlisted = True

    def expect(self, names: Sequence[str]) -> None:
        """Before a restore: these tensors were exchanged densely, others were sparse."""
        if self._exchange is None:
            variables = [v for v in self.variables() if key_of(v) not in self.local]
            rows = zip(variables, describe(variables), strict=True)
            self._sparse = [
                key_of(v)
                for v, row in rows
                if not any(checkpoint.same_name(row.name, name) for name in names)
            ]

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with, and nothing to be made of gradients alone."""
        resizes = self.policy.batch_size is not None and self.process_set.included()
        needed = self.policy.output == "update" or self.policy.private or resizes
        return self.communicator.size == 1 and not needed

    def _watch(self, sparse: Sequence[int]) -> None:
        """Exchange the gradients of all variables but the local and the `sparse` ones."""
        everything = self.variables()
        if not everything:
            raise RuntimeError("no variables are known yet, so there is nothing to exchange.")
        self.enlist()
        variables = [v for v in everything if key_of(v) not in self.local]
        self._sparse = list(sparse)
        rows = zip(variables, describe(variables), strict=True)
        dense = {
            key_of(v): replace(row, group=self.group_of(v))
            for v, row in rows
            if key_of(v) not in set(sparse)
        }
        self._member = {key: number for number, key in enumerate(dense)}
        if self._exchange is not None:  # made before sparse gradients appeared
            self.policy._bound = None
        self._exchange = TensorFlowExchange(
            self.communicator,
            self.policy,
            list(dense.values()),
            skip=self.skip,
            name=self.name,
        )
        self._exchange.hyper = self.hyper or {}

    def adopt(self, saved: dict[str, Any]) -> None:
        """Go on from a `checkpoint.snapshot`, before the next exchange.

        Ranks see then whether each had its own: else all forget what was of use to one alone.

        Raises:
            ValueError: it does not fit.
        """
        self._own = checkpoint.adopt(self.exchange, saved)
        self._agreed = False

    _own = True  # what was adopted was this rank's

    def renew(self) -> None:
        """The ranks have changed (an elastic job): ask Horovod again who exchanges."""
        self.communicator = communicator_of(self.process_set)
        self._agreed, self._traced_version = False, -1
        if self._exchange is not None:
            self._exchange.communicator = self.communicator
            self._exchange.forget_plan()
            self._exchange.version += 1

    # ------------------------------------------------------------------------------------ one step
    @tf.autograph.experimental.do_not_convert
    def average(
        self, grads: Sequence[Gradient], variables: Sequence[Any], rate: Rate
    ) -> list[Gradient]:
        """The averages of `grads`, one for each of `variables`; None where no rank has one.

        Args:
            grads: this rank's; None takes part as zeros.
            variables: whose gradients they are.
            rate: gives the learning rate, as a float or (in a graph) a tensor.
        """
        refusals.check_context()
        if self.alone:
            return list(grads)
        if self.policy.private:
            refusals.check_private_gradients(self.policy, grads, variables, self.local)
        grads = [self._densified(grad) for grad in grads]
        if not self._agreed:
            self._set_up(grads, variables)
        self._guard_before()
        given = {key_of(v): g for v, g in zip(variables, grads, strict=True) if g is not None}
        means = self._exchanged(given, rate)
        results = [self._result(v, g, means) for v, g in zip(variables, grads, strict=True)]
        return self._with_sparse(results, variables, grads)

    def decide(self, lr: float) -> None:
        """Take a decision that is due, before a step whose batch it may enlarge; collective."""
        if self._exchange is not None and not self.alone:
            self.exchange.catch_up(lr)

    def _densified(self, grad: Gradient) -> Gradient:
        sparse = isinstance(grad, tf.IndexedSlices)
        return tf.convert_to_tensor(grad) if sparse and self.sparse_as_dense else grad

    def _exchanged(self, given: dict[int, Gradient], rate: Rate) -> list[Tensor]:
        """The means of all of the exchange's tensors."""
        if not self._member:
            return []
        tensors = self.exchange.tensors
        several = [tf.shape(g)[0] for g in given.values()][:1] if self.policy.several else []
        full = [
            tf.convert_to_tensor(given[key]) if key in given
            else tf.zeros((*several, *tensors[i].shape), tensors[i].dtype)
            for key, i in self._member.items()
        ]  # fmt: skip
        full = [tf.cast(g, t.dtype) for g, t in zip(full, tensors, strict=True)]
        weights = self._weights()
        if tf.executing_eagerly():
            means = self._eagerly(full, float(rate()), weights)
        elif self.policy.private or self.policy.method is not None:  # Python has a say in each step
            means = self._called_back(full, rate, weights)
        elif self._lasting and (self.managed or not self.exchange.switching):
            means = self._within(full, rate, weights)
        else:
            means = self._called_back(full, rate, weights)
        return [mean * self.communicator.size for mean in means] if self.total else list(means)

    def serving(self, variable: Any) -> Compressor:
        """What serves a variable now."""
        return self.exchange.slot_of[self._member[key_of(variable)]].compressor

    def _weights(self) -> list[Tensor]:
        """The variables' values, where some conversation reads them."""
        if not self.exchange.reading:
            return []
        values = {key_of(v): v for v in self.variables()}
        return [tf.convert_to_tensor(values[key]) for key in self._member]

    def _result(self, variable: Any, grad: Gradient, means: Sequence[Tensor]) -> Gradient:
        key = key_of(variable)
        if key in self._member:
            idle = grad is None and key in self._idle
            return None if idle else means[self._member[key]]
        if key in self.local and grad is not None and self.scale_local:
            return _scaled(grad, 1.0 / self.communicator.size)
        return grad

    # ---------------------------------------------------------------------------- the three ways
    def _eagerly(
        self, grads: Sequence[Tensor], lr: float, weights: Weights, directly: bool = False
    ) -> list[Tensor]:
        exchange = self.exchange
        self._run_directly(directly)
        exchange.decide(lr)
        if self.policy.apart:
            exchange.observe(grads, lr)
            return list(grads)
        if self._lasting and not (directly or self.policy.private) and self._ready():
            exchange.tick(lr)
            means = self._function(list(grads), tf.constant(lr, tf.float32), list(weights))
            exchange.account()
            return list(means)
        return self._unfused(grads, lr, weights)

    @property
    def _lasting(self) -> bool:
        """Whether a graph is worth its trace: what it does can be traced, and lasts for a while."""
        return self._traceable and not self.exchange.drifting

    def _run_directly(self, directly: bool) -> None:
        if isinstance(self.communicator, HorovodCommunicator):
            self.communicator.directly = directly

    def _unfused(self, grads: Sequence[Tensor], lr: float, weights: Weights) -> list[Tensor]:
        """Operation by operation, for conversations that look at values."""
        exchange = self.exchange
        exchange.open(lr)
        exchange.give(grads, weights)
        if exchange.finish():
            return exchange.means()
        return [xp.nans_like(grad) for grad in grads]

    def _within(self, grads: Sequence[Tensor], rate: Rate, weights: Weights) -> list[Tensor]:
        with tf.init_scope():
            ready = self._ready()
        if not ready:
            return self._called_back(grads, rate, weights)
        return list(self._function(list(grads), tf.cast(rate(), tf.float32), list(weights)))

    def _called_back(self, grads: Sequence[Tensor], rate: Rate, weights: Weights) -> list[Tensor]:
        def run(lr: Tensor, *inputs: Tensor) -> list[Tensor]:
            count = len(grads)
            return self._eagerly(inputs[:count], float(lr), inputs[count:], few_threads())

        kinds = [grad.dtype for grad in grads]
        means = call_back(run, [tf.cast(rate(), tf.float32), *grads, *weights], kinds)
        tensors = self.exchange.tensors
        return [tf.ensure_shape(mean, t.shape) for mean, t in zip(means, tensors, strict=True)]

    def _ready(self) -> bool:
        """Trace an exchange, if that has not been done for these levels; False if it cannot be."""
        exchange = self.exchange
        exchange.settle()
        if self._traced_version == exchange.version:
            return True
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in exchange.tensors]
        function = tf.function(exchange.traced, autograph=False)
        try:
            rate, weights = tf.TensorSpec((), tf.float32), specs if exchange.reading else []
            self._function = function.get_concrete_function(specs, rate, weights)
        except xp.UntraceableError:
            self._traceable = False
            return False
        self._traced_version = exchange.version
        return True

    # --------------------------------------------------------------------------- sparse gradients
    def _with_sparse(
        self, results: list[Gradient], variables: Sequence[Any], grads: Sequence[Gradient]
    ) -> list[Gradient]:
        """Gather sparse gradients, beside all compression."""
        if not self._sparse:
            return results
        place = {key_of(v): i for i, v in enumerate(variables)}
        factor = 1.0 if self.total else 1.0 / self.communicator.size
        for number, key in enumerate(self._sparse):
            i = place.get(key)
            grad = grads[i] if i is not None else None
            if i is None or not isinstance(grad, tf.IndexedSlices):
                raise RuntimeError(
                    f"variable number {number} with sparse gradients has {grad!r} now; pass "
                    "sparse_as_dense=True where gradients are not always of one kind."
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
        """See that all ranks are about to do the same; collective."""
        pairs = list(zip(variables, grads, strict=True))
        sparse = [key_of(v) for v, g in pairs if isinstance(g, tf.IndexedSlices)]
        sparse = [key for key in sparse if key not in self.local]
        if self._exchange is None or sparse != self._sparse:
            self._watch(sparse)
        names = {key_of(v): name_of(v) for v in variables}
        lines = [
            f"accordion_hvd {accordion_hvd.__version__} for TensorFlow, {self.exchange.name}",
            f"sparse gradients: {[names[key] for key in sparse]}, sums: {self.total}",
            self.exchange.layout(),
        ]
        present = {key_of(v) for v, g in pairs if g is not None}
        mine = np.array([key in present for key in self._member], np.uint8)
        with tf.init_scope():
            require_agreement(self.communicator, "\n".join(lines))
            machines.meet(self.communicator, self.policy.by_machine)
            halves.meet(self.communicator, self.policy)
            if self.hyper is not None:
                checkpoint.agree_on_origin(self.exchange, self._own)
                self._own = True
            if mine.size:
                gathered = gather(self.communicator, xp.asarray(mine))
                table = self.communicator.run("accordion.present", gathered)
                given = np.max(table, axis=0).tolist()
                self._idle = {key for key, i in self._member.items() if not given[i]}
        self._agreed = True

    # -------------------------------------------------------------------------------------- guard
    def check(self) -> None:
        """Compare replicas if a step since the last look asks for it; eager, collective."""
        if self._exchange is None or not self._agreed or self.alone:
            return
        steps = self.exchange.steps
        if self._asks(steps):
            self._compare(steps, self._sums())

    def _asks(self, steps: int) -> bool:
        """Whether a step since the last look asks for one; not while ranks' weights may differ."""
        if not self.exchange.span:
            return False
        due = any(self.guard.due(step) for step in range(self._guarded + 1, steps + 1))
        self._guarded = steps
        return due

    def _guard_before(self) -> None:
        """Look, before a step, at what the steps before have made of the weights.

        (Not after the step: scripts broadcast the weights after the first one.)
        """
        if tf.executing_eagerly():
            self.check()
        elif self.guard.mode != "off" and not self.managed:
            self._guard_within()

    def _guard_within(self) -> None:
        with tf.init_scope():
            self.exchange.settle()
        assert self.exchange._clock is not None
        clock = self.exchange._clock.read_value()
        asked = [tf.equal(clock, step) for step in guards.EARLY]
        asked.append((clock > 0) & tf.equal(clock % self.guard.every, 0))
        due = tf.reduce_any(tf.stack(asked))
        if self.exchange.drifting or self.policy.method is not None:  # not step after step due
            due = call_back(lambda step: self._asks(int(step)), [clock], [tf.bool])[0]

        def look(step: Tensor, sums: Tensor) -> Tensor:
            self._run_directly(few_threads())
            self._compare(int(step), sums)
            return step

        def compare() -> Tensor:
            return call_back(look, [clock, self._sums()], [tf.int64])[0]

        tf.cond(due, compare, lambda: clock)

    def _replicated(self) -> list[Any]:
        return [v for v in self.variables() if key_of(v) not in self.local]

    def _sums(self) -> Tensor:
        sums = [xp.checksum(tf.convert_to_tensor(v)) for v in self._replicated()]
        return tf.stack([*sums, tf.constant(self.exchange.number(), tf.int64)])

    def _compare(self, step: int, sums: Tensor) -> None:
        names = [name_of(v) for v in self._replicated()]
        self.guard.compare(self.communicator, step, [*names, "compression levels"], sums)


def communicator_of(process_set: Any) -> Communicator:
    """Who exchanges; nobody else for a process that is alone, or outside."""
    if process_set.included() and process_set.size() > 1:
        return HorovodCommunicator(process_set)
    return SimulatedCommunicator(Hub(1), 0, xp)


def _scaled(grad: Gradient, factor: float) -> Gradient:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor


def _no_group(variable: Any) -> str:
    """Of variables that all share their settings."""
    return ""
