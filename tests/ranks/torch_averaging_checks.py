"""Tests of `DistributedOptimizer` with model averaging between real ranks in PyTorch."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import accordion_hvd.torch as hvd
from accordion_hvd import COLD, DPSGD, WAGMA, DiLoCo, DynaCOLD, LocalSGD, Nesterov, TopK
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.horovod.process_sets import registered

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from model_ranks import Ranks  # noqa: E402

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
os.environ[DYNAMIC] = "1"
INIT = hvd.init
SHAPES = {"weight": (4, 5), "bias": (5,)}
SIZE = 25
LR = 0.2


def centre(rank: int) -> np.ndarray:
    return np.random.default_rng([3, rank]).normal(size=SIZE).astype(np.float32)


def model() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def distributed(
    method: Any, parameters: dict[str, Any], lr: float = LR, momentum: float = 0, **options: Any
) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=lr, momentum=momentum),
        named_parameters=parameters.items(),
        compression=method,
        **options,
    )


def flat(parameters: dict[str, Any]) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in parameters.values()])


def take(optimizer: Any, parameters: dict[str, Any]) -> np.ndarray:
    """Take a step on f_i = 0.5 ||x - c_i||^2, and return this rank's model."""
    optimizer.zero_grad()
    (0.5 * (flat(parameters) - torch.tensor(centre(hvd.rank()))).square().sum()).backward()
    optimizer.step()
    return flat(parameters).detach().numpy().copy()


def simulated(method: Averaging, steps: int) -> list[np.ndarray]:
    """Return all ranks' models after each step, as simulated ranks in NumPy compute them."""
    world = Ranks(method, hvd.size(), np.zeros(SIZE, np.float32))
    return [
        world.take(lambda rank, step, x: -np.float32(LR) * (x - centre(rank)), LR)
        for _ in range(steps)
    ]


def everybody(x: np.ndarray) -> np.ndarray:
    return hvd.allgather(torch.tensor(x)[None], name="everybody").numpy()


METHODS = [
    LocalSGD(3),
    WAGMA(2, 4, wait_avoiding=False),
    WAGMA(3, 4, wait_avoiding=False),
    WAGMA(2, 4, compressor=TopK(0.2)),
    DiLoCo(3, Nesterov(0.7, 0.9)),
    DPSGD("ring"),
    DPSGD("exponential"),
    COLD("ring", 0.5, TopK(0.5)),
    DynaCOLD("ring"),
]


def follow(method: Averaging) -> Any:
    """Assert that real ranks take nine steps as simulated ranks do; return the optimizer."""
    parameters = model()
    optimizer = distributed(method, parameters)
    for due in simulated(method, 9):
        mine = take(optimizer, parameters)
        np.testing.assert_allclose(
            mine, due[hvd.rank()], rtol=1e-4, atol=1e-4, err_msg=repr(method)
        )
    optimizer.close()
    rows = everybody(flat(parameters).detach().numpy())
    assert (rows == rows[0]).all(), method
    assert optimizer.averaging.stats()["steps"] == 9
    assert optimizer.averaging.stats()["sent"] > 0
    assert not optimizer.averaging.without_waiting
    return optimizer


def check_groups_need_no_process_sets() -> None:
    """If Horovod cannot add process sets, groups exchange their shares among all ranks.

    Groups with a compressor need process sets and are refused.
    """
    known = len(registered())
    os.environ[DYNAMIC] = "0"
    try:
        for method in METHODS[1:3]:
            follow(method)
        try:
            follow(METHODS[3])
        except ValueError as error:
            assert "process sets of ranks" in str(error) and "are needed" in str(error)
        else:
            raise AssertionError("groups' compressors need process sets")
    finally:
        os.environ[DYNAMIC] = "1"
    assert len(registered()) == known


def check_real_ranks_do_what_simulated_ones_do() -> None:
    """Real ranks compute the same models as simulated ranks, with all methods.

    Over MPI, only methods that communicate differently there are checked.
    """
    mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
    for method in METHODS[1:2] + METHODS[-3:] if mpi else METHODS:
        averaging = follow(method).averaging
        assert (averaging._averages.neighbourhood is not None) == (mpi and method.neighbours_only)
    assert mpi or len(registered()) > 1


def check_averaging_each_step_is_averaging_gradients() -> None:
    ours, theirs = model(), model()
    one, other = distributed(LocalSGD(1), ours), distributed(hvd.Compression.none, theirs)
    for _ in range(5):
        np.testing.assert_allclose(take(one, ours), take(other, theirs), atol=1e-6)


