"""Tests of communicators: requests are packed into few operations, and results equal NumPy's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY, TORCH, Framework, installed, parameters, same_bits

from accordion_hvd import Allgather, Allreduce, Alltoall, Broadcast
from accordion_hvd.core.base import Request
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep


class Counting(SimulatedCommunicator):
    """Communicator that counts the operations of its engine."""

    def __init__(self, hub: Hub, rank: int, framework: Framework) -> None:
        super().__init__(hub, rank, framework.xp)
        self.calls = 0

    def _put(self, name: str, group: Any, value: Any, combine: Any) -> Any:
        self.calls += 1
        return super()._put(name, group, value, combine)


def exchange(
    framework: Framework, ranks: int, wanted: Callable[[int], Sequence[Request]]
) -> tuple[list[list[Any]], int]:
    """Run one round of requests; return each rank's results, and the number of operations."""
    hub = Hub(ranks)
    communicators = [Counting(hub, rank, framework) for rank in range(ranks)]

    def generator(rank: int) -> Any:
        return (yield tuple(wanted(rank)))

    results = lockstep(communicators, [generator(rank) for rank in range(ranks)])
    calls = {communicator.calls for communicator in communicators}
    assert not hub.sent, "somebody has sent what nobody fetched"
    assert len(calls) == 1
    return [[array(framework, x) for x in mine] for mine in results], calls.pop()


def array(framework: Framework, x: Any) -> Any:
    return (
        tuple(array(framework, part) for part in x) if isinstance(x, tuple) else framework.array(x)
    )


def values(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng([rank, *shape])
    return (rng.standard_normal(shape) * 100).astype(dtype)


FEW = parameters((NUMPY, TORCH))
by_framework = pytest.mark.parametrize("framework", parameters())
by_ranks = pytest.mark.parametrize("ranks", [1, 2, 3, 4])


@by_framework
@by_ranks
def test_allreduce(framework: Framework, ranks: int) -> None:
    """Allreduces of equal reduction and dtype share one operation, whatever their shapes."""
    shapes = [(3,), (2, 5), (), (300, 250), (1, 1, 4)]
    kinds = [("mean", "float32"), ("sum", "float32"), ("max", "float32"), ("mean", "float64")]
    kinds += [("sum", "int32"), ("sum", "int64"), ("max", "int64")]
    plan = list(itertools.product(kinds, shapes))

    def wanted(rank: int) -> list[Request]:
        tensors = [framework.tensor(values(rank, shape, dtype)) for (_, dtype), shape in plan]
        return [Allreduce(x, op=op) for x, ((op, _), _) in zip(tensors, plan, strict=True)]

    results, calls = exchange(framework, ranks, wanted)
    assert calls == len(kinds)
    reference = {"mean": np.mean, "sum": np.sum, "max": np.max}
    for mine in results:
        for result, ((op, dtype), shape), first in zip(mine, plan, results[0], strict=True):
            all_ = [values(rank, shape, dtype) for rank in range(ranks)]
            assert result.shape == shape and result.dtype == dtype
            np.testing.assert_allclose(result, reference[op](all_, 0), rtol=1e-5, atol=1e-4)
            assert same_bits(result, first)


@by_framework
def test_arguments_are_not_written_unless_reuse(framework: Framework) -> None:
    shapes = [(3,), (300, 250)]
    given = [[framework.tensor(values(rank, shape)) for shape in shapes] for rank in range(2)]
    exchange(framework, 2, lambda rank: [Allreduce(x) for x in given[rank]])
    exchange(framework, 2, lambda rank: [Allreduce(given[rank][1])])
    for rank, tensors in enumerate(given):
        for x, shape in zip(tensors, shapes, strict=True):
            assert same_bits(framework.array(x), values(rank, shape))


@by_framework
@by_ranks
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_halves(framework: Framework, ranks: int, wire: str) -> None:
    """Ranks send 16-bit numbers, add them in fp32, and round the mean, to the bits of NumPy."""
    shapes = [(7,), (3, 5), (400, 3)]

    def wanted(rank: int) -> list[Request]:
        return [Allreduce(framework.tensor(values(rank, s)), wire=wire) for s in shapes]

    results, calls = exchange(framework, ranks, wanted)
    assert calls == 2
    for mine in results:
        for result, shape in zip(mine, shapes, strict=True):
            sent = [rounded(values(rank, shape), wire) for rank in range(ranks)]
            total = sent[0]
            for part in sent[1:]:
                total = total + part
            assert same_bits(result, rounded(total / np.float32(ranks), wire))


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_halves_of_a_group(wire: str) -> None:
    """A single tensor of 16-bit numbers is averaged among the ranks of its group."""

    def wanted(rank: int) -> list[Request]:
        group = (0, 2) if rank % 2 == 0 else (1, 3)
        return [Allreduce(values(rank, (400, 3)), wire=wire, group=group)]

    results, _ = exchange(NUMPY, 4, wanted)
    for rank, (mine,) in enumerate(results):
        one, other = (rounded(values(r, (400, 3)), wire) for r in (rank % 2, rank % 2 + 2))
        assert same_bits(mine, rounded((one + other) / np.float32(2), wire))


def rounded(x: np.ndarray, wire: str) -> np.ndarray:
    """Return `x` rounded to a 16-bit format and converted back, computed with NumPy only."""
    if wire == "float16":
        return x.astype(np.float16).astype(np.float32)
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 256), exponent - 8).astype(np.float32)  # ties to even


