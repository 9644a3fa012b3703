"""Horovod's Keras callbacks, for Keras 3."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from accordion_hvd import check
from accordion_hvd.comm import timeouts
from accordion_hvd.comm.horovod.tensorflow import hvd
from accordion_hvd.tensorflow import validation
from accordion_hvd.tensorflow.functions import broadcast_variables
from accordion_hvd.tensorflow.keras.optimizer import averages_models, is_distributed
from accordion_hvd.tensorflow.variables import key_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcast weights and optimizer state from `root_rank` to all ranks once, before training.

    With a distributed optimizer of this package, the callback also connects `fit` to the policy:

    - It turns off XLA, which cannot compile Horovod's operations.
    - It ends the policy's windows at the ends of epochs, unless the policy has a fixed window.
    - It has decisions taken between batches, and retraces the train function after a change of
      levels.
    - It compares the replicas.
    - It stops training when the privacy budget does not suffice for another step.

    If the optimizer averages models (`WAGMA`, for example), the callback makes all models equal
    before each validation in `fit` and at the end of each epoch. Callbacks that save or evaluate
    models must follow it in the list of callbacks. If the method has a period (`DiLoCo`, whose
    outer steps start from the average), the number of steps per epoch should be a multiple of it.

    Args:
        root_rank: the rank that sends its values.
        device: accepted for compatibility with Horovod; not used.
        local_variables: variables that are not broadcast.
        average: variables that are averaged before validation and at the end of an epoch: "all"
            includes the statistics of batch normalization and other floating-point state of layers;
            "trainable" means only trainable variables; "nothing" leaves the calls of
            `optimizer.average_now(model)` to you.

    Raises:
        ValueError: if `average` is none of these, or if a local variable is not a `tf.Variable` or
            `keras.Variable`.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None, *, average: str = "all"
    ) -> None:
        super().__init__()
        check.one_of(self, "average", average, ("all", "trainable", "nothing"))
        self.root_rank, self.device, self.average = root_rank, device, average
        self.broadcast_done = False
        self._fitting = False
        self._averaged: int | None = None  # the step after which models were averaged
        self._local: set[int] = set()
        self._traced: int | None = None  # version of the exchange in the train function
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
        """Broadcast if the model is built, and start to manage the train function."""
        self._fitting, self._averaged = True, None
        averager = self._averager()
        if is_distributed(self.model.optimizer) and self.model.jit_compile:
            validation.turn_xla_off(self.model)
            self.model.make_train_function()
        if averager is not None:
            if averager.managed:  # an earlier fit ended by an exception and left its train function
                self.model.train_function = None
                self.model.make_train_function()
            averager.managed = not self.model.run_eagerly and not averager.idle
            self._reuse_train_function(averager)
            if self._ends_windows():
                averager.policy.end_window()
        optimizer = self.model.optimizer
        if averages_models(optimizer) and self.model.built and not optimizer.built:
            optimizer.build(self.model.trainable_variables)  # so that the broadcast precedes a step
        if self.model.built and optimizer.built:
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Take decisions that are due, and retrace the train function if levels have changed."""
        averager = self._averager()
        if averager is None or averager.idle or averager._exchange is None:
            return
        averager.check()
        averager.discover()
        exchange = averager.exchange
        exchange.catch_up(float(self.model.optimizer.learning_rate))
        self.model.optimizer._update_batch_count()
        if averager.managed and self._traced not in (None, exchange.version):
            self.model.make_train_function(force=True)
        self._traced = exchange.version

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if the model was not built before; stop when the privacy budget is spent."""
        self._broadcast()
        averager = self._averager()
        if averager is not None and self._traced is None and averager._exchange is not None:
            self._traced = averager.exchange.version  # the first batch has made the exchange
        if averager is not None and not averager.policy.affords():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average models if the optimizer averages models, and end a window of the policy."""
        self._average()
        averager = self._averager()
        if averager is not None and not averager.idle and self._ends_windows():
            self._catch_up(averager)
            averager.policy.end_window()

    def on_test_begin(self, logs: Any = None) -> None:
        """Average models before a validation in `fit`, if the optimizer averages models."""
        if self._fitting:
            self._average()

    def _average(self) -> None:
        optimizer = self.model.optimizer
        averages = is_distributed(optimizer) and optimizer.averaging_models
        if self.average == "nothing" or not averages:
            return
        steps = optimizer.averaging.total_steps
        if self._averaged != steps:  # else a validation has averaged already
            optimizer.average_now(self.model if self.average == "all" else None)
            self._averaged = steps

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the replicas again, and remove a train function with frozen levels."""
        self._fitting = False
        averager = self._averager()
        if averager is None or averager.idle or averager._exchange is None:
            return
        self._catch_up(averager)
        averager.check()
        averager.managed = False
        if averager.exchange.switching:
            averager.train_function = (*self._stamp(self._traced), self.model.train_function)
            self.model.train_function, self._traced = None, None

    def _reuse_train_function(self, averager: Any) -> None:
        *stamp, function = averager.train_function or (None,)
        averager.train_function = None
        if function is None or not averager.managed:
            return
        current = self._stamp(averager.exchange.version)
        if all(old is new or old == new for old, new in zip(stamp, current, strict=True)):
            self.model.train_function, self._traced = function, averager.exchange.version

    def _stamp(self, version: int | None) -> tuple[Any, ...]:
        # A train function depends on the levels and on the arguments of `compile`.
        names = ("_compile_loss", "_compile_metrics", "_compile_config")
        return version, *(getattr(self.model, name, None) for name in names)

    def _catch_up(self, averager: Any) -> None:
        if averager._exchange is not None and averager.agreed:
            averager.exchange.catch_up(float(self.model.optimizer.learning_rate))

    def _averager(self) -> Any:
        optimizer = self.model.optimizer
        averages_gradients = is_distributed(optimizer) and not averages_models(optimizer)
        return optimizer._averager if averages_gradients else None

    def _ends_windows(self) -> bool:
        return getattr(self._averager().policy, "window", "fixed") is None

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        self.broadcast_done = True
        # Seeds of dropout are excluded: ranks should drop different units.
        variables = [*self.model.weights, *self.model.optimizer.variables]
        broadcast = [v for v in variables if key_of(v) not in self._local]
        broadcast_variables(broadcast, self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Average all metrics over the ranks at the end of each epoch.

    Callbacks that use metrics, such as ReduceLROnPlateau, EarlyStopping and ModelCheckpoint, must
    follow it in the list of callbacks.

    Args:
        device: accepted for compatibility with Horovod; not used.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the metrics in `logs` by their averages."""
        names = sorted(logs or {})
        if not names or hvd.size() == 1:
            return
        local = tf.constant([float(logs[name]) for name in names], tf.float64)
        with timeouts.waiting():
            means = hvd.allreduce(local, op=hvd.Average).numpy()
        logs.update(zip(names, map(float, means), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` to `end_epoch`.

    Args:
        initial_lr: learning rate that is multiplied.
        multiplier: function of the epoch; or a number m, which means the function
            m^(epoch - start_epoch).
        start_epoch: first epoch in which the schedule applies.
        end_epoch: first epoch in which the schedule no longer applies. None: it applies to the end.
        staircase: whether to set the learning rate at the beginning of each epoch. If False, it is
            set before each batch, with a fractional epoch.
        momentum_correction: whether to scale velocities together with the learning rate that they
            contain, for optimizers with `momentum`.
        steps_per_epoch: number of batches per epoch. Default: the number that `fit` reports.

    Raises:
        ValueError: if `initial_lr` is None.
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
        """Determine the number of batches per epoch if the schedule needs it."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify the "
                f"steps_per_epoch parameter to the {type(self).__name__}()."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch, and set the learning rate if `staircase` is True."""
        self.current_epoch = epoch
        if self.staircase and self._applies():
            self._adjust(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate if `staircase` is False."""
        if not self.staircase and self._applies():
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + float(batch) / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _applies(self) -> bool:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        return self.current_epoch >= self.start_epoch and not ended

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        new = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not (self.momentum_correction and getattr(inner, "momentum", None) and old):
            return
        # Horovod scales the momentum for one step. In Keras, momentum is a constant of the graph,
        # so this code scales the velocities once, which is equivalent.
        velocities = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []
        for velocity in velocities:
            velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    See Goyal et al., "Accurate, Large Minibatch SGD", 2017.

    Args:
        initial_lr: learning rate at the end of the warm-up.
        warmup_epochs: number of epochs of the warm-up.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1 to print a message at the end of the warm-up.
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
            # So that an epoch ends at an integer, and a warm-up within an epoch, too.
            epoch = min(epoch + 1.0 / self.steps_per_epoch, warmup_epochs)
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate, and print a message at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if last and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(  # noqa: T201 (as Keras does)
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`ModelCheckpoint` that saves only the best model; set its `filepath` before training.

    Args:
        monitor: metric by which models are compared.
        verbose: 1 to print a message when a model is saved.
        save_weights_only: whether to save only the weights.
        mode: whether the metric is minimized or maximized: "min", "max" or "auto".
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


# -------------------------------------------------------------------------------- batches that grow
class AccordionDataset(keras.utils.PyDataset):
    """Dataset of a rank's examples with the batch sizes that `Accordion(batch_size=...)` chooses.

    ```python
    model.fit(AccordionDataset((x, y), optimizer), callbacks=[...])
    ```
    With this dataset, each batch is one step and no gradients are accumulated. The batch size
    changes only between epochs: at the beginning of an epoch, the policy takes a decision that is
    due. The optimizer's `iterations` still count small batches, so that learning rate schedules do
    not change. `fit` also shuffles the order of the batches by default.

    Args:
        arrays: this rank's inputs and targets, and optionally sample weights; the same number of
            examples on all ranks.
        optimizer: the result of `DistributedOptimizer`.
        shuffle: whether to shuffle the examples at the beginning of each epoch.
        seed: seed of the shuffling; ranks shuffle differently.
        drop_last: whether to drop the last, incomplete batch of an epoch. If False, the last batch
            is smaller and counts like the others.

    Raises:
        ValueError: if the optimizer's policy does not choose batch sizes, or the arrays have
            different lengths.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        optimizer: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        growth: Any = optimizer.growth if is_distributed(optimizer) else None
        if growth is None:
            allowed = "a DistributedOptimizer with compression=Accordion(batch_size=(small, large))"
            check.refuse(self, "optimizer", type(optimizer).__name__, allowed)
        self.arrays, self.optimizer = tuple(np.asarray(array) for array in arrays), optimizer
        lengths = [len(array) for array in self.arrays]
        if len(set(lengths)) != 1:
            check.refuse(self, "number of examples", lengths, "the same in all arrays")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._growth = growth
        self._growth.loader = True
        self._epoch = 0
        self._order = np.arange(lengths[0])

    @property
    def batch_size(self) -> int:
        """Return the present number of examples per batch on this rank."""
        ranks = self.optimizer.process_set.size()
        return self._growth.share(ranks) * self._growth.micro_batches

    @property
    def num_batches(self) -> int:
        """Return the number of batches per epoch at the present batch size."""
        count, size = len(self._order), self.batch_size
        return count // size if self.drop_last else -(-count // size)

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        size = self.batch_size
        chosen = self._order[index * size : (index + 1) * size]
        return tuple(array[chosen] for array in self.arrays)

    def on_epoch_begin(self) -> None:
        """Take a decision that is due, and shuffle the examples."""
        self.optimizer.resize()
        _update_fit(self.num_batches)
        if self.shuffle:
            rng = np.random.default_rng([self.seed, hvd.rank(), self._epoch])
            self._order = rng.permutation(len(self._order))
        self._epoch += 1


def _update_fit(count: int) -> None:
    # `fit` reads the number once, when it begins. A later epoch with fewer batches would end in
    # the middle of a step, because the dataset is exhausted.
    frame: Any = sys._getframe(2)
    for _ in range(4):
        owner = frame.f_locals.get("self")
        if hasattr(owner, "_num_batches") and hasattr(owner, "data_adapter"):
            owner._num_batches = count
            return
        frame = frame.f_back
        if frame is None:
            return
