"""Base classes of methods that average models instead of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from accordion_hvd import _renamed, check
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.shifted import Shifted
from accordion_hvd.ops import namespace

Group = tuple[int, ...]


RENAMED = {"meets": "synchronizes", "neighbourly": "neighbours_only", "of_means": "only_means"}
"""Old names of members that an averaging method may define, and the new ones."""


class Averaging(Compressor):
    """Brings models together after each rank has taken its own optimizer's step.

    A subclass is a frozen dataclass. Its `exchange` is a conversation as a compressor's, but what
    it is given and returns is a model: one vector of all parameters of one dtype, as the rank's
    own optimizer has left it. `info.step` counts these steps from 0 and must be an integer.

    Attributes:
        inner: which optimizers may be inside: "any", or "sgd" for plain SGD without momentum,
            where the method needs to know what one step is.
        neighbours_only: whether ranks only tell their neighbours something, always the same ones.
        synchronizes: whether it makes all models equal now and then, by itself.
        shared: keys of the state that are equal on all ranks and outlast a change of their number.
    """

    target: ClassVar[str] = "parameter"
    scope: ClassVar[str] = "model"
    inner: ClassVar[str] = "any"
    neighbours_only: ClassVar[bool] = False
    synchronizes: ClassVar[bool] = True
    shared: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept members by their old names."""
        super().__init_subclass__(**options)
        _renamed.members(cls, RENAMED)

    def start(self, model: Tensor, info: Info) -> State:
        """Return the state before the first step, when all ranks have `model`."""
        return self.init(namespace(model).spec(model), info)

    def groups(self, size: int) -> tuple[Group, ...]:
        """Groups that requests will name, for `size` ranks.

        Raises:
            ValueError: the method does not suit this number of ranks.
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
        """Make all models equal now, for evaluation or a checkpoint: their average."""
        mean = yield Allreduce(model)
        return mean, self.synchronized(state, mean)

    def synchronized(self, state: State, model: Tensor) -> State:
        """Return the state after all ranks have received `model`."""
        return state

    def residual(self, state: State) -> Tensor | None:
        """None: what was not sent is part of the model."""
        return None


def periodic(owner: Any, period: Any) -> None:
    """Raise ValueError unless `period` is an integer of at least 1."""
    check.integer(owner, "period", period, least=1)


def ends_period(step: int, period: int) -> bool:
    """Return whether a step, counted from 0, is the last of a period."""
    return (step + 1) % period == 0


def group_info(info: Info, group: Group) -> Info:
    """Return the `Info` for an exchange `among` the members of a group."""
    return replace(info, rank=group.index(info.rank), size=len(group))


def prefixed(kept: State) -> State:
    """Return a compressor's state under the names that the averaging method uses."""
    return {f"compressor/{key}": value for key, value in kept.items()}


def unprefixed(state: State) -> State:
    """Invert `prefixed`; other keys are left out."""
    parts = ((key.partition("compressor/"), value) for key, value in state.items())
    return {key: value for (_, found, key), value in parts if found}


def check_compressor(owner: Any, compressor: Any) -> None:
    """Raise ValueError unless `compressor` is None or one that returns the mean of vectors."""
    if compressor is None:
        return
    suits = (
        isinstance(compressor, Compressor)
        and (compressor.target, compressor.output) == ("gradient", "gradient")
        and not (compressor.topology_aware or compressor.private or isinstance(compressor, Shifted))
    )
    if not suits:
        allowed = "None or one that returns the mean of gradients, openly and on any machines, "
        allowed += "whatever was sent before"
        check.refuse(owner, "compressor", compressor, allowed)