@pytest.mark.parametrize("framework", FEW)
@by_ranks
def test_allgather(framework: Framework, ranks: int) -> None:
    """Allgathers whose sizes are equal on all ranks share one operation, whatever their dtypes."""

    def parts(rank: int) -> list[np.ndarray]:
        index = np.arange(5, dtype=np.int32) * (rank + 1)
        bits = np.array([rank, 255 - rank, 3], np.uint8)
        return [index, values(rank, (2, 3)), bits, values(rank, (3,), "float16"), np.int64([rank])]

    results, calls = exchange(
        framework, ranks, lambda rank: [Allgather(framework.tensor(x)) for x in parts(rank)]
    )
    assert calls == 1
    for mine in results:
        for i, gathered in enumerate(mine):
            assert len(gathered) == ranks
            assert all(same_bits(x, parts(rank)[i]) for rank, x in enumerate(gathered))


@by_framework
@by_ranks
def test_uneven_allgather(framework: Framework, ranks: int) -> None:
    """First dimensions may differ or be 0; ranks exchange them in one additional operation."""

    def parts(rank: int) -> list[np.ndarray]:
        return [values(rank, (rank, 2)), np.arange(2 * rank + 1, dtype=np.int32)]

    results, calls = exchange(
        framework,
        ranks,
        lambda rank: [Allgather(framework.tensor(x), uneven=True) for x in parts(rank)],
    )
    assert calls == 2
    for mine in results:
        for i, gathered in enumerate(mine):
            assert all(same_bits(x, parts(rank)[i]) for rank, x in enumerate(gathered))


@by_framework
@by_ranks
def test_broadcast(framework: Framework, ranks: int) -> None:
    roots = [0, ranks - 1, 0]

    def parts(rank: int) -> list[np.ndarray]:
        return [values(rank, (4,)), values(rank, (2, 2)), np.int64([rank])]

    results, calls = exchange(
        framework,
        ranks,
        lambda rank: [
            Broadcast(framework.tensor(x), root=r) for x, r in zip(parts(rank), roots, strict=True)
        ],
    )
    assert calls == len(set(roots))
    for mine in results:
        for i, (result, root) in enumerate(zip(mine, roots, strict=True)):
            assert same_bits(result, parts(root)[i])


