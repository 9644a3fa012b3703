"""SketchedAMSGrad: adaptive gradients with count sketches (ICDM 2022), and its dense stage."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import count_sketch, namespace, random
from accordion_hvd.ops.spec import Spec
from accordion_hvd.optimizers.base import UpdateRule, check_betas
from accordion_hvd.policies.fixed import WarmUp

LEAST = 1e-30
"""Least `eps`, far above the smallest fp32 number."""


@dataclass(frozen=True)
class FlooredAMSGrad(UpdateRule):
    """Dense stage of `SketchedAMSGrad`: AMSGrad on the mean of the ranks' gradients.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, vmax <- max(vmax, v), u = m / sqrt(vmax).
    v and vmax start at `eps`, so vmax >= eps and nothing is added to the root. There are no bias
    corrections. In PyTorch weight decay is coupled by default.

    After a sketched stage the ranks have different m. The first exchange of the dense stage then
    averages g + b1 / (1 - b1) m, and the new m of all ranks is 1 - b1 times this mean; v does not
    change in that step (ours).
    """

    scope = "flat"
    batching = ""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_betas(self, self.betas)
        if not check.is_number(self.eps) or self.eps < LEAST:
            check.refuse(self, "eps", self.eps, f"a number of at least {LEAST:g}")

    def init(self, spec: Spec, info: Info) -> State:
        """Return the moments `m`, `v` and `vmax`, (size,), and two counters.

        `count`: updates of m and v, (2,) fp64; `apart`: 1 if m differs between ranks, else 0.
        """
        size, eps = spec.size, self.setting(info, "eps")
        start = {"m": 0.0, "v": eps, "vmax": eps}
        full = {k: spec.xp.full((size,), x, spec.wide, spec.device) for k, x in start.items()}
        counts = {"count": spec.zeros((2,), "float64"), "apart": spec.zeros((1,), spec.wide)}
        return super().init(spec, info) | full | counts

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        xp, (b1, b2), apart = namespace(grad), self.setting(info, "betas"), state["apart"]
        room = xp.reshape(grad, xp.shape(state["m"]))
        room = xp.accumulate(room, state["m"] * (apart * (b1 / (1 - b1))))
        mean = yield Allreduce(room, reuse=True)
        mean = xp.cast(mean, xp.dtype(state["m"]))
        m = xp.momentum(state["m"] * (1 - apart), b1, mean)
        v = state["v"] + (1 - b2) * (1 - apart) * (mean * mean - state["v"])
        vmax = xp.maximum(state["vmax"], v)
        direction = xp.preconditioned(m, vmax, [1.0, 1.0], 0.0, mean)
        new = {"m": m, "v": v, "vmax": vmax, "count": state["count"] + 1, "apart": apart * 0}
        return xp.reshape(direction, xp.shape(grad)), state | new


@dataclass(frozen=True)
class SketchedAMSGrad(FlooredAMSGrad):
    """AMSGrad that moves only the k elements with the largest steps, found by a count sketch.

    Stage 1, for `warmup_steps` steps, is `FlooredAMSGrad`, which also serves small and exempt
    tensors. In stage 2, at learning rate a, each rank has its own gradient g, momentum m and
    residual e:

    1. m <- b1 m + (1 - b1) g; p = a m + e
    2. Ranks average a count sketch of p, and estimate the mean of p from it
    3. The candidates are the `candidates` k elements with the largest estimate / sqrt(vmax)
    4. Ranks average p and g at the candidates; h is the mean of g there, and 0 elsewhere
    5. v <- b2 v + (1 - b2) h^2; vmax <- max(vmax, v)
    6. The k candidates J with the largest mean p / sqrt(vmax) move by exactly this step
    7. e <- p, and 0 at J

    The paper's body was not available: this is a reconstruction from its abstract and from formulas
    quoted elsewhere. docs/optimizer-details.md lists the parts that are ours, the effects of delay
    and noise on training, and arguments that reduce them.

    Sent in stage 2, for k = ratio * size: an allreduce of 4 rows columns k bytes, and one of
    8 candidates k bytes (fp64: 16). With the defaults this is 1/16 of the gradient.

    State: as in stage 1, and `error`.

    Args:
        betas: decay rates b1 and b2, in [0, 1).
        eps: initial value of v and vmax, at least 1e-30.
        ratio: k as a fraction of the elements, in (0, 1]; k is at least 1.
        rows: rows of the sketch, odd; an estimate is the median of the rows.
        columns: columns of the sketch as a multiple of k, above 0. With the default, the candidates
            contain a minority of the k largest elements (docs/optimizer-details.md has measured
            shares); 16 finds most of them if they are far above the rest.
        candidates: number of candidates as a multiple of k, an integer of at least 1.
        bounded: whether v uses the accumulated gradient of an element (g + e / a) instead of g.
        warmup_steps: number of steps of stage 1, or "auto": see `policies.WarmUp`.
    """

    rescale_note: ClassVar[str] = "momentum and residual are the ranks' means"
    averaged_state: ClassVar[tuple[str, ...]] = ("m", "error")
    per_rank_state: ClassVar[tuple[str, ...]] = averaged_state

    ratio: float = 0.0022
    rows: int = 5
    columns: float = 4.0
    candidates: int = 4
    bounded: bool = False
    warmup_steps: int | str = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check.ratio(self, "ratio", self.ratio)
        check.integer(self, "rows", self.rows, least=1)
        if self.rows % 2 == 0:  # else the median is not unique
            check.refuse(self, "rows", self.rows, "an odd number")
        if not check.is_number(self.columns) or self.columns <= 0:
            check.refuse(self, "columns", self.columns, "a number above 0")
        check.integer(self, "candidates", self.candidates, least=1)
        check.one_of(self, "bounded", self.bounded, (True, False))
        if self.warmup_steps != "auto":
            check.integer(self, "warmup_steps", self.warmup_steps, least=0)

    def dense(self) -> UpdateRule:
        return FlooredAMSGrad(self.betas, self.eps)

    def policy(self) -> Any:
        return WarmUp(self.dense(), self, self.warmup_steps)

    def init(self, spec: Spec, info: Info) -> State:
        """Return the state of stage 1, in which `m` is per rank, and the residual `error`."""
        return super().init(spec, info) | {"error": spec.zeros((spec.size,), spec.wide)}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run two rounds, for the sketch and for the candidates; or one round without a sketch."""
        xp = namespace(grad)
        size = xp.shape(state["m"])[0]
        if info.size == 1 or not self.width(size):
            return (yield from self._dense_step(grad, state, info))
        wide = xp.dtype(state["m"])
        rate, inverse, still = _rates(xp, info.lr, wide)
        fresh, (b1, b2) = xp.reshape(grad, (-1,)), self.setting(info, "betas")
        m = xp.momentum(state["m"], b1, fresh)
        room = m * rate
        total = xp.accumulate(state["error"], room)
        candidates = yield from self._candidates(total, state["vmax"], room, info)
        sums, gradients = xp.take(total, candidates), xp.cast(xp.take(fresh, candidates), wide)
        if self.bounded:
            gradients = gradients + (sums - xp.take(m, candidates) * rate) * inverse
        values = yield Allreduce(xp.concat([sums, gradients]), reuse=True)
        steps, gradients = xp.split(values, [xp.shape(candidates)[0]] * 2)
        gradient = xp.add_at(xp.zeros((size,), wide, xp.device(m)), candidates, gradients)
        v = xp.second_moment(state["v"], b2, gradient)
        vmax = xp.maximum(state["vmax"], v)
        steps = steps / xp.take(vmax, candidates) ** 0.5
        chosen = xp.largest_index(xp.cast(steps, "float32"), self.kept(size))
        index = xp.take(candidates, chosen)
        unmoved = xp.take(total, index) * still  # nothing moves at learning rate 0
        error = xp.add_at(xp.clear(total, index), index, unmoved)
        narrow, device = wide == "float32", xp.device(gradient)
        room = xp.zeros_reusing(gradient) if narrow else xp.zeros((size,), wide, device)
        direction = xp.add_at(room, index, xp.take(steps, chosen) * inverse)
        new = {"m": m, "v": v, "vmax": vmax, "error": error, "count": state["count"] + 1}
        return xp.reshape(direction, xp.shape(grad)), new | {"apart": state["apart"] * 0 + 1}

    def _candidates(
        self, total: Tensor, vmax: Tensor, room: Tensor, info: Info
    ) -> Generator[Any, Any, Tensor]:
        """Return where estimates of mean `total` / sqrt(vmax) are largest. Consumes `room`."""
        xp = namespace(total)
        size = xp.shape(total)[0]
        columns, device = self.width(size), xp.device(total)
        seed = random.key("sketch", info.name, info.step)
        codes = count_sketch.hashes(xp, size, self.rows, columns, seed, device)
        sketch = xp.sketch(xp.cast(total, "float32"), codes, columns)
        table = yield Allreduce(sketch, reuse=True)
        scores = xp.unsketch(table, codes, room) / xp.cast(vmax, "float32") ** 0.5
        return xp.largest_index(scores, self.candidates * self.kept(size))

    def _dense_step(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Take a step of stage 1 that also moves by this rank's entire residual."""
        direction, new = yield from self.dense().exchange(grad, state, info)
        xp = namespace(grad)
        if not self.width(xp.shape(new["m"])[0]):
            return direction, new
        _, inverse, still = _rates(xp, info.lr, xp.dtype(new["m"]))
        residual = xp.reshape(new["error"] * inverse / new["vmax"] ** 0.5, xp.shape(grad))
        return direction + residual, new | {"error": new["error"] * still}

    def deactivate(self, state: State) -> State:
        """Return the residual, which stays with this stage; the next stage copies all moments."""
        return {"error": state["error"]}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Copy the moments of the other stage, this rank's own `m` included."""
        m = other_state.get("m", state["m"])
        return super().warm_start(state, other, other_state) | {"m": m}

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Return the other rank's momentum, and a residual of zero."""
        return self.rescale([{**state, "error": 0 * state["error"]}], spec, info)

    def report(self, state: State) -> dict[str, Tensor]:
        """Return `waiting`: 2-norm of the step that the entire residual would make."""
        if "error" not in state:
            return {}
        xp = namespace(state["error"])
        return {"waiting": xp.norm(state["error"] / state["vmax"] ** 0.5)}

    def kept(self, size: int) -> int:
        """Return k: the number of elements that move in a step, at least 1."""
        return max(1, int(self.ratio * size))

    def width(self, size: int) -> int:
        """Return the columns of the sketch; 0 if `size` elements are sent without a sketch."""
        count = self.kept(size)
        columns = min(max(1, int(self.columns * count)), size)
        sent = self.rows * columns + 2 * min(self.candidates * count, size)
        return columns if sent < size else 0


def _rates(xp: ModuleType, lr: Any, dtype: str) -> tuple[Any, Any, Any]:
    """Return the learning rate, its inverse (0 at rate 0), and 1 if the rate is 0, else 0."""
    if isinstance(lr, (int, float)):
        rate = float(lr)
        return rate, 1 / rate if rate else 0.0, 0.0 if rate else 1.0
    rate = xp.cast(lr, dtype)
    still = xp.cast(rate == 0, dtype)
    return rate, (1 - still) / (rate + still), still
