"""The evidence that policies decide by; a policy declares it, the exchange collects it.

Evidence may follow every step (`before`, `after`), keeping one tensor a bucket, or look when a
decision is due (`read`). On ranks other than 0, which decide nothing, nothing is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accordion_hvd.core.base import Compressor, State, Tensor
from accordion_hvd.ops import namespace

Reading = Generator[Any, Any, dict[str, float]]
"""A generator of collectives that returns a number for each bucket."""


@dataclass
class Step:
    """One step of the buckets that share a call, as evidence sees it.

    Attributes:
        grad: this rank's gradients, without errors; not to be written into.
        compressor: the compressor that serves the buckets.
        state: the state before the step in `Evidence.before`, the new one in `Evidence.after`.
        weight: batches that the gradients stand for.
        buckets: how many buckets share the call, stacked along a first dimension; 0 for one
            bucket in its own shape, or for several in one vector.
        mean: the average of the ranks' gradients; in `Evidence.after` only.
    """

    grad: Tensor
    compressor: Compressor
    state: State
    weight: int = 1
    buckets: int = 0
    mean: Tensor = None

    def weighted(self, x: Tensor) -> Tensor:
        """Return `x` as often as its gradient counts."""
        return x if self.weight == 1 else x * self.weight


class Evidence:
    """One kind of evidence.

    Attributes:
        key: names the evidence where a policy is given it, and in checkpoints.
        everywhere: whether buckets in which the policy has no say are looked at, too.
    """

    key: str = ""
    everywhere: bool = False

    def zeros(self, entry: Any) -> Tensor:
        """Return what is kept of a bucket when a window begins."""
        raise NotImplementedError

    def suits(self, compressor: Compressor) -> bool:
        """Return whether steps that this compressor serves are looked at."""
        return True

    def before(self, kept: Tensor, step: Step) -> Tensor:
        """Return what is kept, given a step's gradients; `kept` may be consumed (`ops`)."""
        return kept

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Return what is kept, given a step's results; `kept` may be consumed (`ops`)."""
        return kept

    def read(self, exchange: Any) -> Reading:
        """Return a number for each bucket when a decision is due; runs on all ranks.

        Buckets of which nothing is known are left out, and so are all on ranks other than 0.
        """
        raise NotImplementedError

    @property
    def follows(self) -> bool:
        """Return whether it looks at steps, and so keeps a tensor of each bucket."""
        return self.looks_before or type(self).after is not Evidence.after

    @property
    def looks_before(self) -> bool:
        """Return whether it looks at gradients."""
        return type(self).before is not Evidence.before


class GradientSums(Evidence):
    """Norms of the sums of gradients over a window.

    Args:
        signal: "local", rank 0's own gradients without errors, or "reduced", the averages.
        everywhere: see `Evidence`.
    """

    key = "gradients"

    def __init__(self, signal: str = "local", everywhere: bool = False) -> None:
        self.signal, self.everywhere = signal, everywhere

    def zeros(self, entry: Any) -> Tensor:
        """Zeros in the bucket's shape."""
        return entry.spec.zeros(entry.bucket.shape)

    @property
    def looks_before(self) -> bool:
        """Return whether it sums local gradients."""
        return self.signal == "local"

    def before(self, kept: Tensor, step: Step) -> Tensor:
        """Add local gradients."""
        if self.signal != "local":
            return kept
        return namespace(kept).accumulate(kept, step.weighted(step.grad))

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Add averages to the sum."""
        if self.signal != "reduced":
            return kept
        return namespace(kept).accumulate(kept, step.weighted(step.mean))

    def read(self, exchange: Any) -> Reading:
        """Norms of what has been summed."""
        yield from ()
        return numbers(exchange, {k: exchange.xp.norm(x) for k, x in kept(exchange, self)})


class StateNorms(Evidence):
    """Sums of the magnitudes of what states have under a key, such as Adam's v.

    Args:
        of: the key.
    """

    key = "states"

    def __init__(self, of: str) -> None:
        self.of = of

    def read(self, exchange: Any) -> Reading:
        """Magnitudes as they are now."""
        yield from ()
        xp, found = exchange.xp, {}
        for entry in exchange.bucket_states if exchange.communicator.rank == 0 else ():
            if entry.bucket.compress and entry.state:
                sums = xp.bucket_norms(entry.state[self.of], entry.bucket.size, "l1")
                found[entry.bucket.name] = xp.reshape(sums, ())
        return numbers(exchange, found)


class CompressionError(Evidence):
    """The relative error of rank 0's compression, |x - C(x)| / |x| for x = error + gradient.

    Of a window, the root mean square of numerators over that of denominators. Steps served by a
    level without error feedback do not count.
    """

    key = "errors"

    def zeros(self, entry: Any) -> Tensor:
        """Return two sums of squares, of x and of x - C(x)."""
        return entry.spec.zeros((2,))

    def suits(self, compressor: Compressor) -> bool:
        """Return whether it may have error feedback, of whole tensors."""
        return compressor.batching != "any" and not compressor.sharded

    def before(self, kept: Tensor, step: Step) -> Tensor:
        """Add |error + gradient|^2."""
        xp, residual = namespace(kept), step.compressor.residual(step.state)
        if residual is None:
            return kept
        x = xp.cast(step.grad, "float32") + xp.reshape(residual, xp.shape(step.grad))
        return _added(kept, x, step.buckets, place=0)

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Add |new error|^2."""
        residual = step.compressor.residual(step.state)
        return kept if residual is None else _added(kept, residual, step.buckets, place=1)

    def read(self, exchange: Any) -> Reading:
        """Relative errors; 0 where all gradients were zero."""
        yield from ()
        found = {}
        for name, sums in kept(exchange, self):
            whole, lost = exchange.xp.to_numpy(sums).tolist()
            found[name] = (lost / whole) ** 0.5 if whole else 0.0
        return found