def check_without_waiting_where_mpi_is_there() -> None:
    parameters = model()
    optimizer = distributed("wagma:2,period=4,timeout=50", parameters, momentum=0.5)
    assert optimizer.averaging.without_waiting == ("OMPI_COMM_WORLD_SIZE" in os.environ)
    for step in range(10):
        rows = everybody(take(optimizer, parameters))
        assert (rows == rows[0]).all() == (step in (3, 7)), step
    optimizer.average_now()
    rows = everybody(flat(parameters).detach().numpy())
    assert (rows == rows[0]).all()
    assert np.abs(rows[0] - np.mean([centre(r) for r in range(hvd.size())], 0)).max() < 1
    optimizer.close()
    if optimizer.averaging.without_waiting:
        stats = optimizer.averaging.stats()
        assert stats["late"] + stats["on_time"] == 8 and stats["sent"] > 0
        assert not optimizer.averaging._averages.engine._thread.is_alive()
        assert optimizer.averaging._averages.engine.timeout == 50


def check_without_waiting_that_is_not_possible() -> None:
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return
    try:
        distributed(WAGMA(2, wait_avoiding=True), model())
    except RuntimeError as error:
        assert "was not started by an MPI launcher" in str(error), error
    else:
        raise AssertionError("it was possible")


def check_half_precision_and_two_dtypes() -> None:
    for dtypes in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)):
        parameters = {
            name: torch.nn.Parameter(torch.full((3,), float(hvd.rank()), dtype=dtype) * 0)
            for name, dtype in zip("ab", dtypes, strict=True)
        }
        optimizer = distributed(WAGMA(2, 2), parameters, lr=1.0)
        for _ in range(2):
            for parameter in parameters.values():
                parameter.grad = torch.full_like(parameter, -float(hvd.rank()))
            optimizer.step()
        for parameter, dtype in zip(parameters.values(), dtypes, strict=True):
            assert parameter.dtype == dtype
            rows = everybody(parameter.detach().double().numpy())
            assert (rows == rows[0]).all()
        optimizer.close()


def check_buffers_are_averaged_on_demand() -> None:
    torch.manual_seed(hvd.rank())
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters()), net.named_parameters(), compression=LocalSGD(4)
    )
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(8, 3) + hvd.rank()).sum().backward()
        optimizer.step()
    rows = everybody(net[1].running_mean.numpy())
    assert not (rows == rows[0]).all()
    optimizer.average_now(net)
    after = everybody(net[1].running_mean.numpy())
    np.testing.assert_allclose(after, np.tile(rows.mean(0), (hvd.size(), 1)), rtol=1e-5, atol=1e-6)
    assert int(net[1].num_batches_tracked) == 2


def check_a_rank_without_a_step_still_averages() -> None:
    """A rank whose step a GradScaler skips still takes part in the average."""
    parameters = model()
    optimizer = distributed(LocalSGD(2), parameters)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        optimizer.zero_grad()
        loss = 0.5 * (flat(parameters) - 1).square().sum()
        if step == 1 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    rows = everybody(flat(parameters).detach().numpy())
    skipped, others = LR, LR + (1 - LR) * LR
    due = (skipped + (hvd.size() - 1) * others) / hvd.size()
    np.testing.assert_allclose(rows, due, rtol=1e-5)


def check_state_goes_on() -> None:
    """A training with DiLoCo resumes as simulated, because the state includes the velocity."""
    method = DiLoCo(2, Nesterov(0.7, 0.9))
    due = simulated(method, 8)
    parameters = model()
    optimizer = distributed(method, parameters)
    for _ in range(4):
        take(optimizer, parameters)
    saved = {name: p.detach().clone() for name, p in parameters.items()}
    state = optimizer.averaging.state()
    fresh = {name: torch.nn.Parameter(p) for name, p in saved.items()}
    resumed = distributed(method, fresh)
    resumed.averaging.load(state)
    for step in range(4, 8):
        np.testing.assert_allclose(take(resumed, fresh), due[step][hvd.rank()], atol=1e-5)


def folder() -> str:
    name = np.frombuffer(tempfile.mkdtemp().encode(), np.uint8)
    return bytes(hvd.broadcast(torch.tensor(name), 0, name="folder").numpy()).decode()


