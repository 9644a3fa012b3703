"""0/1 Adam (Lu et al., ICLR 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.adam import Adam
from accordion_hvd.optimizers.base import shaped
from accordion_hvd.optimizers.signs import SCALES, Chunks, advanced, averaged

EXACT, SIGNS, LOCAL, SYNC, FIRST = range(5)
"""Phases: what a step of each exchanges, see `ZeroOneAdam.variant`."""


@dataclass(frozen=True)
class ZeroOneAdam(Adam):
    """Adam whose variance is refreshed ever more rarely, and whose ranks then step on their own.

    Until step `var_freeze_step` gradients are averaged and m follows them: exactly where the
    variance is due, and v with it (`EXACT`); at one bit (`signs.averaged`) in between (`SIGNS`).
    The variance is due at each step at first; after `var_update_scaler` updates the interval
    doubles, again and again; steps that it divides count.

    Then v stays and the errors begin anew, as they are in other units. Each rank i goes on from
    the common weights y with gradients of its own: m_i <- b1 m_i + (1 - b1) g_i,
    x_i <- x_i - lr m_i / (sqrt(v) + eps), u_i <- u_i + lr m_i (`LOCAL`); at some steps, this done,
    U = the average of u at one bit, x = y <- y - U / (sqrt(v) + eps), m <- U / (sum of lr),
    u <- 0 (`SYNC`). The interval between these is 1 step at first, and doubles every
    `local_step_scaler` steps until it is `local_step_clipper`.

    The paper's (and DeepSpeed's; recalled): all this, and the defaults. Ours: decoupled weight
    decay, bias corrections of m and v (`bias_correction=False` is the reference), elements whose
    variance is zero move by weight decay alone, and a single rank never compresses. Between two
    `SYNC`s the ranks' weights differ, so no policy can move it between stages. See
    docs/optimizer-details.md.

    Sent, of a tensor with d elements on n ranks: as an allreduce (`EXACT`); an alltoall of d / 8
    bytes, an allgather of d / (8 n), and two scales (`SIGNS`, `SYNC`); nothing, but for the flags
    by which all ranks know that all gradients are finite (`LOCAL`).

    Args:
        betas: b1 and b2, in [0, 1).
        eps: at least 0.
        bias_correction: whether moments that began at zero are scaled up.
        var_freeze_step: the last step of the first kind, at least 1; the end of the learning
            rate's warm-up, say.
        var_update_scaler: updates of the variance (the paper's kappa) until their interval doubles.
        local_step_scaler: steps until the interval of synchronisations doubles.
        local_step_clipper: the longest interval (the paper's H).
        scale: "l2" or "l1": see `OnebitAdam`.
    """

    needs_weights: ClassVar[bool] = True
    applies_weight_decay: ClassVar[bool] = True
    returns_weights: ClassVar[bool] = True
    decoupled_weight_decay: ClassVar[bool] = True
    rescale_note: ClassVar[str] = "momentum, steps and errors are the ranks' means"
    averaged_state: ClassVar[tuple[str, ...]] = ("m", "u")
    per_rank_state: ClassVar[tuple[str, ...]] = ("m", "u", "error", "server")

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16
    scale: str = "l2"

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        super().__post_init__()
        names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        for name in names:
            check.integer(self, name, getattr(self, name), least=1)
        check.one_of(self, "scale", self.scale, SCALES)

    def plain(self) -> Adam:
        """Small and exempt tensors: gradients averaged exactly at each step."""
        return Adam(self.betas, self.eps, self.bias_correction)

    # ------------------------------------------------------------------------------ the schedules
    def variant(self, step: int) -> int:
        """Return the phase of the step that follows `step` others."""
        number = step + 1
        if number <= self.var_freeze_step:
            return EXACT if self._refreshes(number) else SIGNS
        after = number - self.var_freeze_step
        if after == 1:
            return FIRST
        doublings = min((after - 1) // self.local_step_scaler, 62)
        interval = min(2**doublings, self.local_step_clipper)
        return SYNC if after % interval == 0 else LOCAL

    def _refreshes(self, number: int) -> bool:
        last, interval = 0, 1
        while True:
            first = (last // interval + 1) * interval
            last = first + (self.var_update_scaler - 1) * interval
            if number <= last:
                return number >= first and number % interval == 0
            interval *= 2

    def synchronous(self, step: int) -> bool:
        """Return whether all ranks have the same weights after `step` exchanges."""
        return step == 0 or self.variant(step - 1) != LOCAL

    # ------------------------------------------------------------------------------------ one step
    def init(self, spec: Spec, info: Info) -> State:
        """Return the states of `Adam` and `OnebitAdam`; u, y, and two numbers per tensor.

        `anchor`: y; `rates`: the sum of lr since then; `kept`: p.
        """
        sizes = dict.fromkeys(("error", "u", "anchor"), spec.size) | {"rates": 1, "kept": 1}
        sizes |= {"server": Chunks(spec.size, info.size).length}
        own = {key: spec.zeros((size,), spec.wide) for key, size in sizes.items()}
        return super().init(spec, info) | own

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run the phase of this step; return the new weights."""
        xp, weights = namespace(grad), shaped(info.parameter, state["m"])
        step = self._together if info.phase in (EXACT, SIGNS) else self._apart
        grad = xp.reshape(grad, xp.shape(state["m"]))
        found, state = yield from step(grad, weights, state, info)
        return xp.reshape(found, xp.shape(info.parameter)), state

    def _together(
        self, grad: Tensor, weights: Tensor, state: State, info: Info
    ) -> ExchangeGenerator:
        """Gradients are averaged, exactly or at one bit, and all ranks take the same step."""
        lr = self._lr(weights, info)
        if info.phase == EXACT:
            mean = yield Allreduce(grad, reuse=True)
            direction, state = self.update(mean, state, info)
            direction = namespace(grad).mask_where_zero(
                direction, state["v"]
            )  # m may be signs there
        else:
            if info.size > 1:
                total = namespace(grad).accumulate(state["error"], grad)
                grad, error, server = yield from averaged(total, state["server"], info, self.scale)
                state = {**state, "error": error, "server": server}
            state = self._moved(grad, state, info)
            direction = self._direction(state["m"], self._rates(state, info), state, grad, info)
        return (1 - lr * self.decay(info)) * weights - lr * direction, state

    def _moved(self, grad: Tensor, state: State, info: Info) -> State:
        """Return the state with m updated by `grad`, and v unchanged. Consumes m."""
        m = namespace(grad).momentum(state["m"], self.setting(info, "betas")[0], grad)
        return {**state, "m": m, "count": advanced(state["count"])}

    def _rates(self, state: State, info: Info) -> list[Any]:
        dtype = namespace(state["m"]).dtype(state["m"])
        return self.rates(state["count"], self.setting(info, "betas"), dtype)

    def _direction(
        self, m: Tensor, rates: Sequence[Any], state: State, room: Tensor, info: Info
    ) -> Tensor:
        """m over the root of the variance, zero where that is. Consumes `room`."""
        xp, eps = namespace(m), self.setting(info, "eps")
        return xp.mask_where_zero(xp.preconditioned(m, state["v"], rates, eps, room), state["v"])

    def _apart(self, grad: Tensor, weights: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Take a local step; at a `SYNC`, combine the steps of all ranks since the last one."""
        if info.phase == FIRST:
            state = _begun(weights, state)
        state, lr = self._moved(grad, state, info), self._lr(weights, info)
        decay, rates = 1 - lr * self.decay(info), self._rates(state, info)
        if info.size > 1:
            state["u"] = decay * state["u"] + (lr * rates[0]) * state["m"]
            state["rates"] = decay * state["rates"] + lr * rates[0]
            state["kept"] = decay * state["kept"]
        if info.size > 1 and info.phase != LOCAL:
            return (yield from self._synchronised([1.0, rates[1]], grad, state, info))
        direction = self._direction(state["m"], rates, state, grad, info)
        return decay * weights - lr * direction, state

    def _synchronised(
        self, rates: Sequence[Any], room: Tensor, state: State, info: Info
    ) -> ExchangeGenerator:
        """Return equal weights on all ranks. Consumes `room`."""
        xp = namespace(room)
        total = xp.accumulate(state["error"], state["u"])
        step, error, server = yield from averaged(total, state["server"], info, self.scale)
        span = state["rates"]
        span = span + xp.cast(span <= 0, xp.dtype(span))  # if lr was zero throughout
        found = state["kept"] * state["anchor"]
        found = found - self._direction(step, rates, state, room, info)
        own = {"m": step / span, "error": error, "server": server, "anchor": xp.copy(found)}
        return found, state | own | _nothing(state)

    def _lr(self, like: Tensor, info: Info) -> Any:
        """Return the learning rate, in a form to be multiplied with `like`."""
        xp = namespace(like)
        return xp.cast(info.lr, xp.dtype(like)) if hasattr(info.lr, "dtype") else info.lr


def _begun(weights: Tensor, state: State) -> State:
    """Clear the errors, and count steps from these weights."""
    xp = namespace(weights)
    errors = {key: state[key] * 0 for key in ("error", "server")}
    return {**state, **errors, **_nothing(state), "anchor": xp.copy(weights)}


def _nothing(state: State) -> State:
    """No steps since y."""
    return {"u": state["u"] * 0, "rates": state["rates"] * 0, "kept": state["kept"] * 0 + 1}
