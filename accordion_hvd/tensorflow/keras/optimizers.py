"""Compressed optimizers for Keras 3, such as `OnebitAdam`; used like `keras.optimizers.Adam`.

```python
import accordion_hvd.tensorflow.keras as hvd

model.compile(optimizer=hvd.OnebitAdam(learning_rate=1e-3), loss="mse")
```
Do not wrap it in `DistributedOptimizer`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import keras
import numpy as np
import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.engine import checkpoint, checkpoint_files
from accordion_hvd.engine.guard import Guard, Mode
from accordion_hvd.optimizers import UpdateRule
from accordion_hvd.optimizers.base import give
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import staged
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.keras.optimizer import Settings, _Distributed, wrap
from accordion_hvd.tensorflow.variables import key_of

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10's typing lacks it

UNDECAYED = "undecayed"
"""Group of the variables in `exclude_from_weight_decay`, for rules that apply weight decay."""

MARK = "exchange:"
"""Prefix of the entries that a saved optimizer has in addition to those of Keras."""


@keras.saving.register_keras_serializable("accordion_hvd")
class Directions(keras.optimizers.Optimizer):
    """Optimizer that takes steps x <- x - learning_rate (u + weight_decay x) along directions u.

    An update rule computes the directions, which are not clipped. If the first element of a
    direction is not finite, the step is skipped (on all ranks).
    """

    serving: Any = None  # function from a variable to the update rule of its direction

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable along its direction.

        Raises:
            RuntimeError: if there is no update rule, so that `gradient` is not a direction.
        """
        if self.serving is None:
            raise RuntimeError(
                "Directions is not a complete optimizer: use a compressed optimizer of "
                "accordion_hvd.tensorflow.keras. If a model was saved under the mixed_float16 "
                "policy, set this policy before you load it."
            )
        rule, old = self.serving(variable), tf.convert_to_tensor(variable)
        new = direction = tf.cast(gradient, variable.dtype)
        if not rule.returns_weights:
            decay = 0.0 if rule.decays(True) else self.weight_decay
            if decay and self._use_weight_decay(variable):
                direction = direction + decay * old
            new = old - tf.cast(learning_rate, variable.dtype) * direction
        finite = tf.math.is_finite(tf.reshape(direction, (-1,))[0])
        self.assign(variable, tf.where(finite, new, old))

    def clip(self, grads: list[Any]) -> list[Any]:
        """Clip local gradients as `clipnorm`, `clipvalue` or `global_clipnorm` specify."""
        return super()._clip_gradients(grads)

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        """Do nothing: `update_step` applies the decay, unless the step is skipped."""


