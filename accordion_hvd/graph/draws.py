"""Random choices from many short lists at once, without a loop over the lists.

List i has `degree[i]` places, `start[i]` and those after it. `near(places)` tells which of them are
local; these are `skew[i]` times as likely as others. With `local` the share of local places,
q = skew / (degree kappa) for local places and 1 / (degree kappa) for others. At skew 1 no draw
depends on what is local.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from accordion_hvd.graph.skew import normalizer
from accordion_hvd.graph.structure import Array, flat

DENSE = 0.1
"""Lists whose likeliest places are taken with at least this probability are gone through place by
place; in longer ones looking at every place would cost more than finding the few that are taken."""


@dataclass(frozen=True, eq=False)
class Lists:
    """See the module.

    Attributes:
        start: (lists,).
        degree: (lists,), at least 1.
        skew: (lists,), at least 1.
        local: (lists,), in [0, 1].
        near: tells which places are local.
    """

    start: Array
    degree: Array
    skew: Array
    local: Array
    near: Callable[[Array], Array]

    def probabilities(self, rows: Array, places: Array) -> Array:
        """q of some places: of list `rows[i]`, place `places[i]`."""
        far = 1.0 / (self.degree * normalizer(self.skew, self.local))
        return np.where(self.near(places), (self.skew * far)[rows], far[rows])

    def chosen(self, index: Array) -> Lists:
        """Some of the lists."""
        columns = self.start, self.degree, self.skew, self.local
        start, degree, skew, local = (column[index] for column in columns)
        return Lists(start, degree, skew, local, self.near)


Draws = tuple[Array, Array, Array]
"""For each place that was drawn: its list, the place, and how often it came."""


def independent(lists: Lists, count: int, random: np.random.Generator) -> Draws:
    """`count` draws from each list, with replacement (i.i.d. from q).

    Places are proposed uniformly; remote ones are accepted with probability 1 / skew, others are
    proposed anew.
    """
    rows = np.repeat(np.arange(len(lists.start)), count)
    places = np.empty(len(rows), np.int64)
    open_ = np.arange(len(rows))
    while len(open_):
        mine = rows[open_]
        offset = (random.random(len(open_)) * lists.degree[mine]).astype(np.int64)
        places[open_] = lists.start[mine] + offset
        refused = random.random(len(open_)) * lists.skew[mine] >= 1.0
        refused &= ~lists.near(places[open_])
        open_ = open_[refused]
    order = np.lexsort((places, rows))
    rows, places = rows[order], places[order]
    first = np.flatnonzero(_first_of_run(rows, places))
    times = np.diff(np.append(first, len(rows)))
    return rows[first], places[first], times


def inclusion(q: Array, count: int) -> Array:
    """min(1, count q): the probability with which Bernoulli sampling takes a place."""
    return np.minimum(1.0, count * q)


def bernoulli(lists: Lists, count: int, random: np.random.Generator) -> Draws:
    """Each place independently, with probability min(1, count q)."""
    kappa = normalizer(lists.skew, lists.local)
    likeliest = inclusion(lists.skew / (lists.degree * kappa), count)
    dense = likeliest >= DENSE
    here, there = np.flatnonzero(dense), np.flatnonzero(~dense)
    one = _place_by_place(lists.chosen(here), count, random)
    two = _by_arrivals(lists.chosen(there), count, random)
    rows = np.concatenate([here[one[0]], there[two[0]]])
    places = np.concatenate([one[1], two[1]])
    order = np.argsort(rows, kind="stable")
    return rows[order], places[order], np.ones(len(rows), np.int64)


def _place_by_place(lists: Lists, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    rows = np.repeat(np.arange(len(lists.start)), lists.degree)
    places = flat(lists.start, lists.degree)
    far = count / (lists.degree * normalizer(lists.skew, lists.local))
    rate = np.where(lists.near(places), (lists.skew * far)[rows], far[rows])
    kept = np.flatnonzero(random.random(len(rows)) < rate)
    return rows[kept], places[kept]


def _by_arrivals(lists: Lists, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Take as many steps as places are taken, however long the lists are.

    Each place has a length: -log(1 - its probability). Points are strewn on the line of all places
    at rate 1 (a Poisson process); a place is taken if one falls on it, which has that very
    probability, independently of others. Remote places are laid out as long as local ones, and a
    point there counts with the probability by which they are shorter (thinning).
    """
    far = count / (lists.degree * normalizer(lists.skew, lists.local))
    long, short = -np.log1p(-lists.skew * far), -np.log1p(-far)
    ends = np.cumsum(long * lists.degree)
    total = float(ends[-1]) if len(ends) else 0.0
    points = np.sort(random.random(random.poisson(total))) * total
    counts = random.random(len(points))
    rows = np.minimum(np.searchsorted(ends, points, side="right"), len(ends) - 1)
    begin = ends - long * lists.degree
    offset = ((points - begin[rows]) / long[rows]).astype(np.int64)
    places = lists.start[rows] + np.clip(offset, 0, lists.degree[rows] - 1)
    taken = lists.near(places) | (counts * long[rows] < short[rows])
    rows, places = rows[taken], places[taken]
    first = _first_of_run(rows, places)
    return rows[first], places[first]


def _first_of_run(rows: Array, places: Array) -> Array:
    """Return where (row, place) differs from the entry before."""
    first = np.ones(len(rows), bool)
    first[1:] = (places[1:] != places[:-1]) | (rows[1:] != rows[:-1])
    return first
