"""The table of cases: one row for each configuration of a compressor, with what the laws need.

A new algorithm is one row here; `laws.py` and `test_compressors.py` do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from frameworks import local_size

from accordion_hvd import BF16, FP16, LGC, Compressor, Dense, PowerSGD, RandomK, TopK, TwoLevel
from accordion_hvd.ops import indices

Shape = tuple[int, ...]
Rounds = list[tuple[str, int]]


@dataclass(frozen=True)
class Case:
    """What is claimed of a compressor.

    Attributes:
        compressor: the configuration.
        rounds: for a gradient of a shape and an item size in bytes: what one rank hands over in
            each round, as (collective, bytes).
        feedback: average + error = gradient, up to fp32 rounding.
        loss: how far a mean may be from the exact one (with feedback, from the exact one of what
            was sent), relative to the largest magnitude that went in.
        full: the same algorithm with nothing left out, whose mean is exact up to rounding.
        bitwise: all frameworks give the same bits (else: the same to `close`).
        close: relative to the largest magnitude, how near frameworks are to NumPy.
        guarded: whether a flag for non-finite gradients travels along.
    """

    compressor: Compressor
    rounds: Callable[[Shape, int], Rounds]
    feedback: bool = False
    loss: float = 0.0
    full: Compressor | None = None
    bitwise: bool = True
    close: float = 0.0
    guarded: bool = True

    @property
    def name(self) -> str:
        return repr(self.compressor)

    def moves(
        self, shape: Shape, itemsize: int, ranks: int, step: int = 0
    ) -> list[tuple[str, int, int]]:
        """The rounds of a step, and how many ranks take part in each."""
        return [(kind, size, ranks) for kind, size in self.rounds(shape, itemsize)]


@dataclass(frozen=True)
class BetweenMachines(Case):
    """`TwoLevel` around another case's compressor."""

    def moves(
        self, shape: Shape, itemsize: int, ranks: int, step: int = 0
    ) -> list[tuple[str, int, int]]:
        local = local_size(ranks)
        if local == 1:
            return super().moves(shape, itemsize, ranks, step)
        rows, width = matrix(shape)
        part = (-(-rows // local), width)
        inner = self.rounds(part, 4)
        size = math.prod(part)
        near = [("alltoall", itemsize * local * size, local), ("allgather", 4 * size, local)]
        return [near[0], *[(kind, sent, ranks // local) for kind, sent in inner], near[1]]


@dataclass(frozen=True)
class Learned(Case):
    """`LGC`, whose rounds depend on its phase."""

    def moves(
        self, shape: Shape, itemsize: int, ranks: int, step: int = 0
    ) -> list[tuple[str, int, int]]:
        lgc, size = self.compressor, math.prod(shape)
        assert isinstance(lgc, LGC)
        chosen, phase = lgc.kept(size), lgc.variant(step)
        code = 16 * max(1, math.ceil((chosen - 31) / 16) + 1)
        server = lgc.form == "server"
        if phase == 0:
            return [("allreduce", 4 * size, ranks)]
        if phase < 3:
            shipped = 4 * (172_996 + (ranks * 43_682 if server else 43_681))
            rounds = [("allreduce", 4 * chosen + 4, ranks), ("allgather", 4 * chosen, ranks)]
            return rounds + [("broadcast", shipped, ranks)] * (phase == 2)
        if not server:
            return [("allreduce", 4 * chosen + 4, ranks), ("allreduce", code, ranks)]
        few = max(1, min(chosen, int(lgc.innovation * size)))
        innovation = 4 * few + indices.packed_length(few, chosen)
        return [("allreduce", 4 * chosen + 4 + code, ranks), ("allgather", innovation, ranks)]


def matrix(shape: Shape) -> tuple[int, int]:
    """The oracle of `powersgd.matrix_shape`: the best of all ways to cut the dimensions in two."""
    size = math.prod(shape)
    cuts = [math.prod(shape[:i]) for i in range(1, len(shape))] or [size]
    rows = min(cuts, key=lambda n: n + size // n)
    return rows, size // rows


def powersgd(rank: int) -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        n, m = matrix(shape)
        used = min(rank, n, m)
        return [("allreduce", 4 * used * n), ("allreduce", 4 * used * m)]

    full = PowerSGD(10_000)
    return Case(PowerSGD(rank), rounds, feedback=True, full=full, bitwise=False, close=1e-4)


def topk(ratio: float, wire: str = "float32") -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        kept = max(1, int(ratio * math.prod(shape)))
        value = {"float32": 4, "float16": 2}[wire]
        return [("allgather", value * kept + indices.packed_length(kept, math.prod(shape)))]

    return Case(TopK(ratio, wire), rounds, feedback=True, full=TopK(1.0))


def randomk(ratio: float) -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        return [("allreduce", 4 * max(1, int(ratio * math.prod(shape))))]

    return Case(RandomK(ratio), rounds, feedback=True, full=RandomK(1.0))


def as_is(compressor: Compressor, loss: float, itemsize: int | None) -> Case:
    def rounds(shape: Shape, own: int) -> Rounds:
        return [("allreduce", (itemsize or own) * math.prod(shape))]

    return Case(compressor, rounds, loss=loss, guarded=False)


def lgc(form: str, dense: int, training: int) -> Case:
    compressor = LGC(0.03, form, dense, training, innovation=0.003)
    rough = {"bitwise": False, "close": 1e-3, "loss": 3.0}  # after so little training
    return Learned(compressor, lambda *_: [], feedback=True, **rough)


def two_level(case: Case) -> Case:
    same = {f.name: getattr(case, f.name) for f in fields(case)}
    same["full"] = case.full and TwoLevel(case.full)
    same["loss"] = case.loss and 2 * case.loss  # means of means
    return BetweenMachines(**same | {"compressor": TwoLevel(case.compressor)})


# A 16-bit journey rounds twice: what leaves, and the mean.
CASES = [
    as_is(Dense(), loss=5e-7, itemsize=None),
    as_is(FP16(), loss=2 * 2**-11, itemsize=2),
    as_is(BF16(), loss=2 * 2**-8, itemsize=2),
    topk(0.1),
    topk(0.01),
    topk(0.1, "float16"),
    randomk(0.1),
    randomk(0.01),
    powersgd(1),
    powersgd(4),
    lgc("ring", dense=1, training=1),
    lgc("server", dense=0, training=2),
    two_level(as_is(Dense(), loss=5e-7, itemsize=None)),
    two_level(topk(0.1)),
    two_level(powersgd(1)),
]
"""Every law of `laws.py` is checked for every row."""

REFUSED = [
    *[
        (kind, "ratio", bad)
        for kind in (TopK, RandomK)
        for bad in (0, -1, 1.5, math.nan, "a", True)
    ],
    *[(TopK, "wire", bad) for bad in ("float64", "int8", None)],
    *[(TwoLevel, "compressor", bad) for bad in (None, "topk", TopK)],
    *[(LGC, "ratio", bad) for bad in (0, 2, "a")],
    *[(LGC, "form", bad) for bad in ("tree", None, 1)],
    *[(LGC, "dense", bad) for bad in (-1, 1.5, True)],
    *[(LGC, "training", bad) for bad in (0, 2.5, None)],
    *[(LGC, name, bad) for name in ("innovation", "rate") for bad in (0, 2, math.nan, "a")],
    *[(PowerSGD, "rank", bad) for bad in (0, -2, 1.5, math.nan, "a", True, None)],
]
"""Hyper-parameters that must be refused: class, argument, value."""
