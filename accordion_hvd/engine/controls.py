"""The methods of a wrapped optimizer, in every framework, beyond those of its own class."""

from __future__ import annotations

from typing import Any

from accordion_hvd import _renamed
from accordion_hvd.policies.batch_growth import BatchGrowth


class Controls:
    """Properties and methods that users call on a `DistributedOptimizer`.

    A wrapper has `_averager`, the `GradientAverager`, and `_models`, which averages models (always
    or at times), or None; `_statistics(model)` returns a model's `Parameters` that are not trained.
    """

    _averager: Any
    _models: Any
    _statistics: Any

    @property
    def exchange(self) -> Any:
        """Bytes, times, levels and policy of this optimizer's exchanges: `stats()`, `levels()`.

        A process that is alone, or outside the optimizer's process set, exchanges nothing; its
        figures stay zero.

        Raises:
            RuntimeError: the optimizer is not built, so that no tensors are known.
        """
        return self._averager.exchange

    @property
    def exchange_owner(self) -> Any:
        """Return the object that `save_state(only=[optimizer])` saves; several in a tuple."""
        both = self._models is not None and self._models is not self._averager
        return (self._averager, self._models) if both else self._averager

    @property
    def process_set(self) -> Any:
        """Return the ranks that average."""
        return self._averager.process_set

    @property
    def averaging(self) -> Any:
        """Return the averager of models, with `stats()` and `state`; None if there is none."""
        return self._models

    @property
    def averaging_models(self) -> bool:
        """Return whether ranks average models now, which differ in between."""
        return self._averager.policy.observers.any("withholds")

    apart = _renamed.attribute("apart", "averaging_models")

    @property
    def growth(self) -> BatchGrowth | None:
        """Return the observer that makes batches grow; None if there is none."""
        return self._averager.policy.observers.find(BatchGrowth)

    def end_window(self) -> None:
        """End a window of the policy (an epoch); call it on every rank."""
        self._averager.policy.end_window()

    def average_now(self, model: Any = None) -> None:
        """Make all models equal: their average. All ranks call it after the same step.

        For evaluation and checkpoints under policies that average models; where gradients are
        averaged now (`Accordion(high=WAGMA())` in critical regimes), models are equal already.

        Args:
            model: the model whose statistics are averaged, too: floating-point buffers in PyTorch,
                in Keras floating-point variables that are never trained.

        Raises:
            RuntimeError: the optimizer never averages models; in Keras, within a graph.
        """
        if self._models is None:
            raise RuntimeError(
                "average_now() is for methods that average models, but "
                f"{self._averager.policy!r} averages gradients, which keeps models equal."
            )
        statistics = None if model is None else self._statistics(model)
        if self.averaging_models:
            self._models.average_now(statistics)
        elif statistics is not None:
            self._models.level(statistics)
