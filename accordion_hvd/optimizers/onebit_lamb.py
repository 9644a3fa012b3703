"""LAMB (You et al., ICLR 2020), and 1-bit LAMB (Li et al., HiPC 2022)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import Adam, shaped
from accordion_hvd.optimizers.onebit_adam import OnebitAdam, floored
from accordion_hvd.optimizers.signs import advanced, norms


@dataclass(frozen=True)
class Lamb(Adam):
    """LAMB on the mean of the ranks' gradients: Adam's direction, rescaled for each tensor.

    With the moments of `Adam` and the weights x of one tensor:

    w = m' / (sqrt(v') + eps) + weight_decay x, u = c w,

    where the trust ratio c = |x| / |w| (2-norms) is clipped to [`min_coeff`, `max_coeff`], or is 1
    where a norm is 0. Weight decay is decoupled, as in the paper. The rule applies it itself
    (`applies_weight_decay`), because the trust ratio depends on it.

    The rule also records a moving average of the trust ratio, for 1-bit LAMB:
    k <- coeff_beta k + (1 - coeff_beta) c. Ratios of exactly 1 do not count, as in DeepSpeed.

    Sent: an allreduce of the gradient.

    Args:
        betas: decay rates b1 and b2, in [0, 1).
        eps: constant added to the root, at least 0.
        bias_correction: whether to correct the moments and k for their start at zero.
        min_coeff: smallest trust ratio, above 0.
        max_coeff: largest trust ratio, at least `min_coeff`.
        coeff_beta: decay rate of the moving average, in [0, 1).
    """

    needs_weights: ClassVar[bool] = True
    applies_weight_decay: ClassVar[bool] = True
    decoupled_weight_decay: ClassVar[bool] = True
    group_settings: ClassVar[tuple[str, ...]] = ("betas", "eps", "min_coeff", "max_coeff")

    min_coeff: float = 0.01
    max_coeff: float = 10.0
    coeff_beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "min_coeff", "max_coeff")
        check.below_one(self, "coeff_beta", self.coeff_beta)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of `Adam`, `coeff`: k, and `weight`: total weight of the ratios in k."""
        layers = (max(len(info.sizes), 1),)
        both = {key: spec.zeros(layers, spec.wide) for key in ("coeff", "weight")}
        return super().init(spec, info) | both

    def update(self, grad: Tensor, state: State, info: Info) -> tuple[Tensor, State]:
        direction, state = super().update(grad, state, info)
        direction = decayed(direction, self.decay(info), info)
        low, high = self.setting(info, "min_coeff"), self.setting(info, "max_coeff")
        ratio = trust(direction, info, low, high)
        xp = namespace(ratio)
        rate = (1 - self.coeff_beta) * xp.cast((ratio - 1) ** 2 > 0, xp.dtype(ratio))
        coeff = state["coeff"] + rate * (ratio - state["coeff"])
        weight = state["weight"] + rate * (1 - state["weight"])
        return spread(ratio, info.sizes) * direction, {**state, "coeff": coeff, "weight": weight}


