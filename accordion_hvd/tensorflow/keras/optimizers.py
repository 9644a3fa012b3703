"""Compressed optimizers for Keras 3: `OnebitAdam` and its kin, used as `keras.optimizers.Adam` is.

```python
import accordion_hvd.tensorflow.keras as hvd

model.compile(optimizer=hvd.OnebitAdam(learning_rate=1e-3), loss="mse")
```
No `DistributedOptimizer` around it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from accordion_hvd import check, optimizers
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.guard import Guard
from accordion_hvd.optimizers import UpdateRule
from accordion_hvd.resolve import staged
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.keras.optimizer import Settings, _Distributed, wrap
from accordion_hvd.tensorflow.variables import key_of

UNDECAYED = "undecayed"
"""The group of variables that `exclude_from_weight_decay` names, for rules that decay weights."""

MARK = "exchange:"
"""Begins the names of what a saved optimizer has besides Keras' own variables."""


@keras.saving.register_keras_serializable("accordion_hvd")
class Directions(keras.optimizers.Optimizer):
    """x <- x - learning_rate (u + weight_decay x), for a direction u that was found elsewhere.

    Directions are not clipped; a NaN in their first element means that no rank takes the step.
    """

    serving: Any = None  # tells what found a variable's direction

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Take the step. Raises: RuntimeError where gradients would be taken for directions."""
        if self.serving is None:
            raise RuntimeError(
                "Directions is no optimizer of its own: use accordion_hvd.tensorflow.keras's (and "
                "set the mixed_float16 policy before a model is loaded that was saved under it)."
            )
        rule, old = self.serving(variable), tf.convert_to_tensor(variable)
        new = taken = tf.cast(gradient, variable.dtype)
        if not rule.returns_weights:
            decay = 0.0 if rule.decays(True) else self.weight_decay
            if decay and self._use_weight_decay(variable):
                taken = taken + decay * old
            new = old - tf.cast(learning_rate, variable.dtype) * taken
        good = tf.math.is_finite(tf.reshape(taken, (-1,))[0])
        self.assign(variable, tf.where(good, new, old))

    def clip(self, grads: list[Any]) -> list[Any]:
        """Clip this rank's gradients, as `clipnorm` and similar arguments say."""
        return super()._clip_gradients(grads)

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        """With the step, where it is known whether that counts."""


class _Ruled(_Distributed):
    """Methods of a compressed optimizer: gradients stay local."""

    def _remember(self: Any, rule: UpdateRule) -> None:
        inner: Any = getattr(self, "inner_optimizer", self)
        averager, self.rule = self._averager, rule
        inner.serving = lambda variable: averager.serving(key_of(variable))
        if rule.applies_weight_decay:
            self._averager.group_of = lambda v: "" if inner._use_weight_decay(v) else UNDECAYED

    def get_config(self: Any) -> dict[str, Any]:
        """Return the arguments of `from_config` of its class."""
        passes = self._settings.passes
        own = {"gradient_accumulation_steps": passes if passes > 1 else None}
        plain = Directions.get_config(getattr(self, "inner_optimizer", self))
        return plain | own | _to_keras(self.rule)

    def _step(self: Any, grads: list[Any], variables: list[Any], batches: Any) -> None:
        given = [i for i, grad in enumerate(grads) if grad is not None]
        inner = getattr(self, "inner_optimizer", self)
        clipped = inner.clip([tf.convert_to_tensor(grads[i]) for i in given])
        for i, grad in zip(given, clipped, strict=True):
            grads[i] = grad
        super()._step(grads, variables, batches)

    def save_own_variables(self: Any, store: Any) -> None:
        """Keras' own, and this rank's moments, errors and stage; see `state_dict` in PyTorch."""
        super().save_own_variables(store)  # type: ignore[misc]
        if not self.built or not self.exchange.steps:
            return
        saved = checkpoint.snapshot(self.exchange)
        for key, value in saved.pop("tensors").items():
            store[MARK + key.replace("/", ":")] = value.numpy()
        store[MARK] = np.frombuffer(json.dumps(saved).encode(), np.uint8)

    def load_own_variables(self: Any, store: Any) -> None:
        """Restore from `save_own_variables`."""
        rest = {key: store[key] for key in store.keys() if not key.startswith(MARK)}  # noqa: SIM118
        super().load_own_variables(rest)  # type: ignore[misc]
        if MARK not in store.keys():  # noqa: SIM118
            return
        saved = json.loads(np.asarray(store[MARK]).tobytes())
        names = [key for key in store.keys() if key.startswith(MARK) and key != MARK]  # noqa: SIM118
        saved["tensors"] = {
            key.removeprefix(MARK).replace(":", "/"): tf.constant(np.asarray(store[key]))
            for key in names
        }
        self._averager.adopt(saved)


