"""Horovod's Keras callbacks, on Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.functions import broadcast_variables
from accordion_hvd.tensorflow.keras.optimizer import averages_models, is_distributed
from accordion_hvd.tensorflow.variables import key_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give every rank the weights and the optimizer state of `root_rank`, once, before training.

    With our distributed optimizers it also does what `fit` alone cannot: it turns XLA off
    (Horovod's operations cannot be compiled), ends `Accordion`'s windows with the epochs, lets
    decisions be taken between batches, has the train function made anew when levels have changed,
    compares the replicas, and stops training when a privacy budget has no room for another step.

    Where an optimizer averages models (`WAGMA` and its like), it makes them equal before each
    validation within `fit` and at the end of each epoch, before callbacks that follow it: put it
    before those that save or judge models. For methods with a period, let epochs be a multiple of
    it, where that matters (`DiLoCo`'s outer steps begin from such an average).

    Args:
        root_rank: the rank whose values are taken.
        device: accepted for compatibility.
        local_variables: variables that are not broadcast.
        average: what becomes equal then: "all", the statistics of batch normalisation and their
            like included; "trainable" variables only; or "nothing", where you call
            `optimizer.average_now(model)` when it suits you.

    Raises:
        ValueError: an argument is not what it may be.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        *,
        average: str = "all",
    ) -> None:
        super().__init__()
        check.one_of(self, "average", average, ("all", "trainable", "nothing"))
        self.root_rank, self.device, self.average = root_rank, device, average
        self.broadcast_done = False
        self._fitting = False
        self._averaged: int | None = None  # the step after which models were made equal
        self._local: set[int] = set()
        self._traced: int | None = None  # the version of the exchange in the train function
        if local_variables is not None and not isinstance(local_variables, (list, tuple, set)):
            local_variables = [local_variables]
        for variable in local_variables or []:
            if not isinstance(variable, (tf.Variable, keras.Variable)):
                raise ValueError("All local variables must be of tf.Variable type.")
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast this variable."""
        self._local.add(key_of(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model is built; take charge of the train function."""
        self._fitting, self._averaged = True, None
        averager = self._averager()
        if is_distributed(self.model.optimizer) and self.model.jit_compile:
            validation.turn_xla_off(self.model)
            self.model.make_train_function()
        if averager is not None:
            averager.managed = not self.model.run_eagerly and not averager.idle
            self._take_up(averager)
            if self._ends_windows():
                averager.policy.end_window()
        optimizer = self.model.optimizer
        if averages_models(optimizer) and self.model.built and not optimizer.built:
            optimizer.build(self.model.trainable_variables)  # models must be equal before a step
        if self.model.built and optimizer.built:
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Take decisions that are due; make the train function anew if levels have changed."""
        averager = self._averager()
        if averager is None or averager.idle or averager._exchange is None:
            return
        averager.check()
        averager.discover()
        exchange = averager.exchange
        exchange.catch_up(float(self.model.optimizer.learning_rate))
        self.model.optimizer._follow()
        if averager.managed and self._traced not in (None, exchange.version):
            self.model.make_train_function(force=True)
        self._traced = exchange.version

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if the model was not built before; stop while a privacy budget holds."""
        self._broadcast()
        averager = self._averager()
        if averager is not None and not averager.policy.affords():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End a window; average models that are averaged."""
        self._average()
        averager = self._averager()
        if averager is not None and not averager.idle and self._ends_windows():
            self._catch_up(averager)
            averager.policy.end_window()

    def on_test_begin(self, logs: Any = None) -> None:
        """Models that are averaged become equal, within `fit`."""
        if self._fitting:
            self._average()

    def _average(self) -> None:
        optimizer = self.model.optimizer
        if self.average == "nothing" or not (
            is_distributed(optimizer) and optimizer.averaging_models
        ):
            return
        if self._averaged != optimizer.averaging.steps:  # else it was for a validation
            optimizer.average_now(self.model if self.average == "all" else None)
            self._averaged = optimizer.averaging.steps

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the replicas once more; a train function with frozen levels is not kept."""
        self._fitting = False
        averager = self._averager()
        if averager is None or averager.idle or averager._exchange is None:
            return
        self._catch_up(averager)
        averager.check()
        averager.managed = False
        if averager.exchange.switching:
            averager.kept = (*self._stamp(self._traced), self.model.train_function)
            self.model.train_function, self._traced = None, None

    def _take_up(self, averager: Any) -> None:
        """Train on with the function of the last `fit`, if nothing has changed since."""
        *stamp, function = averager.kept or (None,)
        averager.kept = None
        if function is None or not averager.managed:
            return
        now = self._stamp(averager.exchange.version)
        if all(old is new or old == new for old, new in zip(stamp, now, strict=True)):
            self.model.train_function, self._traced = function, averager.exchange.version

    def _stamp(self, version: int | None) -> tuple[Any, ...]:
        """Return a train function's settings: levels, arguments of `compile`."""
        told = ("_compile_loss", "_compile_metrics")
        return version, *(getattr(self.model, name, None) for name in told)

    def _catch_up(self, averager: Any) -> None:
        if averager._exchange is not None and averager.agreed:
            averager.exchange.catch_up(float(self.model.optimizer.learning_rate))

    def _averager(self) -> Any:
        optimizer = self.model.optimizer
        ours = is_distributed(optimizer) and not averages_models(optimizer)
        return optimizer._averager if ours else None

    def _ends_windows(self) -> bool:
        """Return whether the callback must end the policy's windows, because the user does not."""
        return getattr(self._averager().policy, "window", "fixed") is None

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        self.broadcast_done = True
        # Not the seeds of dropout: ranks that drop the same units learn less from each batch.
        variables = [*self.model.weights, *self.model.optimizer.variables]
        wanted = [v for v in variables if key_of(v) not in self._local]
        broadcast_variables(wanted, self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Average all metrics over the ranks at the end of each epoch, before other callbacks see them.

    Put it before ReduceLROnPlateau, EarlyStopping, ModelCheckpoint and the like.

    Args:
        device: accepted for compatibility.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the metrics in `logs` by their averages."""
        names = sorted(logs or {})
        if not names or hvd.size() == 1:
            return
        mine = tf.constant([float(logs[name]) for name in names], tf.float64)
        for name, value in zip(names, hvd.allreduce(mine, op=hvd.Average).numpy(), strict=True):
            logs[name] = float(value)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` to `end_epoch`.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number: then the learning rate is multiplied by
            it in each epoch.
        start_epoch: the first epoch concerned.
        end_epoch: the first epoch no longer concerned; None for all.
        staircase: at the beginning of each epoch; else of each batch, with a fractional epoch.
        momentum_correction: scale velocities along with the learning rate that they contain, for
            optimizers with `momentum`.
        steps_per_epoch: batches in an epoch; found out by itself if the number is known.

    Raises:
        ValueError: `initial_lr` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has, where that matters."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify the "
                f"steps_per_epoch parameter to the {type(self).__name__}()."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch
        if self.staircase and self._concerned():
            self._adjust(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Adjust the learning rate, unless that is done by epochs."""
        if not self.staircase and self._concerned():
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + float(batch) / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _concerned(self) -> bool:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        return self.current_epoch >= self.start_epoch and not ended

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        now = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not (self.momentum_correction and getattr(inner, "momentum", None) and before):
            return
        # Keras' momentum is a constant in the graph; to scale it for one step, as Horovod does, is
        # to scale the velocities once.
        velocities = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []
        for velocity in velocities:
            velocity.assign(velocity * (now / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    Goyal et al., "Accurate, Large Minibatch SGD", 2017.

    Args:
        initial_lr: the learning rate to arrive at.
        warmup_epochs: epochs until then.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: likewise.
        verbose: 1 to say when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch  # so that epochs end on round numbers
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(  # fmt: skip
            initial_lr,
            multiplier,
            0,
            warmup_epochs,
            False,
            momentum_correction,
            steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate; say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if last and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A `ModelCheckpoint` that keeps the best model; set its `filepath` before training.

    Args:
        monitor: the metric by which models are compared.
        verbose: 1 to say when a model is saved.
        save_weights_only: save no more than the weights.
        mode: "min", "max" or "auto".
        save_freq: see `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best_model{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
