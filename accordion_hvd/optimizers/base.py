"""Base class of optimizers that communicate quantities other than gradients; Adam and AMSGrad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import (
    Allreduce,
    Batching,
    Compressor,
    ExchangeGenerator,
    Info,
    State,
    Tensor,
)
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.signs import joint_residual


class UpdateRule(Compressor):
    """An optimizer's update as an exchange: `exchange` takes a gradient and returns a direction u.

    The framework's optimizer then takes the step x <- x - lr u, the same on all ranks, together
    with decoupled weight decay, x <- x - lr * weight_decay * x. The rule holds everything else:
    moments, residuals and the messages between ranks. State is fp32, or fp64 for fp64 weights.

    A rule may have two stages: a dense stage (`dense`) and the rule itself. A policy chooses the
    stage. At a change of stage the moments are copied (`warm_start`), and the residuals stay with
    their stage (`deactivate`).

    Attributes:
        group_settings: fields that parameter groups may override for their tensors (`Info.hyper`).
        rescale_note: description of how `rescale` converts the per-rank state, for messages.
        owed: keys of what a rank owes to others, which a lost rank takes with it.
        averaged_state: keys of the per-rank state that `rescale` averages over the ranks.
        needs_weights: whether `Info.parameter` holds the weights.
        applies_weight_decay: whether the direction contains decoupled weight decay (`decay`); the
            framework's optimizer must not apply it again.
        returns_weights: whether `exchange` returns the new weights, to be assigned, instead of a
            direction. Ranks whose weights differ for some steps thus get bitwise equal weights
            again; see `synchronous`.
        decoupled_weight_decay: whether weight decay is subtracted from the weights, as in AdamW,
            rather than added to the gradient, as in Adam. The default is the form of the rule's
            paper. A parameter group's setting of this name overrides it; Keras always subtracts.
    """

    output = "update"
    batching: ClassVar[Batching] = "alike"
    per_rank_state: ClassVar[tuple[str, ...]] = ()

    group_settings: ClassVar[tuple[str, ...]] = ("betas", "eps")
    rescale_note: ClassVar[str] = "nothing is lost"
    averaged_state: ClassVar[tuple[str, ...]] = ()
    owed: ClassVar[tuple[str, ...]] = ("error", "server", "host")
    needs_weights: ClassVar[bool] = False
    applies_weight_decay: ClassVar[bool] = False
    returns_weights: ClassVar[bool] = False
    decoupled_weight_decay: ClassVar[bool] = False

    def dense(self) -> UpdateRule:
        """Return the stage that averages gradients exactly; by default the rule itself."""
        return self

    def policy(self) -> Any:
        """Return the policy between the stages; None if the rule serves in every step."""
        return None

    def check_start(self, state: State, other: Compressor, info: Info) -> None:
        """Warn if training may suffer because this stage takes over from `other` now."""

    def decays(self, decoupled: bool) -> bool:
        """Return whether the rule itself applies weight decay of this form."""
        return self.applies_weight_decay and decoupled

    def plain(self) -> Compressor:
        """Return the dense stage, which always serves small and exempt tensors."""
        return self.dense()

    def setting(self, info: Info, name: str) -> Any:
        """Return the parameter group's value of a field, or the rule's own value."""
        return info.hyper.get(name, getattr(self, name))

    def decay(self, info: Info, decoupled: bool = True) -> float:
        """Return the tensor's weight decay if its form is the requested one, else 0."""
        chosen = self.setting(info, "decoupled_weight_decay")
        return (info.hyper.get("weight_decay") or 0.0) if bool(chosen) is decoupled else 0.0

    def residual(self, state: State) -> None:
        """Return None: other methods cannot use residuals in units other than the gradient's."""
        return None

    def deactivate(self, state: State) -> State:
        """Return the per-rank state, which stays with this stage until it serves again."""
        return {key: value for key, value in state.items() if key in self.per_rank_state}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Copy the state that is equal on all ranks from the other stage."""
        shared = [key for key in state if key in other_state and key not in self.per_rank_state]
        return {**state, **{key: other_state[key] for key in shared}}

    def rescale(self, states: Sequence[State], spec: Spec, info: Info) -> State:
        """Return this rank's state, given the `states` of another number of ranks (NumPy arrays).

        Tensors that are equal on all ranks are preserved. Per-rank tensors in `averaged_state`
        are averaged over the ranks; all others are reset, unless a subclass overrides this. If the
        state has "error" and "server", the joint residual of all ranks becomes every rank's error.
        """
        result = {key: value for key, value in states[0].items() if key not in self.per_rank_state}
        own = states[0].keys() & self.per_rank_state
        for key in own.intersection(self.averaged_state):
            result[key] = sum(state[key] for state in states) / len(states)
        if {"error", "server"} <= own and len(states) > 1:
            result["error"] = joint_residual(states, spec.size)
        return self.init(spec, info) | result

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Return this rank's state, given only the state of another rank (NumPy arrays)."""
        return self.rescale([state], spec, info)


def needs_weights(compressor: Compressor) -> bool:
    return isinstance(compressor, UpdateRule) and compressor.needs_weights


def check_betas(owner: Any, betas: Any) -> None:
    """Raise ValueError unless `betas` are two decay rates; store them as a tuple."""
    fine = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not fine or not all(check.is_number(beta) and 0 <= beta < 1 for beta in betas):
        check.refuse(owner, "betas", betas, "two numbers in [0, 1)")
    check.settle(owner, "betas", tuple(betas))