@by_framework
@by_ranks
def test_alltoall(framework: Framework, ranks: int) -> None:
    def parts(rank: int) -> list[np.ndarray]:
        return [values(rank, (ranks, 3)), np.arange(ranks, dtype=np.int32) + 10 * rank]

    results, calls = exchange(
        framework, ranks, lambda rank: [Alltoall(framework.tensor(x)) for x in parts(rank)]
    )
    assert calls == 1
    for rank, mine in enumerate(results):
        for i, result in enumerate(mine):
            assert same_bits(result, np.stack([parts(peer)[i][rank] for peer in range(ranks)]))


@by_framework
@by_ranks
def test_alltoall_of_uneven_shares(framework: Framework, ranks: int) -> None:
    """Ranks may send different numbers of rows: rank r sends (r + 2 p) mod 4 rows to rank p."""

    def rows(rank: int, peer: int) -> int:
        return (rank + 2 * peer) % 4

    def parts(rank: int, dtype: str) -> list[np.ndarray]:
        return [values(10 * rank + peer, (rows(rank, peer), 3), dtype) for peer in range(ranks)]

    def wanted(rank: int) -> list[Request]:
        splits = tuple(rows(rank, peer) for peer in range(ranks))
        both = [np.concatenate(parts(rank, dtype)) for dtype in ("float32", "uint8")]
        return [Alltoall(framework.tensor(x), splits=splits) for x in both]

    results, calls = exchange(framework, ranks, wanted)
    assert calls == 2
    for rank, mine in enumerate(results):
        for came, dtype in zip(mine, ("float32", "uint8"), strict=True):
            assert (
                all(same_bits(x, parts(peer, dtype)[rank]) for peer, x in enumerate(came))
                and len(came) == ranks
            )


def test_uneven_shares_are_counted_and_checked() -> None:
    links = [SimulatedCommunicator(hub := Hub(3), 0, NUMPY.xp)]
    links += [SimulatedCommunicator(hub, rank, NUMPY.xp) for rank in (1, 2)]
    splits = [(5, 1, 2), (0, 7, 0), (4, 0, 0)]
    pending = [
        link.launch("x", [Alltoall(np.zeros((sum(mine), 3), np.float32), splits=mine)])
        for link, mine in zip(links, splits, strict=True)
    ]
    hub.advance_all([work.ready for work in pending])
    traffic = [work.traffic for work in pending]
    assert [x.sent for x in traffic] == [12 * 3, 0, 12 * 4]
    assert [x.received for x in traffic] == [12 * 4, 12 * 1, 12 * 2]
    for wrong in ((5, 1), (5, 1, 1)):
        with pytest.raises(ValueError, match="must be 3 numbers, one per rank, whose sum is 8"):
            links[0].launch("y", [Alltoall(np.zeros((8, 3), np.float32), splits=wrong)])


@pytest.mark.parametrize("framework", FEW)
def test_everything_at_once(framework: Framework) -> None:
    """Results come in the order of the requests, although requests share operations."""

    def wanted(rank: int) -> list[Request]:
        x = framework.tensor(values(rank, (4, 2)))
        return [
            Allgather(x),
            Allreduce(x),
            Broadcast(x, root=1),
            Allreduce(x, wire="bfloat16"),
            Alltoall(x),
            Allreduce(x, op="max"),
            Allgather(x, uneven=True),
            Allreduce(x, wire="float16"),
            Allreduce(x),
        ]

    results, calls = exchange(framework, 4, wanted)
    assert calls == 1 + 1 + 1 + 2 + 1 + 1 + 2 + 2
    all_ = [values(rank, (4, 2)) for rank in range(4)]
    for rank, mine in enumerate(results):
        for gathered in (mine[0], mine[6]):
            assert all(same_bits(a, b) for a, b in zip(gathered, all_, strict=True))
        for i in (1, 8):
            np.testing.assert_allclose(mine[i], np.mean(all_, 0), atol=1e-4)
        assert same_bits(mine[2], all_[1])
        assert same_bits(mine[4], np.stack([x[rank] for x in all_]))
        assert same_bits(mine[5], np.max(all_, 0))
        np.testing.assert_allclose(mine[3], np.mean(all_, 0), atol=2)
        np.testing.assert_allclose(mine[7], np.mean(all_, 0), atol=0.3)


