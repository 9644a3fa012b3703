"""Methods that a wrapped optimizer has besides those of its class, in all frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accordion_hvd.policies.accordion import BatchGrowth

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange


class Controls:
    """Properties and methods that users call on a `DistributedOptimizer`."""

    # A wrapped optimizer defines these attributes.
    _averager: Any  # the `GradientAverager`, or the `ModelAverager` if there are no gradients
    _models: Any  # the `ModelAverager`; None if the policy never averages models
    _statistics: Any  # a method that returns the `Parameters` of a model that are not trained

    @property
    def exchange(self) -> Exchange:
        """Return the exchange, with `stats()` (bytes and times), `levels()` and the policy.

        A single process, or one outside the optimizer's process set, exchanges nothing, so its
        statistics stay zero.

        Raises:
            RuntimeError: if the optimizer is not built yet, so that its tensors are not known.
        """
        return self._averager.exchange

    @property
    def exchange_owner(self) -> Any:
        """Return the object, or a tuple of objects, that `save_state(only=[optimizer])` saves."""
        both = self._models is not None and self._models is not self._averager
        return (self._averager, self._models) if both else self._averager

    @property
    def process_set(self) -> Any:
        """Return the process set over which gradients are averaged."""
        return self._averager.process_set

    @property
    def averaging(self) -> Any:
        """Return the model averager, with `stats()` and `state()`; None if there is none."""
        return self._models

    @property
    def averaging_models(self) -> bool:
        """Return whether ranks average models now, so that replicas differ between averages."""
        return self._averager.policy.observers.any("withholds")

    @property
    def growth(self) -> BatchGrowth | None:
        """Return the observer that increases the batch size; None if there is none."""
        return self._averager.policy.observers.find(BatchGrowth)

    def end_window(self) -> None:
        """End a window of the policy (normally an epoch); call it on every rank."""
        self._averager.policy.end_window()

    def average_now(self, model: Any = None) -> None:
        """Replace the models of all ranks by their average; all ranks call it after the same step.

        Use it before evaluation and checkpoints under policies that average models. While gradients
        are averaged (`Accordion(high=WAGMA())` in critical regimes), models are equal already.

        Args:
            model: model whose statistics are averaged, too: floating-point buffers in PyTorch,
                floating-point variables that are never trained in Keras. None: only the parameters
                are averaged.

        Raises:
            RuntimeError: if the optimizer never averages models, or if the method is called within
                a graph in Keras.
        """
        if self._models is None:
            raise RuntimeError(
                "average_now() requires a policy that averages models, but "
                f"{self._averager.policy!r} averages gradients, so models are equal already."
            )
        statistics = None if model is None else self._statistics(model)
        if self.averaging_models:
            self._models.average_now(statistics)
        elif statistics is not None:
            self._models.level(statistics)


class ModelControls(Controls):
    """Properties and methods of an optimizer that always averages models, by `_averager`."""

    averaging_models = True  # always

    @property
    def exchange(self) -> Any:
        raise AttributeError(
            "this optimizer averages models instead of gradients: see optimizer.averaging.stats()."
        )

    def end_window(self) -> None:
        """Do nothing, because the method has no windows; scripts for policies may call it."""

    def close(self) -> None:
        """Average all models and stop averaging; end the thread of wait-avoiding averaging.

        A process that does not call this method does so when it exits.
        """
        self._averager.close()
