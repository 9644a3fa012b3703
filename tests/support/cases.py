"""The table of cases: one row for each configuration of a compressor, with what the laws need.

A new algorithm is one row here; `laws.py` and `test_compressors.py` do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from frameworks import exact_mean, local_size

from accordion_hvd import (
    BF16,
    DGC,
    EF21,
    FP16,
    LGC,
    QSGD,
    STC,
    AdaComp,
    Compressor,
    Dense,
    Diana,
    DoubleSqueeze,
    EFSignSGD,
    ErrorFeedback,
    Gathered,
    Int8,
    Momentum,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    ScaleCom,
    SignSGD,
    SketchedSGD,
    TernGrad,
    Threshold,
    TopAgg,
    TopK,
    TwoLevel,
)
from accordion_hvd.ops import indices

Shape = tuple[int, ...]
Rounds = list[tuple[str, int]]
Gradients = Sequence[np.ndarray]
WHOLE = (0.9, 1.1)
"""Range of the slope of unbiased means: 1, plus or minus four standard deviations of 12 draws."""


@dataclass(frozen=True)
class Case:
    """The claims about one configuration of a compressor, which the laws check.

    Attributes:
        compressor: the configuration.
        rounds: function of a gradient's shape and item size in bytes that returns the collectives
            of a step as (name, bytes of one rank's tensor).
        feedback: the compressor has error feedback: mean + mean residual = exact mean, up to fp32
            rounding.
        loss: largest error of a mean, relative to the largest magnitude of the gradients. With
            `feedback`, largest part of the exact mean that a step may lose, so that it is neither
            in the mean nor in the mean residual.
        full: the same algorithm with settings that leave nothing out, so that its mean is exact up
            to rounding; None if there are none.
        bitwise: all frameworks give the same bits. Otherwise they agree up to `close`.
        close: largest difference from NumPy, relative to the largest magnitude.
        guarded: the exchange also sends a flag for non-finite gradients.
        unbiased: the mean over many steps of one gradient is exact, up to the sampling error.
        discrete: a rounding error may change the selected elements or the direction of rounding.
        apart: largest change of a mean, relative to the largest magnitude, if small tensors share a
            call of `exchange`, because their random numbers or quantization buckets then differ.
        wanted: function of the ranks' gradients and the step that returns the result which the
            compressor approximates; by default the exact mean.
        uneven: the number of bytes depends on the values; `rounds` is None, and TensorFlow cannot
            trace the compressor in a graph.
        private: a non-finite element counts as zero, and no flag reports it.
        momentum: the result is an update with momentum.
        forgets: decoding errors of the elements that are sent are lost. Elements that are not sent
            stay in the residual.
        slope: least and largest slope of the means over the exact means (see `laws.conservation`).
        in_turn: each step runs only one of the `rounds`, in turn.
    """

    compressor: Compressor
    rounds: Callable[[Shape, int], Rounds] | None
    feedback: bool = False
    loss: float = 0.0
    full: Compressor | None = None
    bitwise: bool = True
    close: float = 0.0
    guarded: bool = True
    unbiased: bool = False
    discrete: bool = False
    apart: float = 0.0
    wanted: Callable[[Gradients, int], np.ndarray] = lambda gradients, step: exact_mean(gradients)
    uneven: bool = False
    private: bool = False
    momentum: bool = False
    forgets: bool = False
    slope: tuple[float, float] = (0.002, 1.1)
    in_turn: bool = False

    @property
    def name(self) -> str:
        return repr(self.compressor)

    def moves(
        self, shape: Shape, itemsize: int, ranks: int, step: int = 0
    ) -> list[tuple[str, int, int]]:
        """Return the collectives of a step as (name, bytes, number of ranks that take part)."""
        return [(kind, size, ranks) for kind, size in self.taken(shape, itemsize, step)]

    def taken(self, shape: Shape, itemsize: int, step: int) -> Rounds:
        """Return those of the `rounds` that a step runs."""
        assert self.rounds is not None
        rounds = self.rounds(shape, itemsize)
        return [rounds[step % len(rounds)]] if self.in_turn else rounds


@dataclass(frozen=True)
class Sliced(Case):
    """A case in which each rank reduces one slice, so that bytes depend on the number of ranks.

    Attributes:
        slices: function of a gradient's shape and the number of ranks that replaces `rounds`.
    """

    slices: Callable[[Shape, int], Rounds] = field(kw_only=True)

    def moves(
        self, shape: Shape, itemsize: int, ranks: int, step: int = 0
    ) -> list[tuple[str, int, int]]:
        return [(kind, size, ranks) for kind, size in self.slices(shape, ranks)]


@dataclass(frozen=True)
class BetweenMachines(Case):
    """A case of `TwoLevel` with the compressor of another case."""

    def moves(
        self, shape: Shape, itemsize: int, ranks: int, step: int = 0
    ) -> list[tuple[str, int, int]]:
        local = local_size(ranks)
        if local == 1:
            return super().moves(shape, itemsize, ranks, step)
        rows, width = matrix(shape)
        part = (-(-rows // local), width)
        inner = self.taken(part, 4, step)
        size = math.prod(part)
        near = [("alltoall", itemsize * local * size, local), ("allgather", 4 * size, local)]
        return [near[0], *[(kind, sent, ranks // local) for kind, sent in inner], near[1]]


@dataclass(frozen=True)
class Learned(Case):
    """A case of `LGC`, whose rounds depend on its phase."""

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
            rounds = [("broadcast", 4 * chosen + 4, ranks), ("allgather", 4 * chosen, ranks)]
            return rounds + [("broadcast", shipped, ranks)] * (phase == 2)
        if not server:
            return [("broadcast", 4 * chosen + 4, ranks), ("allreduce", code, ranks)]
        few = max(1, min(chosen, int(lgc.innovation * size)))
        innovation = 4 * few + indices.packed_length(few, chosen)
        return [("broadcast", 4 * chosen + 4 + code, ranks), ("allgather", innovation, ranks)]


def matrix(shape: Shape) -> tuple[int, int]:
    """Return a tensor's shape as PowerSGD's matrix, whose rows are the first dimension."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (shape[0], 1)


def powersgd(rank: int, alternate: bool = False, wire: str = "float32") -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        (n, m), item = matrix(shape), 4 if wire == "float32" else 2
        used, norm = min(rank, n, m), 4 * (wire == "float16")
        first = norm + item * used * n
        return [("allreduce", first), ("allreduce", norm * alternate + item * used * m)]

    return Case(
        PowerSGD(rank, alternate, wire),
        rounds,
        feedback=True,
        full=None if alternate else PowerSGD(10_000),  # if n < m, the n rows of Q do not span M
        bitwise=False,
        close={"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[wire],
        in_turn=alternate,
    )


def topk(ratio: float, wire: str = "float32", chunk: int | None = None) -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        size, value = math.prod(shape), {"float32": 4, "float16": 2}[wire]
        chunks = -(-size // chunk) if chunk else 1
        kept = chunks * max(1, int(ratio * -(-size // chunks)))
        if chunk:
            return [("allgather", value * kept + kept + (chunk > 256) * -(-kept // 2))]
        return [("allgather", value * kept + indices.packed_length(kept, size))]

    compressor = TopK(ratio, wire, chunk)
    return Case(compressor, rounds, feedback=True, full=TopK(1.0, chunk=chunk), discrete=True)


def stc(ratio: float) -> Case:
    def size(shape: Shape) -> int:
        kept = max(1, int(ratio * math.prod(shape)))
        return 4 + coded((kept,), 1) + indices.packed_length(kept, math.prod(shape))

    return gathered(STC(ratio), size, feedback=True, discrete=True)


def threshold(value: float) -> Case:
    claims = {"slope": (0.0, 0.0)} if value > 10 else {}  # nothing is sent
    return Case(
        Threshold(value), None, True, full=Threshold(0.0), discrete=True, uneven=True, **claims
    )


def adacomp(bin: int) -> Case:
    return Case(AdaComp(bin), None, feedback=True, discrete=True, uneven=True)


def scalecom(compressor: ScaleCom) -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        size = math.prod(shape)
        kept = -(-size // round(1 / compressor.ratio))
        if compressor.selection == "exact":
            kept = max(1, int(compressor.ratio * size))
        return [("broadcast", indices.packed_length(kept, size)), ("allreduce", 4 * kept)]

    full = ScaleCom(1.0, compressor.beta, compressor.selection)
    return Case(compressor, rounds, feedback=True, full=full, discrete=True)


def dgc(compressor: DGC) -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        if compressor.ratio == 1:
            return [("allreduce", 4 * math.prod(shape))]
        sparse = topk(compressor.ratio).rounds
        assert sparse is not None
        return sparse(shape, itemsize)

    momentum = compressor.momentum > 0
    close = {"bitwise": False, "close": 1e-6} if compressor.clip else {}
    full = None if momentum or compressor.clip else DGC(1.0, 0.0)
    return Case(
        compressor, rounds, feedback=True, full=full, discrete=True, momentum=momentum, **close
    )


def randomk(ratio: float) -> Case:
    def rounds(shape: Shape, itemsize: int) -> Rounds:
        return [("allreduce", 4 * max(1, int(ratio * math.prod(shape))))]

    return Case(RandomK(ratio), rounds, feedback=True, full=RandomK(1.0))


def coded(shape: Shape, bits: int) -> int:
    """Return the bytes of packed codes, which consist of sections of 8, 4, 2 and 1 bits."""
    return sum(-(-math.prod(shape) * width // 8) for width in (8, 4, 2, 1) if bits & width)


def gathered(compressor: Compressor, size: Callable[[Shape], int], **claims: Any) -> Case:
    return Case(compressor, lambda shape, itemsize: [("allgather", size(shape))], **claims)


def qsgd(bits: int, bucket: int = 512, norm: str = "max") -> Case:
    def size(shape: Shape) -> int:
        return coded(shape, bits) + 4 * -(-math.prod(shape) // bucket)

    levels = 2 ** (bits - 1) - 1 or 0.5
    loss = (bucket**0.5 if norm == "l2" else 1) / levels
    method = QSGD(bits, bucket, norm)
    claims = {"loss": 1.001 * loss, "apart": 2 * loss, "unbiased": True, "guarded": False}
    return gathered(method, size, slope=WHOLE, **claims)


def terngrad(clip: float | None) -> Case:
    def slices(shape: Shape, ranks: int) -> Rounds:
        part = 8 * -(-math.prod(shape) // (8 * ranks))
        sums = coded((part,), (2 * ranks).bit_length())
        return [("allreduce", 4), ("alltoall", ranks * part // 4), ("allgather", sums)]

    claims = {"loss": 1.001, "unbiased": clip is None, "slope": WHOLE, "apart": 2.0}
    return Sliced(TernGrad(clip), lambda *_: [], slices=slices, **claims)


def majority_of(gradients: Gradients, step: int) -> np.ndarray:
    """Return the sign that most ranks have.

    Zeros and ties count as 1 at every other position and as -1 elsewhere, and inversely in the next
    step.
    """
    place = np.arange(gradients[0].size).reshape(gradients[0].shape)
    zero = np.where((place + step) % 2 == 0, 1, -1)
    votes = sum(np.where(g > 0, 1, np.where(g < 0, -1, zero)) for g in gradients)
    return np.where(votes == 0, zero, np.sign(votes)).astype(np.float64)


def signsgd() -> Case:
    def slices(shape: Shape, ranks: int) -> Rounds:
        width = -(-coded(shape, 1) // ranks)
        return [("alltoall", ranks * width), ("allgather", width)]

    return Sliced(SignSGD(), lambda *_: [], slices=slices, wanted=majority_of, discrete=True)


def onebit_size(shape: Shape) -> int:
    return coded(shape, 1) + 8 * matrix(shape)[1]


def natural() -> Case:
    claims = {"loss": 1.0, "apart": 2.0, "unbiased": True, "guarded": False, "slope": WHOLE}
    return gathered(Natural(), lambda shape: coded(shape, 9), **claims)


def int8() -> Case:
    return gathered(Int8(), int8_size, feedback=True, discrete=True, apart=0.05)


def int8_size(shape: Shape) -> int:
    return coded(shape, 8) + 4 * -(-math.prod(shape) // 256)


def sketched(ratio: float, rows: int, columns: float) -> Case:
    """Return a case of `SketchedSGD` without momentum; `test_sketched_sgd.py` tests momentum."""

    def rounds(shape: Shape, itemsize: int) -> Rounds:
        size = math.prod(shape)
        kept = max(1, int(ratio * size))
        table, asked = rows * min(int(columns * kept), size), 4 * kept
        if table + asked >= size:
            return [("allreduce", 4 * size)]
        return [("allreduce", 4 * table), ("allreduce", 4 * asked)]

    compressor = SketchedSGD(ratio, rows, columns, momentum=0)
    return Case(compressor, rounds, feedback=True, full=SketchedSGD(1.0, momentum=0))


def vote_of_the_largest(gradients: Gradients, step: int) -> np.ndarray:
    """Return the mean of the ranks' votes: the sign at the largest magnitude, and 0 elsewhere."""
    votes = np.zeros((len(gradients), gradients[0].size))
    for vote, gradient in zip(votes, gradients, strict=True):
        flat = gradient.reshape(-1)
        most = np.abs(flat).argmax()
        vote[most] = np.sign(flat[most])
    return votes.mean(0).reshape(gradients[0].shape)


def topagg() -> Case:
    """Return a case of `TopAgg` without random votes or noise; `test_topagg.py` tests both."""
    method = TopAgg(1, None, 0.0, unprotected=True)
    claims = {"wanted": vote_of_the_largest, "guarded": False, "private": True}
    return Case(method, lambda shape, itemsize: [("allreduce", math.prod(shape))], **claims)


def as_is(compressor: Compressor, loss: float, itemsize: int | None) -> Case:
    def rounds(shape: Shape, own: int) -> Rounds:
        return [("allreduce", (itemsize or own) * math.prod(shape))]

    return Case(compressor, rounds, loss=loss, guarded=False)


def lgc(form: str, dense: int, training: int) -> Case:
    compressor = LGC(0.03, form, dense, training, innovation=0.003)
    rough = {"bitwise": False, "close": 1e-3, "loss": 3.0}  # the autoencoder is hardly trained
    return Learned(compressor, lambda *_: [], feedback=True, forgets=True, **rough)


def two_level(case: Case) -> Case:
    same = {f.name: getattr(case, f.name) for f in fields(case)}
    same["full"] = case.full and TwoLevel(case.full)
    same["loss"] = case.loss and 2 * case.loss  # means of means
    return BetweenMachines(**same | {"compressor": TwoLevel(case.compressor)})


def wrapped(compressor: Compressor, inner: Case, **claims: Any) -> Case:
    """Return a case of a wrapper of another case's codec; error feedback must be in `claims`."""
    return Case(compressor, inner.rounds, discrete=True, **claims)


def doubled(
    method: DoubleSqueeze,
    run: Callable[[Shape], int],
    size: Callable[[int, int], int],
    **claims: Any,
) -> Case:
    """Return a case of `DoubleSqueeze`.

    Args:
        run: function of a shape that returns the largest length of a run.
        size: function of the number and the length of the runs in a part, which returns the bytes
            of its message.
    """

    def slices(shape: Shape, ranks: int) -> Rounds:
        least, longest = -(-math.prod(shape) // ranks), run(shape)
        part = min(
            size(runs, width)
            for runs in range(-(-least // longest), -(-least // longest) + 8)
            for width in range(-(-least // runs), longest + 1)
            if runs * width % 8 == 0
        )
        return [("alltoall", ranks * part), ("allgather", part)]

    return Sliced(method, lambda *_: [], slices=slices, discrete=True, **claims)


def doubled_qsgd(bits: int, bucket: int) -> Case:
    """Return a case whose parts have buckets of at most `bucket` elements."""
    once = qsgd(bits, bucket)
    claims = {"loss": 2 * once.loss, "apart": 2 * once.apart, "unbiased": True, "guarded": False}
    return doubled(
        DoubleSqueeze(QSGD(bits, bucket)),
        lambda shape: bucket,
        lambda runs, width: coded((runs * width,), bits) + 4 * runs,
        slope=WHOLE,
        **claims,
    )


def doubled_topk(ratio: float) -> Case:
    def size(runs: int, width: int) -> int:
        kept = max(1, int(ratio * runs * width))
        return 4 * kept + indices.packed_length(kept, runs * width)

    method = DoubleSqueeze(TopK(ratio))
    return doubled(method, vector, size, feedback=True, full=DoubleSqueeze(TopK(1.0)))


def vector(shape: Shape) -> int:
    return 8 * -(-math.prod(shape) // 8)


FAR = {"loss": 10.0}  # replicas follow gradients slowly; those of the laws are independent

# 16-bit compressors round twice: each gradient, and the mean.
CASES = [
    as_is(Dense(), loss=5e-7, itemsize=None),
    as_is(FP16(), loss=2 * 2**-11, itemsize=2),
    as_is(BF16(), loss=2 * 2**-8, itemsize=2),
    topk(0.1),
    topk(0.01),
    topk(0.1, chunk=500),
    topk(0.03, chunk=100),
    topk(0.1, "float16"),
    stc(0.1),
    stc(0.01),
    topagg(),
    randomk(0.1),
    randomk(0.01),
    sketched(0.01, rows=5, columns=10),
    sketched(0.02, rows=3, columns=5),
    sketched(0.1, rows=5, columns=10),  # sent dense, because a sketch would be larger
    powersgd(1),
    powersgd(4),
    powersgd(1, alternate=True),
    powersgd(4, alternate=True),
    powersgd(1, wire="float16"),
    powersgd(4, wire="float16"),
    powersgd(4, True, "float16"),
    powersgd(4, wire="bfloat16"),
    powersgd(2, True, "bfloat16"),
    qsgd(4),
    qsgd(8, bucket=100),
    qsgd(3, bucket=7),
    qsgd(1),
    qsgd(4, bucket=64, norm="l2"),
    terngrad(2.5),
    terngrad(None),
    natural(),
    int8(),
    signsgd(),
    gathered(EFSignSGD(), lambda s: coded(s, 1) + 4, feedback=True, discrete=True),
    gathered(OneBit(), onebit_size, feedback=True, discrete=True),
    lgc("ring", dense=1, training=1),
    lgc("server", dense=0, training=2),
    two_level(as_is(Dense(), loss=5e-7, itemsize=None)),
    two_level(topk(0.1)),
    two_level(stc(0.1)),
    two_level(powersgd(1)),
    two_level(powersgd(2, alternate=True)),
    two_level(powersgd(2, wire="float16")),
    two_level(int8()),
    threshold(1.0),
    threshold(100.0),
    adacomp(50),
    adacomp(7),
    adacomp(500),
    scalecom(ScaleCom(0.1)),
    scalecom(ScaleCom(0.03, beta=0.1)),
    scalecom(ScaleCom(0.1, beta=0.3, selection="exact")),
    two_level(scalecom(ScaleCom(0.1, beta=0.3))),
    two_level(threshold(1.0)),
    dgc(DGC(0.1)),
    dgc(DGC(0.1, momentum=0.0)),
    dgc(DGC(0.1, momentum=0.5, clip=100.0)),
    dgc(DGC(1.0)),
    two_level(dgc(DGC(0.1))),
    wrapped(EF21(TopK(0.1)), topk(0.1), full=EF21(TopK(1.0)), **FAR),
    wrapped(EF21(EFSignSGD()), gathered(EFSignSGD(), lambda s: coded(s, 1) + 4), **FAR),
    wrapped(EF21(OneBit()), gathered(OneBit(), onebit_size), **FAR),
    wrapped(Diana(QSGD(4)), qsgd(4), apart=10.0, slope=WHOLE, **FAR),
    wrapped(Diana(Natural(), 8 / 9), natural(), apart=10.0, slope=WHOLE, **FAR),
    wrapped(EF21(RandomK(0.1)), randomk(0.1), full=EF21(RandomK(1.0)), apart=10.0, **FAR),
    wrapped(EF21(Dense()), as_is(Dense(), loss=0, itemsize=4), full=EF21(Dense())),
    wrapped(ErrorFeedback(Natural()), natural(), feedback=True, apart=2.0),
    wrapped(ErrorFeedback(BF16()), gathered(BF16(), lambda s: 2 * math.prod(s)), feedback=True),
    wrapped(ErrorFeedback(TopK(0.1)), topk(0.1), feedback=True, full=ErrorFeedback(TopK(1.0))),
    wrapped(Gathered(TopK(0.1)), topk(0.1), full=Gathered(TopK(1.0)), loss=1.0, slope=(0.3, 0.6)),
    wrapped(Momentum(TopK(0.1)), topk(0.1), feedback=True, momentum=True),
    two_level(wrapped(EF21(TopK(0.1)), topk(0.1), **FAR)),
    doubled_qsgd(4, 512),
    doubled_qsgd(3, 7),
    doubled(
        DoubleSqueeze(Natural()),
        vector,
        lambda runs, width: coded((runs * width,), 9),
        **{"loss": 3.0, "apart": 6.0, "unbiased": True, "guarded": False, "slope": WHOLE},
    ),
    doubled(
        DoubleSqueeze(EFSignSGD()),
        vector,
        lambda runs, width: coded((runs * width,), 1) + 4,
        feedback=True,
    ),
    doubled(
        DoubleSqueeze(Int8()),
        lambda shape: 256,
        lambda runs, width: runs * width + 4 * runs,
        feedback=True,
    ),
    doubled(
        DoubleSqueeze(OneBit()),
        lambda shape: matrix(shape)[0],
        lambda runs, width: coded((runs * width,), 1) + 8 * runs,
        feedback=True,
    ),
    doubled_topk(0.1),
    doubled(DoubleSqueeze(BF16()), vector, lambda runs, width: 2 * runs * width, feedback=True),
]
"""Every law of `laws.py` that applies to a row is checked for it."""

FIRST = {type(c.compressor): c for c in sorted(reversed(CASES), key=lambda c: c.feedback)}.values()
"""The first case of each class, with error feedback if it has one."""

REFUSED = [
    *[
        (kind, "ratio", bad)
        for kind in (TopK, STC, RandomK, ScaleCom, DGC, SketchedSGD)
        for bad in (0, -1, 1.5, math.nan, "a", True)
    ],
    *[(TopK, "wire", bad) for bad in ("float64", "int8", None)],
    *[(PowerSGD, "wire", bad) for bad in ("float64", "int8", None)],
    *[(TwoLevel, "compressor", bad) for bad in (None, "topk", TopK)],
    (TwoLevel, "compressor", TopAgg(1, None, 1.0)),
    *[(QSGD, "bits", bad) for bad in (0, 9, -1, 2.5, math.nan, "a", True, None)],
    *[(QSGD, "bucket", bad) for bad in (0, -512, 1.5, math.inf, "a", True, None)],
    *[(QSGD, "norm", bad) for bad in ("l1", 2, None)],
    *[(TernGrad, "clip", bad) for bad in (0, -2.5, math.nan, math.inf, "a", True)],
    *[(Int8, "block", bad) for bad in (0, -1, 2.5, math.nan, "a", True, None)],
    *[(SignSGD, "momentum", bad) for bad in (1, 1.5, -0.1, math.nan, "a", True, None)],
    *[(Threshold, "value", bad) for bad in (-1, math.nan, math.inf, "a", True, None)],
    *[(AdaComp, "bin", bad) for bad in (0, -1, 16384, 1.5, math.nan, "a", True)],
    *[(ScaleCom, "beta", bad) for bad in (0, -1, 1.1, math.nan, "a", True, None)],
    *[(ScaleCom, "selection", bad) for bad in ("chunks", 1, None)],
    *[(DGC, "momentum", bad) for bad in (1, -0.1, math.nan, "a", True, None)],
    *[(DGC, "warmup", bad) for bad in (-1, 1.5, math.nan, "a", True, None)],
    *[(DGC, "clip", bad) for bad in (0, -1, math.nan, math.inf, "a", True)],
    *[(SketchedSGD, "rows", bad) for bad in (0, 2, -1, 5.0, "a", True, None)],
    *[(SketchedSGD, "columns", bad) for bad in (0, 0.5, math.nan, math.inf, "a", True, None)],
    *[(SketchedSGD, "candidates", bad) for bad in (0, 1.5, "a", True, None)],
    *[(SketchedSGD, "momentum", bad) for bad in (-0.1, 1, math.nan, "a", True, None)],
    *[(LGC, "ratio", bad) for bad in (0, 2, "a")],
    *[(LGC, "form", bad) for bad in ("tree", None, 1)],
    *[(LGC, "dense", bad) for bad in (-1, 1.5, True)],
    *[(LGC, "training", bad) for bad in (0, 2.5, None)],
    *[(LGC, name, bad) for name in ("innovation", "rate") for bad in (0, 2, math.nan, "a")],
    *[(PowerSGD, "rank", bad) for bad in (0, -2, 1.5, math.nan, "a", True, None)],
    *[(PowerSGD, "alternate", bad) for bad in (2, "P", math.nan, None)],
    *[
        (kind, "codec", bad)
        for kind in (EF21, Diana, ErrorFeedback, Gathered, DoubleSqueeze)
        for bad in (None, "topk", TopK, PowerSGD(1), EF21(TopK(0.1)))
    ],
    *[(Diana, "codec", biased) for biased in (TopK(0.1), RandomK(0.1), OneBit())],
    *[(DoubleSqueeze, "codec", bad) for bad in (Dense(), RandomK(0.1), Threshold(1.0), AdaComp())],
    *[(Momentum, "compressor", bad) for bad in (None, "topk", DGC(0.1), TwoLevel(TopK(0.1)))],
    *[(TopK, "chunk", bad) for bad in (1, 4097, 0.5, "a", True)],
]
"""Hyper-parameters that must be refused: class, argument, value."""
