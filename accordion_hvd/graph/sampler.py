"""Neighbour sampling for mini-batches, with an unbiased preference for local nodes.

`Sampler` draws as GraphSAGE does (`fanout`: neighbours of each node) or as LADIES does
(`layer_size`: nodes of an entire layer). `SkewedSampler` makes the nodes of this rank likelier, and
weights each node by the probability with which it was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from accordion_hvd import check
from accordion_hvd.graph import draws
from accordion_hvd.graph.skew import RULES, SecondMomentGuard, Trace, skew_for
from accordion_hvd.graph.structure import Array, Graph, check_nodes, checked_owners, flat

MODES = tuple(draws.DRAW_MODES)
BASES = ("squared", "linear")


@dataclass(frozen=True, eq=False)
class Block:
    """One layer of a batch: a sparse matrix that is an unbiased estimate of its targets' rows of A.

    Attributes:
        sources: (sources,), nodes whose values the layer reads; the first `targets` of them are the
            targets.
        targets: number of nodes for which the layer computes values.
        rows: (entries,), position of the target of each entry; ascending.
        columns: (entries,), position of the source of each entry; no (row, column) occurs twice.
        values: (entries,), fp32, with E[values] = A. Diagonal entries and exact rows equal A.
        trace: the probabilities of the draws; None unless `sample` was called with `trace=True`.
    """

    sources: Array
    targets: int
    rows: Array
    columns: Array
    values: Array
    trace: Trace | None = None

    @property
    def indptr(self) -> Array:
        """Return the start of each row, (targets + 1,), as in compressed sparse rows."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.rows, minlength=self.targets))])

    def aggregate(self, values: Array) -> Array:
        """Estimate A h for the targets, given h, (sources, features), as a NumPy array."""
        total = np.zeros((self.targets, *values.shape[1:]), np.result_type(values, np.float32))
        parts = values[self.columns] * self.values.reshape(-1, *[1] * (values.ndim - 1))
        if len(parts):
            ptr = self.indptr[:-1]
            filled = np.diff(self.indptr) > 0
            total[filled] = np.add.reduceat(parts, ptr[filled], axis=0)
        return total


Blocks = tuple[Block, ...]
"""Blocks from the input to the output: the first block reads features, the last one computes the
values of the batch."""


class _Layer(NamedTuple):
    """Targets of a layer, with the start and the number of their neighbours in `Graph.indices`."""

    targets: Array
    start: Array
    degree: Array
    hop: int
    epoch: int
    random: np.random.Generator


