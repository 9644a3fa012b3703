"""Neighbours for a mini-batch: base samplers, and one that prefers local nodes without a bias.

`Sampler` draws as GraphSAGE does (`fanout`: neighbours of each node) or as LADIES does
(`layer_size`: nodes for a whole layer). `SkewedSampler` makes nodes that this rank owns likelier
and weights every node by the probability with which it was really drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from accordion_hvd import check
from accordion_hvd.graph import draws
from accordion_hvd.graph.guard import Trace, VarianceGuard
from accordion_hvd.graph.partition import checked_owners
from accordion_hvd.graph.skew import RULES, skew_for
from accordion_hvd.graph.structure import Array, Graph, check_nodes, flat

MODES = ("bernoulli", "iid")
BASES = ("squared", "linear")


@dataclass(frozen=True, eq=False)
class Block:
    """One layer of a batch: an unbiased estimate of the rows of A that belong to its targets.

    Attributes:
        sources: (sources,), nodes whose values come in; the first `targets` are the targets.
        targets: how many nodes values come out for.
        rows: (entries,), position of a target; ascending.
        columns: (entries,), position of a source; no pair of row and column comes twice.
        values: (entries,), fp32. E[values] is A; the node's own term and exact rows have A itself.
        trace: only if `sample` was asked for it.
    """

    sources: Array
    targets: int
    rows: Array
    columns: Array
    values: Array
    trace: Trace | None = None

    @property
    def indptr(self) -> Array:
        """(targets + 1,): where rows begin, for compressed rows."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.rows, minlength=self.targets))])

    def aggregate(self, values: Array) -> Array:
        """Estimate A h for the targets, from h (sources, features) in NumPy."""
        total = np.zeros((self.targets, *values.shape[1:]), np.result_type(values, np.float32))
        parts = values[self.columns] * self.values.reshape(-1, *[1] * (values.ndim - 1))
        if len(parts):
            ptr = self.indptr[:-1]
            filled = np.diff(self.indptr) > 0
            total[filled] = np.add.reduceat(parts, ptr[filled], axis=0)
        return total


Blocks = tuple[Block, ...]
"""From the input on: the first needs its sources' features, the last gives the batch's values."""


class _Layer(NamedTuple):
    """The input of sampling a layer: targets, their first neighbours, the counts of neighbours."""

    targets: Array
    start: Array
    degree: Array
    hop: int
    epoch: int
    random: np.random.Generator


