"""Evidence of how much progress a step with compressed gradients makes."""

from __future__ import annotations

from typing import Any

from accordion_hvd.core.base import Allreduce, Compressor, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.policies.evidence import Evidence, Reading, Step

SAMPLE = 1 << 14
"""Largest number of elements of a bucket that are compared."""

SIGNIFICANT = 2.0
"""Number of standard errors by which the sum of the products must exceed 0."""

SUMS = 3
"""Numbers at the end of a tensor: the sums of <g', g>, of <g', u> and of <g', g>^2."""


class Efficiency(Evidence):
    """Evidence: the progress of steps with compressed gradients, relative to uncompressed ones.

    Let g be the gradient of a step and u the vector that the optimizer received, the average of the
    ranks after compression. To first order, a step along u decreases the loss by the inner product
    of u with the true gradient. The gradient g' of the next step, from other examples, estimates
    the true gradient without the noise that g and u contain. The efficiency is the sum of <g', u>
    over a window, divided by that of <g', g>, where g and g' are gradients of one rank.

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

    def zeros(self, entry: Any) -> Tensor:
        """Return zeros for the samples of g and u, and for the sums."""
        size = entry.bucket.size
        return entry.spec.zeros((2 * -(-size // _stride(size)) + SUMS,))

    def before(self, kept: Tensor, step: Step) -> Tensor:
        """Add the products of a gradient with g and u; the gradient is the next g."""
        xp, sample = namespace(kept), _sample(step.grad, step)
        g, u, sums = _parts(kept, step)
        own, sent = (xp.reshape(xp.inner_products(sample, x), (-1, 1)) for x in (g, u))
        sums = sums + xp.concat([own, sent, own * own], 1)
        return xp.reshape(xp.concat([sample, u, sums], 1), xp.shape(kept))

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Store the mean as the next u."""
        xp = namespace(kept)
        g, _, sums = _parts(kept, step)
        return xp.reshape(xp.concat([g, _sample(step.mean, step), sums], 1), xp.shape(kept))

    def read(self, exchange: Any) -> Reading:
        """Return the efficiency of each bucket with significant sums; one allreduce."""
        sums = yield from _significant(exchange)
        return {name: sent / own for name, (own, sent) in sums.items()}


class EfficiencyWeights(Evidence):
    """Evidence: the sum of <g', g> of each `Efficiency`, its weight in a mean over buckets."""

    key = "efficiency weights"

    def read(self, exchange: Any) -> Reading:
        """Return the sum of each bucket with significant sums; one allreduce."""
        sums = yield from _significant(exchange)
        return {name: own for name, (own, _) in sums.items()}


def _significant(exchange: Any) -> Any:
    """Return bucket -> (sum of <g', g>, sum of <g', u>), means over the ranks, on rank 0."""
    entries = [entry for entry in exchange.bucket_states if entry.bucket.compress]
    if not entries:
        return {}
    xp, communicator = exchange.xp, exchange.communicator
    nothing = xp.zeros((SUMS,), "float32", exchange.device)
    rows = [entry.evidence.get(Efficiency.key, nothing)[-SUMS:] for entry in entries]
    means = xp.to_numpy((yield Allreduce(xp.stack(rows)))).tolist()
    if communicator.rank:
        return {}
    least = SIGNIFICANT / communicator.size**0.5
    return {
        entry.bucket.name: (own, sent)
        for entry, (own, sent, squares) in zip(entries, means, strict=True)
        if own > least * squares**0.5  # False if a sum is not finite
    }


def _stride(size: int) -> int:
    return max(1, -(-size // SAMPLE))


def _parts(kept: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Return g, u and the sums, with a row per bucket."""
    xp = namespace(kept)
    rows = xp.reshape(kept, (step.buckets or 1, -1))
    length = (xp.shape(rows)[1] - SUMS) // 2
    return rows[:, :length], rows[:, length:-SUMS], rows[:, -SUMS:]


def _sample(x: Tensor, step: Step) -> Tensor:
    """Return the sample of each bucket as a row."""
    xp = namespace(x)
    rows = xp.reshape(x, (step.buckets or 1, -1))
    return xp.cast(rows[:, :: _stride(xp.shape(rows)[1])], "float32")
