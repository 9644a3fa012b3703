"""PowerSGD: low-rank gradient averaging (Vogels, Karimireddy & Jaggi, NeurIPS 2019).

Its alternating form is ACP-SGD (Zhang et al., "Evaluation and Optimization of Gradient Compression
for Distributed Deep Learning", ICDCS 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec

_LARGEST, _SMALLEST, _HEADROOM = 2.0**15, 1e-18, 16.0
"""Largest sum over the ranks of numbers in fp16; smallest norm on which their units depend; factor
by which a rank's norm may exceed the last mean norm before its units do."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape (n, m) in which a tensor is viewed as a matrix.

    The dimensions are cut after the first one, as in the paper, or before the last one, whichever
    gives the smaller n + m. The first cut serves PyTorch's convolutions, whose output channels
    come first; the second serves Keras', whose output channels come last. A convolution with very
    few output channels may get the other cut, which then sends less.
    """
    size = math.prod(shape)
    if len(shape) < 2 or size == 0:
        return size, 1
    first, last = (shape[0], size // shape[0]), (size // shape[-1], shape[-1])
    return min(first, last, key=sum)


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low-rank gradient averaging by one warm-started power iteration.

    The gradient plus the residual, viewed as a matrix M of shape (n, m), is approximated by a
    product of two thin factors. The ranks average the factors with two allreduces, so traffic does
    not grow with the number of ranks, and all ranks get the same result. The approximation error
    stays in the residual.

    Algorithms 1 and 2 of the paper: M is approximated by P^T Q, with an orthonormal P of shape
    (rank, n) and Q of shape (rank, m). Q starts from the previous step's Q. Factors are stored with
    `rank` as the first dimension, which is three times faster on a CPU than the paper's (n, rank).

    ACP-SGD (`alternate`) averages one factor per step, with half the bytes and one allreduce. Even
    exchanges orthonormalize the last average of Q and average P = Q M^T; odd exchanges
    orthonormalize the last average of P and average Q = P M. The error is M minus the product with
    this rank's own factor, so its mean over the ranks is the error of the mean. The even exchanges
    are those after 0, 2, ... exchanges that this level has served; skipped ones do not count.

    Use `alternate` where a second round per step costs much, and with twice the rank: at equal rank
    it loses more accuracy (docs/compressor-accuracy.md). With rank 1 it fails: on scikit-learn's
    digits it ends at 93.9 to 96.8 % instead of 98 %.

    With a 16-bit `wire`, twice the rank takes the same bytes. The residual is M minus the product
    of the rounded averages that all ranks receive, also if `alternate`, so no rounding is lost. In
    fp16, Q's rows are normalized before the projection, and factors travel in units that follow
    from the ranks' norms of M, so neither values nor their sums overflow. A rank whose norm is more
    than 16 times the last mean norm makes its first factor of the step smaller, and its residual
    keeps the rest. What the ranks' residuals differ by is rounded, too: one gradient of one rank
    that is 1e5 times as large as usual leaves noise in all later steps. PyTorch's counterpart is
    `fp16_compress_wrapper(powerSGD_hook)`; the paper's factors are fp32.

    Args:
        rank: rank of the approximation, at least 1; at most min(n, m) is used. Default: 2.
        alternate: whether to average P and Q in turn, one of them per step. Default: False.
        wire: dtype in which factors travel, "float32", "float16" or "bfloat16". Default: "float32".

    Traffic: two allreduces per matrix, of rank * n and rank * m numbers of dtype `wire`; if
    `alternate`, one of them per step. With fp16, also one fp32 number.
    """

    summary = "PowerSGD(4)", "16 (n + m)", "large matrices; `alternate=True` where rounds take long"
    batching = "alike"
    contractive: ClassVar[bool] = True
    detects_nonfinite: ClassVar[bool] = True

    rank: int = 2
    alternate: bool = False
    wire: str = "float32"

    def __post_init__(self) -> None:
        check.integer(self, "rank", self.rank, least=1)
        check.one_of(self, "alternate", self.alternate, (False, True))
        check.one_of(self, "wire", self.wire, ("float32", "float16", "bfloat16"))

    @property
    def fp16_reduction(self) -> bool:  # type: ignore[override]
        return self.wire == "float16"

    def variant(self, step: int) -> int:
        return step % 2 if self.alternate else 0

    @property
    def period(self) -> int:
        return 2 if self.alternate else 1

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error` (n, m), `p` (rank, n) and `q` (rank, m). The residual is error - p^T q.

        p and q are the averaged factors of the previous step. Their product is subtracted when the
        next gradient is added, which saves two passes over memory. If `alternate`, `p_mean` and
        `q_mean` are the last averages, and one of p and q is this rank's own factor if it travels
        in fp32. With fp16, `norm` (1, 1) is the mean of the ranks' norms of M.
        """
        state = super().init(spec, info)
        n, m = matrix_shape(spec.shape)
        rank = min(self.rank, n, m)
        q = spec.normal((rank, m), seed=info.name)
        state |= {"error": spec.zeros((n, m)), "p": spec.zeros((rank, n)), "q": q}
        if self.fp16_reduction:
            state["norm"] = spec.zeros((1, 1))
        if not self.alternate:
            return state
        return state | {"p_mean": spec.normal((rank, n), seed=info.name), "q_mean": q}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run two rounds, which average P and then Q; if `alternate`, one of them."""
        xp = namespace(grad)
        matrix = xp.reshape(grad, xp.shape(state["error"]))
        if self.alternate:
            mean, state = yield from self._average_one(matrix, state, info)
            return xp.reshape(mean, xp.shape(grad)), state
        basis = state["q"]
        if self.fp16_reduction:
            basis = basis * _unit(xp.row_norms(basis), 1.0)
        total, p = xp.project(state["error"], matrix, state["p"], state["q"], basis)  # (n, m)
        p, noted = yield from self._first(p, total, state, info)  # (rank, n)
        p = xp.orthogonalize(p)
        if noted:
            unit = _unit(noted["norm"], _LARGEST / info.size)
            q = (yield self._asked(p @ total * unit)) / unit  # (rank, m)
        else:
            q = yield self._asked(p @ total)
        mean = xp.expand(p, q, matrix)
        return xp.reshape(mean, xp.shape(grad)), {"error": total, "p": p, "q": q, **noted}

    def _average_one(self, matrix: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Average P or Q; return the mean as a matrix, and the new state."""
        xp, left = namespace(matrix), info.phase == 1  # Q in odd exchanges
        basis = xp.orthogonalize(state["p_mean" if left else "q_mean"])
        total, own = xp.project(
            state["error"], matrix, state["p"], state["q"], basis, left
        )  # (n, m), (rank, m) if left else (rank, n)
        factor, noted = yield from self._first(own, total, state, info)
        if noted:  # in the first step, no rank knows the units of the others
            usual = _HEADROOM * state["norm"]
            usual = usual + noted["norm"] * xp.cast(usual <= 0, "float32")
            factor = factor / _unit(usual, _LARGEST / info.size)
        if self.wire != "float32":  # the mean of own factors is not quite the one received
            own = factor
        state = {**state, "error": total, **noted}
        if left:
            state |= {"p": basis, "q": own, "q_mean": factor}
            return xp.expand(basis, factor, matrix), state
        state |= {"p": own, "q": basis, "p_mean": factor}
        return xp.expand(factor, basis, matrix), state

    def _first(self, factor: Tensor, total: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Average the first factor, in a unit for fp16, behind norms that show if it is finite."""
        if not self.fp16_reduction:
            return (yield self._asked(factor)), {}
        xp, lead = namespace(total), namespace(total).shape(total)[:-2]
        norm, sent = (xp.row_norms(xp.reshape(x, (*lead, 1, -1))) for x in (total, factor))
        unit = _unit(xp.maximum(_HEADROOM * state["norm"], norm), _LARGEST / info.size)
        norm, factor = yield Allreduce(norm + 2.0**-24 * sent), self._asked(factor * unit)
        return factor, {"norm": norm}

    def _asked(self, factor: Tensor) -> Allreduce:
        wire = None if self.wire == "float32" else self.wire
        return Allreduce(factor, wire=wire, reuse=wire is not None or not self.alternate)

    def residual(self, state: State) -> Tensor | None:
        """Return the residual as a matrix (n, m)."""
        if not state:
            return None
        xp = namespace(state["error"])
        return xp.deflate(xp.copy(state["error"]), state["p"], state["q"])

    def with_residual(self, state: State, residual: Tensor) -> State:
        """Return the state with the full residual in `error`, and p = 0."""
        xp, p = namespace(state["p"]), state["p"]
        zeros = xp.zeros(xp.shape(p), "float32", xp.device(p))
        return super().with_residual({**state, "p": zeros}, residual)

    def settled(self, state: State) -> State:
        """Return the state with the full residual in `error`, without a copy, and p = 0."""
        error = namespace(state["error"]).deflate(state["error"], state["p"], state["q"])
        return self.with_residual(state, error)

    def deactivate(self, state: State) -> State:
        """Return the averages from which the next power iteration starts."""
        return {key: state[key] for key in self._starts}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over another PowerSGD's averages: truncate them, or add rows of this state's."""
        if not isinstance(other, PowerSGD):
            return state
        started = {}
        for key in self._starts:
            theirs = other_state[f"{key[0]}_mean" if other.alternate else key[0]]
            started[key] = _resized(state[key], theirs)
        return {**state, **started}

    @property
    def _starts(self) -> tuple[str, ...]:
        """Return the keys of the averages that the next power iteration needs, that of Q first."""
        return ("q_mean", "p_mean") if self.alternate else ("q",)


def _unit(norm: Tensor, largest: float) -> Tensor:
    """Return a power of two whose product with `norm` is at most `largest`, and half of it or more.

    Powers of two round nothing but what leaves fp16's range, whatever other tensors share a stack.
    """
    return namespace(norm).power_below(largest / (norm + _SMALLEST))


def _resized(ours: Tensor, theirs: Tensor) -> Tensor:
    xp = namespace(ours)
    rank = xp.shape(ours)[0]
    missing = rank - xp.shape(theirs)[0]
    if missing <= 0:
        return theirs[:rank]
    flat = [xp.reshape(theirs, (-1,)), xp.reshape(ours[-missing:], (-1,))]
    return xp.reshape(xp.concat(flat), xp.shape(ours))
