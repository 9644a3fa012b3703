"""Tests of requests between real ranks: each engine's results are those that NumPy computes."""

import harness
import numpy as np

HALVES = {"float16": 2**-10, "bfloat16": 2**-7}


def INIT() -> None:
    import accordion_hvd.torch as hvd

    hvd.init()


def communicator():
    import accordion_hvd.torch as hvd
    from accordion_hvd.torch import engines

    return engines.connect(hvd.global_process_set)


def values(rank: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return a rank's array, which every rank can compute."""
    rng = np.random.default_rng([rank, seed, *shape])
    return rng.standard_normal(shape).astype(np.float32)


def run(requests) -> list:
    import torch

    ours = communicator()
    assert ours.rank == harness.RANK

    def generator():
        return (yield tuple(requests(torch)))

    return [np_of(x) for x in ours.run("core", generator())]


def np_of(x):
    if isinstance(x, tuple):
        return tuple(np_of(part) for part in x)
    return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()


def everybody(shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    return [values(rank, shape, seed) for rank in range(communicator().size)]


def check_the_rank_is_known_before_init() -> None:
    ours = communicator()
    assert ours.rank == harness.RANK
    assert ours.size in (2, 4)


def check_allreduce() -> None:
    from accordion_hvd import Allreduce

    def requests(torch):
        mine = [torch.tensor(values(harness.RANK, shape)) for shape in SHAPES]
        means = [Allreduce(x) for x in mine]
        return [*means, Allreduce(mine[0], op="sum"), Allreduce(mine[1], op="max")]

    *means, total, largest = run(requests)
    for mean, shape in zip(means, SHAPES, strict=True):
        np.testing.assert_allclose(mean, np.mean(everybody(shape), 0), atol=1e-6)
    np.testing.assert_allclose(total, np.sum(everybody(SHAPES[0]), 0), atol=1e-5)
    np.testing.assert_array_equal(largest, np.max(everybody(SHAPES[1]), 0))


SHAPES = [(7,), (3, 4), (300, 300)]  # the last is too large to be copied into a buffer


def check_halves() -> None:
    from accordion_hvd import Allreduce

    for wire, rounding in HALVES.items():

        def requests(torch, wire=wire):
            mine = torch.tensor(values(harness.RANK, (5, 3)))
            return [Allreduce(mine, wire=wire), Allreduce(mine.to(getattr(torch, wire)))]

        for mean in run(requests):
            np.testing.assert_allclose(mean, np.mean(everybody((5, 3)), 0), atol=4 * rounding)


def check_integers_add_up() -> None:
    from accordion_hvd import Allreduce

    def requests(torch):
        return [Allreduce(torch.full((3,), harness.RANK + 1, dtype=torch.int64), op="sum")]

    size = communicator().size
    np.testing.assert_array_equal(run(requests)[0], [size * (size + 1) // 2] * 3)


def check_allgather_in_rank_order() -> None:
    from accordion_hvd import Allgather

    def requests(torch):
        index = torch.arange(4, dtype=torch.int32) + 10 * harness.RANK
        mine = torch.tensor(values(harness.RANK, (2, 3)))
        uneven = torch.full((harness.RANK, 2), harness.RANK, dtype=torch.uint8)
        return [Allgather(index), Allgather(mine), Allgather(uneven, uneven=True)]

    indices, parts, uneven = run(requests)
    for rank, part in enumerate(everybody((2, 3))):
        np.testing.assert_array_equal(indices[rank], np.arange(4) + 10 * rank)
        np.testing.assert_array_equal(parts[rank], part)
        np.testing.assert_array_equal(uneven[rank], np.full((rank, 2), rank))


def check_broadcast_and_alltoall() -> None:
    from accordion_hvd import Alltoall, Broadcast

    size = communicator().size

    def requests(torch):
        mine = torch.tensor(values(harness.RANK, (size, 3)))
        last = Broadcast(mine, root=size - 1)
        return [Broadcast(mine), last, Alltoall(mine)]

    first, last, rows = run(requests)
    all_ = everybody((size, 3))
    np.testing.assert_array_equal(first, all_[0])
    np.testing.assert_array_equal(last, all_[-1])
    np.testing.assert_array_equal(rows, [part[harness.RANK] for part in all_])


def check_alltoall_of_uneven_shares() -> None:
    from accordion_hvd import Alltoall

    size, rank = communicator().size, harness.RANK

    def share(sender: int, receiver: int) -> np.ndarray:
        return values(sender, ((sender + 2 * receiver) % 3, 4), receiver)

    def requests(torch):
        parts = [share(rank, peer) for peer in range(size)]
        tensor = torch.tensor(np.concatenate(parts))
        nothing = torch.zeros((0, 2), dtype=torch.int64)
        return [
            Alltoall(tensor, splits=tuple(map(len, parts))),
            Alltoall(nothing, splits=(0,) * size),
        ]

    came, nothing = run(requests)
    for peer in range(size):
        np.testing.assert_array_equal(came[peer], share(peer, rank))
        assert nothing[peer].shape == (0, 2) and nothing[peer].dtype == np.int64


def check_quantisers_give_the_simulated_bits() -> None:
    """Quantizers give the same averages on real ranks as in a simulation in NumPy, bit for bit."""
    import torch

    from accordion_hvd import (
        QSGD,
        DoubleSqueeze,
        EFSignSGD,
        Info,
        Int8,
        Natural,
        OneBit,
        SignSGD,
        TernGrad,
        TopK,
    )
    from accordion_hvd.ops import namespace, numpy
    from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep

    ours, shape = communicator(), (31, 17)
    size, rank, hub = ours.size, ours.rank, Hub(communicator().size)
    links = [SimulatedCommunicator(hub, peer, numpy) for peer in range(size)]
    methods = [QSGD(3), TernGrad(), Natural(), Int8(), SignSGD(), EFSignSGD(), OneBit()]
    methods += [DoubleSqueeze(x) for x in (QSGD(3), Int8(), EFSignSGD(), OneBit(), TopK(0.05))]
    for method in methods:
        mine = torch.zeros(shape)
        state = method.init(namespace(mine).spec(mine), Info(0, rank, size, "w"))
        spec = numpy.spec(np.zeros(shape, np.float32))
        states = [method.init(spec, Info(0, peer, size, "w")) for peer in range(size)]
        for step in range(3):
            mine = torch.tensor(values(rank, shape, step))
            generator = method.exchange(mine, state, Info(step, rank, size, "w"))
            mean, state = ours.run("quantiser", generator)
            generators = [
                method.exchange(
                    values(peer, shape, step), states[peer], Info(step, peer, size, "w")
                )
                for peer in range(size)
            ]
            results = lockstep(links, generators)
            states = [new for _, new in results]
            np.testing.assert_array_equal(mean.numpy(), results[rank][0], repr(method))


def check_parts_take_the_counted_bytes() -> None:
    """`DoubleSqueeze` passes the engine what is counted: a fraction of `Dense`, on any ranks."""
    import torch

    from accordion_hvd import QSGD, DoubleSqueeze, EFSignSGD, Info, Int8
    from accordion_hvd.comm.collectives import Traffic
    from accordion_hvd.ops import namespace

    ours, shape = communicator(), (250, 256)
    size, rank, passed = ours.size, harness.RANK, []
    share = {"alltoall": (size - 1) / size, "allgather": size - 1}  # of bytes that a rank passes

    def watched(kind, operation):
        def run(name, tensor, *others):
            passed.append(share[kind] * tensor.numel())
            return operation(name, tensor, *others)

        return run

    for kind in share:
        setattr(ours, kind, watched(kind, getattr(ours, kind)))
    dense = 2 * (size - 1) / size * 4 * 250 * 256
    for codec, fewer in ((QSGD(4), 7.5), (Int8(), 3.9), (EFSignSGD(), 30.0)):
        method, mine = DoubleSqueeze(codec), torch.tensor(values(rank, shape, 0))
        info, traffic = Info(0, rank, size, "parts"), Traffic()
        state = method.init(namespace(mine).spec(mine), info)
        passed.clear()
        ours.run("parts", method.exchange(mine, state, info), traffic)
        assert abs(sum(passed) - traffic.sent) < 1e-6, (sum(passed), traffic.sent)
        assert dense / traffic.sent >= fewer, (codec, dense / traffic.sent)
    for kind in share:
        delattr(ours, kind)


def check_decisions_of_rank_0_are_everybodys() -> None:
    """All ranks follow rank 0's decisions, although other ranks' norms call for other levels.

    The mean of all residuals equals the part of the mean gradients that the averages lack.
    """
    import torch

    from accordion_hvd import Accordion, PowerSGD
    from accordion_hvd.comm.agreement import gather
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import TensorInfo

    ours = communicator()
    policy = Accordion(low=PowerSGD(2), high=PowerSGD(1), window=2, interval=1)
    exchange = Exchange(ours, policy, [TensorInfo("w", (40, 50), "float32")], name="core.accordion")
    carried = 0.0
    for step in range(8):
        mine = values(harness.RANK, (40, 50), step // 2) * (
            1.0 + harness.RANK * 10.0 ** (step // 2)
        )
        exchange.begin(0.1)
        exchange.start(0, torch.tensor(mine))
        assert exchange.finish()
        mean = exchange.layout.batches[0].unpack()[0]
        scales = [1.0 + r * 10.0 ** (step // 2) for r in range(ours.size)]
        parts = everybody((40, 50), step // 2)
        carried = (
            carried + np.mean([p * s for p, s in zip(parts, scales, strict=True)], 0) - mean.numpy()
        )
        sums = ours.run("core.compare", gather(ours, ours.xp.checksum(mean).reshape(1)))
        assert len({int(x[0]) for x in sums}) == 1, "ranks hold different means"
    levels = [row["level"] for row in policy.history]
    assert levels == [0, 1, 1], policy.history  # rank 0's norms are steady, others' are not
    entry = exchange.bucket_states[0]
    error = entry.compressor.residual(entry.state)
    mean_error = ours.run("core.error", gather(ours, error))
    scale = np.abs(np.mean(mean_error, 0)).max()
    np.testing.assert_allclose(np.mean(mean_error, 0), carried, atol=1e-5 * scale)


def check_plans_that_differ_are_noticed() -> None:
    import torch

    from accordion_hvd import TopK
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.layout import TensorInfo
    from accordion_hvd.resolve import as_policy

    ours = communicator()
    name = "odd" if ours.rank == 0 else "even"
    tensors = [TensorInfo(name, (40, 50), "float32")]
    exchange = Exchange(ours, as_policy(TopK(0.1)), tensors, name="core.plans")
    exchange.begin(0.1)
    exchange.start(0, torch.ones(40, 50))
    try:
        exchange.finish()
    except RuntimeError as error:
        assert "ranks disagree" in str(error)
    else:
        raise AssertionError("a plan that differs was not noticed")


if __name__ == "__main__":
    harness.main(globals())