class Sampler:
    """The base samplers of GraphSAGE and LADIES, which ignore partitions.

    - `fanout=f`, node-wise (GraphSAGE, Hamilton et al., 2017): the base probability p is uniform
      over the neighbours of a node. If a node has at most f neighbours, all are taken.
    - `layer_size=m`, layer-wise (LADIES, Zou et al., 2019): the candidates are all neighbours of
      all targets, and p_u is proportional to sum_v A_vu^2 (`base="squared"`) or to sum_v |A_vu|
      (`base="linear"`). If there are at most m candidates, all are taken.

    The diagonal term of each target is always exact. With q the probabilities (here q = p) and m
    the fanout or the layer size, the modes are:

    - "fixed": exactly m different nodes, each taken with probability pi_u = min(1, r q_u), where r
      is such that the sum of pi is m. If q is uniform, all sets of m neighbours are equally likely,
      as in GraphSAGE. The nodes are drawn by systematic sampling in random order (Goodman & Kish,
      1950) or, from long lists of neighbours, by Sampford's method (1967).
    - "bernoulli": each node is taken independently with probability pi_u = min(1, m q_u), so the
      number of nodes is random and at most m on average. Noisier than "fixed".
    - "iid": m draws with replacement.

    A node has weight 1 / pi_u, or 1 / (m q_u) for each draw in mode "iid". So the estimate is
    unbiased before the layer's non-linearity. In mode "bernoulli", a target may have only its
    diagonal term, which is a valid draw.

    The random generator is seeded by (seed, rank, epoch, step, hop): equal arguments give equal
    blocks, and ranks draw independently.

    Args:
        graph: the entire graph.
        fanout: number of neighbours per node, a list with an entry for each hop from the batch
            outwards (an int for one hop); an entry None takes all neighbours.
        layer_size: number of nodes per layer, for each hop; instead of `fanout`.
        mode: "fixed", "bernoulli" or "iid".
        base: base probabilities of layer-wise sampling, "squared" or "linear".
        seed: seed of the draws, equal on all ranks.
        rank: this rank.
    """

    def __init__(
        self,
        graph: Graph,
        fanout: int | None | Sequence[int | None] = None,
        layer_size: int | None | Sequence[int | None] = None,
        *,
        mode: str = "fixed",
        base: str = "squared",
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        if (fanout is None) == (layer_size is None):
            check.refuse(self, "fanout", fanout, "given, or layer_size instead, but not both")
        check.one_of(self, "mode", mode, MODES)
        check.one_of(self, "base", base, BASES)
        check.integer(self, "seed", seed, least=0)
        check.integer(self, "rank", rank, least=0)
        self.graph, self.mode, self.base, self.seed, self.rank = graph, mode, base, seed, rank
        self.by_node = fanout is not None
        name, sizes = ("fanout", fanout) if self.by_node else ("layer_size", layer_size)
        self.reweight = True
        self.sizes = sizes = [sizes] if not isinstance(sizes, Sequence) else list(sizes)
        for size in sizes:
            if size is not None:
                check.integer(self, name, size, least=1)
        if not sizes:
            check.refuse(self, name, sizes, "a size for each hop")
        self._place = np.zeros(graph.nodes, np.int64)  # scratch: positions of nodes in a list

    @property
    def hops(self) -> int:
        """Return the number of layers."""
        return len(self.sizes)

    def sample(self, targets: Any, epoch: int = 0, step: int = 0, trace: bool = False) -> Blocks:
        """Return the blocks of a batch.

        Args:
            targets: nodes of the batch, without duplicates.
            epoch: number of the epoch, part of the seed.
            step: number of the batch in the epoch, part of the seed.
            trace: whether to record the probabilities of the draws in `Block.trace`.

        Raises:
            ValueError: if a target is no node of the graph, or occurs twice.
        """
        nodes = self._checked(targets)
        blocks: list[Block] = []
        for hop in range(self.hops):
            blocks.append(self._block(nodes, hop, epoch, step, trace))
            nodes = blocks[-1].sources
        return tuple(reversed(blocks))

    def _checked(self, targets: Any) -> Array:
        given = np.asarray(targets)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            kind = f"of shape {given.shape} and type {given.dtype}"
            check.refuse(self, "targets", kind, "a list of integers")
        nodes = given.astype(np.int64)
        check_nodes(self, "targets", nodes, self.graph.nodes)
        twice = ~self._is_last(nodes)
        if twice.any():
            check.refuse(self, "a target", int(nodes[twice][0]), "unique in a batch")
        return nodes

    # ------------------------------------------------------------------------------ one layer
    def _block(self, targets: Array, hop: int, epoch: int, step: int, trace: bool) -> Block:
        random = np.random.default_rng([self.seed, self.rank, epoch, step, hop])
        start = self.graph.indptr[targets]
        layer = _Layer(targets, start, self.graph.indptr[targets + 1] - start, hop, epoch, random)
        size = self.sizes[hop]
        if size is None:
            rows, places, scale, drawn = self._all_neighbours(layer)
        else:
            draw = self._by_node if self.by_node else self._by_layer
            rows, places, scale, drawn = draw(layer, size)
        nodes = self.graph.indices[places].astype(np.int64)
        sources, columns = self._join(targets, nodes)
        diagonal = np.arange(len(targets))
        all_rows = np.concatenate([diagonal, rows])
        order = np.argsort(all_rows, kind="stable")
        values = (self.graph.weights[places] * scale).astype(np.float32)
        return Block(
            sources,
            len(targets),
            all_rows[order],
            np.concatenate([diagonal, columns])[order],
            np.concatenate([self.graph.own[targets], values])[order],
            self._trace(drawn, sources) if trace else None,
        )

    def _all_neighbours(self, layer: _Layer) -> Any:
        """Return row, place and factor of all neighbours; and None, since nothing was drawn."""
        rows = np.repeat(np.arange(len(layer.targets)), layer.degree)
        return rows, flat(layer.start, layer.degree), np.ones(len(rows)), None

    def _by_node(self, layer: _Layer, fanout: int) -> Any:
        targets, start, degree = layer.targets, layer.start, layer.degree
        few, many = np.flatnonzero(degree <= fanout), np.flatnonzero(degree > fanout)
        local, skew = self._node_skews(targets[many], layer.hop, layer.epoch)
        lists = draws.Lists(start[many], degree[many], skew, local, self._is_local)
        mode = draws.DRAW_MODES[self.mode]
        rows, places, times = mode.draw(lists, fanout, layer.random)
        weight = times / mode.expected(lists, rows, places, fanout)
        scale = weight
        if not self.reweight:
            scale = times / mode.expected(lists.unskewed(), rows, places, fanout)
        drawn = (
            self.graph.indices[places],
            np.abs(self.graph.weights[places].astype(np.float64)),
            1.0 / lists.degree[rows],
            lists.probabilities(rows, places),
            weight,
        )
        exact = few[np.repeat(np.arange(len(few)), degree[few])]
        return (
            np.concatenate([exact, many[rows]]),
            np.concatenate([flat(start[few], degree[few]), places]),
            np.concatenate([np.ones(len(exact)), scale]),
            drawn,
        )

    def _by_layer(self, layer: _Layer, size: int) -> Any:
        rows, places, ones, _ = self._all_neighbours(layer)
        nodes, columns = self._distinct(self.graph.indices[places].astype(np.int64))
        if len(nodes) <= size:
            return rows, places, ones, None
        weights = np.abs(self.graph.weights[places].astype(np.float64))
        squares = np.bincount(columns, weights * weights, len(nodes))
        base = squares if self.base == "squared" else np.bincount(columns, weights, len(nodes))
        p = base / base.sum()
        q = self._layer_skewed(nodes, base, squares, layer.hop, layer.epoch)
        mode = draws.DRAW_MODES[self.mode]
        times = mode.draw_one(q, size, layer.random)
        weight = times / mode.expected_one(q, size)
        scale = weight if self.reweight else times / mode.expected_one(p, size)
        taken = np.flatnonzero(times)
        drawn = nodes[taken], np.sqrt(squares[taken]), p[taken], q[taken], weight[taken]
        entries = np.flatnonzero(times[columns])
        return rows[entries], places[entries], scale[columns[entries]], drawn

    # ------------------------------------------------------------ overridden by the skewed sampler
    def _is_local(self, places: Array) -> Array:
        return np.ones(len(places), bool)

    def _node_skews(self, targets: Array, hop: int, epoch: int) -> tuple[Array, Array]:
        return np.ones(len(targets)), np.ones(len(targets))

    def _layer_skewed(
        self, nodes: Array, base: Array, squares: Array, hop: int, epoch: int
    ) -> Array:
        return base / base.sum()

    # -------------------------------------------------------------------------- lists of nodes
    def _is_last(self, nodes: Array) -> Array:
        """Return a mask of the last occurrence of each node."""
        places = np.arange(len(nodes))
        self._place[nodes] = places
        return self._place[nodes] == places

    def _distinct(self, nodes: Array) -> tuple[Array, Array]:
        """Return the distinct nodes, ascending, and the position of each entry among them."""
        distinct = np.sort(nodes[self._is_last(nodes)])
        self._place[distinct] = np.arange(len(distinct))
        return distinct, self._place[nodes]

    def _join(self, targets: Array, nodes: Array) -> tuple[Array, Array]:
        """Return the targets followed by the other nodes, and the position of each of `nodes`."""
        last = self._is_last(np.concatenate([nodes, targets]))[: len(nodes)]
        sources = np.concatenate([targets, np.sort(nodes[last])])
        self._place[sources] = np.arange(len(sources))
        return sources, self._place[nodes]

    def _trace(self, drawn: Any, sources: Array) -> Trace:
        if drawn is None:
            empty = np.zeros(0)
            return Trace(np.zeros(0, np.int64), empty, empty, empty, empty)
        self._place[sources] = np.arange(len(sources))
        return Trace(self._place[drawn[0]], *drawn[1:])


class SkewedSampler(Sampler):
    """A sampler that prefers the nodes of its own rank within a budget of the second moment.

    Local nodes are s times as likely as with the base sampler, and each node is weighted by the
    resulting probability, so that the estimate stays unbiased (after Jiang & Rumi, arXiv
    2101.07706; `accordion_hvd.graph.skew` states what is ours). Layer-wise, s is computed for each
    batch and hop from the local share c of the base probabilities; node-wise, for each node from
    the share of its local neighbours. Neither needs communication. At s = 1, the sampler draws
    exactly what `Sampler` draws, bit for bit.

    The budget bounds the second moment: M(q) <= D M(p), see `accordion_hvd.graph.skew`. It does not
    bound the variance relative to the base sampler's, which may be zero: the skew can raise the
    variance by any factor, although by at most (D - 1) M(p) / m in mode "iid". The budget holds
    for each hop; the ratios of several hops can multiply. In mode "fixed", if a node has fewer
    than m local neighbours, the rest of the m draws is remote, whatever the skew.

    Args:
        graph: the entire graph.
        part: a `Partition`, or the owner of each node.
        rank: this rank.
        fanout: see `Sampler`.
        layer_size: see `Sampler`.
        budget: D, at least 1, for all hops or for each hop from the batch outwards; 2 if neither
            `budget` nor `skew` is given. The last hop causes most of the traffic, so a larger D
            for it and 1 for the others is a sound choice. Use the same D on all ranks; otherwise
            the noisiest rank dominates the averaged gradient.
        skew: a constant s instead of a budget, for all hops or for each hop.
        rule: how s follows from D. "measured": from the entries of A, as if all features had the
            same norm. "tight": in addition, as if p were proportional to a; with both bases here it
            is not, so the budget may be exceeded. "worst": holds for any features.
        most: upper bound of s; 10 to 20 is sound.
        warmup: number of epochs in which s grows from 1 to its full value.
        guard: guard of the budget during training; see `SecondMomentGuard`.
        reweight: False to weight by the base probabilities, as if there were no skew. This makes
            training biased; for comparisons only.
        mode: see `Sampler`.
        base: see `Sampler`.
        seed: see `Sampler`.
    """

    def __init__(
        self,
        graph: Graph,
        part: Any,
        rank: int,
        fanout: int | None | Sequence[int | None] = None,
        layer_size: int | None | Sequence[int | None] = None,
        *,
        budget: float | Sequence[float] | None = None,
        skew: float | Sequence[float] | None = None,
        rule: str = "measured",
        most: float = 20.0,
        warmup: int = 0,
        guard: SecondMomentGuard | None = None,
        reweight: bool = True,
        mode: str = "fixed",
        base: str = "squared",
        seed: int = 0,
    ) -> None:
        options = {"mode": mode, "base": base, "seed": seed, "rank": rank}
        super().__init__(graph, fanout, layer_size, **options)  # type: ignore[arg-type]
        if budget is not None and skew is not None:
            check.refuse(self, "skew", skew, "None if a budget is given")
        self.budget = self._each("budget", 2.0 if budget is None and skew is None else budget)
        self.skew = self._each("skew", skew)
        check.one_of(self, "rule", rule, RULES)
        check.at_least(self, "most", most, least=1)
        check.integer(self, "warmup", warmup, least=0)
        if guard is not None and self.budget is None:
            check.refuse(self, "guard", guard, "None if there is no budget")
        self.rule, self.most, self.warmup, self.guard = rule, most, warmup, guard
        self.reweight = reweight
        self.local = checked_owners(self, part, graph.nodes) == rank
        self._shares = self._node_shares() if self.by_node else None

    def _each(self, name: str, value: Any) -> list[float] | None:
        if value is None:
            return None
        values = list(value) if isinstance(value, Sequence) else [value] * self.hops
        if len(values) != self.hops:
            check.refuse(self, name, value, f"one number, or one for each of {self.hops} hops")
        for each in values:
            check.at_least(self, name, each, least=1)
        return values

    def strength(self, hop: int, epoch: int) -> float:
        """Return the factor of s - 1, in [0, 1]: the product of warm-up and guard."""
        grown = min(1.0, epoch / self.warmup) if self.warmup else 1.0
        return grown if self.guard is None else grown * self.guard.factor(hop, epoch)

    def skews(self, local: Any, moment: Any, hop: int, epoch: int) -> Array:
        """Return s, by the rule, the warm-up and the guard.

        Args:
            local: c; any shape.
            moment: the local share of M(p) if all features have the same norm; of the same shape.
            hop: number of the hop, counted from the batch outwards.
            epoch: number of the epoch, from 0.
        """
        if self.skew is not None:
            full = np.where((local > 0) & (local < 1), min(self.skew[hop], self.most), 1.0)
        else:
            assert self.budget is not None
            full = skew_for(self.rule, self.budget[hop], local, moment, self.most)
        return 1.0 + (full - 1.0) * self.strength(hop, epoch)

    def observe(self, blocks: Blocks, norms: Sequence[Array | None]) -> list[float]:
        """Give the guard the draws of a batch; see `SecondMomentGuard.observe`.

        Args:
            blocks: blocks from `sample(..., trace=True)`.
            norms: for each block, the norms of its sources' values; None to skip the block.

        Returns:
            The estimate of M(q) / M(p) for each hop; NaN where no node was drawn.

        Raises:
            ValueError: if the sampler has no guard.
        """
        if self.guard is None or self.budget is None:
            raise ValueError(f"{type(self).__name__}: guard is None, but observe needs a guard.")
        ratios = [float("nan")] * self.hops
        for hop, (block, norm) in enumerate(zip(blocks[::-1], norms[::-1], strict=True)):
            if norm is not None and block.trace is not None:
                ratios[hop] = self.guard.observe(hop, block.trace, norm, self.budget[hop])
        return ratios

    def _is_local(self, places: Array) -> Array:
        return self.local[self.graph.indices[places]]

    def _node_shares(self) -> tuple[Array, Array]:
        """Return the local share of each node's neighbours, and of its sum_u A_vu^2 / p_u."""
        ends, is_local = self.graph.indptr, self.local[self.graph.indices]
        squares = self.graph.weights.astype(np.float64) ** 2

        def summed(x: Array) -> Array:
            rows = np.repeat(np.arange(self.graph.nodes), self.graph.degrees)
            return np.bincount(rows, x, self.graph.nodes)

        with np.errstate(invalid="ignore"):
            local = summed(is_local) / np.diff(ends)
            moment = summed(squares * is_local) / summed(squares)
        return np.nan_to_num(local), np.nan_to_num(moment)

    def _node_skews(self, targets: Array, hop: int, epoch: int) -> tuple[Array, Array]:
        assert self._shares is not None
        local, moment = (share[targets] for share in self._shares)
        return local, self.skews(local, moment, hop, epoch)

    def _layer_skewed(
        self, nodes: Array, base: Array, squares: Array, hop: int, epoch: int
    ) -> Array:
        is_local = self.local[nodes]
        local = base[is_local].sum() / base.sum() if not is_local.all() else 1.0
        moments = squares / base
        skew = self.skews(local, moments[is_local].sum() / moments.sum(), hop, epoch)
        weights = np.where(is_local, skew * base, base)
        return weights / weights.sum()
