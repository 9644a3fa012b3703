"""Random draws from many short lists at once, without a loop over the lists.

List i has `degree[i]` places, from `start[i]` on. `is_local(places)` returns which places are
local; a local place is `skew[i]` times as likely as a remote one. With `local` the share of local
places, q = skew / (degree kappa) for local places and q = 1 / (degree kappa) for remote ones
(kappa: see `skew.normalizer`). At skew 1, no draw depends on which places are local.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

    def chosen(self, index: Array) -> Lists:
        """Return the lists at the given indices."""
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
    places = np.empty(len(rows), np.int64)
    open_ = np.arange(len(rows))
    while len(open_):
        mine = rows[open_]
        offset = (random.random(len(open_)) * lists.degree[mine]).astype(np.int64)
        places[open_] = lists.start[mine] + offset
        rejected = random.random(len(open_)) * lists.skew[mine] >= 1.0
        rejected &= ~lists.is_local(places[open_])
        open_ = open_[rejected]
    order = np.lexsort((places, rows))
    rows, places = rows[order], places[order]
    first = np.flatnonzero(_first_of_run(rows, places))
    times = np.diff(np.append(first, len(rows)))
    return rows[first], places[first], times


def inclusion(q: Array, count: int) -> Array:
    """Return min(1, count q), the probability that Bernoulli sampling takes a place."""
    return np.minimum(1.0, count * q)


def bernoulli(lists: Lists, count: int, random: np.random.Generator) -> Draws:
    """Draw each place independently, with probability min(1, count q)."""
    kappa = normalizer(lists.skew, lists.local)
    likeliest = inclusion(lists.skew / (lists.degree * kappa), count)
    is_dense = likeliest >= DENSE
    dense, sparse = np.flatnonzero(is_dense), np.flatnonzero(~is_dense)
    dense_rows, dense_places = _place_by_place(lists.chosen(dense), count, random)
    sparse_rows, sparse_places = _by_arrivals(lists.chosen(sparse), count, random)
    rows = np.concatenate([dense[dense_rows], sparse[sparse_rows]])
    places = np.concatenate([dense_places, sparse_places])
    order = np.argsort(rows, kind="stable")
    return rows[order], places[order], np.ones(len(rows), np.int64)


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
