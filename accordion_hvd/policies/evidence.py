"""Evidence for the decisions of policies: a policy declares evidence, the exchange collects it.

Evidence either accumulates one tensor per bucket over the steps of a window (`before`, `after`), or
reads the state of the exchange when a decision is due (`read`). Ranks other than 0 decide nothing,
and accumulate nothing unless the evidence is `on_all_ranks`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from accordion_hvd.core.base import Compressor, State, Tensor, widened
from accordion_hvd.ops import namespace, on_cpu, random
from accordion_hvd.ops.spec import FOLDS

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import BucketState

Signal: TypeAlias = Literal["local", "reduced"]
Reading = Generator[Any, Any, dict[str, float]]
"""A generator that yields collectives and returns bucket -> number."""


@dataclass
class Step:
    """One step of a bucket batch, as evidence sees it.

    Attributes:
        grad: this rank's gradients, without residuals; read-only.
        compressor: the compressor that serves the buckets.
        stored: the state before the step in `Evidence.before`, the new one in `Evidence.after`, as
            it is stored.
        weight: number of small batches whose gradients `grad` averages.
        buckets: number of buckets, stacked along a first dimension; 0 for a single bucket in its
            own shape, or for several buckets in one vector.
        mean: average of the ranks' gradients; only in `Evidence.after`.
    """

    grad: Tensor
    compressor: Compressor
    stored: State
    weight: int = 1
    buckets: int = 0
    mean: Tensor = None

    def residual(self) -> Tensor | None:
        """Return the residual in fp32; None without error feedback."""
        return self.compressor.residual(widened(self.stored))

    def weighted(self, x: Tensor) -> Tensor:
        return x if self.weight == 1 else x * self.weight


class Evidence:
    """Base class of evidence.

    The parameter `kept` of the methods is the tensor that the exchange accumulates for a bucket.

    Attributes:
        key: name of the evidence in the arguments of `Policy.decide` and in checkpoints.
        everywhere: whether to include buckets that are exempt from the policy.
        needs_optimizer: whether the exchange must know the optimizer's learning rate and momentum.
        on_all_ranks: whether ranks other than 0 accumulate a tensor, too.
        of_level: whether a switch of a bucket's level discards its tensor.
        tolerates_nonfinite: whether a gradient that is not finite may change the tensor. Other
            evidence is undone in such a step, which needs a pass over the gradients.
    """

    key: str = ""
    everywhere: bool = False
    needs_optimizer: bool = False
    on_all_ranks: bool = False
    of_level: bool = False
    tolerates_nonfinite: bool = False

    def zeros(self, entry: BucketState) -> Tensor:
        """Return the tensor of a bucket (a `BucketState`) at the start of a window."""
        raise NotImplementedError

    def suits(self, compressor: Compressor) -> bool:
        """Return whether to follow the steps that this compressor serves."""
        return True

    def before(self, kept: Tensor, step: Step) -> Tensor:
        """Return the new tensor, given a step's gradients; may consume `kept` (see `ops`)."""
        return kept

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Return the new tensor, given a step's results; may consume `kept` (see `ops`)."""
        return kept

    def read(self, exchange: Exchange) -> Reading:
        """Return a number for each bucket when a decision is due; runs on all ranks.

        The result omits buckets without a tensor. On ranks other than 0 it is empty.
        """
        raise NotImplementedError

    @property
    def follows(self) -> bool:
        """Return whether the evidence follows steps and so accumulates a tensor per bucket."""
        return self.looks_before or type(self).after is not Evidence.after

    @property
    def looks_before(self) -> bool:
        """Return whether the evidence needs the gradients of each step."""
        return type(self).before is not Evidence.before


SKETCHED = 1 << 16
"""Largest bucket whose sum of gradients is kept whole; no larger one is part of one vector."""


