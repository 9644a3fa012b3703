"""PowerSGD: low-rank gradient averaging (Vogels, Karimireddy & Jaggi, NeurIPS 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace
from accordion_hvd.ops.spec import Spec


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

    Args:
        rank: rank of the approximation, at least 1; at most min(n, m) is used. Default: 2.

    Traffic: two allreduces per matrix, of rank * n and rank * m fp32 numbers.
    """

    batching: ClassVar[str] = "alike"
    contractive: ClassVar[bool] = True
    detects_nonfinite: ClassVar[bool] = True

    rank: int = 2

    def __post_init__(self) -> None:
        """Raise ValueError if `rank` is not an integer of at least 1."""
        check.integer(self, "rank", self.rank, least=1)

    def init(self, spec: Spec, info: Info) -> State:
        """Return `error` (n, m), `p` (rank, n) and `q` (rank, m). The residual is error - p^T q.

        p and q are the averaged factors of the previous step. Their product is subtracted when the
        next gradient is added, which saves two passes over memory.
        """
        state = super().init(spec, info)
        n, m = matrix_shape(spec.shape)
        rank = min(self.rank, n, m)
        q = spec.normal((rank, m), seed=info.name)
        return state | {"error": spec.zeros((n, m)), "p": spec.zeros((rank, n)), "q": q}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run two rounds: average P, then average Q."""
        xp = namespace(grad)
        matrix = xp.reshape(grad, xp.shape(state["error"]))
        total, p = xp.project(state["error"], matrix, state["p"], state["q"])  # (n, m), (rank, n)
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
        """Return `q`, from which the next power iteration starts."""
        return {"q": state["q"]}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over another PowerSGD's `q`: truncate it, or add rows of this state's `q`.

        Older versions viewed some tensors as other matrices; a `q` of such a matrix is not used.
        """
        xp, ours = namespace(state["q"]), state["q"]
        rank, width = xp.shape(ours)[0], xp.shape(state["error"])[1]
        if xp.shape(ours)[1] != width:
            ours = xp.spec(state["error"]).normal((rank, width), seed="powersgd")
        if not isinstance(other, PowerSGD) or xp.shape(other_state["q"])[1] != width:
            return {**state, "q": ours}
        theirs = other_state["q"]
        missing = xp.shape(ours)[0] - xp.shape(theirs)[0]
        if missing <= 0:
            return {**state, "q": theirs[: xp.shape(ours)[0]]}
        flat = [xp.reshape(theirs, (-1,)), xp.reshape(ours[-missing:], (-1,))]
        return {**state, "q": xp.reshape(xp.concat(flat), xp.shape(ours))}
