"""Displacement: mild compression where residuals keep the weights far from uncompressed values."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor
from accordion_hvd.ops import count_sketch, random
from accordion_hvd.policies.accordion import HIGH, LOW
from accordion_hvd.policies.base import Decision, Numbers, Seen, Windowed, agree
from accordion_hvd.policies.evidence import Evidence, Reading, weight_norms

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import BucketState


COLUMNS = 256
BOUND, RELEASE = 0.06, 1 / 3


class RelativeResidual(Evidence):
    """Evidence: the norm of the ranks' mean residual, relative to the norm of the weights.

    The norm is multiplied by the optimizer's gain (`gain_of_sgd`, `gain_of_adam`), so that the
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
        tensors = [[exchange.tensors[i].name for i in e.bucket.members] for e in entries]
        gains = exchange.gains([name for names in tensors for name in names])
        ratios = {}
        for entry, names, norm in zip(entries, tensors, norms, strict=True):
            effect = statistics.fmean(gains[name] for name in names) * norm
            size = weights[entry.bucket.name]
            without = math.inf if effect else 0.0  # weights that are all zero
            ratios[entry.bucket.name] = effect / size if size else without
        return ratios

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
        check_bounds(self, bound, release)
        self.low, self.high, self.bound, self.release = low, high, bound, release

    def decide(self, seen: Seen, lr: Numbers) -> list[Decision]:
        ratios = seen.get(RelativeResidual.key, {})
        displacements = {name: lr[name] * ratios.get(name, math.nan) for name in self.current}
        return [self._judge(name, d, lr[name]) for name, d in displacements.items()]

    def __repr__(self) -> str:
        bounds = {"bound": self.bound, "release": self.release}
        return self._call(low=self.low, high=self.high, **bounds, window=self.window)

    def _judge(self, name: str, displacement: float, lr: float) -> Decision:
        level, reason = self.current[name], "between the bounds"
        if not displacement <= self.bound:  # also if NaN
            level, reason = LOW, "displaced"
        elif displacement < self.release * self.bound:
            level, reason = HIGH, "not displaced"
        return self._decision(name, level, reason, lr, norm=displacement)


def check_bounds(owner: Any, bound: Any, release: Any) -> None:
    if not (check.is_number(bound) and bound > 0):
        check.refuse(owner, "bound", bound, "a number above 0")
    check.ratio(owner, "release", release)


# -------------------------------------------------------------------------------------------- gains
# The gain of an optimizer is the change of a weight, in learning rates, per unit of gradient. A
# gradient also takes part in later steps; the gain is the sum of its effects.
_SHORTEST = 1e-3
"""Smallest 1 - m, for momenta m of 1 and above."""

_EPSILON = 1e-8


def gain_of_sgd(momentum: float) -> float:
    return 1 / max(1 - momentum, _SHORTEST)


def gain_of_adam(mean: float, beta: float, steps: float) -> float:
    """Return the mean gain of Adam for a tensor: one over the root mean square of its gradients.

    Args:
        mean: mean of Adam's second moments, without correction of their bias.
        beta: decay of the second moments per step.
    """
    bias = 1 - beta**steps
    return 1 / (math.sqrt(mean / bias) + _EPSILON) if bias > 0 else USUAL_GAIN


USUAL_GAIN = gain_of_sgd(0.9)
"""The gain that is assumed if the optimizer is unknown."""
