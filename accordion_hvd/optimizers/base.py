"""Base class of optimizers that communicate quantities other than gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from accordion_hvd import _renamed, check
from accordion_hvd.core.base import Compressor, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.signs import joint_residual

RENAMED = {
    "ASSIGNS": "returns_weights",
    "AVERAGED": "averaged_state",
    "DECAYS": "applies_weight_decay",
    "GROUP": "group_settings",
    "RESCALED": "rescale_note",
}
"""Old names of members that an update rule may define, and the new ones."""


class UpdateRule(Compressor):
    """An optimizer's update as a conversation: gradients go in, a direction u comes out.

    The weights then take the step x <- x - lr u, on every rank the same (and decoupled weight
    decay, x <- x - lr * weight_decay * x, with it). What else is in an optimizer is in here:
    moments, errors, and what ranks tell each other. State is fp32, or fp64 for fp64 weights.

    A rule may have two stages, a `dense` one and itself; a policy says which serves when, and
    at a change the moments go along (`warm_start`) while errors wait (`deactivate`).

    Attributes:
        group_settings: fields that parameter groups may set for their tensors (`Info.hyper`).
        rescale_note: what `rescale` does with what ranks had of their own, in words.
        averaged_state: what of it becomes the ranks' mean there.
        applies_weight_decay: whether decoupled weight decay (`decay`) is in what comes out, so
            that whoever takes the step must not apply any.
        returns_weights: whether what comes out are the new weights themselves, to be assigned,
            instead
            of a direction: how ranks whose weights differ for some steps get equal bits again.
            See `synchronous`.
        decoupled_weight_decay: whether weight decay is subtracted from the weights, as in AdamW,
            rather than added to the gradient, as in Adam: the form of the rule's paper. A
            parameter group's setting of this name overrides it; Keras always subtracts.
    """

    output: ClassVar[str] = "update"
    batching: ClassVar[str] = "alike"
    per_rank_state: ClassVar[tuple[str, ...]] = ()

    group_settings: ClassVar[tuple[str, ...]] = ("betas", "eps")
    rescale_note: ClassVar[str] = "nothing is lost"
    averaged_state: ClassVar[tuple[str, ...]] = ()
    applies_weight_decay: ClassVar[bool] = False
    returns_weights: ClassVar[bool] = False
    decoupled_weight_decay: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept members by their old names."""
        super().__init_subclass__(**options)
        _renamed.members(cls, RENAMED)

    def dense(self) -> UpdateRule:
        """Return the stage in which gradients are averaged exactly; by default itself."""
        return self

    def decays(self, decoupled: bool) -> bool:
        """Return whether the rule applies such weight decay itself."""
        return self.applies_weight_decay and decoupled

    def plain(self) -> Compressor:
        """Small and exempt tensors are always in the dense stage."""
        return self.dense()

    def setting(self, info: Info, name: str) -> Any:
        """Return a field, or the value of the tensor's parameter group."""
        return info.hyper.get(name, getattr(self, name))

    def decay(self, info: Info, decoupled: bool = True) -> float:
        """Return the tensor's weight decay if it has this form, else 0."""
        chosen = self.setting(info, "decoupled_weight_decay")
        return (info.hyper.get("weight_decay") or 0.0) if bool(chosen) is decoupled else 0.0

    def residual(self, state: State) -> None:
        """None: errors are not in units of the gradient, so no other method can take them up."""
        return None

    def deactivate(self, state: State) -> State:
        """Return the per-rank state, which waits here; the rest goes to the next stage."""
        return {key: value for key, value in state.items() if key in self.per_rank_state}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over what is alike on all ranks."""
        shared = [key for key in state if key in other_state and key not in self.per_rank_state]
        return {**state, **{key: other_state[key] for key in shared}}

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Return this rank's state, given the `states` of another number of ranks (NumPy arrays).

        Equal tensors are preserved. Per-rank tensors become their mean if they are
        `averaged_state`, and
        are dropped otherwise, unless a method knows better. Where chunks have servers, the
        residual of all ranks becomes every rank's error.
        """
        made = {key: value for key, value in states[0].items() if key not in self.per_rank_state}
        own = states[0].keys() & self.per_rank_state
        for key in own.intersection(self.averaged_state):
            made[key] = sum(state[key] for state in states) / len(states)
        if {"error", "server"} <= own and len(states) > 1:
            made["error"] = joint_residual(states, spec.size)
        return self.init(spec, info) | made

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Return this rank's state, given only that of another rank (NumPy arrays)."""
        return self.rescale([state], spec, info)


def check_betas(owner: Any, betas: Any) -> None:
    """Refuse what are not two decay rates in [0, 1)."""
    fine = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not fine or not all(check.is_number(beta) and 0 <= beta < 1 for beta in betas):
        check.refuse(owner, "betas", betas, "two numbers in [0, 1)")


def check_eps(owner: Any, eps: Any) -> None:
    """Refuse what is not a number of at least 0."""
    if not check.is_number(eps) or eps < 0:
        check.refuse(owner, "eps", eps, "a number of at least 0")


def shaped(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` in the shape and dtype of `like`."""
    xp = namespace(like)
    return xp.cast(xp.reshape(x, xp.shape(like)), xp.dtype(like))


def corrections(count: Any, betas: Sequence[float], dtype: str) -> list[Any]:
    """Adam's inverse bias corrections 1 / (1 - beta^count), as tensors of `dtype`.

    `count` is a tensor whose last dimension holds one number for each beta, in fp64.
    """
    xp = namespace(count)
    pairs = ((count[..., i : i + 1], beta) for i, beta in enumerate(betas))
    return [xp.cast(1 / (1 - beta**number), dtype) for number, beta in pairs]


__getattr__ = _renamed.module_attributes(__name__, {"Rule": "UpdateRule"})
