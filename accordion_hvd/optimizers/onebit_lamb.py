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
from accordion_hvd.optimizers.adam import Adam
from accordion_hvd.optimizers.base import shaped
from accordion_hvd.optimizers.onebit_adam import OnebitAdam
from accordion_hvd.optimizers.signs import advanced, norms


@dataclass(frozen=True)
class Lamb(Adam):
    """LAMB on the average of the ranks' gradients: Adam's direction, scaled for each tensor.

    w = m' / (sqrt(v') + eps) + weight_decay x, u = c w, with the trust ratio c = |x| / |w| (2-norms
    of one tensor) between `min_coeff` and `max_coeff`, or 1 where a norm is 0. Weight decay is in
    here, as the ratio depends on it (`applies_weight_decay`), and not in the moments: it is
    decoupled, as in the paper. Moments are `Adam`'s.

    It also records a moving average of c, k <- coeff_beta k + (1 - coeff_beta) c, for what may
    follow (1-bit LAMB); ratios of exactly 1 are left out, as in DeepSpeed.

    Sent: an allreduce of the gradient.

    Args:
        betas: b1 and b2, in [0, 1).
        eps: at least 0.
        bias_correction: whether moments, and k, that began at zero are scaled up.
        min_coeff: the least trust ratio, above 0.
        max_coeff: the largest.
        coeff_beta: of the moving average, in [0, 1).
    """

    needs_weights: ClassVar[bool] = True
    applies_weight_decay: ClassVar[bool] = True
    decoupled_weight_decay: ClassVar[bool] = True
    group_settings: ClassVar[tuple[str, ...]] = ("betas", "eps", "min_coeff", "max_coeff")

    min_coeff: float = 0.01
    max_coeff: float = 10.0
    coeff_beta: float = 0.9

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        super().__post_init__()
        check_bounds(self, "min_coeff", "max_coeff")
        check.below_one(self, "coeff_beta", self.coeff_beta)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of `Adam` and, per tensor, `coeff`: k, and `weight`: its known part."""
        layers = (max(len(info.sizes), 1),)
        both = {key: spec.zeros(layers, spec.wide) for key in ("coeff", "weight")}
        return super().init(spec, info) | both

    def update(self, grad: Tensor, state: State, info: Info) -> tuple[Tensor, State]:
        """Return the direction and the new state for a gradient. Consumes all."""
        direction, state = super().update(grad, state, info)
        whole = decayed(direction, self.decay(info), info)
        low, high = self.setting(info, "min_coeff"), self.setting(info, "max_coeff")
        ratio = trust(whole, info, low, high)
        xp = namespace(ratio)
        rate = (1 - self.coeff_beta) * xp.cast((ratio - 1) ** 2 > 0, xp.dtype(ratio))
        coeff = state["coeff"] + rate * (ratio - state["coeff"])
        weight = state["weight"] + rate * (1 - state["weight"])
        return spread(ratio, info.sizes) * whole, {**state, "coeff": coeff, "weight": weight}


@dataclass(frozen=True)
class OnebitLamb(OnebitAdam, Lamb):
    """LAMB until the variance is stable; then momentum at one bit, and trust ratios from before.

    Stage 1 is `Lamb`. Stage 2 has the momentum of `OnebitAdam`, and for each tensor:
    g~ = (m_t - b1 m_{t-1}) / (1 - b1), the gradient that all ranks can tell from m;
    v~ <- b2 v~ + (1 - b2) g~^2, which begins at the variance v frozen at the switch;
    r = max over elements of (sqrt(v) + eps) / (sqrt(v~) + eps);
    w = m / (sqrt(v) + eps) + weight_decay x; if there is decay, r <- a r + 1 - a, where
    a = min(1, |m / (sqrt(v) + eps)| / |w|) (decay is decoupled, as in the paper);
    r is clipped to [factor_min, factor_max], then to within `factor_threshold` of what it was the
    step before (1 at first); u = k r w, with k from stage 1.

    The paper's (and DeepSpeed's; recalled): all this. There, all tensors are fused under one scale,
    and each is first multiplied by mean(rms(m)) / rms(m) of the switch, and divided afterwards, to
    be of equal size. Here each tensor has scales of its own, C(q p) / q = C(p) for any q > 0, and
    so the factor would change nothing: there is none. Ours: bias corrections of m, v, v~ and k
    (`bias_correction=False` is the reference); elements whose variance is zero at the switch move
    by weight decay alone, and do not count in r.

    Under `Accordion` critical regimes are in stage 1, where v and k go on from where they were
    frozen, and others in stage 2, where v~ begins anew; errors wait meanwhile.

    Sent in stage 2: as `OnebitAdam`. State: that, v~, and five numbers a tensor.

    Args:
        betas: b1 and b2, in [0, 1).
        eps: at least 0.
        bias_correction: whether what began at zero is scaled up.
        min_coeff: the least trust ratio of stage 1, above 0.
        max_coeff: the largest.
        coeff_beta: of the trust ratios' moving average, in [0, 1).
        warmup_steps: steps of stage 1, at least 1, or "auto": see `policy.WarmUp`.
        scale: "l2" or "l1": see `OnebitAdam`.
        factor_min: the least r, above 0.
        factor_max: the largest.
        factor_threshold: by what part of itself r may change in a step, in (0, 1).
    """

    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        super().__post_init__()
        check_bounds(self, "factor_min", "factor_max")
        if not check.is_number(self.factor_threshold) or not 0 < self.factor_threshold < 1:
            check.refuse(self, "factor_threshold", self.factor_threshold, "a number in (0, 1)")

    def dense(self) -> Lamb:
        """Return the optimizer of stage 1."""
        settings = self.betas, self.eps, self.bias_correction
        return Lamb(*settings, self.min_coeff, self.max_coeff, self.coeff_beta)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the states of `OnebitAdam` and `Lamb`; `fresh`: v~, `since`, `factor`: r."""
        made = super().init(spec, info)
        own = {"fresh": spec.zeros((spec.size,), spec.wide), "since": spec.zeros((1,), spec.wide)}
        return made | own | {"factor": made["coeff"] + 1}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over what is alike on all ranks; v~ begins at v."""
        state = super().warm_start(state, other, other_state)
        if "fresh" in other_state or "v" not in other_state:
            return state
        fresh = namespace(state["v"]).copy(state["v"])
        own = {"fresh": fresh, "since": state["since"] * 0, "factor": state["factor"] * 0 + 1}
        return state | own

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Stage 2: as `OnebitAdam`, then arithmetic on what all ranks have."""
        xp, betas = namespace(grad), self.setting(info, "betas")
        before = xp.copy(state["m"]) if info.size == 1 else state["m"]
        m, own, room = yield from self.shared(grad, state, info)
        guess = (m - betas[0] * before) * (1 / (1 - betas[0]))
        fresh = betas[1] * state["fresh"] + (1 - betas[1]) * guess * guess
        own |= {"m": m, "fresh": fresh, "since": state["since"] + 1}
        state = {**state, **own, "count": advanced(state["count"])}
        direction = xp.mask_where_zero(self.direction(state, info, room), state["v"])
        whole = decayed(direction, self.decay(info), info)
        factor = self._factor(direction, whole, state, info)
        scale = spread(factor * self._coeff(state), info.sizes)
        return xp.reshape(scale * whole, xp.shape(grad)), {**state, "factor": factor}

    def _factor(self, direction: Tensor, whole: Tensor, state: State, info: Info) -> Tensor:
        """r, from the direction without weight decay and with it."""
        xp, eps, betas = namespace(whole), self.setting(info, "eps"), self.setting(info, "betas")
        _, rate = self.rates(state["count"], betas, xp.dtype(whole))
        below = (state["fresh"] * self._fresh_rate(state, info)) ** 0.5 + eps
        quotient = xp.mask_where_zero(((state["v"] * rate) ** 0.5 + eps) / below, state["v"])
        factor = each(quotient, info.sizes, "max")
        if self.decay(info):
            size = each(whole, info.sizes, "l2")
            size = size + xp.cast(size <= 0, xp.dtype(size))
            share = each(direction, info.sizes, "l2") / size
            share = xp.minimum(share, share * 0 + 1)
            factor = factor * share + (1 - share)
        factor = clipped(factor, self.factor_min, self.factor_max)
        last = state["factor"]
        nearest = last * (1 - self.factor_threshold), last * (1 + self.factor_threshold)
        return clipped(factor, *nearest)

    def _fresh_rate(self, state: State, info: Info) -> Any:
        """Return the inverse bias correction of v~."""
        if not self.bias_correction:
            return 1.0
        xp, beta = namespace(state["count"]), self.setting(info, "betas")[1]
        number = state["count"][..., 1:] + xp.cast(state["since"], "float64")
        return xp.cast(1 / (1 - beta**number), xp.dtype(state["fresh"]))

    def _coeff(self, state: State) -> Tensor:
        """k; 1 where stage 1 has said nothing."""
        if not self.bias_correction:
            return state["coeff"]
        xp, weight = namespace(state["coeff"]), state["weight"]
        none = xp.cast(weight <= 0, xp.dtype(weight))
        return state["coeff"] / (weight + none) + none


