"""Closed forms of the largest preference for local nodes within a variance budget.

A sampler draws nodes u from base probabilities p and weights them by 1 / p_u. With local nodes s
times as likely, q_u = s p_u / kappa (local) and p_u / kappa (remote), where c is the local share of
p and kappa = 1 + (s - 1) c; the remote share falls from 1 - c to (1 - c) / kappa. The second moment
of the estimate is M(q) = sum_u a_u^2 / q_u, where a_u is what u contributes in size; the budget D
asks that M(q) <= D M(p).

That local nodes are made likelier, and by how much so that training still converges, is the idea of
Jiang & Rumi, "Communication-Efficient Sampling for Distributed Training of Graph Convolutional
Networks" (arXiv 2101.07706, 2021). We could read their abstract only: the closed forms here are
derivations of our own, not theorems of theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from accordion_hvd.graph.structure import Array

RULES = ("tight", "worst", "measured")


def normalizer(skew: Any, local: Any) -> Any:
    """kappa = 1 + (s - 1) c."""
    return 1.0 + (skew - 1.0) * local


def worst_case_skew(budget: float, local: Any) -> Array:
    """s = 1 + (D - 1) / c: then kappa = D, and M(q) <= D M(p) whatever the features are.

    Since p_u / q_u <= kappa for all u. Remote accesses shrink by D exactly.

    Args:
        budget: D, at least 1.
        local: c, the local share of the base probabilities; any shape.

    Returns:
        s, of the same shape; 1 where c is 0 or 1: there is nothing to prefer.
    """
    c = np.asarray(local, np.float64)
    mixed = (c > 0) & (c < 1)
    return np.where(mixed, 1.0 + (budget - 1.0) / np.where(mixed, c, 1.0), 1.0)


def tight_skew(budget: float, local: Any, moment: Any = None) -> Array:
    """Return the s for which M(q) = D M(p), if local nodes have the share `moment` of M(p).

    M(q) / M(p) = kappa (x / s + 1 - x), with x the local share of sum_u a_u^2 / p_u. Where p_u is
    proportional to a_u, x = c, and with tau = (D - 1) / (c (1 - c))
    s = 1 + tau / 2 + sqrt(tau + tau^2 / 4). In general s is the larger root of
    c (1 - x) s^2 + ((1 - c) (1 - x) + c x - D) s + (1 - c) x = 0.

    Args:
        budget: D, at least 1.
        local: c; any shape.
        moment: x, of that shape; c where it is not given.

    Returns:
        s, of that shape, at least 1; 1 where c is 0 or 1. Infinite where x is 1: remote nodes
        contribute nothing.
    """
    c = np.asarray(local, np.float64)
    x = c if moment is None else np.asarray(moment, np.float64)
    mixed = (c > 0) & (c < 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        if moment is None:
            tau = np.maximum(budget - 1.0, 0.0) / (c * (1 - c))
            root = 1.0 + tau / 2 + np.sqrt(tau + tau * tau / 4)
        else:
            root = _larger_root(c * (1 - x), (1 - c) * (1 - x) + c * x - budget, (1 - c) * x)
    return np.where(mixed, np.maximum(root, 1.0), 1.0)


def _larger_root(a: Array, b: Array, d: Array) -> Array:
    """Return the larger root of a s^2 + b s + d for negative b; infinite where a is 0."""
    inside = np.sqrt(np.maximum(b * b - 4 * a * d, 0.0))
    return np.where(b < 0, (inside - b) / (2 * a), 1.0)


def skew_for(
    rule: str, budget: float, local: Any, moment: Any = None, most: float = np.inf
) -> Array:
    """s by one of `RULES`, clamped to 1..`most`.

    Args:
        rule: "worst" (`worst_case_skew`), "tight" (`tight_skew` as if p were proportional to a) or
            "measured" (`tight_skew` with `moment`).
        budget: D; 1 is the base sampler, also where "measured" would find a larger s that costs
            nothing.
        local: c.
        moment: x, for "measured".
        most: the clamp; nodes with c near 0 or 1 would get very large ones.
    """
    if budget == 1:
        return np.ones(np.shape(local))
    if rule == "worst":
        found = worst_case_skew(budget, local)
    else:
        found = tight_skew(budget, local, moment if rule == "measured" else None)
    return np.clip(found, 1.0, most)
