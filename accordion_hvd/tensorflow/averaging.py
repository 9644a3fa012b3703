"""Averaging of the models in variables: eagerly, or called from a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.horovod.tensorflow import HorovodCommunicator
from accordion_hvd.comm.local import connect
from accordion_hvd.core.base import Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.buckets import TensorInfo
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.model_averager import ModelAverager, Parameters
from accordion_hvd.ops import tensorflow as xp
from accordion_hvd.policies.alternation import Alternation
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.graph import call_back, few_threads, when
from accordion_hvd.tensorflow.variables import describe, key_of, plain


class Variables(Parameters):
    """Variables of floating-point numbers, be they Keras' or TensorFlow's.

    Args:
        variables: gives them; [] as long as none are known.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]]) -> None:
        self._variables = variables

    def tensors(self) -> list[TensorInfo]:
        """Names, shapes, dtypes and devices."""
        return describe(self._variables())

    def read(self) -> list[Tensor]:
        """Their values; within a graph, at this place in it."""
        return [tf.convert_to_tensor(plain(variable)) for variable in self._variables()]

    def write(self, values: Sequence[Tensor]) -> None:
        """Assign all of them."""
        for variable, value in zip(self._variables(), values, strict=True):
            plain(variable).assign(value)


class Passing(Parameters):
    """Values that a graph hands to Python and takes back."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = list(values)

    def tensors(self) -> list[TensorInfo]:
        """Refuse: no caller needs it."""
        return []

    def read(self) -> list[Tensor]:
        """Return the values as they are now."""
        return self._values

    def write(self, values: Sequence[Tensor]) -> None:
        """Keep new values."""
        self._values = list(values)


class TensorFlowModelAverager(ModelAverager):
    """Averages variables after each step, from graphs too (`tf.py_function`).

    Args:
        method: how.
        process_set: who.
        variables: gives the variables; [] as long as none are known.
        guard: compares models when they should be equal.
        alternation: says when they are averaged; None: always.

    Attributes:
        local: keys (`key_of`) of variables that are left alone.
    """

    def __init__(
        self,
        method: Averaging,
        process_set: Any,
        variables: Callable[[], Sequence[Any]],
        guard: Guard,
        alternation: Alternation | None = None,
    ) -> None:
        self.local: set[int] = set()
        mine = Variables(lambda: [v for v in variables() if key_of(v) not in self.local])
        number = getattr(process_set, "process_set_id", None) or 0
        super().__init__(
            method, mine, connect(process_set, HorovodCommunicator, xp), guard, number, alternation
        )
        self._begun: tf.Variable | None = None  # what graphs know of `prepare`
        self._enlisted = False

    def enlist(self) -> None:
        """Be among what `save_state` saves, now that there are variables."""
        if not self._enlisted:
            checkpoint.register(self)
        self._enlisted = True

    def leave_alone(self, variable: Any) -> None:
        """Do not average this variable. Raises: RuntimeError after the first step."""
        if self._ready:
            raise RuntimeError("register local variables before the first step.")
        self.local.add(key_of(variable))

    def renew(self) -> None:
        """Nothing: ranks do not change, as elastic jobs are refused."""

    def load(self, saved: dict[str, Any]) -> None:
        """See `ModelAverager.load`; graphs that were traced before look at it, too."""
        super().load(saved)
        if self._begun is not None:
            self._begun.assign(False)

    def prepare(self, given: Parameters | None = None) -> None:
        """See `ModelAverager.prepare`. Raises: RuntimeError when no variables are known."""
        if not (self.single_rank or self._ready or self.parameters.tensors()):
            raise RuntimeError(
                "no variables are known yet, so there is nothing to average: build the optimizer "
                "(optimizer.build(model.trainable_variables)) or take a step before."
            )
        super().prepare(given)

    # ----------------------------------------------------------------- around the optimizer's step
    def follow(self, slots: Parameters) -> Any:
        """Before a step, where a policy says when models are averaged: act on its decisions.

        Args:
            slots: of the optimizer; averaged once where gradients are averaged again.

        Returns:
            Whether models are averaged now; in a graph, a tensor.
        """
        alternation = self.alternation
        assert alternation is not None
        if tf.executing_eagerly():
            self.directly(False)
            if self.follow_mode():
                self.level(slots)
            return alternation.averaging_models

        def turn() -> tuple[bool, bool]:
            self.directly(few_threads())
            turned = self.follow_mode()
            return alternation.averaging_models, turned

        apart, turned = call_back(turn, [], [tf.bool, tf.bool])
        when(turned, lambda: self._within(slots, self.level))
        return apart

    def before(self) -> None:
        """Prepare for a step: the first one must find equal models."""
        validation.check_context()
        if self.single_rank:
            return
        if tf.executing_eagerly():
            self.directly(False)
            self.prepare()
            return
        with tf.init_scope():
            if self._begun is None:
                self._begun = tf.Variable(False, trainable=False)
        values = self.parameters.read()
        tf.cond(self._begun, lambda: tf.constant(True), lambda: self._begin_within(values))

    def _begin_within(self, values: list[Tensor]) -> Tensor:
        def prepare(*values: Tensor) -> bool:
            self.directly(few_threads())
            self.prepare(Passing(values))
            return True

        done = call_back(prepare, values, [tf.bool])[0]
        assert self._begun is not None
        with tf.control_dependencies([done]):
            self._begun.assign(True)
        return done

    def after(self, rate: Any) -> None:
        """Average after a step, which was taken at this learning rate."""
        if self.single_rank:
            return
        if tf.executing_eagerly():
            self.average(float(rate))
            return
        rates = tf.cast(rate, tf.float32)
        self._within(self.parameters, lambda given, told: self.average(float(told), given), rates)

    def _within(self, parameters: Parameters, act: Callable[..., None], *told: Tensor) -> None:
        """In a graph: `act` on the values of parameters, in Python; they are what it leaves.

        Args:
            parameters: whose values it may change.
            act: is given these as `Parameters`, and then `told`.
            told: tensors.
        """

        def work(*given: Tensor) -> list[Tensor]:
            passing = Passing(given[len(told) :])
            self.directly(few_threads())
            try:
                act(passing, *given[: len(told)])
            except BaseException:  # the graph ends here, and variables keep what there was last
                parameters.write(passing.read())
                raise
            return passing.read()

        values = parameters.read()
        if values:
            found = call_back(work, [*told, *values], [value.dtype for value in values])
            pairs = zip(found, values, strict=True)
            parameters.write([tf.ensure_shape(new, old.shape) for new, old in pairs])

    def directly(self, directly: bool) -> None:
        """Choose whether to call Horovod without graphs of its own (see its communicator)."""
        if isinstance(self.communicator, HorovodCommunicator):
            self.communicator.directly = directly
