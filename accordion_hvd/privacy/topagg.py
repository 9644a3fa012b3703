"""TopAgg: private aggregation of votes on gradients (DataLens: Wang, Wu, Long et al., CCS 2021)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, Compressor, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.ops import namespace, random
from accordion_hvd.ops.spec import Spec
from accordion_hvd.privacy.budget import PrivacyBudget, Release

TRUSTED = 0
"""The rank that draws the noise and adds it to its own votes."""

UNITS = ("rank", "teacher", "example")

_CHUNK = 1 << 24  # elements looked at together; positions are int32
_LARGEST = 1e8  # sigma whose noise fits into 32 bits with room to spare
_REACH = 10  # deviations of noise that the wire's integers hold; more wraps around


@dataclass(frozen=True)
class TopAgg(Compressor):
    """Differentially private: contributors vote with signs, noise is added to the votes.

    Of its gradient g each contributor takes the k largest magnitudes, bounds them by B, the
    smaller of `clip` and its own largest, and votes +1 with probability 1/2 + g_j / (2 B), else
    -1, on each; a contributor whose gradient is zero does not vote. Votes are summed over all, and
    rounded Gaussian noise is added once, to all coordinates, those that nobody chose included. The
    result is the sign of coordinates whose noisy sum exceeds `threshold` times the contributors,
    0 elsewhere (Algorithm 1 of "DataLens: Scalable Privacy Preserving Training via Gradient
    Compression and Aggregation"; read in the authors' code, recalled from the paper). B is taken
    for each contributor, never across them: else the proof fails.

    Protection: a change of one record changes one contributor's vote, so that the sums
    differ by at most 2 sqrt(k) in Euclidean norm (the authors'); adding or removing a whole
    vote, as an example in a Poisson sample, changes them by at most sqrt(k) (ours). That is all
    the Gaussian mechanism needs, whatever signs chance has drawn for the others. Contributors' data
    must be disjoint. Not protected are ranks from each other: each sees its data, and partial sums
    pass through it. Nor what is not exchanged: statistics of batch normalisation, losses, the time
    that a step takes.

    The noise is drawn by rank 0 from the operating system's cryptographic source, so that no seed
    repeats it, and rounded to integers, which costs no privacy (`accordion_hvd.ops.secret`); sums
    are exact, modulo 2^bits. Signs are drawn from that source too, by each rank.

    What is not finite in a gradient counts as 0: a step that is skipped would tell of it.

    Sent: an allreduce of d integers of 8, 16 or 32 bits, whatever fits.

    Args:
        k: elements that a contributor votes on, of all the model's together.
        clip: bound of magnitudes (the code's max_grad); None: each contributor's largest, which
            makes votes unbiased for the direction of its k largest.
        sigma: standard deviation of the noise, in votes.
        threshold: a fraction of the contributors in [0, 1), the paper's beta; None: no threshold,
            the result is the noisy mean of the votes.
        unit: who votes: "rank" (each with its gradient), "teacher" (several on each rank, whose
            gradients come along a new first dimension) or "example" (stacked, too, and sampled
            anew for each step, as in DP-SGD; that form is ours).
        contributors: how many vote in a step, over all ranks; of examples, how many are expected.
            It must not depend on data. For ranks: None.
        rate: with which probability an example takes part in a step, each on its own.
        budget: what releases are entered in; training stops before it is exceeded. None: nobody
            counts.
        unprotected: allow sigma = 0; signs are then drawn from a known seed.
        deterministic: draw noise and signs from a known seed. FOR TESTS ONLY: it protects nothing.
    """

    scope = "model"
    batching = "any"
    private = True

    k: int
    clip: float | None
    sigma: float
    threshold: float | None = None
    unit: str = "rank"
    contributors: int | None = None
    rate: float = 1.0
    budget: PrivacyBudget | None = None
    unprotected: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Raises: ValueError for an argument that makes no sense."""
        check.integer(self, "k", self.k, least=1)
        if self.clip is not None and not (check.is_number(self.clip) and self.clip > 0):
            check.refuse(self, "clip", self.clip, "a number above 0, or None")
        if not check.is_number(self.sigma) or not 0 <= self.sigma <= _LARGEST:
            check.refuse(self, "sigma", self.sigma, f"a number above 0, at most {_LARGEST:g}")
        if self.threshold is not None:
            if not check.is_number(self.threshold) or not 0 <= self.threshold < 1:
                check.refuse(self, "threshold", self.threshold, "a number in [0, 1), or None")
        self._check_unit()
        self._check_protection()
        object.__setattr__(self, "per_sample", self.unit != "rank")

    def _check_unit(self) -> None:
        check.one_of(self, "unit", self.unit, UNITS)
        if self.unit != "rank":
            check.integer(self, "contributors", self.contributors, least=1)
        elif self.contributors is not None:
            check.refuse(self, "contributors", self.contributors, "None where ranks vote")
        check.ratio(self, "rate", self.rate)
        if self.unit != "example" and self.rate != 1:
            check.refuse(self, "rate", self.rate, "1 unless examples vote: only they are sampled")

    def _check_protection(self) -> None:
        for name in ("unprotected", "deterministic"):
            check.one_of(self, name, getattr(self, name), (False, True))
        if self.sigma == 0 and not self.unprotected:
            allowed = "above 0; unprotected=True allows to do without noise, and privacy"
            check.refuse(self, "sigma", self.sigma, allowed)
        if self.budget is not None and not isinstance(self.budget, PrivacyBudget):
            check.refuse(self, "budget", self.budget, "a PrivacyBudget, or None")
        if self.budget is not None and (self.sigma == 0 or self.deterministic):
            check.refuse(self, "budget", self.budget, "None: without secret noise all is spent")
        if self.budget is not None:
            self.budget.left(self.mechanism)  # which refuses neighbours of another kind
        if self.deterministic:
            warnings.warn(
                "TopAgg(deterministic=True) draws its noise from a seed that anyone can repeat: it "
                "protects NOTHING and is for tests only.",
                RuntimeWarning,
                stacklevel=4,
            )

    # -------------------------------------------------------------------------------- what it costs
    @property
    def sensitivity(self) -> float:
        """Return the largest change of the sum of votes by one record, in Euclidean norm."""
        return math.sqrt(self.k) * (1 if self.unit == "example" else 2)

    @property
    def mechanism(self) -> Release:
        """Return the mechanism of a release: Gaussian, of examples on a Poisson sample."""
        relation = "add or remove" if self.unit == "example" else "replace"
        return Release(self.sigma / self.sensitivity, float(self.rate), relation)

    def spend(self, count: int = 1) -> None:
        """Enter releases in the budget.

        Raises:
            BudgetSpent: there is no room for them.
        """
        if self.budget is not None:
            self.budget.spend(self.mechanism, count)

    def affords(self, count: int = 1) -> bool:
        """Return whether the budget has room for another release."""
        return self.budget is None or self.budget.left(self.mechanism) >= count

    # --------------------------------------------------------------------------------- what it does
    def accept(self, spec: Spec, name: str) -> None:
        """Raises: ValueError, also when k exceeds the model's elements."""
        super().accept(spec, name)
        self._check_size(spec.size)

    def _check_size(self, size: int) -> None:
        if not size:
            raise ValueError("TopAgg: the gradient is empty: there is nothing to vote on.")
        check.integer(self, "k", self.k, least=1, most=size)

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Make one release.

        `grad` is a rank's gradient in any shape, or (contributors of this rank, elements).
        """
        xp = namespace(grad)
        shape = xp.shape(grad)
        rows, shape = (shape[0], shape[1:]) if self.per_sample else (1, shape)
        grads = xp.reshape(grad, (rows, 1, math.prod(shape)))
        votes = yield from self.release(grads, info)
        return xp.reshape(votes, shape), state

    def release(self, grads: Tensor, info: Info) -> Generator[Any, Any, Tensor]:
        """Several releases in one allreduce, for each of which every contributor has a gradient.

        The caller enters them in the budget.

        Args:
            grads: (contributors of this rank, releases, elements).
            info: of this rank; `step` must not come twice.

        Returns:
            (releases, elements) fp32.
        """
        xp = namespace(grads)
        _, releases, size = xp.shape(grads)
        self._check_size(size)
        wire = self.wire(info.size)
        votes = xp.cast(self.votes(grads, info), wire)
        if info.rank == TRUSTED and self.sigma:
            votes = votes + self._noise(xp, releases * size, wire, info, xp.device(grads))
        sums = yield Allreduce(votes, op="sum", reuse=True)
        return self._decided(xp, xp.cast(xp.reshape(sums, (releases, size)), "float32"), info.size)

    def votes(self, grads: Tensor, info: Info) -> Tensor:
        """Add up this rank's votes for `grads` (see `release`): int32, flat, without noise."""
        xp = namespace(grads)
        rows, releases, size = xp.shape(grads)
        some = max(1, _CHUNK // (releases * size))
        total = xp.zeros((releases * size,), "int32", xp.device(grads))
        for first in range(0, rows, some):
            words = ("topagg", info.name, info.step, info.rank, first)
            total = total + self._votes_of_some(grads[first : first + some], words)
        return total

    def _votes_of_some(self, grads: Tensor, words: tuple[Any, ...]) -> Tensor:
        xp = namespace(grads)
        rows, releases, size = xp.shape(grads)
        x = xp.reshape(xp.finite(grads), (rows * releases, size))
        index = xp.largest_index(x, self.k)
        values = xp.reshape(xp.take(xp.reshape(x, (-1,)), index), (rows * releases, self.k))
        bound = xp.bucket_norms(values, self.k, "max")
        voting = bound > 0
        if self.clip is not None:
            bound = xp.minimum(bound, xp.full((1,), self.clip, "float32", xp.device(grads)))
        bound = (bound + (1 - xp.cast(voting, "float32")))[:, None]  # nothing is divided by 0
        chance = xp.minimum(xp.maximum(values, -bound), bound) / bound * 0.5 + 0.5
        drawn = self._draws(xp, index, values, size, words)
        signs = xp.cast(xp.reshape(drawn, (-1, self.k)) < chance, "int32") * 2 - 1
        signs = signs * xp.cast(voting, "int32")[:, None]
        return xp.sum_at(index % (releases * size), xp.reshape(signs, (-1,)), releases * size)

    def _draws(
        self, xp: ModuleType, index: Tensor, values: Tensor, size: int, words: tuple[Any, ...]
    ) -> Tensor:
        """Draw the secret random numbers with which chances are compared.

        From known seeds (in tests) draws belong to a teacher's place, or to an example's gradient:
        by their place, removing an example would change the signs of all that follow it.
        """
        rows, device = xp.shape(values)[0], xp.device(values)
        if self.sigma and not self.deterministic:
            return xp.secret_uniform(rows * self.k, device)
        if self.unit != "example":
            return random.uniform(xp, rows * self.k, random.key(*words), device)
        bits = xp.cast(xp.from_bytes(xp.to_bytes(values), "int32", (-1,)), "int64")
        mixed = random.key(bits, xp.cast(index % size, "int64"))
        own = xp.sum_at(index // size, xp.cast(mixed - (1 << 31), "int32"), rows)
        seeds = random.key(*words[:-1], xp.cast(own, "int64"))
        return random.uniform(xp, self.k, seeds[:, None], device)

    def wire(self, ranks: int) -> str:
        """Return the dtype of votes on the wire, which has room for all votes and for the noise."""
        votes = self.expected(ranks) * (2 if self.unit == "example" else 1)
        most = votes + _REACH * self.sigma + 1
        return "int8" if most < 2**7 else "int16" if most < 2**15 else "int32"

    def expected(self, ranks: int) -> int:
        """Return how many contributors count as all."""
        return ranks if self.contributors is None else self.contributors

    def _noise(self, xp: ModuleType, count: int, wire: str, info: Info, device: Any) -> Tensor:
        if not self.deterministic:
            return xp.secret_normal(count, self.sigma, wire, device)
        seed = random.key("topagg noise", info.name, info.step)
        words = random.words(xp, 12 * count, seed, device) // (1 << 8)  # of 24 bits
        words = xp.reshape(words, (12, count))
        near_normal = sum((words[i] for i in range(1, 12)), words[0]) - 6 * (1 << 24)
        scaled = xp.cast(near_normal, "float64") * (self.sigma / (1 << 24))
        far = 1 << 40  # casts cut towards 0
        return xp.cast(xp.cast(scaled + (far + 0.5), "int64") - far, wire)

    def _decided(self, xp: ModuleType, sums: Tensor, ranks: int) -> Tensor:
        contributors = self.expected(ranks)
        if self.threshold is None:
            return sums * (1 / contributors)
        limit = self.threshold * contributors
        return xp.cast(sums > limit, "float32") - xp.cast(sums < -limit, "float32")
