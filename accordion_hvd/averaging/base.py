"""Base class and helpers of methods that average models instead of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import (
    Allreduce,
    Compressor,
    ExchangeGenerator,
    Info,
    Private,
    State,
    Tensor,
)
from accordion_hvd.core.codec import Shifted
from accordion_hvd.ops import namespace

RankGroup = tuple[int, ...]


class Averaging(Compressor):
    """Base class of model averaging: after each local optimizer step, ranks combine their models.

    A subclass is a frozen dataclass. Its `exchange` is an exchange generator like a compressor's,
    but its argument and result are models instead of gradients. A model is one vector with all
    parameters of one dtype, after the step of the rank's own optimizer. `info.step` counts these
    steps from 0 and must be an integer.

    Attributes:
        inner: inner optimizers that the method supports: "any", or "sgd" for plain SGD without
            momentum, for methods that depend on the form of a step.
        neighbours_only: whether each rank only sends to its neighbours, which never change.
        synchronizes: whether the method makes all models equal from time to time.
        shared: keys of the state that are equal on all ranks, and are preserved when the number of
            ranks changes.
    """

    output = "model"
    scope = "model"
    inner: ClassVar[str] = "any"
    neighbours_only: ClassVar[bool] = False
    synchronizes: ClassVar[bool] = True
    shared: ClassVar[tuple[str, ...]] = ()

    def start(self, model: Tensor, info: Info) -> State:
        """Return the state before the first step, when `model` is equal on all ranks."""
        return self.synchronized(self.init(namespace(model).spec(model), info), model)

    def groups(self, size: int) -> tuple[RankGroup, ...]:
        """Return the groups that requests may name, for `size` ranks.

        Raises:
            ValueError: if the method does not support this number of ranks.
        """
        return ()

    @property
    def only_means(self) -> bool:
        """Return whether groups only compute means, which `by_shares` can compute as well."""
        return True

    def equal(self, step: int) -> bool:
        """Return whether all models are equal after the exchange of this step."""
        return True

    def synchronize(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Make all models equal now, for evaluation or a checkpoint, by averaging them."""
        mean = yield Allreduce(model)
        return mean, self.synchronized(state, mean)

    def synchronized(self, state: State, model: Tensor) -> State:
        """Return the state after all ranks have received `model`."""
        return state

    def residual(self, state: State) -> Tensor | None:
        """Return None: the part of a model that was not sent remains in the model."""
        return None


def ends_period(step: int, period: int) -> bool:
    """Return whether `step`, counted from 0, is the last step of a period."""
    return (step + 1) % period == 0


def group_info(info: Info, group: RankGroup) -> Info:
    return replace(info, rank=group.index(info.rank), size=len(group))


def prefixed(state: State) -> State:
    """Return a compressor's state under keys that start with "compressor/"."""
    return {f"compressor/{key}": value for key, value in state.items()}


def unprefixed(state: State) -> State:
    """Return the compressor's state from a state with keys of `prefixed`."""
    parts = ((key.partition("compressor/"), value) for key, value in state.items())
    return {key: value for (_, found, key), value in parts if found}


def check_compressor(owner: Any, compressor: Any) -> None:
    """Raise ValueError unless `compressor` is None or returns means of gradients."""
    if compressor is None:
        return
    supported = (
        isinstance(compressor, Compressor)
        and compressor.output == "gradient"
        and compressor.period == 1  # an average does not know the phase of its compressor
        and not (compressor.topology_aware or compressor.sharded)
        and not isinstance(compressor, (Private, Shifted))
    )
    if not supported:
        allowed = "None or a compressor that returns the mean of gradients and is not private, "
        allowed += "topology-aware, EF21, Diana, LGC, PowerSGD with alternate=True or, with "
        allowed += "residuals, DoubleSqueeze"
        check.refuse(owner, "compressor", compressor, allowed)