class Sampler:
    """The base samplers; they know of no partition.

    Which of a layer's nodes a batch gets is drawn from a generator seeded by (seed, rank, epoch,
    step, hop): the same arguments give the same blocks, and ranks draw independently.

    - `fanout=f`, node-wise (GraphSAGE, Hamilton et al., 2017): p is uniform over a node's
      neighbours. Nodes with at most f neighbours get them all, exactly.
    - `layer_size=m`, layer-wise (LADIES, Zou et al., 2019): the candidates are all neighbours of
      all targets, p_u is proportional to sum_v A_vu^2 (`base="squared"`) or to sum_v |A_vu|
      ("linear"). At most m candidates are all taken, exactly.

    A node's own term is always taken exactly. What is drawn is weighted by 1 / (m q_u) ("iid": m
    draws with replacement) or 1 / pi_u ("bernoulli": each node independently with pi_u =
    min(1, m q_u); no duplicates), so the estimate is unbiased before the layer's non-linearity. A
    node whose neighbours are all passed over keeps its own term, which is a valid draw.

    Args:
        graph: the whole structure.
        fanout: neighbours of a node, for each hop, from the batch outwards; None takes all.
        layer_size: nodes of a layer, for each hop; instead of `fanout`.
        mode: "bernoulli" or "iid".
        base: of layer-wise sampling.
        seed: equal on all ranks.
        rank: this rank; others draw other nodes.
    """

    def __init__(
        self,
        graph: Graph,
        fanout: int | None | Sequence[int | None] = None,
        layer_size: int | None | Sequence[int | None] = None,
        *,
        mode: str = "bernoulli",
        base: str = "squared",
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        if (fanout is None) == (layer_size is None):
            check.refuse(self, "fanout", fanout, "given, or else layer_size, but not both")
        check.one_of(self, "mode", mode, MODES)
        check.one_of(self, "base", base, BASES)
        check.integer(self, "seed", seed, least=0)
        check.integer(self, "rank", rank, least=0)
        self.graph, self.mode, self.base, self.seed, self.rank = graph, mode, base, seed, rank
        self.by_node = fanout is not None
        name, sizes = ("fanout", fanout) if self.by_node else ("layer_size", layer_size)
        self.sizes = sizes = [sizes] if not isinstance(sizes, Sequence) else list(sizes)
        for size in sizes:
            if size is not None:
                check.integer(self, name, size, least=1)
        if not sizes:
            check.refuse(self, name, sizes, "a size for each hop")
        self._place = np.zeros(graph.nodes, np.int64)  # of a node in the list at hand

    @property
    def hops(self) -> int:
        """Layers that a batch reaches through."""
        return len(self.sizes)

    def sample(self, targets: Any, epoch: int = 0, step: int = 0, trace: bool = False) -> Blocks:
        """Return the blocks of a batch.

        Args:
            targets: nodes, each once.
            epoch: seeds the draws, as does
            step: the batch's number in the epoch.
            trace: note what was drawn by which probability.

        Raises:
            ValueError: targets are no nodes, or one comes twice.
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
        twice = ~self._last(nodes)
        if twice.any():
            check.refuse(self, "a target", int(nodes[twice][0]), "named once in a batch")
        return nodes

    # ------------------------------------------------------------------------------ one layer
    def _block(self, targets: Array, hop: int, epoch: int, step: int, trace: bool) -> Block:
        random = np.random.default_rng([self.seed, self.rank, epoch, step, hop])
        start = self.graph.indptr[targets]
        layer = _Layer(targets, start, self.graph.indptr[targets + 1] - start, hop, epoch, random)
        size = self.sizes[hop]
        if size is None:
            rows, places, scale, noted = self._whole(layer)
        else:
            draw = self._by_node if self.by_node else self._by_layer
            rows, places, scale, noted = draw(layer, size)
        nodes = self.graph.indices[places].astype(np.int64)
        sources, columns = self._joined(targets, nodes)
        mine = np.arange(len(targets))
        all_rows = np.concatenate([mine, rows])
        order = np.argsort(all_rows, kind="stable")
        values = (self.graph.weights[places] * scale).astype(np.float32)
        return Block(
            sources,
            len(targets),
            all_rows[order],
            np.concatenate([mine, columns])[order],
            np.concatenate([self.graph.own[targets], values])[order],
            self._trace(noted, sources) if trace else None,
        )

    def _whole(self, layer: _Layer) -> Any:
        """Return all neighbours: row, place and factor of each; and nothing for a trace."""
        rows = np.repeat(np.arange(len(layer.targets)), layer.degree)
        return rows, flat(layer.start, layer.degree), np.ones(len(rows)), None

    def _by_node(self, layer: _Layer, fanout: int) -> Any:
        targets, start, degree = layer.targets, layer.start, layer.degree
        few, many = np.flatnonzero(degree <= fanout), np.flatnonzero(degree > fanout)
        local, skew = self._node_skews(targets[many], layer.hop, layer.epoch)
        lists = draws.Lists(start[many], degree[many], skew, local, self._near_places)
        draw = draws.bernoulli if self.mode == "bernoulli" else draws.independent
        rows, places, times = draw(lists, fanout, layer.random)
        q, p = lists.probabilities(rows, places), 1.0 / degree[many[rows]]
        scale = self._scale(self._weighted_by(p, q), fanout, times)
        noted = (
            self.graph.indices[places],
            np.abs(self.graph.weights[places].astype(np.float64)),
            p,
            q,
            self._scale(q, fanout, times),
        )
        exact = few[np.repeat(np.arange(len(few)), degree[few])]
        return (
            np.concatenate([exact, many[rows]]),
            np.concatenate([flat(start[few], degree[few]), places]),
            np.concatenate([np.ones(len(exact)), scale]),
            noted,
        )

    def _by_layer(self, layer: _Layer, size: int) -> Any:
        rows, places, whole, _ = self._whole(layer)
        nodes, columns = self._distinct(self.graph.indices[places].astype(np.int64))
        if len(nodes) <= size:
            return rows, places, whole, None
        weights = np.abs(self.graph.weights[places].astype(np.float64))
        squares = np.bincount(columns, weights * weights, len(nodes))
        base = squares if self.base == "squared" else np.bincount(columns, weights, len(nodes))
        p = base / base.sum()
        q = self._layer_skewed(nodes, base, squares, layer.hop, layer.epoch)
        if self.mode == "bernoulli":
            times = (layer.random.random(len(nodes)) < draws.inclusion(q, size)).astype(np.int64)
        else:
            ends = np.cumsum(q)
            drawn = np.searchsorted(ends, layer.random.random(size) * ends[-1], side="right")
            times = np.bincount(np.minimum(drawn, len(nodes) - 1), minlength=len(nodes))
        scale = self._scale(self._weighted_by(p, q), size, times)
        taken = np.flatnonzero(times)
        exact = self._scale(q, size, times)[taken]
        noted = nodes[taken], np.sqrt(squares[taken]), p[taken], q[taken], exact
        kept = np.flatnonzero(times[columns])
        return rows[kept], places[kept], scale[columns[kept]], noted

    def _scale(self, q: Array, count: int, times: Array) -> Array:
        return times / (draws.inclusion(q, count) if self.mode == "bernoulli" else count * q)

    # ------------------------------------------------------------- what the skewed sampler changes
    def _near_places(self, places: Array) -> Array:
        return np.ones(len(places), bool)

    def _node_skews(self, targets: Array, hop: int, epoch: int) -> tuple[Array, Array]:
        return np.ones(len(targets)), np.ones(len(targets))

    def _layer_skewed(
        self, nodes: Array, base: Array, squares: Array, hop: int, epoch: int
    ) -> Array:
        return base / base.sum()

    def _weighted_by(self, p: Array, q: Array) -> Array:
        return q

    # -------------------------------------------------------------------------- lists of nodes
    def _last(self, nodes: Array) -> Array:
        places = np.arange(len(nodes))
        self._place[nodes] = places
        return self._place[nodes] == places

    def _distinct(self, nodes: Array) -> tuple[Array, Array]:
        """Return the nodes once, ascending, and the position of each entry among them."""
        found = np.sort(nodes[self._last(nodes)])
        self._place[found] = np.arange(len(found))
        return found, self._place[nodes]

    def _joined(self, targets: Array, nodes: Array) -> tuple[Array, Array]:
        """Targets, then what else is in `nodes`; and the position of each of `nodes`."""
        last = self._last(np.concatenate([nodes, targets]))[: len(nodes)]
        sources = np.concatenate([targets, np.sort(nodes[last])])
        self._place[sources] = np.arange(len(sources))
        return sources, self._place[nodes]

    def _trace(self, noted: Any, sources: Array) -> Trace:
        if noted is None:
            nothing = np.zeros(0)
            return Trace(np.zeros(0, np.int64), nothing, nothing, nothing, nothing)
        self._place[sources] = np.arange(len(sources))
        return Trace(self._place[noted[0]], *noted[1:])


class SkewedSampler(Sampler):
    """A sampler that prefers nodes of its own rank, as far as a variance budget allows.

    Local nodes become s times as likely as by the base sampler, and every node is weighted by the
    probability that results, so the estimate stays unbiased (Jiang & Rumi, arXiv 2101.07706; what
    is ours and what theirs, `accordion_hvd.graph.skew` says). s is found anew for every batch and
    hop from the local share c of the base probabilities (layer-wise), or for every node from the
    share of its local neighbours (node-wise); no communication is needed for that. At s = 1 it
    draws what `Sampler` draws, bit for bit.

    The budget bounds M(q) relative to M(p). The variance of either mode is at most M(q) / m: that
    bound grows by D at most. Where Bernoulli sampling takes most nodes for certain, its variance is
    far below the bound, and skewing can raise it by more than D within it.

    Args:
        graph: the whole structure.
        part: a `Partition`, or the owner of each node.
        rank: this rank.
        fanout: as `Sampler`.
        layer_size: as `Sampler`.
        budget: D, at least 1, for all hops or for each from the batch outwards. Most traffic is
            at the last: a larger D there and 1 before is a sound choice. Keep it equal on all
            ranks, or the average of gradients is dominated by the noisiest.
        skew: a constant s instead of a budget; one, or one per layer.
        rule: how s follows from D: "measured" (by the weights of A, as if all features had the same
            norm), "tight" (the same, as if p were also proportional to a: where it is not, as with
            both bases here, the budget may be exceeded), "worst" (holds for any features).
        most: no s is larger; 10 to 20 is sound.
        warmup: epochs in which s grows from 1 to what it shall be.
        guard: watches the variance in a run; see `VarianceGuard`.
        reweight: False weights by the base probabilities, as if nothing were skewed. That is
            biased training, for comparisons only.
        mode: as `Sampler`.
        base: as `Sampler`.
        seed: as `Sampler`.
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
        guard: VarianceGuard | None = None,
        reweight: bool = True,
        mode: str = "bernoulli",
        base: str = "squared",
        seed: int = 0,
    ) -> None:
        options = {"mode": mode, "base": base, "seed": seed, "rank": rank}
        super().__init__(graph, fanout, layer_size, **options)  # type: ignore[arg-type]
        if budget is not None and skew is not None:
            check.refuse(self, "skew", skew, "None where a budget is given")
        self.budget = self._each("budget", 2.0 if budget is None and skew is None else budget)
        self.skew = self._each("skew", skew)
        check.one_of(self, "rule", rule, RULES)
        check.at_least(self, "most", most, least=1)
        check.integer(self, "warmup", warmup, least=0)
        if guard is not None and self.budget is None:
            check.refuse(self, "guard", guard, "None without a budget to keep")
        self.rule, self.most, self.warmup, self.guard = rule, most, warmup, guard
        self.reweight = reweight
        owner = checked_owners(self, part, graph.nodes)
        self.local = owner == rank
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
        """Return the used part of s - 1: less during warm-up or if the guard says so."""
        grown = min(1.0, epoch / self.warmup) if self.warmup else 1.0
        return grown if self.guard is None else grown * self.guard.factor(hop, epoch)

    def skews(self, local: Any, moment: Any, hop: int, epoch: int) -> Array:
        """s by rule and schedule.

        Args:
            local: c; any shape.
            moment: the local share of M(p), if features have the same norm; for each node, too.
            hop: from the batch outwards.
            epoch: from 0.
        """
        if self.skew is not None:
            full = np.where((local > 0) & (local < 1), min(self.skew[hop], self.most), 1.0)
        else:
            assert self.budget is not None
            full = skew_for(self.rule, self.budget[hop], local, moment, self.most)
        return 1.0 + (full - 1.0) * self.strength(hop, epoch)

    def observe(self, blocks: Blocks, norms: Sequence[Array | None]) -> list[float]:
        """Show the guard what was drawn; see `VarianceGuard.observe`.

        Args:
            blocks: from `sample(..., trace=True)`.
            norms: for each block, the norms of its sources' values (None: not known, passed over).

        Returns:
            The estimates of M(q) / M(p), by hop; NaN where nothing was drawn.
        """
        if self.guard is None or self.budget is None:
            raise ValueError(f"{type(self).__name__}: guard is None, so nobody can observe.")
        ratios = [float("nan")] * self.hops
        for hop, (block, norm) in enumerate(zip(blocks[::-1], norms[::-1], strict=True)):
            if norm is not None and block.trace is not None:
                ratios[hop] = self.guard.observe(hop, block.trace, norm, self.budget[hop])
        return ratios

    def _near_places(self, places: Array) -> Array:
        return self.local[self.graph.indices[places]]

    def _node_shares(self) -> tuple[Array, Array]:
        """For every node, the local share of its neighbours and of sum_u A_vu^2 / p_u."""
        ends, near = self.graph.indptr, self.local[self.graph.indices]
        squares = self.graph.weights.astype(np.float64) ** 2

        def summed(x: Array) -> Array:
            rows = np.repeat(np.arange(self.graph.nodes), self.graph.degrees)
            return np.bincount(rows, x, self.graph.nodes)

        with np.errstate(invalid="ignore"):
            local = summed(near) / np.diff(ends)
            moment = summed(squares * near) / summed(squares)
        return np.nan_to_num(local), np.nan_to_num(moment)

    def _node_skews(self, targets: Array, hop: int, epoch: int) -> tuple[Array, Array]:
        assert self._shares is not None
        local, moment = (share[targets] for share in self._shares)
        return local, self.skews(local, moment, hop, epoch)

    def _layer_skewed(
        self, nodes: Array, base: Array, squares: Array, hop: int, epoch: int
    ) -> Array:
        near = self.local[nodes]
        local = base[near].sum() / base.sum() if not near.all() else 1.0
        moments = squares / base
        skew = self.skews(local, moments[near].sum() / moments.sum(), hop, epoch)
        weights = np.where(near, skew * base, base)
        return weights / weights.sum()

    def _weighted_by(self, p: Array, q: Array) -> Array:
        return q if self.reweight else p
