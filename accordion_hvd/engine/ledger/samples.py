"""Errors of compression, measured in a few steps, and of compressors that send nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.core.base import Compressor, Info, State, Tensor

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import Batch, BucketState


logger = logging.getLogger(__name__)

EARLY, EVERY, OFTEN = (1, 2, 10, 30), 100, 3200
"""Steps that are measured, besides every `EVERY`-th one of the first `OFTEN` steps."""

LIMIT = 64
"""Maximum number of measured steps that are kept for each bucket."""


class Samples:
    """Norms and relative errors of the buckets in a few steps.

    The compressor of a bucket receives x = gradient + residual and sends C(x). The relative error
    is |x - C(x)| / |x|. For a compressor with error feedback, x - C(x) is the new residual.

    Args:
        shadows: compressors that receive x, too, without sending C(x). They have no error feedback.

    Attributes:
        measuring: whether the present step is measured.
        rows: bucket -> rows of step, |x|, norm of the residual (NaN without error feedback), and
            relative error.
        shadow_rows: text of a shadow -> sums over the measured steps and buckets: |x|^2,
            |x - C(x)|^2, bytes that a rank would send, and bytes of a ring allreduce.

    Raises:
        TypeError: if a shadow is no compressor.
        ValueError: if a shadow cannot serve alone.
    """

    def __init__(self, shadows: Sequence[Compressor] = ()) -> None:
        for shadow in shadows:
            if not isinstance(shadow, Compressor):
                raise TypeError(f"Ledger: shadow {shadow!r} must be a compressor, as PowerSGD(1).")
            if not measurable(shadow):
                raise ValueError(
                    f"Ledger: shadow {shadow!r} must be a compressor that averages gradients and "
                    "needs neither weights nor a privacy budget, as PowerSGD(1)."
                )
        self.shadows = tuple(shadows)
        self.measuring = self._failed = False
        self.rows: dict[str, list[list[float]]] = {}
        self.shadow_rows = {repr(shadow): [0.0] * 4 for shadow in shadows}
        self._states: dict[tuple[str, str], State] = {}
        self._sent: dict[tuple[str, str], float] = {}
        self._open: dict[str, tuple[Any, Any]] = {}  # bucket -> |x|, |x - C(x)| if it is known

    def begin(self, exchange: Exchange) -> None:
        step = exchange.steps + 1
        interval = EVERY << (step // OFTEN).bit_length()  # doubles as often as the steps double
        self.measuring = not self._failed and (step in EARLY or step % interval == 0)
        self._open.clear()

    def before(self, exchange: Exchange, batch: Batch, grad: Tensor) -> None:
        """Measure a batch before its exchange; `grad` is only read.

        Nothing is measured in graphs, and nothing of a private method, because it would reveal
        information about gradients. If a shadow fails, nothing is measured any more.
        """
        try:
            self._measure(exchange, batch, grad)
        except Exception as error:
            self.measuring, self._failed = False, True
            self._open.clear()
            text = f"{type(error).__name__}: {error}"
            logger.warning("accordion_hvd: errors are not measured any more (%s).", text)

    def _measure(self, exchange: Exchange, batch: Batch, grad: Tensor) -> None:
        xp = exchange.xp
        if exchange.policy.observers.any("private") or xp.symbolic(grad):
            return
        for entry, part in batch.parts(grad):
            if not entry.bucket.compress:
                continue
            info = replace(exchange.info(entry), parameter=None)
            residual, x = entry.residual(info), xp.cast(part, "float32")
            if residual is not None:
                x = x + xp.reshape(residual, xp.shape(part))
            norm, error = xp.norm(x), None
            if residual is None and measurable(entry.compressor):
                error, _ = _compress(xp, entry, entry.compressor, x, info)
            self._open[entry.bucket.name] = (norm, error)
            for shadow in self.shadows:
                self._follow(exchange, entry, shadow, x, info)

    def after(self, exchange: Exchange) -> None:
        if not self._open:
            return
        xp, number = exchange.xp, exchange.steps
        for entry in exchange.bucket_states:
            norm, error = self._open.pop(entry.bucket.name, (None, None))
            if norm is None:
                continue
            residual = entry.residual(exchange.info(entry))
            left = math.nan if residual is None else _number(xp, xp.norm(residual))
            size = _number(xp, norm)
            lost = left if error is None else _number(xp, error)
            row = [number, size, left, lost / size if size else 0.0]
            rows = self.rows.get(entry.bucket.name, [])
            self.rows[entry.bucket.name] = thinned([*rows, row], LIMIT)

    def as_dict(self) -> dict[str, Any]:
        columns = ("step", "norm", "residual", "error")
        sums = ("norm", "error", "sent", "dense")
        shadows = {k: dict(zip(sums, row, strict=True)) for k, row in self.shadow_rows.items()}
        return {"columns": columns, "buckets": self.rows, "shadows": shadows}

    def _follow(
        self, exchange: Exchange, entry: BucketState, shadow: Compressor, x: Tensor, info: Info
    ) -> None:
        name, xp, ranks = repr(shadow), exchange.xp, exchange.communicator.size
        key = name, entry.bucket.name
        error, self._states[key] = _compress(xp, entry, shadow, x, info, self._states.get(key))
        if key not in self._sent:
            self._sent[key] = _bytes_sent(xp, entry, shadow, x, info, ranks)
        dense = 2 * (ranks - 1) / ranks * entry.bucket.dense_bytes
        new = (_number(xp, xp.norm(x)) ** 2, _number(xp, error) ** 2, self._sent[key], dense)
        sums = self.shadow_rows[name]
        self.shadow_rows[name] = [old + more for old, more in zip(sums, new, strict=True)]


def _compress(
    xp: Any,
    entry: BucketState,
    compressor: Compressor,
    x: Tensor,
    info: Info,
    state: State | None = None,
) -> tuple[Tensor, State]:
    """Return |x - C(x)| on a single rank, and the new state without a residual."""
    info = _late(compressor, info, 1)
    state = compressor.init(entry.spec, info) if state is None else state
    generator = compressor.exchange(xp.copy(x), state, info)
    mean, kept = LocalCommunicator(xp).run("shadow", generator)
    residual = compressor.residual(kept)
    if residual is not None:
        zeros = xp.zeros(xp.shape(residual), "float32", xp.device(residual))
        kept = compressor.with_residual(kept, zeros)
    return xp.norm(x - xp.reshape(xp.cast(mean, "float32"), xp.shape(x))), kept


def _bytes_sent(
    xp: Any, entry: BucketState, compressor: Compressor, x: Tensor, info: Info, ranks: int
) -> float:
    info, traffic = _late(compressor, info, ranks), Traffic()
    generator = compressor.exchange(xp.copy(x), compressor.init(entry.spec, info), info)
    LocalCommunicator(xp, ranks).run("shadow", generator, traffic)
    return traffic.sent


def _late(compressor: Compressor, info: Info, ranks: int) -> Info:
    # After phases of preparation, as in most steps of a job.
    steps = -(-compressor.startup_steps // ranks) * ranks
    phase = compressor.variant(steps) if compressor.period != 1 else 0
    return replace(info, phase=phase, rank=0, size=ranks)


def measurable(compressor: Compressor) -> bool:
    """Return whether a compressor can serve a tensor outside of an exchange."""
    alone = compressor.scope in ("tensor", "flat") and not compressor.topology_aware
    return compressor.output == "gradient" and alone


def _number(xp: Any, scalar: Tensor) -> float:
    return float(xp.to_numpy(scalar).reshape(-1)[0])


# ---------------------------------------------------------------------- sums over consecutive steps
PARTS = ("compute", "encode", "wait", "decode", "decide", "graph", "measure")
"""Parts of the time of a step; they add up to it."""

MOST_ROWS = 512
"""Maximum number of rows of a series."""


class Series:
    """Numbers that are added up over windows of consecutive steps.

    All windows have the same number of steps, except the last one. When there are `limit` windows,
    each two neighbours are merged, and windows become twice as long. So memory is bounded, and no
    step is lost.

    Args:
        limit: maximum number of windows; even.

    Attributes:
        span: number of steps in a window.
        rows: for each window, the number of its steps and the sums of its columns.
    """

    def __init__(self, columns: Sequence[str], limit: int = MOST_ROWS) -> None:
        self.columns, self.limit = tuple(columns), limit
        self.span = 1
        self.rows: list[list[float]] = []

    def add(self, values: Mapping[str, float], steps: int = 1) -> None:
        """Add the numbers of `steps` steps; columns that are not in `values` get 0.

        The steps stay together, so that a window may exceed its length by up to `steps` - 1.
        """
        row = [float(steps), *[values.get(column, 0.0) for column in self.columns]]
        if self.rows and self.rows[-1][0] + steps <= self.span:
            self.rows[-1] = _sum(self.rows[-1], row)
            return
        self.rows.append(row)
        if len(self.rows) == self.limit:
            pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
            self.rows = [_sum(first, second) for first, second in pairs]
            self.span *= 2

    def total(self, column: str) -> float:
        place = ("steps", *self.columns).index(column)
        return sum(row[place] for row in self.rows)

    @property
    def steps(self) -> int:
        return int(self.total("steps"))

    def as_dict(self) -> dict[str, Any]:
        """Return the series for JSON: the columns `steps` and `columns`, one list each."""
        names = ("steps", *self.columns)
        return {name: [row[place] for row in self.rows] for place, name in enumerate(names)}


def thinned(rows: list[Any], limit: int) -> list[Any]:
    """Return `rows`, or if there are `limit` of them, every second one and the last."""
    return rows if len(rows) < limit else [*rows[:-1:2], rows[-1]]


def _sum(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]