class StepTimes(Evidence):
    """The median time of a step on rank 0 since the last decision, in seconds; one for the job.

    Args:
        longest: steps that are remembered.
    """

    key = "seconds"
    JOB: ClassVar[str] = "(step)"

    def __init__(self, longest: int = 1000) -> None:
        self.longest = longest
        self.times: list[float] = []
        self._last: tuple[int, float] | None = None

    def note(self, step: int) -> None:
        """Note that exchange number `step` is about to begin; repeated calls count once."""
        now = time.perf_counter()
        if self._last is not None:
            done = step - self._last[0]
            if done <= 0:
                return
            self.times += [(now - self._last[1]) / done] * done
            del self.times[: -self.longest]
        self._last = (step, now)

    def restart(self) -> None:
        """Forget all times; the next step that counts begins after the next `note`."""
        self.times, self._last = [], None

    def read(self, exchange: Any) -> Reading:
        """Return the median; nothing before the second step."""
        yield from ()
        return {self.JOB: statistics.median(self.times)} if self.times else {}


def weight_norms(exchange: Any) -> dict[str, float]:
    """Return the norms of the weights of each bucket in which the policy has a say."""
    xp, weights, found = exchange.xp, exchange.replicas(), {}
    for entry in exchange.bucket_states:
        if entry.bucket.compress:
            tensors = [weights[exchange.tensors[i].name] for i in entry.bucket.members]
            found[entry.bucket.name] = xp.norm(xp.stack([xp.norm(tensor) for tensor in tensors]))
    return numbers(exchange, found)


def kept(exchange: Any, evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Yield buckets' names and what is kept of them, where something is."""
    for entry in exchange.bucket_states:
        known = entry.evidence.get(evidence.key)
        if known is not None:
            yield entry.bucket.name, known


def numbers(exchange: Any, scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as numbers; all are read from the device together."""
    if not scalars:
        return {}
    values = exchange.xp.to_numpy(exchange.xp.stack(list(scalars.values())))
    return {name: float(value) for name, value in zip(scalars, values, strict=True)}


def _added(kept: Tensor, x: Tensor, buckets: int, place: int) -> Tensor:
    """Add the sums of squares of stacked buckets, or of one, at a place of their pairs."""
    xp = namespace(x)
    rows = xp.reshape(x, (buckets or 1, -1))
    sums = xp.bucket_norms(rows, xp.shape(rows)[1], "l2") ** 2
    sums = xp.reshape(sums, (buckets, 1) if buckets else (1,))
    return kept + sums * xp.asarray(np.eye(2, dtype=np.float32)[place], xp.device(kept))