def decayed(direction: Tensor, decay: float, info: Info) -> Tensor:
    """`direction` with weight decay in it, in memory of its own if there is some."""
    return direction + decay * shaped(info.parameter, direction) if decay else direction


def trust(whole: Tensor, info: Info, low: float, high: float) -> Tensor:
    """LAMB's ratio of each tensor."""
    xp = namespace(whole)
    weight = each(shaped(info.parameter, whole), info.sizes, "l2")
    size = each(whole, info.sizes, "l2")
    dtype = xp.dtype(size)
    known = xp.cast(weight > 0, dtype) * xp.cast(size > 0, dtype)
    ratio = clipped(weight / (size + (1 - known)), low, high)
    return known * ratio + (1 - known)


def clipped(x: Tensor, low: Any, high: Any) -> Tensor:
    """`x` between two numbers or tensors like itself."""
    xp = namespace(x)
    return xp.minimum(xp.maximum(x, x * 0 + low), x * 0 + high)


def each(x: Tensor, sizes: Sequence[int], kind: str) -> Tensor:
    """Norms of tensors of these sizes that lie side by side in the last dimension of `x`.

    (elements,) becomes (tensors,), and (number, elements) becomes (number, tensors).
    """
    xp = namespace(x)
    front = xp.shape(x)[:-1]
    if len(sizes) < 2:
        return xp.reshape(norms(x, kind), (*front, 1))
    parts = []
    for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
        part = xp.reshape(x[..., end - size : end], (*front, size))
        parts.append(xp.reshape(norms(part, kind), front or (1,)))
    return xp.transpose(xp.stack(parts)) if front else xp.concat(parts)


def spread(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the factors from `each`, in a shape to be multiplied with its argument."""
    xp = namespace(x)
    if len(sizes) < 2:
        return x
    if len(xp.shape(x)) > 1:
        return xp.stack([spread(row, sizes) for row in xp.unstack(x)])
    ones = [xp.full((size,), 1.0, xp.dtype(x), xp.device(x)) for size in sizes]
    return xp.concat([one * x[i : i + 1] for i, one in enumerate(ones)])


def check_bounds(owner: Any, low: str, high: str) -> None:
    """Refuse bounds that are not 0 < low <= high."""
    least, most = getattr(owner, low), getattr(owner, high)
    if not check.is_number(least) or least <= 0:
        check.refuse(owner, low, least, "a number above 0")
    if not check.is_number(most) or most < least:
        check.refuse(owner, high, most, f"a number of at least {low}, {least}")