@by_framework
def test_groups(framework: Framework) -> None:
    """Requests of disjoint groups and requests of all ranks can be made in the same round."""

    def wanted(rank: int) -> list[Request]:
        group = (0, 2) if rank % 2 == 0 else (1, 3)
        x = framework.tensor(values(rank, (2, 4)))
        requests = [Allreduce(x, group=group), Allgather(x, group=group), Allreduce(x)]
        return [*requests, Broadcast(x, root=group[1], group=group), Alltoall(x, group=group)]

    results, calls = exchange(framework, 4, wanted)
    assert calls == 5
    for rank, mine in enumerate(results):
        group = (0, 2) if rank % 2 == 0 else (1, 3)
        theirs = [values(peer, (2, 4)) for peer in group]
        np.testing.assert_allclose(mine[0], np.mean(theirs, 0), atol=1e-4)
        assert all(same_bits(a, b) for a, b in zip(mine[1], theirs, strict=True))
        np.testing.assert_allclose(mine[2], np.mean([values(r, (2, 4)) for r in range(4)], 0), 1e-4)
        assert same_bits(mine[3], theirs[1])
        assert same_bits(mine[4], np.stack([x[group.index(rank)] for x in theirs]))


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(TypeError, match="but must yield requests"):
        exchange(NUMPY, 1, lambda rank: [np.zeros(3)])


def test_a_single_request_has_a_single_answer() -> None:
    def generator() -> Any:
        one = yield Allreduce(np.ones(3, np.float32))
        (two,) = yield (Allreduce(np.ones(3, np.float32)),)
        return one, two

    one, two = SimulatedCommunicator(Hub(1), 0, NUMPY.xp).run("generator", generator())
    assert one.shape == two.shape == (3,)


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
def test_layouts_of_torch_do_not_matter() -> None:
    """Results do not depend on the memory layout of views, transposes or channels-last tensors."""
    import torch

    def wanted(rank: int) -> list[Request]:
        x = torch.tensor(values(rank, (2, 3, 4, 5))).contiguous(memory_format=torch.channels_last)
        y = torch.tensor(values(rank, (6, 4))).t()
        z = torch.tensor(values(rank, (9,)))[1:8:2]
        return [kind(t) for t in (x, y, z) for kind in (Allreduce, Allgather, Broadcast)]

    results, _ = exchange(TORCH, 2, wanted)
    shown = [
        [values(r, (2, 3, 4, 5)), values(r, (6, 4)).T, values(r, (9,))[1:8:2]] for r in range(2)
    ]
    for mine in results:
        for i in range(3):
            np.testing.assert_allclose(mine[3 * i], (shown[0][i] + shown[1][i]) / 2, atol=1e-4)
            for rank in range(2):
                np.testing.assert_array_equal(mine[3 * i + 1][rank], shown[rank][i])
            np.testing.assert_array_equal(mine[3 * i + 2], shown[0][i])


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("native", [True, False])
def test_engines_that_add_16_bits_do_so(
    dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reduction, as of any other dtype, instead of an alltoall and an allgather."""
    name = {"float16": "native_fp16_allreduce", "bfloat16": "native_bf16_allreduce"}[dtype]
    monkeypatch.setattr(SimulatedCommunicator, name, native)
    x = TORCH.xp.cast(TORCH.tensor(values(0, (300,))), dtype)
    for wire in (None, dtype):
        sent = TORCH.xp.cast(x, "float32") if wire else x
        results, calls = exchange(TORCH, 2, lambda rank, x=sent, w=wire: [Allreduce(x, wire=w)])
        assert calls == (1 if native else 2)
        wanted = TORCH.array(TORCH.xp.cast(x, "float32"))
        for (mean,) in results:
            np.testing.assert_allclose(np.asarray(mean, np.float32), wanted, rtol=2**-7)
