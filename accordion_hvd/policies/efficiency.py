"""Evidence of how much progress a step with compressed gradients makes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion_hvd.core.base import Allreduce, Compressor, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.policies.evidence import Evidence, Reading, Step

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import BucketState

SAMPLE = 1 << 14
"""Largest number of elements of a bucket that are compared."""

SIGNIFICANT = 2.0
"""Number of standard errors of the products by which their sum must exceed 0."""

SUMS = 4
"""Numbers at the end of a tensor: the sums of <g', g>, of <g', u> and of <g', g>^2, and steps."""

FEW = 1 << 12
"""Largest number of elements of a bucket whose gradients are added up, for `_inequality`."""


class Efficiency(Evidence):
    """Evidence: the progress of steps with compressed gradients, relative to uncompressed ones.

    Let g be the gradient of a step and u the vector that the optimizer received, the average of the
    ranks after compression. To first order, a step along u decreases the loss by the inner product
    of u with the true gradient. The gradient g' of the next step, from other examples, estimates
    the true gradient without the noise that g and u contain. The efficiency is the sum of <g', u>
    over a window, divided by that of <g', g>, where g and g' are gradients of one rank.

    If the ranks' data differ, the expected gradient of rank i is m + d_i, and <g', g> contains
    <d_i, d_i>, which no step along the mean gradient gains. It is estimated by the sums of the
    gradients of every other step, less their means over the ranks, and subtracted.

    All ranks measure at most 16,384 elements of each bucket, at equal distances, and average their
    sums. A switch of the level starts the evidence anew. If a gradient is not finite, the bucket
    may be without evidence in this window.
    """

    key = "efficiencies"
    on_all_ranks = True
    of_level = True
    tolerates_nonfinite = True

    def suits(self, compressor: Compressor) -> bool:
        """Return whether the compressor serves each bucket in a shape of its own."""
        return compressor.batching != "any" and not compressor.sharded

    def zeros(self, entry: BucketState) -> Tensor:
        """Return zeros for the samples of g and u, the sums of gradients, and the other sums."""
        length, few = _lengths(entry.bucket.size)
        return entry.spec.zeros((2 * length + 2 * few + SUMS,))

    def before(self, kept: Tensor, step: Step) -> Tensor:
        """Add the products of a gradient with g and u; the gradient is the next g."""
        xp, sample = namespace(kept), _sample(step.grad, step)
        g, u, one, other, sums = _parts(kept, step, step.grad)
        own, sent = (xp.reshape(xp.inner_products(sample, x), (-1, 1)) for x in (g, u))
        sums = sums + xp.concat([own, sent, own * own, own * 0 + 1.0], 1)
        other = other + sample[:, :: _stride(xp.shape(sample)[1], FEW)]  # they change places
        return xp.reshape(xp.concat([sample, u, other, one, sums], 1), xp.shape(kept))

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Store the mean as the next u."""
        xp = namespace(kept)
        g, _, *rest = _parts(kept, step, step.mean)
        return xp.reshape(xp.concat([g, _sample(step.mean, step), *rest], 1), xp.shape(kept))

    def read(self, exchange: Exchange) -> Reading:
        """Return the efficiency of each bucket with significant sums; one allreduce."""
        sums = yield from _significant(exchange)
        return {name: sent / own for name, (own, sent) in sums.items()}


class EfficiencyWeights(Evidence):
    """Evidence: the sum of <g', g> of each `Efficiency`, its weight in a mean over buckets."""

    key = "efficiency weights"

    def read(self, exchange: Exchange) -> Reading:
        """Return the sum of each bucket with significant sums; one allreduce."""
        sums = yield from _significant(exchange)
        return {name: own for name, (own, _) in sums.items()}


def _significant(exchange: Exchange) -> Any:
    """Return bucket -> (sum of <g', g>, sum of <g', u>), means over the ranks, on rank 0."""
    entries = [entry for entry in exchange.bucket_states if entry.bucket.compress]
    if not entries:
        return {}
    xp, communicator = exchange.xp, exchange.communicator
    rows, halves, found = [], [], Efficiency()
    for entry in entries:
        kept = entry.evidence.get(Efficiency.key)
        kept = found.zeros(entry) if kept is None else kept
        few = _lengths(entry.bucket.size)[1]
        one, other = xp.split(kept[-SUMS - 2 * few : -SUMS], [few, few])
        both = xp.inner_products(xp.reshape(one, (1, few)), xp.reshape(other, (1, few)))
        rows.append(xp.concat([kept[-SUMS:], both]))
        halves += [one, other]
    sums, means = yield Allreduce(xp.stack(rows)), Allreduce(xp.concat(halves))
    if communicator.rank:
        return {}
    sums, means = (np.asarray(xp.to_numpy(x), np.float64) for x in (sums, means))
    cuts = np.cumsum([xp.shape(half)[0] for half in halves])[:-1]
    of_ranks = iter(np.split(means, cuts))
    least, result = SIGNIFICANT / communicator.size**0.5, {}
    for entry, (own, sent, squares, steps, both) in zip(entries, sums.tolist(), strict=True):
        spread = squares - own**2 / max(steps - 1, 1)
        product = both - next(of_ranks) @ next(of_ranks)
        own -= _inequality(steps, product, *_lengths(entry.bucket.size))
        if own > least * max(spread, 0.0) ** 0.5:  # False if a sum is not finite
            result[entry.bucket.name] = float(own), sent
    return result


def _inequality(steps: float, product: float, length: int, few: int) -> float:
    """Return the part of the sum of <g', g> that is due to the differences between the ranks.

    Args:
        steps: number of steps of the window.
        product: product of the sums of gradients of every other step, without their means.
        length: number of elements of the sample.
        few: number of its elements in the product.
    """
    pairs = (steps + 1) // 2 * (steps // 2)
    return (steps - 1) * product / pairs * length / few if pairs else 0.0


def _lengths(size: int) -> tuple[int, int]:
    """Return the elements of a bucket's sample, and those of them whose gradients are added up."""
    length = -(-size // _stride(size))
    return length, -(-length // _stride(length, FEW))


def _stride(size: int, most: int = SAMPLE) -> int:
    return max(1, -(-size // most))


def _parts(kept: Tensor, step: Step, like: Tensor) -> tuple[Tensor, ...]:
    """Return g, u, the two sums of gradients and the other sums, with a row per bucket."""
    xp = namespace(kept)
    rows = xp.reshape(kept, (step.buckets or 1, -1))
    length, few = _lengths(xp.shape(xp.reshape(like, (step.buckets or 1, -1)))[1])
    ends = [0, length, 2 * length, 2 * length + few, 2 * (length + few), 2 * (length + few) + SUMS]
    return tuple(rows[:, begin:end] for begin, end in itertools.pairwise(ends))


def _sample(x: Tensor, step: Step) -> Tensor:
    """Return the sample of each bucket as a row."""
    xp = namespace(x)
    rows = xp.reshape(x, (step.buckets or 1, -1))
    return xp.cast(rows[:, :: _stride(xp.shape(rows)[1])], "float32")