def check_saved_state_goes_on_exactly() -> None:
    """A training resumed within a period equals one that does not stop, bit for bit.

    Saving is refused while models differ, and so is loading another method's state.
    """
    mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
    chosen = [METHODS[3], METHODS[4], METHODS[7], METHODS[8]]
    for method in [WAGMA(2, 3, wait_avoiding=False)] if mpi else chosen:
        parameters = model()
        optimizer = distributed(method, parameters)
        for _ in range(5):
            take(optimizer, parameters)
        where = folder()
        try:
            hvd.save_state(where, only=[optimizer])
        except RuntimeError as error:
            assert "call optimizer.average_now()" in str(error), error
        else:
            raise AssertionError("models that are not equal were saved")
        optimizer.average_now()
        hvd.save_state(where, only=[optimizer])
        fresh = {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items()}
        for _ in range(4):
            take(optimizer, parameters)
        resumed = distributed(method, fresh)
        hvd.load_state(where, only=[resumed])
        for _ in range(4):
            mine = take(resumed, fresh)
        assert (mine == flat(parameters).detach().numpy()).all(), method
        assert resumed.averaging.steps == 9
        for others in (LocalSGD(7), TopK(0.1)):
            try:
                hvd.load_state(where, only=[distributed(others, model())])
            except RuntimeError as error:
                assert repr(method) in str(error), error
            else:
                raise AssertionError("another method's state was loaded")


def check_saved_state_on_other_ranks() -> None:
    """Two of four ranks resume with DiLoCo's velocity, but without COLD's estimates."""
    known = [known for known in registered() if known.ranks == [0, 1]]  # as one of the groups
    pair = known[0] if known else hvd.add_process_set([0, 1])
    for method, shared in ((METHODS[4], True), (METHODS[8], False), (METHODS[3], None)):
        parameters = model()
        optimizer = distributed(method, parameters)
        for _ in range(5):
            take(optimizer, parameters)
        optimizer.average_now()
        where, saved = folder(), optimizer.averaging.state()["states"][0]
        hvd.save_state(where, only=[optimizer])
        few = distributed(method, parameters, process_set=pair)
        hvd.load_state(where, only=[few])
        few.average_now()
        if hvd.rank() < 2:
            for key, value in few.averaging.state()["states"][0].items():
                kept = shared if shared is not None else key == "reference"
                assert (value == (saved[key] if kept else 0 * saved[key])).all(), (method, key)
            assert few.averaging.steps == 0
            take(few, parameters)
        everybody(np.zeros(1, np.float32))


def check_what_is_refused() -> None:
    def sgd(**options: Any) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, **options)

    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    scaler = torch.amp.GradScaler("cpu")
    for make, word in (
        (lambda: hvd.DistributedOptimizer(sgd(), compression=WAGMA(), op=hvd.Sum), "hvd.Average"),
        (lambda: hvd.DistributedOptimizer(sgd(), compression=WAGMA(), skip=["a"]), "skip"),
        (
            lambda: hvd.DistributedOptimizer(sgd(), compression=WAGMA(), grad_scaler=scaler),
            "grad_scaler",
        ),
        (lambda: hvd.DistributedOptimizer(sgd(), compression=WAGMA(9)), "group_size is 9"),
        (lambda: hvd.DistributedOptimizer(sgd(momentum=0.9), compression=COLD()), "plain SGD"),
        (lambda: hvd.DistributedOptimizer(adam, compression=DynaCOLD()), "plain SGD"),
        (lambda: hvd.DistributedOptimizer(distributed(LocalSGD(), model())), "already"),
        (lambda: hvd.DistributedOptimizer(sgd(), compression=DPSGD(np.eye(1))), "a matrix of"),
    ):
        try:
            make()
        except ValueError as error:
            assert word in str(error), error
        else:
            raise AssertionError(word)
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1)
    optimizer = hvd.DistributedOptimizer(groups, compression=COLD())
    optimizer.param_groups[0]["lr"] = 0.0
    (a + b).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        assert "groups is [0.0, 0.1], but must be equal" in str(error), error
    else:
        raise AssertionError("groups")


def check_models_that_differ_at_first() -> None:
    parameters = {"a": torch.nn.Parameter(torch.full((2,), float(hvd.rank())))}
    optimizer = distributed(WAGMA(2), parameters)
    parameters["a"].grad = torch.ones(2)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "Were the initial weights broadcast" in str(error)
    else:
        raise AssertionError("nobody has noticed")


if __name__ == "__main__":
    harness.main(globals())