class CompressedOptimizer(_Ruled, Directions):
    """An optimizer whose ranks exchange what its paper says, instead of gradients.

    Gradients are this rank's own until then: `clipnorm`, `clipvalue` and `global_clipnorm` clip
    these, each rank by its own norm. If a gradient of some rank is not finite, no rank takes the
    step, and nothing is forgotten. Under the mixed_float16 policy, which must be set before, the
    result is a `LossScaleOptimizer` that does all this.

    A saved model holds this rank's moments and errors: each rank must save its own to resume
    exactly; where all load one rank's, errors begin anew. `hvd.save_state` and `hvd.load_state`
    keep them on any number of ranks. `policy`, `process_set`, `skip` and `guard` are not saved.

    Args:
        learning_rate: a number or a schedule.
        beta_1: decay rate of the first moment, beta_2 of the second, epsilon: beside the root, for
            those that have them; None: the paper's.
        weight_decay: taken off the weights in each step (decoupled, as everywhere in Keras).
        gradient_accumulation_steps: batches whose gradients are averaged for one step.
        policy: what moves it between its stages, instead of the paper's rule: `Accordion(...)`
            without levels, or any policy over `accordion_hvd.optimizers`.
        process_set: the ranks that exchange; others take steps of their own.
        skip: patterns (as of file names) of variables that stay in the dense stage.
        guard: what to do when replicas differ: "error" (the default), "warn" or "off".
        guard_every: steps between comparisons of the replicas, by default 100.
        settings: the other arguments of the optimizer in `accordion_hvd.optimizers`.
        options: what all Keras optimizers take.

    Raises:
        ValueError: an argument is not what it must be; the sentence says which.
        TypeError: an argument that it does not have.
    """

    _rule: ClassVar[type[UpdateRule]]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Under mixed_float16 something else, which Keras will not wrap in loss scaling."""
        if keras.config.dtype_policy().name != "mixed_float16":
            return super().__new__(cls)
        settings, plain, rule = cls._understood(*args, **options)
        scaled: Any = wrap(Directions(**plain), settings, _Ruled)
        scaled._remember(rule)
        for kind in (type(scaled), cls):  # saved under one name, by which this one is found again
            keras.saving.register_keras_serializable("accordion_hvd", cls.__name__)(kind)
        return scaled

    def __init__(self, learning_rate: Any = 1e-3, **options: Any) -> None:
        settings, plain, rule = self._understood(learning_rate, **options)
        object.__setattr__(self, "_settings", settings)  # before Keras tracks attributes
        super().__init__(**plain)
        self._remember(rule)

    @classmethod
    def _understood(
        cls,
        learning_rate: Any = 1e-3,
        *,
        policy: Any = None,
        process_set: Any = hvd.global_process_set,
        skip: Any = (),
        guard: str | None = None,
        guard_every: int | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        **rest: Any,
    ) -> tuple[Settings, dict[str, Any], UpdateRule]:
        """Settings, what Keras' own class takes, and the rule."""
        known = {field.name for field in dataclasses.fields(cls._rule)}  # type: ignore[arg-type]
        own = {key: rest.pop(key) for key in list(rest) if key in _FROM_KERAS | known}
        rule = cls._rule(**_from_keras(own, cls._rule()))
        passes = gradient_accumulation_steps or 1
        check.integer(cls.__name__, "gradient_accumulation_steps", passes, least=1)
        validation.check_strategy()
        decay = float(rest.get("weight_decay") or 0.0)
        told = {"weight_decay": decay, "decoupled_weight_decay": True}
        hyper = {"": told, UNDECAYED: told | {"weight_decay": 0.0}}
        settings = Settings(
            staged(rule, policy), process_set, False, True, tuple(skip), guard,
            guard_every, False, passes, True, hyper,
        )  # fmt: skip
        Guard(guard, guard_every)
        name = name or keras.src.utils.naming.to_snake_case(cls.__name__)
        return settings, {"learning_rate": learning_rate, "name": name, **rest}, rule


_FROM_KERAS = {"beta_1", "beta_2", "epsilon"}


def _from_keras(given: dict[str, Any], default: Any) -> dict[str, Any]:
    rest = {key: value for key, value in given.items() if key not in _FROM_KERAS}
    if given.get("beta_1") is not None or given.get("beta_2") is not None:
        betas = [given.get(key) for key in ("beta_1", "beta_2")]
        pairs = zip(betas, default.betas, strict=True)
        rest["betas"] = tuple(other if beta is None else beta for beta, other in pairs)
    if given.get("epsilon") is not None:
        rest["eps"] = given["epsilon"]
    return rest


def _to_keras(rule: Any) -> dict[str, Any]:
    found = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    if "betas" in found:
        found["beta_1"], found["beta_2"] = found.pop("betas")
    if "eps" in found:
        found["epsilon"] = found.pop("eps")
    return found


def _native(name: str) -> type[CompressedOptimizer]:
    rule = getattr(optimizers, name)
    text = f"{rule.__doc__}\n\nSee `CompressedOptimizer` for what all of them take."
    contents = {"_rule": rule, "__doc__": text, "__module__": __name__}
    kind = type(name, (CompressedOptimizer,), contents)
    return keras.saving.register_keras_serializable("accordion_hvd")(kind)


NATIVE = {name: _native(name) for name in optimizers.NATIVE}
NATIVE |= {alias: NATIVE[name] for alias, name in optimizers.ALIASES.items()}
