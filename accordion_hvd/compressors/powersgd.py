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

AVERAGES_P, AVERAGES_Q = 0, 1
"""Phases of `PowerSGD.alternate`."""


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

    Args:
        rank: rank of the approximation, at least 1; at most min(n, m) is used. Default: 2.
        alternate: whether to average P and Q in turn, one of them per step. Default: False.

    Traffic: two allreduces per matrix, of rank * n and rank * m fp32 numbers; if `alternate`, one
    of them per step.
    """

    batching: ClassVar[str] = "alike"
    contractive: ClassVar[bool] = True
    detects_nonfinite: ClassVar[bool] = True

    rank: int = 2
    alternate: bool = False

    def __post_init__(self) -> None:
        check.integer(self, "rank", self.rank, least=1)
        check.one_of(self, "alternate", self.alternate, (False, True))

    def variant(self, step: int) -> int:
        return step % 2 if self.alternate else 0

    @property
    def phases(self) -> bool:
        return self.alternate

    @property
    def period(self) -> int:
        return 2 if self.alternate else 1

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error` (n, m), `p` (rank, n) and `q` (rank, m). The residual is error - p^T q.

        p and q are the averaged factors of the previous step. Their product is subtracted when the
        next gradient is added, which saves two passes over memory. If `alternate`, one of them is
        this rank's own factor, and `p_mean` and `q_mean` are the last averages.
        """
        state = super().init(spec, info)
        n, m = matrix_shape(spec.shape)
        rank = min(self.rank, n, m)
        q = spec.normal((rank, m), seed=info.name)
        state |= {"error": spec.zeros((n, m)), "p": spec.zeros((rank, n)), "q": q}
        if not self.alternate:
            return state
        return state | {"p_mean": spec.normal((rank, n), seed=info.name), "q_mean": q}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run two rounds, which average P and then Q; if `alternate`, one of them."""
        xp = namespace(grad)
        matrix = xp.reshape(grad, xp.shape(state["error"]))
        if self.alternate:
            mean, state = yield from _average_one(matrix, state, info.phase)
            return xp.reshape(mean, xp.shape(grad)), state
        old = state["p"], state["q"]
        total, p = xp.project(state["error"], matrix, *old, state["q"])  # (n, m), (rank, n)
        p = yield Allreduce(p, reuse=True)
        p = xp.orthogonalize(p)
        q = yield Allreduce(p @ total)  # (rank, m)
        mean = xp.expand(p, q, matrix)
        return xp.reshape(mean, xp.shape(grad)), {"error": total, "p": p, "q": q}

    def residual(self, state: State) -> Tensor:
        """Return the residual as a matrix (n, m)."""
        return namespace(state["error"]).deflate(state["error"], state["p"], state["q"])

    def with_residual(self, state: State, residual: Tensor) -> State:
        """Return the state with the full residual in `error`, and p = 0."""
        xp, p = namespace(state["p"]), state["p"]
        zeros = xp.zeros(xp.shape(p), "float32", xp.device(p))
        return super().with_residual({**state, "p": zeros}, residual)

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


def _average_one(matrix: Tensor, state: State, phase: int) -> ExchangeGenerator:
    """Average P or Q; return the mean as a matrix, and the new state."""
    xp, left = namespace(matrix), phase == AVERAGES_Q
    basis = xp.orthogonalize(state["p_mean" if left else "q_mean"])
    total, own = xp.project(
        state["error"], matrix, state["p"], state["q"], basis, left=left
    )  # (n, m), (rank, m) if left else (rank, n)
    factor = yield Allreduce(own)
    state = {**state, "error": total}
    if left:
        state |= {"p": basis, "q": own, "q_mean": factor}
        return xp.expand(basis, factor, matrix), state
    state |= {"p": own, "q": basis, "p_mean": factor}
    return xp.expand(factor, basis, matrix), state


def _resized(ours: Tensor, theirs: Tensor) -> Tensor:
    xp = namespace(ours)
    rank = xp.shape(ours)[0]
    missing = rank - xp.shape(theirs)[0]
    if missing <= 0:
        return theirs[:rank]
    flat = [xp.reshape(theirs, (-1,)), xp.reshape(ours[-missing:], (-1,))]
    return xp.reshape(xp.concat(flat), xp.shape(ours))
