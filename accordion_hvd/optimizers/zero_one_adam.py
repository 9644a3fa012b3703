"""0/1 Adam (Lu et al., ICLR 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import Adam, shaped
from accordion_hvd.optimizers.signs import SCALES, Chunks, advanced, averaged

EXACT, SIGNS, LOCAL, SYNC, FIRST = range(5)
"""Phases: what a step exchanges; see `ZeroOneAdam.variant`."""


@dataclass(frozen=True)
class ZeroOneAdam(Adam):
    """0/1 Adam: variance updates become rare, and later ranks take local steps between averages.

    Until step `var_freeze_step` ranks average gradients at every step and update m:

    - `EXACT`: at steps that are multiples of an interval, the average is exact, and v is updated.
      The interval is 1 at first, and doubles after every `var_update_scaler` updates of v.
    - `SIGNS`: at all other steps the average has one bit an element (`signs.averaged`).

    Then v is frozen, and the residuals restart at zero, because their units change. From common
    weights y:

    - `LOCAL`: rank i steps with its own gradient: m_i <- b1 m_i + (1 - b1) g_i,
      x_i <- x_i - lr m_i / (sqrt(v) + eps), u_i <- u_i + lr m_i.
    - `SYNC`: after such a step, ranks average u_i at one bit an element to U, and
      x_i = y <- y - U / (sqrt(v) + eps), m_i <- U / (sum of lr since the last `SYNC`), u_i <- 0.
      The interval of `SYNC` steps is 1 at first, and doubles every `local_step_scaler` steps, up to
      `local_step_clipper`.

    The paper's (and DeepSpeed's; recalled): all of the above and the defaults. Ours: decoupled
    weight decay, bias corrections of m and v (`bias_correction=False` is the reference), elements
    whose variance is zero move by weight decay alone, and a single rank never compresses. The
    weights of the ranks differ between two `SYNC` steps, so a policy cannot switch stages. See
    docs/optimizer-details.md.

    Sent, of a tensor with d elements on n ranks: an allreduce (`EXACT`); an alltoall of d / 8
    bytes, an allgather of d / (8 n) and two scales (`SIGNS`, `SYNC`); only the flags that report
    non-finite gradients (`LOCAL`).

    Args:
        betas: decay rates b1 and b2, in [0, 1).
        eps: constant added to the root, at least 0.
        bias_correction: whether to correct the moments for their start at zero.
        var_freeze_step: last step at which v may change, at least 1, such as the end of the
            learning rate's warm-up.
        var_update_scaler: number of updates of v until their interval doubles (the paper's kappa).
        local_step_scaler: number of steps until the interval of `SYNC` steps doubles.
        local_step_clipper: longest interval of `SYNC` steps (the paper's H).
        scale: "l2" or "l1": see `OnebitAdam`.
    """

    needs_weights: ClassVar[bool] = True
    applies_weight_decay: ClassVar[bool] = True
    returns_weights: ClassVar[bool] = True
    decoupled_weight_decay: ClassVar[bool] = True
    rescale_note: ClassVar[str] = "momentum, steps and residuals are the ranks' means"
    averaged_state: ClassVar[tuple[str, ...]] = ("m", "u")
    per_rank_state: ClassVar[tuple[str, ...]] = ("m", "u", "error", "server")

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16
    scale: str = "l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        for name in names:
            check.integer(self, name, getattr(self, name), least=1)
        check.one_of(self, "scale", self.scale, SCALES)

    def plain(self) -> Adam:
        return Adam(self.betas, self.eps, self.bias_correction)

    # ------------------------------------------------------------------------------ the schedules
    def variant(self, step: int) -> int:
        """Return the phase of the step that follows `step` completed steps."""
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
        """Return whether step `number`, counted from 1, updates v."""
        last, interval = 0, 1
        while True:
            first = (last // interval + 1) * interval
            last = first + (self.var_update_scaler - 1) * interval
            if number <= last:
                return number >= first and number % interval == 0
            interval *= 2

    def synchronous(self, step: int) -> bool:
        return step == 0 or self.variant(step - 1) != LOCAL

    # ------------------------------------------------------------------------------------ one step
    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of `Adam`, the residuals `error` and `server`, and the following keys.

        `u`: u_i; `anchor`: y; `rates`: sum of lr since y; `kept`: product of the factors
        1 - lr weight_decay since y.
        """
        sizes = dict.fromkeys(("error", "u", "anchor"), spec.size) | {"rates": 1, "kept": 1}
        sizes |= {"server": Chunks(spec.size, info.size).length}
        own = {key: spec.zeros((size,), spec.wide) for key, size in sizes.items()}
        return super().init(spec, info) | own

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run the phase of this step; return the new weights."""
        xp, weights = namespace(grad), shaped(info.parameter, state["m"])
        step = self._common_step if info.phase in (EXACT, SIGNS) else self._local_step
        grad = xp.reshape(grad, xp.shape(state["m"]))
        new, state = yield from step(grad, weights, state, info)
        return xp.reshape(new, xp.shape(info.parameter)), state

    def _common_step(
        self, grad: Tensor, weights: Tensor, state: State, info: Info
    ) -> ExchangeGenerator:
        """Average the gradients, exactly or at one bit an element, and take a common step."""
        lr = self._lr(weights, info)
        if info.phase == EXACT:
            mean = yield Allreduce(grad, reuse=True)
            direction, state = self.update(mean, state, info)
            # Where v is 0, m may still contain signs:
            direction = namespace(grad).mask_where_zero(direction, state["v"])
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
        """Return m' / (sqrt(v') + eps), and 0 where v is 0. Consumes `room`."""
        xp, eps = namespace(m), self.setting(info, "eps")
        return xp.mask_where_zero(xp.preconditioned(m, state["v"], rates, eps, room), state["v"])

    def _local_step(
        self, grad: Tensor, weights: Tensor, state: State, info: Info
    ) -> ExchangeGenerator:
        """Take a local step; at a `SYNC`, average the ranks' steps since the last `SYNC`."""
        if info.phase == FIRST:
            state = _restarted(weights, state)
        state, lr = self._moved(grad, state, info), self._lr(weights, info)
        decay, rates = 1 - lr * self.decay(info), self._rates(state, info)
        if info.size > 1:
            state["u"] = decay * state["u"] + (lr * rates[0]) * state["m"]
            state["rates"] = decay * state["rates"] + lr * rates[0]
            state["kept"] = decay * state["kept"]
        if info.size > 1 and info.phase != LOCAL:
            return (yield from self._synchronized([1.0, rates[1]], grad, state, info))
        direction = self._direction(state["m"], rates, state, grad, info)
        return decay * weights - lr * direction, state

    def _synchronized(
        self, rates: Sequence[Any], room: Tensor, state: State, info: Info
    ) -> ExchangeGenerator:
        """Return new weights, equal on all ranks, and the state after `SYNC`. Consumes `room`."""
        xp = namespace(room)
        total = xp.accumulate(state["error"], state["u"])
        step, error, server = yield from averaged(total, state["server"], info, self.scale)
        span = state["rates"]
        span = span + xp.cast(span <= 0, xp.dtype(span))  # if lr was zero throughout
        weights = state["kept"] * state["anchor"]
        weights = weights - self._direction(step, rates, state, room, info)
        own = {"m": step / span, "error": error, "server": server, "anchor": xp.copy(weights)}
        return weights, state | own | _no_steps(state)

    def _lr(self, like: Tensor, info: Info) -> Any:
        """Return the learning rate, in the dtype of `like` if it is a tensor."""
        xp = namespace(like)
        return xp.cast(info.lr, xp.dtype(like)) if hasattr(info.lr, "dtype") else info.lr


def _restarted(weights: Tensor, state: State) -> State:
    """Return the state with zero residuals and y = `weights`."""
    xp = namespace(weights)
    errors = {key: state[key] * 0 for key in ("error", "server")}
    return {**state, **errors, **_no_steps(state), "anchor": xp.copy(weights)}


def _no_steps(state: State) -> State:
    """Return the part of the state that counts steps since y, reset."""
    return {"u": state["u"] * 0, "rates": state["rates"] * 0, "kept": state["kept"] * 0 + 1}
