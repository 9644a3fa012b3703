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
from accordion_hvd.policies.warmup import WarmUp

LEAST = 1e-30
"""The least `eps`: far enough from where fp32 ends."""


@dataclass(frozen=True)
class FlooredAMSGrad(UpdateRule):
    """AMSGrad in SketchedAMSGrad's form, on the average of the ranks' gradients: its dense stage.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, vmax <- max(vmax, v), u = m / sqrt(vmax).
    v and vmax begin at `eps`, below which vmax never is, so nothing is added to the root; there are
    no bias corrections. For weight decay see `SketchedAMSGrad`.

    In the sketched stage each rank has its own m. Where that comes before, the first gradient takes
    what is in the ranks' momentum along: each rank sends g + b1 / (1 - b1) m, the mean of which,
    times 1 - b1, is the new m of all; v stays as it is in that step (ours).

    Sent: an allreduce of the gradient.

    Args:
        betas: b1 and b2, in [0, 1).
        eps: where v begins, at least 1e-30.
    """

    scope: ClassVar[str] = "flat"
    batching: ClassVar[str] = ""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Raises: ValueError when an argument is not what it must be."""
        check_betas(self, self.betas)
        if not check.is_number(self.eps) or self.eps < LEAST:
            check.refuse(self, "eps", self.eps, f"a number of at least {LEAST:g}")
        object.__setattr__(self, "betas", tuple(self.betas))

    def init(self, spec: Spec, info: Info) -> State:
        """`m`, `v`, `vmax`: vectors with the gradient's elements.

        `count`: updates of m and v, fp64; `apart`: 1 where ranks differ in m, else 0.
        """
        size, eps = spec.size, self.setting(info, "eps")
        start = {"m": 0.0, "v": eps, "vmax": eps}
        full = {k: spec.xp.full((size,), x, spec.wide, spec.device) for k, x in start.items()}
        rest = {"count": spec.zeros((2,), "float64"), "apart": spec.zeros((1,), spec.wide)}
        return super().init(spec, info) | full | rest

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run one allreduce."""
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
    """AMSGrad that moves only the largest steps of all ranks together, found in a count sketch.

    At each step, on each rank with its own gradient g, momentum m and error e, at learning rate a:
    m <- b1 m + (1 - b1) g; p = a m + e. Sketches of p are averaged; of the elements whose
    estimates are largest over sqrt(vmax), `candidates` k of them, the ranks average p and g in a
    second round. v <- b2 v + (1 - b2) h^2, where h is the mean gradient at the candidates and 0
    elsewhere; vmax <- max(vmax, v). The k candidates J with the largest p / sqrt(vmax) are moved by
    that, exactly; e <- p, and 0 at J.

    Stage 1, for `warmup_steps`, is `FlooredAMSGrad`: AMSGrad in this form. Small and exempt tensors
    stay there. The paper's body was not at hand: this is a reconstruction from its abstract and
    from formulas quoted elsewhere. docs/optimizer-details.md says which parts are ours, what delay
    and noise do to training, and which arguments help.

    Sent in stage 2, for k = ratio * size: an allreduce of 4 rows columns k bytes, and one of
    8 candidates k (fp64: 16). At the defaults that is a 16th of the gradient.

    State: as stage 1, and `error`.

    Args:
        betas: b1 and b2, in [0, 1).
        eps: where v begins, at least 1e-30.
        ratio: k, as a part of the elements, in (0, 1]; at least one element is sent.
        rows: of the sketch, odd and at least 1; 5 find nearly all large elements, 1 few.
        columns: of the sketch, in multiples of k, above 0; the more, the fewer mistakes.
        candidates: how many times k elements are asked for exactly, an integer of at least 1.
        bounded: whether v learns from all that an element has gathered, not from g alone.
        warmup_steps: steps of stage 1, or "auto": see `policy.WarmUp`.
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
        """Raises: ValueError for arguments out of bounds, an even number of rows among them."""
        super().__post_init__()
        check.ratio(self, "ratio", self.ratio)
        check.integer(self, "rows", self.rows, least=1)
        if self.rows % 2 == 0:  # the median would be a matter of taste
            check.refuse(self, "rows", self.rows, "an odd number")
        if not check.is_number(self.columns) or self.columns <= 0:
            check.refuse(self, "columns", self.columns, "a number above 0")
        check.integer(self, "candidates", self.candidates, least=1)
        check.one_of(self, "bounded", self.bounded, (True, False))
        if self.warmup_steps != "auto":
            check.integer(self, "warmup_steps", self.warmup_steps, least=0)

    def dense(self) -> UpdateRule:
        """Return the optimizer of stage 1."""
        return FlooredAMSGrad(self.betas, self.eps)

    def policy(self) -> Any:
        """Stage 1 for `warmup_steps`, then stage 2."""
        return WarmUp(self.dense(), self, self.warmup_steps)

    def init(self, spec: Spec, info: Info) -> State:
        """Return stage 1's state with this rank's own `m`, and `error`: unsent momentum."""
        return super().init(spec, info) | {"error": spec.zeros((spec.size,), spec.wide)}

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Run two rounds: the sketch, then the candidates' values; or one without a sketch."""
        xp = namespace(grad)
        size = xp.shape(state["m"])[0]
        if info.size == 1 or not self.width(size):
            return (yield from self._exactly(grad, state, info))
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
        steps, seen = xp.split(values, [xp.shape(candidates)[0]] * 2)
        gradient = xp.add_at(xp.zeros((size,), wide, xp.device(m)), candidates, seen)
        v = xp.second_moment(state["v"], b2, gradient)
        vmax = xp.maximum(state["vmax"], v)
        steps = steps / xp.take(vmax, candidates) ** 0.5
        chosen = xp.largest_index(xp.cast(steps, "float32"), self.kept(size))
        index = xp.take(candidates, chosen)
        kept = xp.take(total, index) * still
        error = xp.add_at(xp.clear(total, index), index, kept)
        narrow, device = wide == "float32", xp.device(gradient)
        room = xp.zeros_reusing(gradient) if narrow else xp.zeros((size,), wide, device)
        direction = xp.add_at(room, index, xp.take(steps, chosen) * inverse)
        new = {"m": m, "v": v, "vmax": vmax, "error": error, "count": state["count"] + 1}
        return xp.reshape(direction, xp.shape(grad)), new | {"apart": state["apart"] * 0 + 1}

    def _candidates(
        self, total: Tensor, vmax: Tensor, room: Tensor, info: Info
    ) -> Generator[Any, Any, Tensor]:
        """Return the positions where the sketched mean of `total` over sqrt(vmax) is largest.

        Consumes `room`.
        """
        xp = namespace(total)
        size = xp.shape(total)[0]
        columns, device = self.width(size), xp.device(total)
        seed = random.key("sketch", info.name, info.step)
        codes = count_sketch.hashes(xp, size, self.rows, columns, seed, device)
        sketch = xp.sketch(xp.cast(total, "float32"), codes, columns)
        table = yield Allreduce(sketch, reuse=True)
        scores = xp.unsketch(table, codes, room) / xp.cast(vmax, "float32") ** 0.5
        return xp.largest_index(scores, self.candidates * self.kept(size))

    def _exactly(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Take a step of stage 1 that includes all residuals."""
        direction, new = yield from self.dense().exchange(grad, state, info)
        xp = namespace(grad)
        if not self.width(xp.shape(new["m"])[0]):
            return direction, new
        _, inverse, still = _rates(xp, info.lr, xp.dtype(new["m"]))
        waiting = xp.reshape(new["error"] * inverse / new["vmax"] ** 0.5, xp.shape(grad))
        return direction + waiting, new | {"error": new["error"] * still}

    def deactivate(self, state: State) -> State:
        """Errors wait; all else, this rank's momentum too, goes along."""
        return {"error": state["error"]}

    def warm_start(self, state: State, other: Compressor, other_state: State) -> State:
        """Take over moments."""
        return super().warm_start(state, other, other_state) | {
            "m": other_state.get("m", state["m"])
        }

    def rescale_from_one(self, state: State, spec: Spec, info: Info) -> State:
        """Return the other rank's momentum, without its residual."""
        return self.rescale([{**state, "error": 0 * state["error"]}], spec, info)

    def report(self, state: State) -> dict[str, Tensor]:
        """`waiting`: how far (2-norm) the weights would move if nothing waited any longer."""
        if "error" not in state:
            return {}
        xp = namespace(state["error"])
        return {"waiting": xp.norm(state["error"] / state["vmax"] ** 0.5)}

    def kept(self, size: int) -> int:
        """k: how many of `size` elements move in a step; rounded down, but at least one."""
        return max(1, int(self.ratio * size))

    def width(self, size: int) -> int:
        """Columns of the sketch of `size` elements; 0 where they travel as they are instead."""
        count = self.kept(size)
        columns = min(max(1, int(self.columns * count)), size)
        sent = self.rows * columns + 2 * min(self.candidates * count, size)
        return columns if sent < size else 0


def _rates(xp: ModuleType, lr: Any, dtype: str) -> tuple[Any, Any, Any]:
    if isinstance(lr, (int, float)):
        rate = float(lr)
        return rate, 1 / rate if rate else 0.0, 0.0 if rate else 1.0
    rate = xp.cast(lr, dtype)
    still = xp.cast(rate == 0, dtype)
    return rate, (1 - still) / (rate + still), still
