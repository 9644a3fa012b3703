"""Random draws from many short lists at once, without a loop over the lists.

List i has `degree[i]` places, from `start[i]` on. `is_local(places)` returns which places are
local; a local place is `skew[i]` times as likely as a remote one. With `local` the share of local
places, q = skew / (degree kappa) for local places and q = 1 / (degree kappa) for remote ones
(kappa: see `skew.normalizer`). At skew 1, no draw depends on which places are local.

`DRAW_MODES` has the functions of each mode of `Sampler`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from accordion_hvd.graph.skew import normalizer
from accordion_hvd.graph.structure import Array, flat

DENSE = 0.1
"""If the likeliest places of a list are taken with at least this probability, every place of the
list is tested. In longer lists, this would cost more than generating the few places that are
taken."""


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of places to draw from; see the module.

    Attributes:
        start: (lists,), first place of each list.
        degree: (lists,), number of places, at least 1.
        skew: (lists,), s, at least 1.
        local: (lists,), share of local places, in [0, 1].
        is_local: function from places to a mask of the local ones.
    """

    start: Array
    degree: Array
    skew: Array
    local: Array
    is_local: Callable[[Array], Array]

    def probabilities(self, rows: Array, places: Array) -> Array:
        """Return q of each place `places[i]` in list `rows[i]`."""
        remote = 1.0 / (self.degree * normalizer(self.skew, self.local))
        return np.where(self.is_local(places), (self.skew * remote)[rows], remote[rows])

    def likeliest(self) -> Array:
        """Return q of the likeliest place of each list."""
        return self.skew / (self.degree * normalizer(self.skew, self.local))

    def limited(self, count: int) -> Lists:
        """Return the lists with the largest skew at which `count` q is at most 1 everywhere.

        `count` is at most the number of places of each list. A list with more local places than
        that needs no limit. In a list with fewer, all local places are taken at the limit.
        """
        local = np.rint(self.degree * self.local)
        free = np.maximum(count - local, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(free > 0, (self.degree - local) / free, np.inf)
        return replace(self, skew=np.maximum(np.minimum(self.skew, most), 1.0))

    def unskewed(self) -> Lists:
        return replace(self, skew=np.ones(len(self.start)))

    def chosen(self, index: Array) -> Lists:
        columns = self.start, self.degree, self.skew, self.local
        start, degree, skew, local = (column[index] for column in columns)
        return Lists(start, degree, skew, local, self.is_local)


Draws = tuple[Array, Array, Array]
"""For each drawn place: its list, the place, and how often it was drawn."""


def independent(lists: Lists, count: int, random: np.random.Generator) -> Draws:
    """Draw `count` places from each list, with replacement (i.i.d. from q).

    Rejection sampling: places are proposed uniformly; a remote place is accepted with probability
    1 / skew, a local one always. A rejected draw is proposed again.
    """
    rows = np.repeat(np.arange(len(lists.start)), count)
    places = _proposed(lists, rows, lists.skew, random)
    order = np.lexsort((places, rows))
    rows, places = rows[order], places[order]
    first = np.flatnonzero(_first_of_run(rows, places))
    times = np.diff(np.append(first, len(rows)))
    return rows[first], places[first], times


def _proposed(lists: Lists, rows: Array, skew: Array, random: np.random.Generator) -> Array:
    """Return a place of each of the lists `rows`; local ones are `skew[row]` times as likely."""
    places = np.empty(len(rows), np.int64)
    open_ = np.arange(len(rows))
    while len(open_):
        mine = rows[open_]
        offset = (random.random(len(open_)) * lists.degree[mine]).astype(np.int64)
        places[open_] = lists.start[mine] + offset
        rejected = random.random(len(open_)) * skew[mine] >= 1.0
        rejected &= ~lists.is_local(places[open_])
        open_ = open_[rejected]
    return places


def inclusion(q: Array, count: int) -> Array:
    """Return min(1, count q), the probability that Bernoulli sampling takes a place."""
    return np.minimum(1.0, count * q)


def bernoulli(lists: Lists, count: int, random: np.random.Generator) -> Draws:
    """Draw each place independently, with probability min(1, count q)."""
    is_dense = inclusion(lists.likeliest(), count) >= DENSE
    return _either(lists, is_dense, _place_by_place, _by_arrivals, count, random)


def fixed(lists: Lists, count: int, random: np.random.Generator) -> Draws:
    """Draw exactly `count` places from each list, without replacement.

    Each list has at least `count` places. A place is taken with probability `count` q, after
    `Lists.limited`. At skew 1, all subsets of `count` places are equally likely, as in GraphSAGE.
    """
    lists = lists.limited(count)
    is_dense = count * count * lists.likeliest() >= 1.0
    return _either(lists, is_dense, _systematic, _sampford, count, random)


Method = Callable[[Lists, int, np.random.Generator], tuple[Array, Array]]


def _either(
    lists: Lists,
    is_dense: Array,
    method: Method,
    other: Method,
    count: int,
    random: np.random.Generator,
) -> Draws:
    """Draw from the dense lists by `method` and from the others by `other`."""
    dense, sparse = np.flatnonzero(is_dense), np.flatnonzero(~is_dense)
    dense_rows, dense_places = method(lists.chosen(dense), count, random)
    sparse_rows, sparse_places = other(lists.chosen(sparse), count, random)
    rows = np.concatenate([dense[dense_rows], sparse[sparse_rows]])
    places = np.concatenate([dense_places, sparse_places])
    order = np.argsort(rows, kind="stable")
    return rows[order], places[order], np.ones(len(rows), np.int64)


def _systematic(lists: Lists, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Draw by systematic sampling in random order (Goodman & Kish, 1950).

    The shuffled places of a list are intervals of lengths pi, side by side from 0 to `count`. The
    places that contain one of the points U, U + 1, ..., U + `count` - 1 are taken, where U is
    uniform in [0, 1).
    """
    rows = np.repeat(np.arange(len(lists.start)), lists.degree)
    places = flat(lists.start, lists.degree)[np.argsort(rows + random.random(len(rows)) / 2)]
    local = lists.is_local(places)
    remote = count / (lists.degree * normalizer(lists.skew, lists.local))
    ends = np.cumsum(lists.degree)
    before = np.cumsum(local) - local  # local places before each place, from the list's start on
    before -= np.repeat(before[ends - lists.degree], lists.degree)
    offset = np.arange(len(rows)) - np.repeat(ends - lists.degree, lists.degree)
    excess = (lists.skew - 1.0) * remote  # what a local place is longer than a remote one
    begin = remote[rows] * offset + excess[rows] * before
    end = remote[rows] * (offset + 1) + excess[rows] * (before + local)
    end[ends - 1] = count
    start = random.random(len(lists.start))[rows]
    taken = np.ceil(end - start) > np.ceil(begin - start)
    return rows[taken], places[taken]


def _sampford(lists: Lists, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Draw by rejection (Sampford, 1967), in time that does not depend on the length of lists.

    The first place is drawn with probability q, the others independently with probability
    proportional to pi / (1 - pi); a list whose places are not all different is drawn again.
    """
    remote = count / (lists.degree * normalizer(lists.skew, lists.local))
    odds = lists.skew * (1.0 - remote) / (1.0 - lists.skew * remote)
    places = np.empty((len(lists.start), count), np.int64)
    open_ = np.arange(len(lists.start))
    while len(open_):
        others = np.repeat(open_, count - 1)
        places[open_, :1] = _proposed(lists, open_, lists.skew, random)[:, None]
        places[open_, 1:] = _proposed(lists, others, odds, random).reshape(len(open_), count - 1)
        places[open_] = np.sort(places[open_], axis=1)
        open_ = open_[(np.diff(places[open_], axis=1) == 0).any(axis=1)]
    return np.repeat(np.arange(len(places)), count), places.ravel()


def _place_by_place(lists: Lists, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    rows = np.repeat(np.arange(len(lists.start)), lists.degree)
    places = flat(lists.start, lists.degree)
    remote = count / (lists.degree * normalizer(lists.skew, lists.local))
    rate = np.where(lists.is_local(places), (lists.skew * remote)[rows], remote[rows])
    taken = np.flatnonzero(random.random(len(rows)) < rate)
    return rows[taken], places[taken]


def _by_arrivals(lists: Lists, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Draw in time proportional to the number of drawn places, not to the length of the lists.

    Let a place of probability pi be an interval of length -log(1 - pi), and let points fall on the
    line of all intervals at rate 1 (a Poisson process). Then an interval is hit with probability
    pi, independently of the others, and every place that is hit is drawn. For fast lookup, remote
    places have the same length as local ones, and a point on a remote place counts only with the
    ratio of the two lengths as its probability (thinning).
    """
    remote = count / (lists.degree * normalizer(lists.skew, lists.local))
    long, short = -np.log1p(-lists.skew * remote), -np.log1p(-remote)
    ends = np.cumsum(long * lists.degree)
    total = float(ends[-1]) if len(ends) else 0.0
    points = np.sort(random.random(random.poisson(total))) * total
    thinning = random.random(len(points))
    rows = np.minimum(np.searchsorted(ends, points, side="right"), len(ends) - 1)
    begin = ends - long * lists.degree
    offset = ((points - begin[rows]) / long[rows]).astype(np.int64)
    places = lists.start[rows] + np.clip(offset, 0, lists.degree[rows] - 1)
    taken = lists.is_local(places) | (thinning * long[rows] < short[rows])
    rows, places = rows[taken], places[taken]
    first = _first_of_run(rows, places)
    return rows[first], places[first]


def _first_of_run(rows: Array, places: Array) -> Array:
    """Return a mask of the entries whose (row, place) differs from the entry before."""
    first = np.ones(len(rows), bool)
    first[1:] = (places[1:] != places[:-1]) | (rows[1:] != rows[:-1])
    return first


# ------------------------------------------------------------------------- draws from a single list
def independent_times(q: Array, count: int, random: np.random.Generator) -> Array:
    """Return how often each place is drawn in `count` i.i.d. draws from q."""
    ends = np.cumsum(q)
    index = np.searchsorted(ends, random.random(count) * ends[-1], side="right")
    return np.bincount(np.minimum(index, len(q) - 1), minlength=len(q))


def bernoulli_times(q: Array, count: int, random: np.random.Generator) -> Array:
    """Return 1 for each place with probability min(1, count q), else 0."""
    return (random.random(len(q)) < inclusion(q, count)).astype(np.int64)


def fixed_times(q: Array, count: int, random: np.random.Generator) -> Array:
    """Return 1 for exactly `count` places, each with probability `fixed_inclusion`, else 0.

    Systematic sampling in random order, as in `_systematic`.
    """
    order = np.argsort(random.random(len(q)))
    ends = np.cumsum(fixed_inclusion(q, count)[order])
    ends[-1] = count
    passed = np.ceil(ends - random.random())
    times = np.zeros(len(q), np.int64)
    times[order] = np.diff(passed, prepend=0.0) > 0
    return times


def fixed_inclusion(q: Array, count: int) -> Array:
    """Return min(1, r q) with the r for which the sum is `count`; at most all places.

    These are the probabilities with which places of one list are taken if exactly `count` are.
    """
    rate, certain = np.zeros(len(q)), np.zeros(len(q), bool)
    while True:
        rate[certain] = 1.0
        rate[~certain] = q[~certain] * ((count - certain.sum()) / q[~certain].sum())
        above = rate > 1.0
        if not above.any():
            return rate
        certain |= above


class DrawMode(NamedTuple):
    """The functions of a mode of `Sampler`.

    Attributes:
        draw: draws from many lists.
        expected: from lists, their rows, places and count: how often the places are
            drawn on average.
        draw_one: from q of all places of one list: how often each place is drawn.
        expected_one: from q of all places of one list: how often each place is drawn on average.
    """

    draw: Callable[[Lists, int, np.random.Generator], Draws]
    expected: Callable[[Lists, Array, Array, int], Array]
    draw_one: Callable[[Array, int, np.random.Generator], Array]
    expected_one: Callable[[Array, int], Array]


DRAW_MODES = {
    "fixed": DrawMode(
        fixed,
        lambda lists, rows, places, count: inclusion(
            lists.limited(count).probabilities(rows, places), count
        ),
        fixed_times,
        fixed_inclusion,
    ),
    "bernoulli": DrawMode(
        bernoulli,
        lambda lists, rows, places, count: inclusion(lists.probabilities(rows, places), count),
        bernoulli_times,
        inclusion,
    ),
    "iid": DrawMode(
        independent,
        lambda lists, rows, places, count: count * lists.probabilities(rows, places),
        independent_times,
        lambda q, count: count * q,
    ),
}