def check_eps(owner: Any, eps: Any) -> None:
    if not check.is_number(eps) or eps < 0:
        check.refuse(owner, "eps", eps, "a number of at least 0")


def shaped(x: Tensor, like: Tensor) -> Tensor:
    xp = namespace(like)
    return xp.cast(xp.reshape(x, xp.shape(like)), xp.dtype(like))


def corrections(count: Any, betas: Sequence[float], dtype: str) -> list[Any]:
    """Return Adam's inverse bias corrections 1 / (1 - beta^count), as tensors of `dtype`.

    The last dimension of `count`, fp64, has the number of updates for each beta.
    """
    xp = namespace(count)
    pairs = ((count[..., i : i + 1], beta) for i, beta in enumerate(betas))
    return [xp.cast(1 / (1 - beta**number), dtype) for number, beta in pairs]


def give(kind: Any, rule: type[UpdateRule], common: Callable[..., Any]) -> None:
    """Make a class of a framework the optimizer of an update rule.

    The constructor in the class is only a signature, for type checkers and readers: it is removed,
    and the class inherits one that takes all arguments.

    Args:
        kind: the class. Its constructor has an argument for each of the rule, and `**options`.
        rule: the update rule, whose documentation the class gets.
        common: function with the keyword arguments that `**options` stands for, with defaults.
    """
    own = [*signature(kind.__init__).parameters.values()][1:-1]  # without self and **options
    shared = [p for p in signature(common).parameters.values() if p.kind is p.KEYWORD_ONLY]
    kind.__signature__ = Signature([*own, *shared])
    note = "See `CompressedOptimizer` for arguments that all of them take."
    kind.__doc__ = f"{rule.__doc__}\n\n{note}"
    kind._rule = rule
    del kind.__init__


# ------------------------------------------------------------------------------- uncompressed rules
# Adam: Kingma & Ba, ICLR 2015. AMSGrad: Reddi, Kale & Kumar, ICLR 2018.


@dataclass(frozen=True)
class Adam(UpdateRule):
    """Adam on the mean of the ranks' gradients: dense stage and baseline of other optimizers.

    Ranks average their gradients exactly. With the mean gradient g:

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, u = m' / (sqrt(v') + eps),

    where m' = m / (1 - b1^t) and v' = v / (1 - b2^t), or m' = m and v' = v without
    `bias_correction`. The paper has no weight decay. In PyTorch weight decay is coupled by default,
    as in `torch.optim.Adam`.

    Sent: an allreduce of the gradient.

    Args:
        betas: decay rates b1 and b2, in [0, 1).
        eps: constant added to the root, at least 0.
        bias_correction: whether to correct the moments for their start at zero.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: bool = True

    def __post_init__(self) -> None:
        check_betas(self, self.betas)
        check_eps(self, self.eps)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the moments `m` and `v`, (size,), and `count`: updates of each, (2,) fp64."""
        moments = {key: spec.zeros((spec.size,), spec.wide) for key in ("m", "v")}
        return super().init(spec, info) | moments | {"count": spec.zeros((2,), "float64")}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        xp = namespace(grad)
        mean = yield Allreduce(xp.reshape(grad, xp.shape(state["m"])), reuse=True)
        direction, state = self.update(mean, state, info)
        return xp.reshape(direction, xp.shape(grad)), state

    def update(self, grad: Tensor, state: State, info: Info) -> tuple[Tensor, State]:
        """Return the direction and the new state for a gradient. Consumes `grad` and `state`."""
        state = self.moments(grad, state, info)
        return self.direction(state, info, grad), state

    def moments(self, grad: Tensor, state: State, info: Info) -> State:
        """Return the state with moments updated by a gradient. Consumes the moments."""
        xp, betas = namespace(grad), self.setting(info, "betas")
        m = xp.momentum(state["m"], betas[0], grad)
        v = xp.second_moment(state["v"], betas[1], grad)
        return {**state, "m": m, "v": v, "count": state["count"] + 1}

    def direction(self, state: State, info: Info, room: Tensor) -> Tensor:
        """Return the direction for these moments.

        Consumes `room`, whose memory holds the direction if the dtype allows it.
        """
        xp, m = namespace(room), state["m"]
        rates = self.rates(state["count"], self.setting(info, "betas"), xp.dtype(m))
        largest = state.get("vmax", state["v"])
        return xp.preconditioned(m, largest, rates, self.setting(info, "eps"), room)

    def rates(self, count: Tensor, betas: tuple[float, float], dtype: str) -> list:
        return corrections(count, betas, dtype) if self.bias_correction else [1.0, 1.0]


@dataclass(frozen=True)
class AMSGrad(Adam):
    """AMSGrad on the mean of the ranks' gradients.

    `Adam` with the direction u = m' / (sqrt(vmax') + eps), where vmax <- max(vmax, v) and
    vmax' = vmax / (1 - b2^t). This is PyTorch's form. The paper has no bias correction:
    `bias_correction=False`. In PyTorch weight decay is coupled by default, as in
    `torch.optim.Adam`.

    Sent: an allreduce of the gradient.

    Args:
        betas: decay rates b1 and b2, in [0, 1).
        eps: constant added to the root, at least 0.
        bias_correction: whether to correct the moments for their start at zero.
    """

    def init(self, spec: Spec, info: Info) -> State:
        return super().init(spec, info) | {"vmax": spec.zeros((spec.size,), spec.wide)}

    def moments(self, grad: Tensor, state: State, info: Info) -> State:
        state = super().moments(grad, state, info)
        return {**state, "vmax": namespace(grad).maximum(state["vmax"], state["v"])}
