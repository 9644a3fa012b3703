"""Displacement: mild compression where residuals keep the weights far from uncompressed values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor
from accordion_hvd.ops import count_sketch, random
from accordion_hvd.policies.accordion import HIGH, LOW
from accordion_hvd.policies.base import Decision, Seen, Windowed, agree
from accordion_hvd.policies.evidence import Evidence, Reading, weight_norms

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import BucketState

COLUMNS = 256
BOUND, RELEASE = 0.06, 1 / 3


class RelativeResidual(Evidence):
    """Evidence: the norm of the ranks' mean residual, relative to the norm of the weights.

    The norm is multiplied by the optimizer's gain (see `accordion_hvd.engine.gain`), so that the
    product with the learning rate is the change of the weights for which the residual stands.

    The residual of a single rank is no good measure: with PowerSGD, its deviation from the mean is
    never sent and walks at random. Therefore the ranks average count sketches of their residuals:
    256 numbers per bucket, which estimate the norm to about 4 %.
    """

    key = "relative residuals"
    needs_optimizer = True

    def read(self, exchange: Exchange) -> Reading:
        """Return the relative norm for each bucket, after the last step; one allreduce."""
        entries = [entry for entry in exchange.bucket_states if entry.bucket.compress]
        if not entries:
            return {}
        xp = exchange.xp
        sketches = xp.stack([self._sketch(exchange, entry) for entry in entries])
        mean = xp.to_numpy((yield Allreduce(sketches)))
        if exchange.communicator.rank:
            return {}
        norms, weights = np.linalg.norm(mean, axis=1).tolist(), weight_norms(exchange)
        effects = zip(_gains(exchange, entries).items(), norms, strict=True)
        return {name: _ratio(gain * norm, weights[name]) for (name, gain), norm in effects}

    def _sketch(self, exchange: Exchange, entry: BucketState) -> Any:
        """Return the count sketch of this rank's residual; zeros if there is no residual."""
        xp, size, device = exchange.xp, entry.bucket.size, entry.spec.device
        residual = entry.residual(exchange.info(entry))
        if residual is None:
            return xp.zeros((COLUMNS,), "float32", device)
        seed = random.key("residual", entry.name, exchange.steps)
        codes = count_sketch.hashes(xp, size, 1, COLUMNS, seed, device)
        vector = xp.reshape(xp.cast(residual, "float32"), (-1,))
        return xp.reshape(xp.sketch(vector, codes, COLUMNS), (-1,))


class Displacement(Windowed):
    """Uses low compression for the layers whose residuals displace the weights by much.

    With error feedback, gradients are computed at the weights x instead of x - lr g e, the weights
    of a training without compression. Here e is the ranks' mean residual, and g the gain of the
    optimizer: 1 / (1 - m) for SGD with momentum m, and one over the root mean square of the layer's
    gradients for Adam. At the end of each window, let d = lr g |e| / |x| for a layer, with the
    learning rate of the next step. `low` serves the layer if d exceeds `bound`, and `high` if d is
    below `release` times `bound`. Between the two bounds the level remains. In the first window,
    `low` serves all layers. Ours, not from a paper.

    Args:
        low: the level of low compression; it must have error feedback.
        high: the level of high compression.
        bound: value of d above which `low` serves a layer, above 0.
        release: fraction of `bound` below which `high` serves a layer, in (0, 1].
        window: batches in a window. In Keras, callbacks set it; in PyTorch, pass it or call
            `optimizer.end_window()` after each epoch.

    Attributes:
        history: one row per window and layer; `norm` is d.
    """

    watches_rates = True
    evidence = (RelativeResidual(),)

    def __init__(
        self,
        low: Compressor,
        high: Compressor,
        *,
        bound: float = BOUND,
        release: float = RELEASE,
        window: int | None = None,
    ) -> None:
        super().__init__(window)
        agree(self, [low, high])
        if not (check.is_number(bound) and bound > 0):
            check.refuse(self, "bound", bound, "a number above 0")
        check.ratio(self, "release", release)
        self.low, self.high, self.bound, self.release = low, high, bound, release

    def levels(self, name: str) -> tuple[Compressor, ...]:
        return self.low, self.high

    def decide(self, seen: Seen, lr: Mapping[str, float]) -> list[Decision]:
        ratios = seen.get(RelativeResidual.key, {})
        displacements = {name: lr[name] * ratios.get(name, math.nan) for name in self.current}
        return [self._judge(name, d, lr) for name, d in displacements.items()]

    def __repr__(self) -> str:
        return (
            f"Displacement(low={self.low!r}, high={self.high!r}, bound={self.bound!r}, "
            f"release={self.release!r}, window={self.window!r})"
        )

    def _judge(self, name: str, displacement: float, lr: Mapping[str, float]) -> Decision:
        level, reason = self.current[name], "between the bounds"
        if not displacement <= self.bound:  # also if NaN
            level, reason = LOW, "displaced"
        elif displacement < self.release * self.bound:
            level, reason = HIGH, "not displaced"
        compressor = repr(self.levels(name)[level])
        row = Decision(name, level, self._step, self._epoch, compressor, reason, displacement)
        row.lr, row.previous_lr = lr[name], self._lr.get(name, math.nan)
        return row


def _gains(exchange: Exchange, entries: Sequence[BucketState]) -> dict[str, float]:
    tensors = {e.bucket.name: [exchange.tensors[i].name for i in e.bucket.members] for e in entries}
    gains = exchange.gains([name for names in tensors.values() for name in names])
    return {
        bucket: statistics.fmean(gains[name] for name in names) for bucket, names in tensors.items()
    }


def _ratio(residual: float, weights: float) -> float:
    return residual / weights if weights else (math.inf if residual else 0.0)