class _Ruled(_Distributed):
    """Methods of a compressed optimizer, whose gradients remain local."""

    def _set_rule(self: Any, rule: UpdateRule) -> None:
        inner: Any = getattr(self, "inner_optimizer", self)
        averager, self.rule = self._averager, rule
        inner.serving = lambda variable: averager.serving(key_of(variable))
        if rule.applies_weight_decay:
            self._averager.group_of = lambda v: "" if inner._use_weight_decay(v) else UNDECAYED

    def get_config(self: Any) -> dict[str, Any]:
        passes = self._settings.passes
        own = {"gradient_accumulation_steps": passes if passes > 1 else None}
        plain = Directions.get_config(getattr(self, "inner_optimizer", self))
        return plain | own | _to_keras(self.rule)

    def _step(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        inner = getattr(self, "inner_optimizer", self)
        clipped = inner.clip([tf.convert_to_tensor(grads[i]) for i in present])
        for i, grad in zip(present, clipped, strict=True):
            grads[i] = grad
        super()._step(grads, variables, batches)

    def save_own_variables(self: Any, store: Any) -> None:
        super().save_own_variables(store)  # type: ignore[misc]
        if not self.built or not self.exchange.steps:
            return
        saved = checkpoint.snapshot(self.exchange)
        for key, value in saved.pop("tensors").items():
            store[MARK + key.replace("/", ":")] = value.numpy()
        store[MARK] = np.frombuffer(json.dumps(saved).encode(), np.uint8)

    def load_own_variables(self: Any, store: Any) -> None:
        plain = {key: store[key] for key in store.keys() if not key.startswith(MARK)}  # noqa: SIM118
        # Checked before Keras changes anything.
        adopt = self._adopting(store) if MARK in store.keys() else None  # noqa: SIM118
        super().load_own_variables(plain)  # type: ignore[misc]
        if adopt is not None:
            adopt()

    def _adopting(self: Any, store: Any) -> checkpoint.Restore:
        saved = checkpoint_files.parsed(np.asarray(store[MARK]).tobytes(), "the optimizer's state")
        names = [key for key in store.keys() if key.startswith(MARK) and key != MARK]  # noqa: SIM118
        saved["tensors"] = {
            key.removeprefix(MARK).replace(":", "/"): tf.constant(np.asarray(store[key]))
            for key in names
        }
        return self._averager.adopting(saved)


class Options(TypedDict, total=False):
    """The keyword arguments of all compressed optimizers."""

    weight_decay: float | None
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None
    name: str | None
    policy: Policy | None
    process_set: ProcessSet | None
    skip: Sequence[str]
    guard: Mode | None
    guard_every: int | None


class CompressedOptimizer(_Ruled, Directions):
    """Base class of optimizers whose ranks exchange quantities other than gradients.

    Gradients remain local until a step: `clipnorm`, `clipvalue` and `global_clipnorm` clip the
    gradients of each rank by their local norm. If a gradient of any rank is not finite, or above
    1e15 in norm, no rank takes the step, and all state remains as it was. If the mixed_float16
    policy is set before the optimizer is created, the result is a `LossScaleOptimizer` with the
    same behavior.

    A saved model contains the moments and residuals of the rank that saved it. To resume exactly,
    each rank must save and load its own model. If all ranks load the model of one rank, residuals
    are reset. `hvd.save_state` and `hvd.load_state` preserve residuals, even if the number of ranks
    changes. `policy`, `process_set`, `skip` and `guard` are not saved.

    Each subclass, such as `OnebitAdam`, takes these arguments.

    Args:
        learning_rate: a number or a schedule.
        options: the keyword arguments below; the other arguments of the optimizer of the same name
            in `accordion_hvd.optimizers`; and the arguments of all Keras optimizers.

    Keyword Args:
        beta_1 (float): decay rate of the first moment, for optimizers that have one. Default: the
            value of the optimizer's paper. `beta_2` (second moment) and `epsilon` (constant for
            numerical stability) are accepted in the same manner.
        weight_decay (float): coefficient of the decoupled weight decay, as everywhere in Keras.
        gradient_accumulation_steps (int): number of batches whose gradients are averaged for one
            step.
        policy (Policy): policy that switches between the stages of the optimizer, instead of the
            paper's rule: `Accordion(...)` without levels, or another policy whose levels are
            `accordion_hvd.optimizers`.
        process_set (ProcessSet): the ranks that communicate. Other ranks take local steps.
        skip (Sequence[str]): shell-style patterns of the paths of variables that stay in the dense
            stage.
        guard (str): reaction to replicas that differ: "error", "warn" or "off". Default: the
            environment variable ACCORDION_HVD_GUARD, else "error".
        guard_every (int): number of steps between comparisons of the replicas. Default: the
            environment variable ACCORDION_HVD_GUARD_EVERY, else 100.

    Raises:
        ValueError: if an argument is invalid.
        TypeError: if the optimizer has no such argument.
    """

    _rule: ClassVar[type[UpdateRule]]

    def __init_subclass__(cls, rule: type[UpdateRule] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if rule is not None:
            give(cls, rule, cls._parse_arguments)
            keras.saving.register_keras_serializable("accordion_hvd")(cls)
        elif "__init__" in vars(cls):
            # So that `inspect.signature` reads this constructor, not the base class's signature.
            cls.__signature__ = None  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create the optimizer; under mixed_float16, create a `LossScaleOptimizer` instead."""
        if keras.config.dtype_policy().name != "mixed_float16":
            return super().__new__(cls)
        settings, plain, rule = cls._parse_arguments(*args, **options)
        scaled: Any = wrap(Directions(**plain), settings, _Ruled)
        scaled._set_rule(rule)
        # Both classes have one name; Keras loads the class that is registered last.
        for kind in (type(scaled), cls):
            keras.saving.register_keras_serializable("accordion_hvd", cls.__name__)(kind)
        return scaled

    def __init__(self, learning_rate: Any = 1e-3, **options: Any) -> None:
        settings, plain, rule = self._parse_arguments(learning_rate, **options)
        object.__setattr__(self, "_settings", settings)  # before Keras tracks attributes
        super().__init__(**plain)
        self._set_rule(rule)

    @classmethod
    def _parse_arguments(
        cls,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1e-3,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        policy: Policy | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
        **options: Any,
    ) -> tuple[Settings, dict[str, Any], UpdateRule]:
        fields = dataclasses.fields(cls._rule)  # type: ignore[arg-type]
        known = {field.name for field in fields}
        own = {key: options.pop(key) for key in list(options) if key in _FROM_KERAS | known}
        rule = cls._rule(**_from_keras(own, cls._rule()))
        passes = gradient_accumulation_steps or 1
        check.integer(cls.__name__, "gradient_accumulation_steps", passes, least=1)
        if passes > 1 and use_ema:
            several = (
                f"False with gradient_accumulation_steps={passes}, which Keras takes for steps"
            )
            check.refuse(cls.__name__, "use_ema", True, several)
        validation.check_strategy()
        decayed = {"weight_decay": float(weight_decay or 0.0), "decoupled_weight_decay": True}
        hyper = {"": decayed, UNDECAYED: decayed | {"weight_decay": 0.0}}
        settings = Settings(
            staged(rule, policy), process_set or hvd.global_process_set, False, True,
            check.patterns(skip), guard, guard_every, False, passes, True, hyper,
        )  # fmt: skip
        Guard(guard, guard_every)
        plain = {
            "learning_rate": learning_rate, "weight_decay": weight_decay, "clipnorm": clipnorm,
            "clipvalue": clipvalue, "global_clipnorm": global_clipnorm, "use_ema": use_ema,
            "ema_momentum": ema_momentum, "ema_overwrite_frequency": ema_overwrite_frequency,
            "name": name or keras.src.utils.naming.to_snake_case(cls.__name__),
        }  # fmt: skip
        if loss_scale_factor is not None:  # the first versions of Keras 3 lack this argument
            plain["loss_scale_factor"] = loss_scale_factor
        return settings, plain | options, rule


_FROM_KERAS = {"beta_1", "beta_2", "epsilon"}


def _from_keras(arguments: dict[str, Any], default: Any) -> dict[str, Any]:
    translated = {key: value for key, value in arguments.items() if key not in _FROM_KERAS}
    if arguments.get("beta_1") is not None or arguments.get("beta_2") is not None:
        betas = [arguments.get(key) for key in ("beta_1", "beta_2")]
        pairs = zip(betas, default.betas, strict=True)
        translated["betas"] = tuple(other if beta is None else beta for beta, other in pairs)
    if arguments.get("epsilon") is not None:
        translated["eps"] = arguments["epsilon"]
    return translated


def _to_keras(rule: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(rule) if field.init]
    config = {name: getattr(rule, name) for name in names}
    if "betas" in config:
        config["beta_1"], config["beta_2"] = config.pop("betas")
    if "eps" in config:
        config["epsilon"] = config.pop("eps")
    return config