class GradientSums(Evidence):
    """Norms of the sums of gradients over a window.

    On an accelerator, a sketch of the sum (see `ops.numpy.fold`) of a bucket above `SKETCHED`
    elements is kept, with its signs: 1 / 8 byte per element. The norm then has a relative standard
    deviation of at most 2.2 % if no few columns of the sketch have most of the energy, and less for
    larger buckets.

    Args:
        signal: "local" for rank 0's own gradients without residuals, "reduced" for the averages.
        everywhere: see `Evidence`.
    """

    key = "gradients"

    def __init__(self, signal: Signal = "local", everywhere: bool = False) -> None:
        self.signal, self.everywhere = signal, everywhere

    def zeros(self, entry: BucketState) -> Tensor:
        spec, size = entry.spec, entry.bucket.size
        if not self._sketched(entry):
            return spec.zeros(entry.bucket.shape)
        columns = -(-size // FOLDS)
        while math.gcd(columns, size) > 1:  # so that no column of a matrix falls into few columns
            columns += 1
        key = random.key("gradient sums", entry.bucket.name)
        bits = random.words(spec.xp, columns + 2 * FOLDS, key, spec.device)
        signs = spec.xp.cast(bits % 2 * 2 - 1, "float32")
        return spec.xp.stack([signs * 0, signs])

    @property
    def looks_before(self) -> bool:
        return self.signal == "local"

    def before(self, kept: Tensor, step: Step) -> Tensor:
        return self._add(kept, step.weighted(step.grad)) if self.signal == "local" else kept

    def after(self, kept: Tensor, step: Step) -> Tensor:
        return self._add(kept, step.weighted(step.mean)) if self.signal == "reduced" else kept

    def _add(self, kept: Tensor, x: Tensor) -> Tensor:
        xp = namespace(kept)
        if xp.shape(kept) == xp.shape(x):
            return xp.accumulate(kept, x)
        rows = xp.reshape(kept, (-1, 2, xp.shape(kept)[-1]))
        sums, signs = rows[:, 0], rows[:, 1]
        sums = sums + xp.fold(xp.reshape(x, (xp.shape(rows)[0], -1)), signs)
        return xp.reshape(xp.concat([sums, signs], 1), xp.shape(kept))

    def _sketched(self, entry: BucketState) -> bool:
        """Return whether memory is scarce; a CPU adds up the whole sum faster than a sketch."""
        return entry.bucket.size > SKETCHED and not on_cpu(entry.spec.device)

    def read(self, exchange: Exchange) -> Reading:
        yield from ()
        norms = {}
        for entry, tensor in kept(exchange, self):
            sums = tensor[0] if self._sketched(entry) else tensor
            norms[entry.bucket.name] = exchange.xp.norm(sums)
        return numbers(exchange, norms)


class StateNorms(Evidence):
    """L1 norms of one tensor of the compressors' states, such as Adam's v.

    Args:
        of: key of the tensor in the states.
    """

    key = "states"

    def __init__(self, of: str) -> None:
        self.of = of

    def read(self, exchange: Exchange) -> Reading:
        yield from ()
        xp, norms = exchange.xp, {}
        for entry in exchange.bucket_states if exchange.communicator.rank == 0 else ():
            if entry.bucket.compress and entry.state:
                sums = xp.bucket_norms(entry.state[self.of], entry.bucket.size, "l1")
                norms[entry.bucket.name] = xp.reshape(sums, ())
        return numbers(exchange, norms)


class CompressionError(Evidence):
    """Relative error of rank 0's compression, |x - C(x)| / |x| for x = residual + gradient.

    For a window: the root mean square of |x - C(x)| over that of |x|. Steps of a level without
    error feedback do not count.
    """

    key = "errors"

    def zeros(self, entry: BucketState) -> Tensor:
        """Return zeros for two sums of squares, of x and of x - C(x)."""
        return entry.spec.zeros((2,))

    def suits(self, compressor: Compressor) -> bool:
        """Return whether the compressor may have a residual for each bucket."""
        return compressor.batching != "any" and not compressor.sharded

    def before(self, kept: Tensor, step: Step) -> Tensor:
        """Add |residual + gradient|^2."""
        xp, residual = namespace(kept), step.residual()
        if residual is None:
            return kept
        x = xp.cast(step.grad, "float32") + xp.reshape(residual, xp.shape(step.grad))
        return _add_square(kept, x, step.buckets, place=0)

    def after(self, kept: Tensor, step: Step) -> Tensor:
        """Add |new residual|^2."""
        residual = step.residual()
        return kept if residual is None else _add_square(kept, residual, step.buckets, place=1)

    def read(self, exchange: Exchange) -> Reading:
        """Return the relative errors; 0 if all gradients were zero."""
        yield from ()
        errors = {}
        for entry, sums in kept(exchange, self):
            total, lost = exchange.xp.to_numpy(sums).tolist()
            errors[entry.bucket.name] = (lost / total) ** 0.5 if total else 0.0
        return errors


class StepTimes(Evidence):
    """Median seconds per step on rank 0 since the last decision; one number for the job.

    Args:
        longest: number of the latest steps that count.
    """

    key = "seconds"
    JOB: ClassVar[str] = "(step)"

    def __init__(self, longest: int = 1000) -> None:
        self.longest = longest
        self.times: list[float] = []
        self._last: tuple[int, float] | None = None

    def note(self, step: int) -> None:
        """Record that exchange number `step` is about to begin; repeated calls count once."""
        now = time.perf_counter()
        if self._last is not None:
            done = step - self._last[0]
            if done <= 0:
                return
            self.times += [(now - self._last[1]) / done] * done
            del self.times[: -self.longest]
        self._last = (step, now)

    def restart(self) -> None:
        """Forget all times; the next measured step begins at the next `note`."""
        self.times, self._last = [], None

    def read(self, exchange: Exchange) -> Reading:
        """Return the median; an empty dict before the second step."""
        yield from ()
        return {self.JOB: statistics.median(self.times)} if self.times else {}


def weight_norms(exchange: Exchange) -> dict[str, float]:
    """Return the norm of the weights of each bucket that the policy serves."""
    xp, weights, norms = exchange.xp, exchange.replicas(), {}
    for entry in exchange.bucket_states:
        if entry.bucket.compress:
            tensors = [weights[exchange.tensors[i].name] for i in entry.bucket.members]
            norms[entry.bucket.name] = xp.norm(xp.stack([xp.norm(tensor) for tensor in tensors]))
    return numbers(exchange, norms)


def kept(exchange: Exchange, evidence: Evidence) -> Iterator[tuple[BucketState, Tensor]]:
    """Yield each bucket that has an accumulated tensor, and the tensor."""
    for entry in exchange.bucket_states:
        if evidence.key in entry.evidence:
            yield entry, entry.evidence[evidence.key]


def numbers(exchange: Exchange, scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as numbers, copied from the device in one transfer."""
    if not scalars:
        return {}
    values = exchange.xp.to_numpy(exchange.xp.stack(list(scalars.values())))
    return {name: float(value) for name, value in zip(scalars, values, strict=True)}


def _add_square(sums: Tensor, x: Tensor, buckets: int, place: int) -> Tensor:
    """Add |x|^2 of each stacked bucket, or of one bucket, to element `place` of its two sums."""
    xp = namespace(x)
    rows = xp.reshape(x, (buckets or 1, -1))
    squares = xp.bucket_norms(rows, xp.shape(rows)[1], "l2") ** 2
    squares = xp.reshape(squares, (buckets, 1) if buckets else (1,))
    return sums + squares * xp.asarray(np.eye(2, dtype=np.float32)[place], xp.device(sums))
