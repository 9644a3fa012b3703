"""TopAgg: private aggregation of votes on gradients (DataLens: Wang, Wu, Long et al., CCS 2021)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

from accordion_hvd import check
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, Private, State, Tensor
from accordion_hvd.ops import namespace, random
from accordion_hvd.ops.spec import Spec
from accordion_hvd.privacy.budget import PrivacyAccountant, PrivacyBudget, Relation, Release

TRUSTED = 0
"""Rank that draws the noise and adds it to its votes."""

Unit: TypeAlias = Literal["rank", "teacher", "example"]

_CHUNK = 1 << 24  # elements processed at once; positions are int32
_LARGEST = 1e8  # largest sigma; its noise fits easily into 32 bits
_REACH = 10  # standard deviations of noise that the integers on the wire can hold; more wraps


@dataclass(frozen=True)
class TopAgg(Private):
    """TopAgg: differentially private aggregation of top-k sign votes with Gaussian noise.

    Algorithm 1 of "DataLens: Scalable Privacy Preserving Training via Gradient Compression and
    Aggregation" (read in the authors' code, recalled from the paper):

    1. Each contributor selects the k largest magnitudes of its gradient g.
    2. On each of them it votes +1 with probability 1/2 + g_j / (2 B), else -1, where g_j is clipped
       to [-B, B], and B is the smaller of `clip` and the contributor's largest magnitude. A
       contributor whose gradient is zero does not vote.
    3. Votes are summed over all contributors, and rounded Gaussian noise is added once, to all
       elements, including those without votes.
    4. The result is the sign of each element whose noisy sum exceeds `threshold` times the number
       of contributors in magnitude, and 0 elsewhere.

    Protection: a change of one record changes one contributor's votes, so their sum changes by at
    most 2 sqrt(k) in Euclidean norm (the authors'). Adding or removing all votes of a contributor,
    such as an example in a Poisson sample, changes the sum by at most sqrt(k) (ours). The Gaussian
    mechanism needs no more. The data of the contributors must be disjoint. Ranks are not protected
    from each other, and neither is anything outside of the exchange: statistics of batch
    normalisation, losses, the duration of a step.

    Rank 0 draws the noise, and each rank its signs, from the operating system's cryptographic
    source. The noise is rounded to integers, which costs no privacy (`accordion_hvd.ops.secret`),
    and sums are exact modulo 2^bits. Non-finite elements of a gradient count as 0, because a
    skipped step would reveal them.

    Sent: an allreduce of d integers of 8, 16 or 32 bits, the smallest that fits.

    Args:
        k: number of elements that a contributor votes on, out of the entire model.
        clip: bound of magnitudes (max_grad in the authors' code); None: each contributor's largest
            magnitude, which makes votes unbiased for the direction of its k largest elements.
        sigma: standard deviation of the noise, in votes.
        threshold: fraction of the contributors, in [0, 1) (the paper's beta); None: the result is
            the noisy mean of the votes.
        unit: contributors: "rank" (each rank with its gradient), "teacher" (several on each rank,
            with gradients stacked along a new first dimension) or "example" (stacked, too, and a
            new Poisson sample at each step, as in DP-SGD; this form is ours).
        contributors: number of contributors in a step, over all ranks; for examples, the expected
            number. It must not depend on the data. None for ranks.
        rate: probability that an example is in the sample of a step, independently of others. A
            rate below 1 requires the lots of a `PoissonSampler`. The batches of a shuffling loader
            are no such samples: with them, a rate below 1 understates epsilon, so use 1.
        budget: budget that records the releases; training stops before it is exceeded. None:
            releases are not counted.
        unprotected: whether sigma = 0 is allowed; signs are then drawn from a known seed.
        deterministic: whether to draw noise and signs from a known seed. FOR TESTS ONLY: this
            protects nothing.
    """

    k: int
    clip: float | None
    sigma: float
    threshold: float | None = None
    unit: Unit = "rank"
    contributors: int | None = None
    rate: float = 1.0
    budget: PrivacyBudget | None = None
    unprotected: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
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

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "model" if self.unit == "rank" else "samples"

    def _check_unit(self) -> None:
        check.one_of(self, "unit", self.unit, get_args(Unit))
        if self.unit != "rank":
            check.integer(self, "contributors", self.contributors, least=1)
        elif self.contributors is not None:
            check.refuse(self, "contributors", self.contributors, "None if ranks vote")
        check.ratio(self, "rate", self.rate)
        if self.unit != "example" and self.rate != 1:
            allowed = "1 unless examples vote: only examples are sampled"
            check.refuse(self, "rate", self.rate, allowed)

    def _check_protection(self) -> None:
        for name in ("unprotected", "deterministic"):
            check.one_of(self, name, getattr(self, name), (False, True))
        if self.sigma == 0 and not self.unprotected:
            allowed = "above 0 (unprotected=True allows 0: no noise and no privacy)"
            check.refuse(self, "sigma", self.sigma, allowed)
        if self.budget is not None and not isinstance(self.budget, PrivacyBudget):
            check.refuse(self, "budget", self.budget, "a PrivacyBudget, or None")
        if self.budget is not None and (self.sigma == 0 or self.deterministic):
            allowed = "None: without secret noise, epsilon is infinite"
            check.refuse(self, "budget", self.budget, allowed)
        if self.budget is not None:
            self.budget.left(self.mechanism)  # raises if the relations differ
        if self.deterministic:
            warnings.warn(
                "TopAgg(deterministic=True) draws its noise from a known seed: it protects NOTHING "
                "and is for tests only.",
                RuntimeWarning,
                stacklevel=4,
            )

    # --------------------------------------------------------------------------------- privacy cost
    @property
    def sensitivity(self) -> float:
        """Return the largest change of the sum of votes by one record, in Euclidean norm."""
        return math.sqrt(self.k) * (1 if self.unit == "example" else 2)

    @property
    def mechanism(self) -> Release:
        """Return the mechanism of one release: Gaussian; for examples, on a Poisson sample."""
        relation: Relation = "add or remove" if self.unit == "example" else "replace"
        return Release(self.sigma / self.sensitivity, float(self.rate), relation)

    def accountant(self, policy: Any) -> PrivacyAccountant:
        return PrivacyAccountant(policy, self.budget, self.mechanism)

    def spend(self, count: int = 1) -> None:
        """Record `count` releases in the budget.

        Raises:
            BudgetSpent: if the budget does not allow them.
        """
        if self.budget is not None:
            self.budget.spend(self.mechanism, count)

    def affords(self, count: int = 1) -> bool:
        """Return whether the budget has room for `count` more releases."""
        return self.budget is None or self.budget.left(self.mechanism) >= count

    # ---------------------------------------------------------------------------------- aggregation
    def accept(self, spec: Spec, name: str) -> None:
        """Raises: ValueError if the tensor is not valid, or has fewer than k elements."""
        super().accept(spec, name)
        self._check_size(spec.size)

    def _check_size(self, size: int) -> None:
        if not size:
            raise ValueError("TopAgg: the gradient is empty, but must have at least one element.")
        check.integer(self, "k", self.k, least=1, most=size)

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Make one release.

        `grad` is this rank's gradient, or (contributors of this rank, elements).
        """
        xp = namespace(grad)
        shape = xp.shape(grad)
        rows, shape = (shape[0], shape[1:]) if self.unit != "rank" else (1, shape)
        grads = xp.reshape(grad, (rows, 1, math.prod(shape)))
        votes = yield from self.release(grads, info)
        return xp.reshape(votes, shape), state

    def release(self, grads: Tensor, info: Info) -> Generator[Any, Any, Tensor]:
        """Make several releases in one allreduce; every contributor has a gradient for each.

        The caller must record the releases in the budget.

        Args:
            grads: (contributors of this rank, releases, elements).
            info: facts about this exchange; each call needs another `step`.

        Returns:
            The results, (releases, elements) fp32.
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
        """Return the sum of this rank's votes on `grads` (see `release`), int32, without noise."""
        xp = namespace(grads)
        rows, releases, size = xp.shape(grads)
        step = max(1, _CHUNK // (releases * size))
        total = xp.zeros((releases * size,), "int32", xp.device(grads))
        for first in range(0, rows, step):
            seed = ("topagg", info.name, info.step, info.rank, first)
            total = total + self._chunk_votes(grads[first : first + step], seed)
        return total

    def _chunk_votes(self, grads: Tensor, seed: tuple[Any, ...]) -> Tensor:
        xp = namespace(grads)
        rows, releases, size = xp.shape(grads)
        x = xp.reshape(xp.finite(grads), (rows * releases, size))
        index = xp.largest_index(x, self.k)
        values = xp.reshape(xp.take(xp.reshape(x, (-1,)), index), (rows * releases, self.k))
        bound = xp.bucket_norms(values, self.k, "max")
        voting = bound > 0
        if self.clip is not None:
            bound = xp.minimum(bound, xp.full((1,), self.clip, "float32", xp.device(grads)))
        bound = (bound + (1 - xp.cast(voting, "float32")))[:, None]  # never 0
        chance = xp.minimum(xp.maximum(values, -bound), bound) / bound * 0.5 + 0.5
        drawn = self._draws(xp, index, values, size, seed)
        signs = xp.cast(xp.reshape(drawn, (-1, self.k)) < chance, "int32") * 2 - 1
        signs = signs * xp.cast(voting, "int32")[:, None]
        return xp.sum_at(index % (releases * size), xp.reshape(signs, (-1,)), releases * size)

    def _draws(
        self, xp: ModuleType, index: Tensor, values: Tensor, size: int, seed: tuple[Any, ...]
    ) -> Tensor:
        """Draw the secret random numbers that decide the votes, uniform in [0, 1).

        With a known seed (in tests), the numbers depend on a teacher's index, or on an example's
        gradient: if they depended on an example's index, removing an example would change the signs
        of all later examples.
        """
        rows, device = xp.shape(values)[0], xp.device(values)
        if self.sigma and not self.deterministic:
            return xp.secret_uniform(rows * self.k, device)
        if self.unit != "example":
            return random.uniform(xp, rows * self.k, random.key(*seed), device)
        bits = xp.cast(xp.from_bytes(xp.to_bytes(values), "int32", (-1,)), "int64")
        mixed = random.key(bits, xp.cast(index % size, "int64"))
        own = xp.sum_at(index // size, xp.cast(mixed - (1 << 31), "int32"), rows)
        seeds = random.key(*seed[:-1], xp.cast(own, "int64"))
        return random.uniform(xp, self.k, seeds[:, None], device)

    def wire(self, ranks: int) -> str:
        """Return the dtype of votes on the wire: the smallest with room for all votes and noise."""
        votes = self.expected(ranks) * (2 if self.unit == "example" else 1)
        most = votes + _REACH * self.sigma + 1
        return "int8" if most < 2**7 else "int16" if most < 2**15 else "int32"

    def expected(self, ranks: int) -> int:
        """Return the number of contributors of a step, or its expectation for examples."""
        return ranks if self.contributors is None else self.contributors

    def _noise(self, xp: ModuleType, count: int, wire: str, info: Info, device: Any) -> Tensor:
        if not self.deterministic:
            return xp.secret_normal(count, self.sigma, wire, device)
        seed = random.key("topagg noise", info.name, info.step)
        words = random.words(xp, 12 * count, seed, device) // (1 << 8)  # of 24 bits
        words = xp.reshape(words, (12, count))
        almost_normal = sum((words[i] for i in range(1, 12)), words[0]) - 6 * (1 << 24)
        scaled = xp.cast(almost_normal, "float64") * (self.sigma / (1 << 24))
        offset = 1 << 40  # makes all numbers positive, because casts round towards 0
        return xp.cast(xp.cast(scaled + (offset + 0.5), "int64") - offset, wire)

    def _decided(self, xp: ModuleType, sums: Tensor, ranks: int) -> Tensor:
        contributors = self.expected(ranks)
        if self.threshold is None:
            return sums * (1 / contributors)
        limit = self.threshold * contributors
        return xp.cast(sums > limit, "float32") - xp.cast(sums < -limit, "float32")
