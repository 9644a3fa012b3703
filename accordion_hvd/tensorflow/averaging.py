"""Averaging of TensorFlow models: eagerly, or called from a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.horovod.tensorflow import HorovodCommunicator
from accordion_hvd.comm.local import connect
from accordion_hvd.core.base import Tensor
from accordion_hvd.engine.averages import ModelParameters
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.engine.model_averager import ModelAverager
from accordion_hvd.ops import tensorflow as xp
from accordion_hvd.policies.accordion import Alternation
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.variables import (
    call_back,
    create,
    describe,
    few_threads,
    key_of,
    plain,
    when,
)


class Variables(ModelParameters):
    """Floating-point variables of Keras or TensorFlow.

    Args:
        variables: function that returns the variables; an empty list as long as none are known.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]]) -> None:
        self._variables = variables

    def tensors(self) -> list[TensorInfo]:
        return describe(self._variables())

    def read(self) -> list[Tensor]:
        """Return the values; in a graph, the values at this point of the graph."""
        return [tf.convert_to_tensor(plain(variable)) for variable in self._variables()]

    def write(self, values: Sequence[Tensor]) -> None:
        for variable, value in zip(self._variables(), values, strict=True):
            plain(variable).assign(value)


class Passing(ModelParameters):
    """Values that a graph passes to Python and takes back."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = list(values)

    def tensors(self) -> list[TensorInfo]:
        return []  # nobody needs any

    def read(self) -> list[Tensor]:
        return self._values

    def write(self, values: Sequence[Tensor]) -> None:
        self._values = list(values)


class TensorFlowModelAverager(ModelAverager):
    """Average variables after each step, eagerly or from graphs (`tf.py_function`).

    Args:
        variables: function that returns the variables; an empty list as long as none are known.
        alternation: observer that decides when models are averaged. None: always.

    Attributes:
        local: keys (`key_of`) of variables that are not averaged.
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
        averaged = Variables(lambda: [v for v in variables() if key_of(v) not in self.local])
        super().__init__(method, averaged, _connect, guard, process_set, alternation)
        self._begun: tf.Variable | None = None  # whether graphs have called `prepare`

    def leave_alone(self, variable: Any) -> None:
        """Do not average this variable.

        Raises:
            RuntimeError: after the first step.
        """
        if self.ready:
            raise RuntimeError("local variables must be registered before the first step.")
        self.local.add(key_of(variable))

    def load(self, saved: dict[str, Any]) -> None:
        """Load a state as `ModelAverager.load` does; existing graphs call `prepare` again."""
        super().load(saved)
        if self._begun is not None:
            self._begun.assign(False)

    def prepare(self, given: ModelParameters | None = None) -> None:
        """Prepare for a step; RuntimeError if no variables are known."""
        if not (self.single_rank or self.ready or self.parameters.tensors()):
            raise RuntimeError(
                "no variables are known yet, so there is nothing to average: build the optimizer "
                "(optimizer.build(model.trainable_variables)) or take a step first."
            )
        super().prepare(given)

    # ----------------------------------------------------------------- around the optimizer's step
    def follow(self, slots: ModelParameters) -> Any:
        """Apply the policy's decision whether models are averaged; call it before each step.

        Args:
            slots: state variables of the optimizer, such as momentum. They are averaged once when
                training returns to averaging gradients.

        Returns:
            Whether models are averaged in this step; in a graph, a tensor.
        """
        alternation = self.alternation
        assert alternation is not None
        if tf.executing_eagerly():
            self.directly(False)
            if self.follow_mode():
                self.level(slots)
            return alternation.averaging_models

        def switch() -> tuple[bool, bool]:
            self.directly(few_threads())
            must_level = self.follow_mode()
            return alternation.averaging_models, must_level

        averaging_models, must_level = call_back(switch, [], [tf.bool, tf.bool])
        when(must_level, lambda: self._within(slots, self.level))
        return averaging_models

    def before(self) -> None:
        """Prepare for a step; before the first step, check that all models are equal."""
        validation.check_context()
        if self.single_rank:
            return
        if tf.executing_eagerly():
            self.directly(False)
            self.prepare()
            return
        with tf.init_scope():
            if self._begun is None:
                self._begun = create(False)
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
        """Average the models after a step with learning rate `rate`."""
        if self.single_rank:
            return
        if tf.executing_eagerly():
            self.average(float(rate))
            return
        rates = tf.cast(rate, tf.float32)
        self._within(self.parameters, lambda given, lr: self.average(float(lr), given), rates)

    def _within(
        self, parameters: ModelParameters, act: Callable[..., None], *inputs: Tensor
    ) -> None:

        def work(*given: Tensor) -> list[Tensor]:
            passing = Passing(given[len(inputs) :])
            self.directly(few_threads())
            try:
                act(passing, *given[: len(inputs)])
            except BaseException:  # the graph ends here, so assign the latest values now
                parameters.write(passing.read())
                raise
            return passing.read()

        values = parameters.read()
        if values:
            results = call_back(work, [*inputs, *values], [value.dtype for value in values])
            pairs = zip(results, values, strict=True)
            parameters.write([tf.ensure_shape(new, old.shape) for new, old in pairs])

    def directly(self, directly: bool) -> None:
        """Choose whether the communicator calls Horovod directly (see `HorovodCommunicator`)."""
        if isinstance(self.communicator, HorovodCommunicator):
            self.communicator.directly = directly


def _connect(process_set: Any) -> Communicator:
    return connect(process_set, HorovodCommunicator, xp)
