"""Adam (Kingma & Ba, ICLR 2015) and AMSGrad (Reddi, Kale & Kumar, ICLR 2018), uncompressed."""

from __future__ import annotations

from dataclasses import dataclass

from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule, check_betas, check_eps, corrections


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