@dataclass(frozen=True)
class OnebitLamb(OnebitAdam, Lamb):
    """1-bit LAMB: LAMB until the variance is stable, then momentum at one bit an element.

    Stage 1 is `Lamb`. Stage 2 averages the momentum m as `OnebitAdam` does, and freezes v and k.
    For each tensor with weights x:

    1. g~ = (m_t - b1 m_{t-1}) / (1 - b1), the gradient that all ranks reconstruct from m
    2. v~ <- b2 v~ + (1 - b2) g~^2, which starts at the frozen variance v
    3. w = m / (sqrt(v) + eps) + weight_decay x
    4. r = max over elements of (sqrt(v) + eps) / (sqrt(v~) + eps); with weight decay
       r <- a r + 1 - a, where a = min(1, |m / (sqrt(v) + eps)| / |w|)
    5. r is clipped to [factor_min, factor_max], then to (1 +- factor_threshold) times the previous
       r (1 at first)
    6. u = k r w

    The paper's (and DeepSpeed's; recalled): all of the above, with decoupled weight decay. Ours:
    one scale a tensor (see docs/optimizer-details.md), bias corrections of m, v, v~ and k
    (`bias_correction=False` is the reference), and elements whose variance is zero at the switch
    move by weight decay alone and do not count in r.

    Sent in stage 2: the same as `OnebitAdam`. State: that of `OnebitAdam`, v~, and five numbers a
    tensor.

    Args:
        betas: decay rates b1 and b2, in [0, 1).
        eps: constant added to the root, at least 0.
        bias_correction: whether to correct the moments, v~ and k for the start at zero.
        min_coeff: smallest trust ratio of stage 1, above 0.
        max_coeff: largest trust ratio of stage 1, at least `min_coeff`.
        coeff_beta: decay rate of the moving average of trust ratios, in [0, 1).
        warmup_steps: number of steps of stage 1, at least 1, or "auto": see `policies.WarmUp`.
        scale: "l2" or "l1": see `OnebitAdam`.
        floor: least v and v~ of an element in steps 3 and 4, as a multiple of its tensor's mean v,
            in [0, 1] (ours; the reference has 0).
        factor_min: smallest r, above 0.
        factor_max: largest r, at least `factor_min`.
        factor_threshold: largest relative change of r in a step, in (0, 1).
    """

    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "factor_min", "factor_max")
        if not check.is_number(self.factor_threshold) or not 0 < self.factor_threshold < 1:
            check.refuse(self, "factor_threshold", self.factor_threshold, "a number in (0, 1)")

    def dense(self) -> Lamb:
        settings = self.betas, self.eps, self.bias_correction
        return Lamb(*settings, self.min_coeff, self.max_coeff, self.coeff_beta)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the states of both parents; `fresh`: v~, `since`: its updates, `factor`: r."""
        state = super().init(spec, info)
        own = {"fresh": spec.zeros((spec.size,), spec.wide), "since": spec.zeros((1,), spec.wide)}
        return state | own | {"factor": state["coeff"] + 1}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Copy the state that is equal on all ranks from the other stage; v~ starts at v."""
        state = super().warm_start(state, other, other_state)
        if "fresh" in other_state or "v" not in other_state:
            return state
        fresh = namespace(state["v"]).copy(state["v"])
        own = {"fresh": fresh, "since": state["since"] * 0, "factor": state["factor"] * 0 + 1}
        return state | own

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run stage 2: average the momentum as `OnebitAdam` does, and return the direction."""
        xp, betas = namespace(grad), self.setting(info, "betas")
        previous = xp.copy(state["m"]) if info.size == 1 else state["m"]
        m, own, room = yield from self.shared(grad, state, info)
        mean = (m - betas[0] * previous) * (1 / (1 - betas[0]))
        fresh = betas[1] * state["fresh"] + (1 - betas[1]) * mean * mean
        own |= {"m": m, "fresh": fresh, "since": state["since"] + 1}
        state = {**state, **own, "count": advanced(state["count"])}
        v, fresh = state["v"], state["fresh"]
        if info.size > 1:
            v, fresh = (floored(x, self.floor, state["v"]) for x in (v, fresh))
        direction = self.direction({**state, "v": v}, info, room)
        direction = xp.mask_where_zero(direction, state["v"])
        with_decay = decayed(direction, self.decay(info), info)
        factor = self._factor(direction, with_decay, v, fresh, state, info)
        scale = spread(factor * self._coeff(state), info.sizes)
        return xp.reshape(scale * with_decay, xp.shape(grad)), {**state, "factor": factor}

    def _factor(
        self, direction: Tensor, with_decay: Tensor, v: Tensor, fresh: Tensor, state: State,
        info: Info,
    ) -> Tensor:  # fmt: skip
        """Return r, given the direction without and with weight decay, and v and v~."""
        xp, eps = namespace(direction), self.setting(info, "eps")
        _, rate = self.rates(state["count"], self.setting(info, "betas"), xp.dtype(with_decay))
        below = (fresh * self._fresh_rate(state, info)) ** 0.5 + eps
        quotient = xp.mask_where_zero(((v * rate) ** 0.5 + eps) / below, state["v"])
        factor = each(quotient, info.sizes, "max")
        if self.decay(info):
            size = each(with_decay, info.sizes, "l2")
            size = size + xp.cast(size <= 0, xp.dtype(size))
            share = each(direction, info.sizes, "l2") / size
            share = xp.minimum(share, share * 0 + 1)
            factor = factor * share + (1 - share)
        factor = clipped(factor, self.factor_min, self.factor_max)
        last = state["factor"]
        bounds = last * (1 - self.factor_threshold), last * (1 + self.factor_threshold)
        return clipped(factor, *bounds)

    def _fresh_rate(self, state: State, info: Info) -> Any:
        if not self.bias_correction:
            return 1.0
        xp, beta = namespace(state["count"]), self.setting(info, "betas")[1]
        number = state["count"][..., 1:] + xp.cast(state["since"], "float64")
        return xp.cast(1 / (1 - beta**number), xp.dtype(state["fresh"]))

    def _coeff(self, state: State) -> Tensor:
        """Return k; 1 if stage 1 has recorded no trust ratio."""
        if not self.bias_correction:
            return state["coeff"]
        xp, weight = namespace(state["coeff"]), state["weight"]
        none = xp.cast(weight <= 0, xp.dtype(weight))
        return state["coeff"] / (weight + none) + none


def decayed(direction: Tensor, decay: float, info: Info) -> Tensor:
    """Return the direction plus weight decay, in new memory if there is any decay."""
    return direction + decay * shaped(info.parameter, direction) if decay else direction


def trust(direction: Tensor, info: Info, low: float, high: float) -> Tensor:
    """Return LAMB's trust ratio of each tensor."""
    xp = namespace(direction)
    weight = each(shaped(info.parameter, direction), info.sizes, "l2")
    size = each(direction, info.sizes, "l2")
    dtype = xp.dtype(size)
    known = xp.cast(weight > 0, dtype) * xp.cast(size > 0, dtype)
    ratio = clipped(weight / (size + (1 - known)), low, high)
    return known * ratio + (1 - known)


