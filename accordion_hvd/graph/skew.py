"""Closed forms of the largest skew towards local nodes within a budget of the second moment.

A sampler draws nodes u with base probabilities p and weights them by 1 / p_u. Let c be the local
share of p. If local nodes are s times as likely, then q_u = s p_u / kappa for local nodes and
q_u = p_u / kappa for remote ones, where kappa = 1 + (s - 1) c. The remote share falls from 1 - c to
(1 - c) / kappa. The second moment of the estimate is M(q) = sum_u a_u^2 / q_u, where a_u is the
size of u's contribution. The budget D demands M(q) <= D M(p).

The budget bounds a second moment, not a variance. The variance of the mean of m i.i.d. draws is
(M(q) - ||A h||^2) / m, so the skew adds at most (D - 1) M(p) / m to it; relative to the variance
of the base sampler, this may be any factor. For example, if all neighbours have the same feature
and p is proportional to a, the base sampler has no variance, and the skewed one has.

Jiang & Rumi, "Communication-Efficient Sampling for Distributed Training of Graph Convolutional
Networks" (arXiv 2101.07706, 2021), proposed to make local nodes likelier, within a limit at which
training still converges. We could read only the abstract of the paper: the closed forms here are
our own derivations, not the paper's theorems.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from accordion_hvd.graph.structure import Array

RULES = ("tight", "worst", "measured")


def normalizer(skew: Any, local: Any) -> Any:
    """Return kappa = 1 + (s - 1) c."""
    return 1.0 + (skew - 1.0) * local


def worst_case_skew(budget: float, local: Any) -> Array:
    """Return s = 1 + (D - 1) / c, for which M(q) <= D M(p) for any features.

    Then kappa = D, and p_u / q_u <= kappa for all u. The remote share shrinks by exactly D.

    Args:
        budget: D, at least 1.
        local: c, the local share of the base probabilities; any shape.

    Returns:
        s, of the same shape; 1 where c is 0 or 1, since all nodes are remote or all are local.
    """
    c = np.asarray(local, np.float64)
    mixed = (c > 0) & (c < 1)
    return np.where(mixed, 1.0 + (budget - 1.0) / np.where(mixed, c, 1.0), 1.0)


def tight_skew(budget: float, local: Any, moment: Any = None) -> Array:
    """Return the s for which M(q) = D M(p), given the local share `moment` of M(p).

    Let x be the local share of M(p) = sum_u a_u^2 / p_u. Then M(q) / M(p) = kappa (x / s + 1 - x).
    If p_u is proportional to a_u, then x = c and

        s = 1 + tau / 2 + sqrt(tau + tau^2 / 4)   with   tau = (D - 1) / (c (1 - c)).

    In general, s is the larger root of

        c (1 - x) s^2 + ((1 - c) (1 - x) + c x - D) s + (1 - c) x = 0.

    Args:
        budget: D, at least 1.
        local: c; any shape.
        moment: x, of the same shape; c if None.

    Returns:
        s, of the same shape, at least 1; 1 where c is 0 or 1. Infinite where x is 1, since remote
        nodes then contribute nothing.
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
    """Return the larger root of a s^2 + b s + d where b is negative, else 1; infinite if a is 0."""
    inside = np.sqrt(np.maximum(b * b - 4 * a * d, 0.0))
    return np.where(b < 0, (inside - b) / (2 * a), 1.0)


def skew_for(
    rule: str, budget: float, local: Any, moment: Any = None, most: float = np.inf
) -> Array:
    """Return s by one of `RULES`, clamped to [1, `most`].

    Args:
        rule: "worst" (`worst_case_skew`), "tight" (`tight_skew` as if p were proportional to a) or
            "measured" (`tight_skew` with `moment`).
        budget: D. D = 1 always gives s = 1, the base sampler, even if "measured" would allow a
            larger s at the same second moment.
        local: c.
        moment: x, for "measured".
        most: the upper bound; without it, s would be very large if c is close to 0 or 1.
    """
    if budget == 1:
        return np.ones(np.shape(local))
    if rule == "worst":
        skew = worst_case_skew(budget, local)
    else:
        skew = tight_skew(budget, local, moment if rule == "measured" else None)
    return np.clip(skew, 1.0, most)
