"""Goodput: the compressor with which training makes most progress per second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.compressors.dense import BF16, FP16, Dense
from accordion_hvd.core.base import Allreduce, Compressor, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.policies.base import Decision, Numbers, Seen, Windowed, agree
from accordion_hvd.policies.displacement import BOUND, RELEASE, RelativeResidual, check_bounds
from accordion_hvd.policies.evidence import Evidence, Reading, Step
from accordion_hvd.policies.gate import Gate, as_gate

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import BucketState


# --------------------------------------------------------------------------- statistical efficiency
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
        g, u, one, other, sums = _parts(kept, sample)
        own, sent = (xp.reshape(xp.inner_products(sample, x), (-1, 1)) for x in (g, u))
        sums = sums + xp.concat([own, sent, own * own, own * 0 + 1.0], 1)
        other = other + sample[:, :: _stride(xp.shape(sample)[1], FEW)]  # they change places
        return xp.reshape(xp.concat([sample, u, other, one, sums], 1), xp.shape(kept))

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Store the mean as the next u."""
        xp, sample = namespace(kept), _sample(step.mean, step)
        g, _, *rest = _parts(kept, sample)
        return xp.reshape(xp.concat([g, sample, *rest], 1), xp.shape(kept))

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

    `product` is that of the sums of gradients of every other step, without their means, over `few`
    of the `length` elements of the sample.
    """
    pairs = (steps + 1) // 2 * (steps // 2)
    return (steps - 1) * product / pairs * length / few if pairs else 0.0


def _lengths(size: int) -> tuple[int, int]:
    """Return the elements of a bucket's sample, and those of them whose gradients are added up."""
    length = -(-size // _stride(size))
    return length, -(-length // _stride(length, FEW))


def _stride(size: int, most: int = SAMPLE) -> int:
    return max(1, -(-size // most))


def _parts(kept: Tensor, sample: Tensor) -> tuple[Tensor, ...]:
    """Return g, u, the two sums of gradients and the other sums, with a row per bucket."""
    buckets, length = namespace(kept).shape(sample)
    rows, few = namespace(kept).reshape(kept, (buckets, -1)), _lengths(length)[1]
    ends = itertools.accumulate([0, length, length, few, few, SUMS])
    return tuple(rows[:, begin:end] for begin, end in itertools.pairwise(ends))


def _sample(x: Tensor, step: Step) -> Tensor:
    xp = namespace(x)
    rows = xp.reshape(x, (step.buckets or 1, -1))
    return xp.cast(rows[:, :: _stride(xp.shape(rows)[1])], "float32")


# --------------------------------------------------------------------------------------- the policy
NEARLY_EXACT = (Dense, FP16, BF16)
LEAST = 0.05  # lower bound of an efficiency, which is a quotient of noisy numbers
FIRST_TRIAL = 4  # windows before the first trial of a stronger level; the number doubles


class Goodput(Windowed):
    """Uses the compressor with which training makes most progress per second.

    Goodput is throughput times statistical efficiency (Pollux, OSDI 2021; GraVAC, 2023). This
    policy measures both in the job:

    - *Throughput.* A `Gate` measures the duration of a step with the strongest permitted levels and
      with each milder one, and mixes them if compressing some layers costs more time than it saves.
      It measures again when the link or the duration of a step changes.
    - *Statistical efficiency* of the level that serves a layer: let g be a rank's gradient and u
      the average that the optimizer received. To first order, a step along u decreases the loss by
      <g(t + 1), u(t)> times the learning rate, and an uncompressed one by <g(t + 1), g(t)>. The
      ratio of the sums of a window, averaged over the ranks, is the efficiency. It is 1 for
      `Dense`, `FP16` and `BF16`. A level that has not served yet counts as efficient as the next
      milder one.
    - *Harm.* The mildest level that is not nearly exact (`Dense`, `FP16`, `BF16`) is always
      permitted, like `low` of `Displacement`. A stronger one is forbidden for a layer if its
      displacement exceeds `bound` in a window, and permitted again when the learning rate has
      fallen so far that the displacement, which is proportional to it, would be below `bound`.

    A level must make 3 % more progress per second than a milder one to serve. After 4, 8, 16, ...
    windows, the policy permits the next stronger level where the displacement is below `release`
    times `bound`. If that level is faster, it serves for a window at least, in which its efficiency
    is measured. `gate.verdict` is the last decision in a sentence.

    For sparsifying compressors, the measured efficiency is too low: what they send late still
    counts later. Ours, not from a paper.

    ```python
    policy = Goodput([Dense(), FP16(), PowerSGD(4), PowerSGD(1)], window=100)
    ```

    Args:
        levels: compressors from the mildest to the strongest, at least two. Those that are not
            nearly exact must have error feedback, whose residual is the evidence.
        bound: displacement above which a stronger level is forbidden, above 0.
        release: fraction of `bound` below which the next stronger level is permitted, in (0, 1].
        window: batches in a window. In Keras, callbacks set it; in PyTorch, pass it or call
            `optimizer.end_window()` after each epoch.

    Attributes:
        history: one row per window and layer; `level` is the strongest permitted one, `norm` the
            displacement and `efficiency` the efficiency by the level that served the layer.
    """

    watches_rates = True
    evidence = (RelativeResidual(), Efficiency(), EfficiencyWeights())
    KEPT = (*Windowed.KEPT, "_ratios", "_progress")

    def __init__(
        self,
        levels: Sequence[Compressor],
        *,
        bound: float = BOUND,
        release: float = RELEASE,
        window: int | None = None,
    ) -> None:
        super().__init__(window)
        if not isinstance(levels, Sequence) or isinstance(levels, str) or len(levels) < 2:
            allowed = "two or more compressors such as [Dense(), PowerSGD(4)]"
            check.refuse(self, "levels", levels, allowed)
        agree(self, list(levels))
        check_bounds(self, bound, release)
        self.bound, self.release = bound, release
        self.fp16_reduction = self._levels[self.start("")].fp16_reduction  # later, the gate chooses
        self.gate = as_gate(self, Gate(fallbacks=self._levels[-2::-1]))
        assert self.gate is not None
        self.gate.efficiency = self.efficiency
        self._ratios: dict[str, list[float]] = {}
        # bucket -> for each level the last residual relative to the weights; 0 before it was used
        self._progress: dict[str, list[list[float]]] = {}
        # bucket -> for each level the sums of efficiency x weight and of weights; [] if unknown

    def start(self, name: str) -> int:
        """Return the mildest level that is not nearly exact, or the strongest level."""
        lossy = [i for i, x in enumerate(self._levels) if not isinstance(x, NEARLY_EXACT)]
        return lossy[0] if lossy else len(self._levels) - 1

    def serving(self, name: str) -> int:
        """Return the level that serves bucket `name`, which the gate may have made milder."""
        assert self.gate is not None
        number = self.gate.assignment.get(name, 0)
        return len(self._levels) - 1 - number if number else self.current[name]

    def observing(self) -> bool:
        """Return whether this step is evidence of the efficiency: not in the gate's trials."""
        assert self.gate is not None
        return self.gate.decided

    def efficiency(self, assignment: Mapping[str, int]) -> float:
        """Return the progress of a step relative to an uncompressed one, in (0, 1].

        Args:
            assignment: bucket -> 1 + index of the gate's fallback that serves it; the strongest
                permitted level serves the others.
        """
        weights = {name: self._weight(name) for name in self.current}
        total = sum(weights.values())
        if not total:
            return 1.0  # nothing has been measured yet
        last = len(self._levels) - 1
        levels = self.current | {name: last - number for name, number in assignment.items()}
        progress = (w * self._efficiency(name, levels[name]) for name, w in weights.items())
        return sum(progress) / total

    def tick(self, lr: Numbers) -> None:
        """Count an exchange; windows begin after the gate's trials, in which other levels serve."""
        super().tick(lr)
        assert self.gate is not None
        if not self.gate.decided:
            self._steps = 0

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        ratios = seen.get(RelativeResidual.key, {})
        rows = [self._judge(name, ratios.get(name, math.nan), lr[name]) for name in self.current]
        weights, found = seen.get(EfficiencyWeights.key, {}), seen.get(Efficiency.key, {})
        for row in rows:
            if row.name in weights:
                row.weight = weights[row.name]
                row.efficiency = min(max(found[row.name], LEAST), 1.0)
        return rows

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions; remember what was measured about the levels that served."""
        assert self.gate is not None
        for row in decisions:
            serving, count = self.serving(row.name), len(self._levels)
            known = self._ratios.setdefault(row.name, [0.0] * count)
            ratio = row.norm / row.lr if row.lr else 0.0
            known[serving] = ratio if math.isfinite(ratio) else 0.0
            progress = self._progress.setdefault(row.name, [[] for _ in range(count)])
            if math.isfinite(row.efficiency):  # older windows count half
                old, weights = progress[serving] or (0.0, 0.0)
                sums = old / 2 + row.efficiency * row.weight, weights / 2 + row.weight
                progress[serving] = list(sums)
            if self._tries:  # what is known of stronger levels is old
                progress[serving + 1 :] = [[] for _ in progress[serving + 1 :]]
        super().apply(decisions)
        self.gate.rejudge()

    def __repr__(self) -> str:
        bounds = {"bound": self.bound, "release": self.release}
        return self._call(list(self._levels), **bounds, window=self.window)

    @property
    def _tries(self) -> bool:
        """Return whether stronger levels may be tried from the end of this window on."""
        ended = self._epoch + 1
        return ended >= FIRST_TRIAL and ended & (ended - 1) == 0

    def _weight(self, name: str) -> float:
        """Return the last sum of weights of a bucket, at any level; 0 if there is none."""
        return max((sums[1] for sums in self._progress.get(name, ()) if sums), default=0.0)

    def _efficiency(self, name: str, level: int) -> float:
        known = self._progress.get(name)
        for place in range(level, -1, -1):
            if isinstance(self._levels[place], NEARLY_EXACT):
                break
            if known and known[place]:
                total, weights = known[place]
                return total / weights
        return 1.0

    def _judge(self, name: str, ratio: float, lr: float) -> Decision:
        """Return the strongest level that is permitted from now on."""
        limit, serving, displacement = self.current[name], self.serving(name), lr * ratio
        level, reason = limit, "between the bounds"
        if not displacement <= self.bound:  # also if NaN
            level, reason = max(serving - 1, self.start(name)), "displaced"
        elif serving < limit:
            reason = "a milder level is better"
        elif displacement < self.release * self.bound:
            level, reason = self._stronger(name, limit, lr)
        return self._decision(name, level, reason, lr, norm=displacement)

    def _stronger(self, name: str, limit: int, lr: float) -> tuple[int, str]:
        """Return the next stronger level if it exists and may be tried, and the reason."""
        if limit + 1 == len(self._levels):
            return limit, "the strongest level"
        known = self._ratios.get(name, {limit + 1: 0.0})[limit + 1]
        if lr * known > self.bound:
            return limit, "the next level would displace"
        if not (known or self._tries):
            return limit, "not yet tried"
        return limit + 1, "not displaced"