def clipped(x: Tensor, low: Any, high: Any) -> Tensor:
    """Return `x` clipped to bounds that are numbers or tensors like `x`."""
    xp = namespace(x)
    return xp.minimum(xp.maximum(x, x * 0 + low), x * 0 + high)


def each(x: Tensor, sizes: Sequence[int], kind: str) -> Tensor:
    """Return the "l1", "l2" or "max" norms of tensors that are concatenated in the last dimension.

    (elements,) becomes (tensors,), and (number, elements) becomes (number, tensors).
    """
    xp = namespace(x)
    front = xp.shape(x)[:-1]
    if len(sizes) < 2:
        return xp.reshape(norms(x, kind), (*front, 1))
    parts, end = [], 0
    for size, run in itertools.groupby(sizes):  # tensors of one size are rows of one call
        count = len(list(run))
        rows = xp.reshape(x[..., end : end + count * size], (-1, size))
        parts.append(xp.reshape(norms(rows, kind), (*front, count)))
        end += count * size
    return xp.concat(parts, len(front))


def spread(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return factors of tensors (as from `each`) repeated for all elements of the tensors."""
    xp = namespace(x)
    if len(sizes) < 2:
        return x
    front, parts, end = xp.shape(x)[:-1], [], 0
    for size, run in itertools.groupby(sizes):
        count = len(list(run))
        ones = xp.full((size,), 1.0, xp.dtype(x), xp.device(x))
        factors = xp.reshape(x[..., end : end + count], (*front, count, 1))
        parts.append(xp.reshape(factors * ones, (*front, count * size)))
        end += count
    return xp.concat(parts, len(front))


def check_bounds(owner: Any, low: str, high: str) -> None:
    """Raise ValueError unless 0 < low <= high, for the fields of these names."""
    least, most = getattr(owner, low), getattr(owner, high)
    if not check.is_number(least) or least <= 0:
        check.refuse(owner, low, least, "a number above 0")
    if not check.is_number(most) or most < least:
        check.refuse(owner, high, most, f"a number of at least {low}, {least}")
