"""Tests of Horovod's interface on ranks that torch.distributed connects."""

from __future__ import annotations

import sys

import harness
import torch
from harness import raises, refused

import accordion_hvd.torch as hvd
from accordion_hvd import PowerSGD, TopK
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.torch import engines

INIT = hvd.init


def numbers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def check_horovod_is_not_loaded() -> None:
    assert "horovod" not in sys.modules
    assert engines.coordinator() == engines.carrier() == "torch"


def check_places() -> None:
    assert hvd.is_initialized() and hvd.rank() == harness.RANK and hvd.size() in (2, 4)
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.gloo_enabled() and not hvd.mpi_enabled()


def check_reductions() -> None:
    parts = torch.stack([numbers(rank, 3, 4) for rank in range(hvd.size())])
    mine = parts[hvd.rank()]
    expected = {
        hvd.Average: parts.mean(0), hvd.Sum: parts.sum(0), hvd.Max: parts.amax(0),
        hvd.Min: parts.amin(0), hvd.Product: parts.prod(0),
    }  # fmt: skip
    for op, value in expected.items():
        torch.testing.assert_close(hvd.allreduce(mine, op=op, name="x"), value)
    torch.testing.assert_close(mine, numbers(hvd.rank(), 3, 4))  # it has not changed
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    torch.testing.assert_close(scaled, 6 * parts.sum(0))
    torch.testing.assert_close(hvd.allreduce(mine, average=False), parts.sum(0))
    half = hvd.allreduce(mine, compression=hvd.Compression.fp16)
    torch.testing.assert_close(half, parts.mean(0), atol=2e-3, rtol=2e-3)
    assert half.dtype == torch.float32
    place = mine.clone()
    assert hvd.allreduce_(place) is place
    torch.testing.assert_close(place, parts.mean(0))
    several = hvd.grouped_allreduce([mine, 2 * mine[0]])
    torch.testing.assert_close(several[1], 2 * parts.mean(0)[0])
    handle = hvd.allreduce_async(mine)
    torch.testing.assert_close(hvd.synchronize(handle), parts.mean(0))
    rows = hvd.reducescatter(torch.ones(hvd.size() + 1, 2), op=hvd.Sum)
    assert rows.shape[0] == (2 if hvd.rank() == 0 else 1) and (rows == hvd.size()).all()


def check_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int16, torch.int64):
        mine = torch.full((2, 3), hvd.rank() + 1).to(dtype)
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert total.dtype == dtype
        assert (total == hvd.size() * (hvd.size() + 1) // 2).all()
        last = hvd.broadcast(mine, hvd.size() - 1)
        assert last.dtype == dtype and (last == hvd.size()).all()
        assert hvd.allgather(mine).shape == (2 * hvd.size(), 3)
    flag = torch.tensor(hvd.rank() == 0)
    assert bool(hvd.broadcast_(flag, 0)) and flag.shape == ()


def check_gathering() -> None:
    rows = hvd.allgather(torch.full((hvd.rank(), 2), hvd.rank()))
    expected = [rank for rank in range(hvd.size()) for _ in range(rank)]
    assert rows[:, 0].tolist() == expected
    sent = [(hvd.rank() + peer) % 3 for peer in range(hvd.size())]
    mine = torch.cat([torch.full((n, 2), 10 * hvd.rank() + peer) for peer, n in enumerate(sent)])
    received, counts = hvd.alltoall(mine, torch.tensor(sent))
    assert counts.tolist() == [(hvd.rank() + peer) % 3 for peer in range(hvd.size())]
    expected = [10 * peer + hvd.rank() for peer, n in enumerate(counts.tolist()) for _ in range(n)]
    assert received[:, 1].tolist() == expected
    even = hvd.alltoall(torch.arange(hvd.size()) + 10 * hvd.rank())
    assert even.tolist() == [10 * peer + hvd.rank() for peer in range(hvd.size())]
    assert hvd.allgather_object({"rank": hvd.rank()})[-1] == {"rank": hvd.size() - 1}
    assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1


def check_process_sets() -> None:
    members = list(range(1, max(2, hvd.size() - 1)))
    some = hvd.add_process_set(members)
    assert some.included() == (hvd.rank() in members) and some.size() == len(members)
    if some.included():
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=some)
        assert total.tolist() == [len(members)] * 2 and some.rank() == hvd.rank() - 1
        assert hvd.broadcast(torch.tensor([hvd.rank()]), 1, process_set=some).item() == 1
    else:
        raises(ValueError, "not a member", lambda: hvd.allreduce(torch.ones(1), process_set=some))
    net = torch.nn.Linear(40, 50)
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), TopK(0.1),
        process_set=some,
    )  # fmt: skip
    for step in range(2):
        optimizer.zero_grad()
        net(numbers(10 * step + hvd.rank(), 4, 40)).square().mean().backward()
        optimizer.step()
    sums = hvd.allgather_object(float(net.weight.detach().double().sum()))
    assert len({sums[rank] for rank in members}) == 1, sums
    assert len(set(sums)) == hvd.size() - len(members) + 1, sums
    raises(ValueError, "already", lambda: hvd.add_process_set(members))
    raises(ValueError, "must be different ones from 0", lambda: hvd.add_process_set([0, 77]))
    assert hvd.remove_process_set(some) and not hvd.remove_process_set(some)


def check_refusals() -> None:
    net = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    with refused(ValueError, "Adasum", "torch.distributed"):
        hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    with refused(ValueError, "Adasum"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    with refused(RuntimeError, "join", "torch.distributed"):
        hvd.join()
    with refused(AttributeError, "hvd.elastic", "torch.distributed"):
        _ = hvd.elastic
    with refused(ValueError, "comm"):
        hvd.shutdown()
        hvd.init(comm=[0])
    hvd.init()


def check_parameters_that_differ_are_not_broadcast() -> None:
    last = hvd.rank() == hvd.size() - 1
    for shapes in ([(4,)] * (2 + last), [(4,), (5 + last,)]):
        parameters = {str(i): torch.zeros(shape) for i, shape in enumerate(shapes)}
        with refused(RanksDisagree, f"[{hvd.size() - 1}]", "torch.float32"):
            hvd.broadcast_parameters(parameters, 0)


def check_launch_orders_that_differ() -> None:
    """Ranks exchange in the same order although gradients become ready in different orders."""
    layers = torch.nn.ModuleList(torch.nn.Linear(300, 300, bias=False) for _ in range(6))
    for layer in layers:
        torch.nn.init.constant_(layer.weight, 0.01)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), 0.1), layers.named_parameters(), PowerSGD(2)
    )
    optimizer.exchange.group_bytes = 1000  # one fusion group per layer
    optimizer.exchange.forget()
    for step in range(3):
        optimizer.zero_grad()
        order = range(6) if hvd.rank() % 2 else reversed(range(6))
        x = numbers(100 * step + hvd.rank(), 4, 300)
        for index in order:
            layers[index](x).square().mean().backward()
        optimizer.step()
    assert len(optimizer.exchange.layout.groups) == 6
    sums = hvd.allgather_object([float(layer.weight.detach().double().sum()) for layer in layers])
    assert all(row == sums[0] for row in sums)


if __name__ == "__main__":
    harness.main(globals())
