"""What `accordion_hvd.torch` promises, checked on real ranks."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import os
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import horovod.torch as stock
import numpy as np
import torch
from harness import refused

import accordion_hvd.torch as hvd
from accordion_hvd import (
    BF16,
    DGC,
    FP16,
    LGC,
    Accordion,
    AdaComp,
    AdaQS,
    Dense,
    Fixed,
    Gate,
    LocalSGD,
    PowerSGD,
    RandomK,
    Replay,
    ScaleCom,
    SketchedSGD,
    StepSchedule,
    Threshold,
    TopK,
    TwoLevel,
)
from accordion_hvd.check import PayloadError
from accordion_hvd.comm.agreement import RanksDisagree
from accordion_hvd.compressors import sparsifier
from accordion_hvd.engine import halves
from accordion_hvd.engine.guard import ReplicasDiffer
from accordion_hvd.simulation.one_process import simulate

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
torch.set_num_threads(1)
INIT = hvd.init

LEVELS = [Dense(), FP16(), BF16(), TopK(0.05), RandomK(0.05), PowerSGD(2)]
SPARSE = [Threshold(0.02), AdaComp(50), ScaleCom(0.05, beta=0.3)]


# --------------------------------------------------------------------------------------- helpers
def network(seed: int = 0, width: int = 64) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )


def batches(count: int, seed: int = 7, rank: int | None = None) -> Iterator[tuple[Any, Any]]:
    """Data that differs between ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + (hvd.rank() if rank is None else rank))
    for _ in range(count):
        x = torch.randn(8, 32, generator=generator)
        yield x, torch.randint(0, 10, (8,), generator=generator)


def loss_of(model: torch.nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(model: torch.nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | more)


def wrapped(model: torch.nn.Module, inner: Any = None, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        inner or sgd(model), named_parameters=model.named_parameters(), **options
    )


def train(model: torch.nn.Module, optimizer: Any, steps: int = 6, seed: int = 7) -> None:
    for batch in batches(steps, seed):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's vector, as rows."""
    return hvd.allgather(tensor.detach().reshape(1, -1).clone(), name="check.everywhere")


def assert_same(model: torch.nn.Module) -> None:
    rows = everywhere(weights(model))
    assert torch.isfinite(rows).all(), "weights are not finite"
    assert (rows == rows[0]).all(), "ranks hold different weights"


def shared_folder() -> Path:
    """A new folder that all ranks see (they share a machine)."""
    name = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    return Path(hvd.broadcast_object(name, 0, name="check.folder"))


def remove(folder: Path) -> None:
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


# ---------------------------------------------------------------------------------- what is there
def check_every_name_of_horovod_is_there() -> None:
    missing = [n for n in dir(stock) if not n.startswith("_") and not hasattr(hvd, n)]
    assert not missing, missing
    assert hvd.elastic.TorchState.__module__.startswith("accordion_hvd")
    missing = [n for n in stock.elastic.__all__ if not hasattr(hvd.elastic, n)]
    assert not missing, missing


def check_elastic_state() -> None:
    model, other = network(), network()
    optimizer, stray = wrapped(model, compression=TopK(0.1)), wrapped(other)
    train(model, optimizer)
    train(other, stray, steps=2)
    if hvd.rank():  # an optimizer that is not in the elastic state lives on rank 0 alone
        del other, stray
        gc.collect()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=hvd.rank())
    state.sync()
    assert_same(model)
    assert state.batch == 0
    kept = weights(model)
    train(model, optimizer)
    assert_same(model)
    assert not torch.equal(weights(model), kept)
    state.restore()
    assert torch.equal(weights(model), kept)


# --------------------------------------------------------------------------- weights and averages
def check_weights_are_equal_after_training() -> None:
    for level in [*LEVELS, *SPARSE, hvd.Compression.none, hvd.Compression.fp16, "topk:0.1"]:
        model = network(hvd.rank())
        optimizer = wrapped(model, compression=level)
        hvd.broadcast_parameters(model.state_dict(), 0)
        before = weights(model)
        train(model, optimizer)
        assert_same(model)
        assert not torch.equal(before, weights(model)), "nothing was learned"


def check_halves_that_the_engine_adds() -> None:
    """As on slow links."""
    exact, rounded = network(), network()
    train(exact, wrapped(exact))
    optimizer = wrapped(rounded, compression=FP16())
    limit, halves.SLOW = halves.SLOW, math.inf
    try:
        train(rounded, optimizer)
    finally:
        halves.SLOW = limit
    assert optimizer.exchange.communicator.half_allreduce
    assert_same(rounded)
    torch.testing.assert_close(weights(rounded), weights(exact), atol=2e-3, rtol=0)


def check_weights_are_equal_with_two_levels() -> None:
    """Levels of both kinds, changing; state saved and restored on the way."""
    pair = {"low": TwoLevel(PowerSGD(4)), "high": TwoLevel(PowerSGD(1))}
    mixed = {"low": Dense(), "high": TwoLevel(TopK(0.05))}
    with harness.machines_of(max(1, hvd.size() // 2), hvd.barrier):
        for levels in (pair, mixed):
            policy = Accordion(**levels, window=2, interval=1, threshold=0.9)
            model = network(hvd.rank())
            optimizer = wrapped(model, compression=policy)
            hvd.broadcast_parameters(model.state_dict(), 0)
            train(model, optimizer, 8)
            assert_same(model)
            assert {row["level"] for row in policy.history} == {0, 1}, policy.history
            folder = shared_folder()
            hvd.save_state(folder, only=[optimizer])
            hvd.load_state(folder, only=[optimizer])
            remove(folder)
            train(model, optimizer, 2)
            assert_same(model)


def check_dense_equals_stock_horovod() -> None:
    for op in (hvd.Average, hvd.Sum):
        theirs, ours = network(), network()
        other = stock.DistributedOptimizer(sgd(theirs), theirs.named_parameters(), op=op)
        train(theirs, other)
        train(ours, wrapped(ours, op=op))
        difference = (weights(theirs) - weights(ours)).abs().max()
        assert difference < 1e-6, difference
        assert hvd.size() > 2 or difference == 0, difference


def check_compressed_equals_simulation() -> None:
    """The wires change nothing: the same gradients through `simulate` give the same means."""
    for level in (TopK(0.05), RandomK(0.05), PowerSGD(2), FP16(), BF16(), *SPARSE, DGC(0.05)):
        compare_with_simulation(level)
    compare_with_simulation(SketchedSGD(0.02, columns=5))


def check_learned_codes_equal_simulation() -> None:
    """Four steps of LGC, one in each phase; its autoencoder is the same on all ranks."""
    for form in ("ring", "server"):
        optimizer = compare_with_simulation(LGC(0.05, form, dense=1, training=2, innovation=0.005))
        (slot,) = (s for s in optimizer.exchange.slots if s.bucket.compress)
        assert optimizer.exchange.phase(slot) == 3
        autoencoders = everywhere(slot.state["weights"])
        assert (autoencoders == autoencoders[0]).all()
        assert 0 < optimizer.exchange.stats()["reports"][slot.bucket.name]["reconstruction"] < 10


def check_two_levels_equal_simulation() -> None:
    """Two machines by name, so that what is between them is simulated with two as well."""
    local_size = hvd.size() // 2
    with harness.machines_of(local_size, hvd.barrier):
        for level in (TopK(0.05), PowerSGD(2), BF16()):
            stats = compare_with_simulation(TwoLevel(level), local_size).exchange.stats()
            assert 0 < stats["between"] < stats["sent"] or local_size == 1
    with harness.machines_of(hvd.size(), hvd.barrier):
        stats = compare_with_simulation(TwoLevel(TopK(0.05)), hvd.size()).exchange.stats()
        assert stats["between"] == 0 < stats["sent"]


def check_machines_of_different_size_are_refused() -> None:
    if hvd.size() == 4:
        model = network()
        optimizer = wrapped(model, compression=TwoLevel(TopK(0.05)))
        with harness.machines_of(3, hvd.barrier), refused(ValueError, "machines have 3, 1 ranks"):
            train(model, optimizer, 1)


def compare_with_simulation(level: Any, local_size: int = 1) -> Any:
    """Gradients and bytes after a few steps; returns the optimizer."""
    model = network()
    optimizer = wrapped(model, sgd(model, lr=0.0, momentum=0.0), compression=level)
    world = simulate(level, hvd.size(), local_size=local_size)
    streams = [batches(4, rank=rank) for rank in range(hvd.size())]
    for batch in batches(4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        given = []
        for stream in streams:
            copied = copy.deepcopy(model)
            copied.zero_grad()
            loss_of(copied, next(stream)).backward()
            named = list(copied.named_parameters())
            given.append({n: p.grad for n, p in reversed(named)})
        means = world.step(given)[hvd.rank()]
        assert means is not None
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gap = (parameter.grad - means[name]).abs().max()
            assert gap < 1e-6, (level, name, gap)
    ours, theirs = optimizer.exchange.stats(), world.exchanges[hvd.rank()].stats()
    assert all(np.isclose(ours[key], theirs[key]) for key in ("payload", "sent", "between"))
    return optimizer


def check_one_rank_equals_plain_training() -> None:
    alone = hvd.add_process_set([hvd.size() - 1])
    try:
        plain, ours = network(), network()
        inner = sgd(plain)
        train(plain, inner)
        optimizer = wrapped(ours, compression=TopK(0.01), process_set=alone)
        train(ours, optimizer)
        assert torch.equal(weights(plain), weights(ours))
        assert optimizer.exchange.stats()["sent"] == 0
        optimizer.synchronize()
        optimizer.set_backward_passes_per_step(2)
    finally:
        hvd.remove_process_set(alone)


def check_updates_contain_the_momentum() -> None:
    """DGC that leaves nothing out, around plain SGD, is SGD with momentum; alone too."""
    alone = hvd.add_process_set([hvd.size() - 1])
    try:
        for options in ({}, {"process_set": alone}):
            if options and not alone.included():
                continue
            plain, ours = network(), network()
            train(plain, wrapped(plain, **options))
            inner = sgd(ours, momentum=0.0)
            train(ours, wrapped(ours, inner, compression=DGC(1.0, momentum=0.9), **options))
            torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-4, atol=1e-5)
        hvd.barrier()
    finally:
        hvd.remove_process_set(alone)
    model = network()
    train(model, wrapped(model, sgd(model, momentum=0.0), compression=DGC(0.01, warmup=4)))
    assert_same(model)
    for momentum in (sgd(network()), torch.optim.Adam(network().parameters())):
        with refused(ValueError, "DGC(ratio=0.001)", "returns finished updates", "plain SGD"):
            hvd.DistributedOptimizer(momentum, compression=DGC())


def check_a_broken_payload_names_its_sender() -> None:
    """On every rank, whose weights and errors are as they were; training goes on."""
    odd = hvd.size() - 1
    for level in (TopK(0.05), Threshold(0.02)):
        model = network()
        optimizer = wrapped(model, sgd(model), compression=level)
        train(model, optimizer, 3)
        before, owed = weights(model), errors(optimizer)
        encode = ones if hvd.rank() == odd else sparsifier.encode
        with replaced(level, encode), refused(PayloadError, f"rank {odd} has sent does not"):
            train(model, optimizer, 1)
        hvd.barrier()
        assert torch.equal(weights(model), before)
        for mine, was in zip(errors(optimizer), owed, strict=True):
            torch.testing.assert_close(mine, was, rtol=0, atol=1e-6)
        train(model, optimizer, 2)
        assert_same(model)


def ones(*given: Any) -> torch.Tensor:
    """Instead of a payload."""
    return sparsifier.encode(*given).fill_(255)


@contextmanager
def replaced(level: Any, encode: Any) -> Iterator[None]:
    """Within it, this rank's payloads are made by `encode`."""
    module = sys.modules[type(level).__module__]
    was, module.encode = module.encode, encode  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.encode = was  # type: ignore[attr-defined]


def errors(optimizer: Any) -> list[torch.Tensor]:
    slots = [slot for slot in optimizer.exchange.slots if slot.bucket.compress]
    return [slot.state["error"].clone() for slot in slots]


def check_exchanges_leave_during_backward() -> None:
    """The last layers' gradients are on their way before the first layer's is computed."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)])
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrapped(model, sgd(model, lr=1e-3), compression=TopK(0.1))
    seen = []

    def look(*_: Any) -> None:
        running = optimizer.exchange.running
        seen.append(None if running is None else running.launched)

    model[0].register_full_backward_pre_hook(look)
    for step in range(3):
        optimizer.zero_grad()
        seed = torch.Generator().manual_seed(step * 10 + hvd.rank())
        model(torch.randn(2, 2048, generator=seed)).square().mean().backward()
        optimizer.step()
    assert seen[1:] == [2, 2], seen
    assert_same(model)


def check_process_set_averages_within() -> None:
    half = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    try:
        model = network(hvd.rank())
        optimizer = wrapped(model, compression=PowerSGD(2), process_set=half, guard="off")
        if half.included() and half.size() > 1:
            for p in model.parameters():
                hvd.broadcast_(p.data, 0, process_set=half)
        train(model, optimizer)
        rows = everywhere(weights(model))
        evens = rows[0::2]
        assert (evens == evens[0]).all()
        assert not torch.equal(rows[0], rows[1])
    finally:
        hvd.remove_process_set(half)


# ------------------------------------------------------------------------------------- Accordion
def check_accordion_switches_everywhere_alike() -> None:
    model = network()
    policy = Accordion(low=PowerSGD(4), high=TopK(0.05), window=3, interval=1, threshold=0.9)
    optimizer = wrapped(model, compression=policy)
    for epoch in range(5):
        train(model, optimizer, 3, seed=epoch)
    assert_same(model)
    assert {row["level"] for row in policy.history} == {0, 1}, "nothing ever switched"
    text = repr(policy.history).encode()
    texts = hvd.allgather_object(text, name="check.history")
    assert all(other == texts[0] for other in texts), "ranks decided differently"

    again, replay = network(), Replay(policy.history)
    repeated = wrapped(again, compression=replay)
    for epoch in range(5):
        train(again, repeated, 3, seed=epoch)
    assert torch.equal(weights(model), weights(again)), "the replay differs"


def check_windows_by_hand_and_learning_rate() -> None:
    model = network()
    policy = Accordion(low=Dense(), high=TopK(0.05), threshold=100.0, interval=1)
    inner = sgd(model)
    optimizer = wrapped(model, inner, compression=policy)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3], 0.1)
    seen = []
    for epoch in range(6):
        train(model, optimizer, 2, seed=epoch)
        seen.append(set(optimizer.exchange.levels().values()))
        scheduler.step()
        optimizer.end_window()
    assert_same(model)
    fell = [row["window"] for row in policy.history if row["reason"] == "learning rate fell"]
    assert set(fell) == {2}, policy.history
    assert [("TopK(ratio=0.05)" in levels) for levels in seen] == [
        False, False, True, False, True, True,
    ], seen  # fmt: skip


def check_a_gate_tries_and_chooses() -> None:
    model = network()
    gate = Gate(steps=2, every=20)
    policy = Accordion(low=PowerSGD(2), high=TopK(0.1), window=30, interval=1, gate=gate)
    optimizer = wrapped(model, sgd(model), compression=policy)
    seen = set()
    for step in range(70):
        train(model, optimizer, 1, seed=step)
        seen.add(tuple(sorted(set(optimizer.exchange.levels().values()))))
    assert_same(model)
    served = {compressor for combination in seen for compressor in combination}
    assert {"PowerSGD(rank=2)", "FP16()"} <= served, seen
    verdicts = hvd.allgather_object(gate.verdict)
    assert all(text == verdicts[0] and " a step" in text for text in verdicts), verdicts
    if hvd.rank() == 0:
        advice = optimizer.exchange.advice()
        assert any(way.turns for way in advice.ways), advice
        assert all(row.dense > 0 for row in advice.tensors), advice


def check_without_a_window_there_is_an_error() -> None:
    from accordion_hvd.policies import windows

    model = torch.nn.Linear(32, 32)
    optimizer = wrapped(model, compression=Accordion(low=Dense(), high=TopK(0.1)), guard="off")
    patience, windows.PATIENCE = windows.PATIENCE, 3
    try:
        with refused(RuntimeError, "window", "end_window"):
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.ones(2, 32)).sum().backward()
                optimizer.step()
    finally:
        windows.PATIENCE = patience


# ---------------------------------------------------------------------- Horovod's ways, and better
def check_closures_use_averaged_gradients() -> None:
    plain, closed = network(), network()
    ordinary, optimizer = wrapped(plain), wrapped(closed)
    train(plain, ordinary)
    for batch in batches(6):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(closed, batch)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    assert torch.equal(weights(plain), weights(closed))


def check_lbfgs_takes_the_same_turns() -> None:
    model = network()
    inner = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    optimizer = wrapped(model, inner)
    for batch in batches(2):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(model)


def check_zero_grad_and_its_race() -> None:
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, next(batches(1))).backward()
    with refused(AssertionError, "zero_grad", "race"):
        optimizer.zero_grad()
    optimizer.step()
    assert_same(model)


def check_wrapping_keeps_class_state_and_defaults() -> None:
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.123)
    loss_of(model, next(batches(1, rank=0))).backward()
    inner.step()
    optimizer = wrapped(model, inner, compression=TopK(0.05))
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.defaults["lr"] == 0.123
    assert type(optimizer).__name__ == "Adam"
    assert len(optimizer.state) == len(list(model.parameters())), "Adam's moments were lost"
    optimizer.zero_grad()
    train(model, optimizer)
    assert_same(model)
    assert optimizer.state_dict().keys() == inner.state_dict().keys()


def check_horovods_attributes_are_there() -> None:
    model = network()
    optimizer = wrapped(model, op=hvd.Sum, sparse_as_dense=True)
    assert optimizer.op == hvd.Sum and wrapped(network()).op == hvd.Average
    assert optimizer.process_set is hvd.global_process_set
    assert optimizer.sparse_as_dense is True and optimizer.gradient_predivide_factor == 1.0
    named = {parameter: name for name, parameter in model.named_parameters()}
    assert optimizer._parameter_names == named


def check_frozen_integers_among_the_parameters() -> None:
    model = network()
    model.quantised = torch.nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
    optimizer = wrapped(model, compression=TopK(0.1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 2)
    assert_same(model)
    assert model.quantised.tolist() == [0, 1, 2, 3] and model.quantised.grad is None


def check_scheduler_made_before_wrapping() -> None:
    model = network()
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = wrapped(model, inner)
    train(model, optimizer, 2)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert_same(model)


def check_added_groups_are_averaged() -> None:
    model, more = network(), torch.nn.Linear(10, 40)
    with torch.no_grad():
        more.weight.fill_(0.1), more.bias.fill_(0.0)
    optimizer = wrapped(model, compression=TopK(0.1))
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": more.parameters(), "lr": 0.05})
    both = torch.nn.Sequential(model, more)
    train(both, optimizer, 3)
    assert_same(both)
    fresh = network(3)
    early = wrapped(fresh)
    extra = torch.nn.Linear(10, 10)
    hvd.broadcast_parameters(extra.state_dict(), 0)
    early.add_param_group({"params": extra.parameters()})
    both = torch.nn.Sequential(fresh, extra)
    train(both, early, 3)
    assert_same(both)


def check_layers_unfrozen_on_the_way() -> None:
    model = network()
    model[2].requires_grad_(False)
    optimizer = wrapped(model, compression=PowerSGD(2))
    before = model[2].weight.detach().clone()
    train(model, optimizer, 3)
    assert torch.equal(before, model[2].weight)
    model[2].requires_grad_(True)
    train(model, optimizer, 3)
    assert_same(model)
    assert not torch.equal(before, model[2].weight)
    model[2].requires_grad_(False)
    optimizer.zero_grad()
    before = model[2].weight.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(before, model[2].weight), "a layer frozen again moved"
    assert_same(model)


def check_parameters_unused_on_some_ranks() -> None:
    model = network()
    side = torch.nn.Linear(32, 40)
    hvd.broadcast_parameters(side.state_dict(), 0)
    both = torch.nn.ModuleList([model, side])
    optimizer = wrapped(both, compression=TopK(0.1))
    for step, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if (hvd.rank() + step) % 2:
            loss = loss + side(batch[0]).square().mean()
        loss.backward()
        optimizer.step()
    assert_same(both)


def check_tied_weights() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.ReLU(), torch.nn.Linear(40, 40))
    model[2].weight = model[0].weight
    optimizer = wrapped(model, compression=PowerSGD(2))
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step * 10 + hvd.rank()))
        model(x).square().mean().backward()
        optimizer.step()
    assert_same(model)


def check_two_optimizers_side_by_side() -> None:
    first, second = network(0), network(1)
    ours, theirs = wrapped(first, compression=TopK(0.1)), wrapped(second, compression=PowerSGD(1))
    for batch in batches(4):
        ours.zero_grad()
        theirs.zero_grad()
        (loss_of(first, batch) + loss_of(second, batch)).backward()
        ours.step()
        theirs.step()
    assert_same(first)
    assert_same(second)


def check_gradient_accumulation() -> None:
    model, other = network(), network()
    optimizer = wrapped(model, backward_passes_per_step=2)
    single = wrapped(other)
    data = list(batches(8))
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        loss_of(model, first).backward()
        loss_of(model, second).backward()
        optimizer.step()
        single.zero_grad()
        (loss_of(other, first) + loss_of(other, second)).backward()
        single.step()
    assert_same(model)
    assert torch.allclose(weights(model), weights(other), atol=1e-6)
    optimizer.set_backward_passes_per_step(1)
    train(model, optimizer, 2)
    assert optimizer.exchange.steps == 6
    optimizer.zero_grad()
    loss_of(model, data[0]).backward()
    with refused(AssertionError, "backward_passes_per_step"):
        loss_of(model, data[0]).backward()
    optimizer.step()
    # fewer passes than announced: step() exchanges what there is
    optimizer.set_backward_passes_per_step(3)
    optimizer.zero_grad()
    loss_of(model, data[0]).backward()
    optimizer.step()
    assert_same(model)


def check_clipping_between_synchronize_and_step() -> None:
    model = network()
    optimizer = wrapped(model, compression=TopK(0.1))
    for batch in batches(4):
        optimizer.zero_grad()
        (100 * loss_of(model, batch)).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        rows = everywhere(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        assert (rows == rows[0]).all()
        assert rows[0].norm() < 0.51
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_same(model)
    assert optimizer.exchange.steps == 4
    loss_of(model, batch).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(w.message) for w in caught)
    assert optimizer.exchange.steps == 5, "gradients were exchanged twice"


def check_grad_scaler_keeps_errors_unscaled() -> None:
    def run(scales: list[float], bad: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        optimizer = wrapped(model, compression=TopK(0.05), grad_scaler=scaler)
        for step, batch in enumerate(batches(len(scales))):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            if step == bad and hvd.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(scales[(step + 1) % len(scales)])
        assert_same(model)
        slot = optimizer.exchange.slots[0]
        return weights(model), slot.compressor.residual(slot.state).clone()

    plain, error = run([1.0] * 6, None)
    scaled, scaled_error = run([1024.0, 1024.0, 8.0, 8.0, 65536.0, 1.0], None)
    assert torch.allclose(plain, scaled, atol=1e-6)
    assert torch.allclose(error, scaled_error, atol=1e-6), "errors depend on the scale"
    skipped, _ = run([1024.0] * 6, bad=3)
    assert torch.isfinite(skipped).all()


def check_non_finite_gradients_reach_all_and_poison_nothing() -> None:
    for level in (TopK(0.05), PowerSGD(2), Accordion(PowerSGD(2), TopK(0.1), window=100)):
        model = network()
        optimizer = wrapped(model, compression=level)
        train(model, optimizer, 3)
        slots = optimizer.exchange.slots
        errors = [s.compressor.residual(s.state) for s in slots]
        before = [None if e is None else e.clone() for e in errors]
        optimizer.zero_grad()
        factor = float("nan") if hvd.rank() == hvd.size() - 1 else 1.0
        (factor * loss_of(model, next(batches(1)))).backward()
        optimizer.synchronize()
        assert all(torch.isnan(p.grad).all() for p in model.parameters()), "not all ranks heard"
        after = [s.compressor.residual(s.state) for s in slots]
        for old, new in zip(before, after, strict=True):
            assert old is None or torch.allclose(old, new, atol=1e-6), "error was poisoned"
        optimizer.zero_grad()
        train(model, optimizer, 2)
        assert_same(model)


def check_sparse_gradients_beside_compression() -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(200, 16, sparse=True)
        head = torch.nn.Linear(16, 128)
        model = torch.nn.ModuleDict({"table": table, "head": head})
        dense = copy.deepcopy(model)
        dense["table"].sparse = False
        run = {}
        for name, net in (("sparse", model), ("dense", dense)):
            inner = sgd(net, momentum=0.0)
            options = {"compression": TopK(1.0), "sparse_as_dense": as_dense}
            optimizer = wrapped(net, inner, **options)
            for step in range(3):
                seed = torch.Generator().manual_seed(31 * step + hvd.rank())
                rows = torch.randint(0, 200, (12,), generator=seed)
                optimizer.zero_grad()
                net["head"](net["table"](rows)).square().mean().backward()
                optimizer.step()
                if name == "sparse":
                    assert net["table"].weight.grad.is_sparse
            run[name] = weights(net)
            assert_same(net)
        assert torch.allclose(run["sparse"], run["dense"], atol=1e-6), as_dense


def check_skip_patterns_travel_dense() -> None:
    model = network()
    optimizer = wrapped(model, compression=TopK(0.01), skip=["4.*", "0.weight"])
    train(model, optimizer, 1)
    levels = optimizer.exchange.levels()
    compressed = {name for name, level in levels.items() if level != "Dense()"}
    assert compressed == {"2.weight"}, levels


def check_channels_last_and_half_precision() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 16, 3)
    )
    model = model.to(memory_format=torch.channels_last)
    for level in (Dense(), PowerSGD(2), TopK(0.1)):
        optimizer = wrapped(model, compression=level)
        for step in range(3):
            seed = torch.Generator().manual_seed(step * 10 + hvd.rank())
            x = torch.randn(2, 8, 8, 8, generator=seed).to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert_same(model)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        half = network(hvd.rank()).to(dtype)
        hvd.broadcast_parameters(half.state_dict(), 0)
        for level in (Dense(), PowerSGD(2), TopK(0.1), FP16()):
            optimizer = wrapped(half, sgd(half, lr=0.01), compression=level)
            for x, y in batches(3):
                optimizer.zero_grad()
                loss_of(half, (x.to(dtype), y)).backward()
                optimizer.step()
            assert half[0].weight.grad.dtype == dtype
            assert_same(half)


def check_compiled_models() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = wrapped(model, compression=PowerSGD(2))
    train(compiled, optimizer, 3)
    assert_same(model)


def check_copies_and_pickles() -> None:
    model = network()
    policy = Accordion(low=PowerSGD(2), high=TopK(0.1), window=2, interval=1)
    optimizer = wrapped(model, compression=policy)
    train(model, optimizer, 3)
    assert repr(pickle.loads(pickle.dumps(policy)).history) == repr(policy.history)
    assert pickle.loads(pickle.dumps(TopK(0.1))) == TopK(0.1)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert isinstance(twin, torch.optim.SGD)
    assert twin.param_groups[0]["params"][0] is next(iter(twin_model.parameters()))
    train(twin_model, twin, 3)
    assert_same(twin_model)
    assert not torch.equal(weights(twin_model), weights(model))
    buffer = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    train(loaded["model"], loaded["optimizer"], 2)
    assert_same(loaded["model"])
    train(model, optimizer, 2)
    assert_same(model)


def check_broadcasting_optimizer_state_leaves_weights_alone() -> None:
    model = network(0)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1 + hvd.rank(), weight_decay=0.5)
    if hvd.rank() == 0:
        loss_of(model, next(batches(1))).backward()
        inner.step()
        inner.zero_grad()
    for optimizer in (inner, wrapped(model, inner)):
        before = weights(model)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert torch.equal(before, weights(model))
        assert optimizer.param_groups[0]["lr"] == 0.1
        moments = torch.cat([s["exp_avg"].reshape(-1) for s in optimizer.state.values()])
        rows = everywhere(moments)
        assert rows.any()
        assert (rows == rows[0]).all()
    hvd.broadcast_parameters(model.named_parameters(), 0)
    assert_same(model)


# ------------------------------------------------------------------------------------- refusals
def check_refusals() -> None:
    model = network()
    with refused(ValueError, "Adasum", "TopK"):
        wrapped(model, compression=TopK(0.1), op=hvd.Adasum)
    with refused(ValueError, "unique", "twice"):
        pairs = [("twice", p) for p in model.parameters()]
        hvd.DistributedOptimizer(sgd(model), named_parameters=pairs)
    with refused(ValueError, "backward_passes_per_step", "0"):
        wrapped(model, backward_passes_per_step=0)
    with refused(ValueError, "guard", "'loud'", "'warn'"):
        wrapped(model, guard="loud")
    with refused(TypeError, "3.5", "TopK(0.01)"):
        wrapped(model, compression=3.5)
    with refused(ValueError, "nonsense", "allowed", "topk"):
        wrapped(model, compression="nonsense")
    with refused(ValueError, "named"):
        hvd.DistributedOptimizer(sgd(model), named_parameters=[("one", model[0].weight)])
    policy = Accordion(low=Dense(), high=TopK(0.1), window=1)
    train(model, wrapped(model, compression=policy), 1)
    second = wrapped(network(), compression=policy)
    with refused(ValueError, "another optimizer"):
        train(model, second, 1)
        _ = second.exchange


def check_ours_in_stock_horovod_says_what_to_write() -> None:
    model = network()
    optimizer = stock.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), compression=PowerSGD(2)
    )
    with refused(TypeError, "import accordion_hvd.torch as hvd"):
        loss_of(model, next(batches(1))).backward()
    del optimizer


def check_sharded_parameters_are_refused() -> None:
    class FlatParameter(torch.nn.Parameter):
        pass

    flat = FlatParameter(torch.zeros(10))
    with refused(ValueError, "sharded", "part"):
        hvd.DistributedOptimizer(torch.optim.SGD([flat], 0.1), named_parameters=[("part", flat)])


# ---------------------------------------------------------------------------------------- guards
def check_ranks_set_up_differently_find_out() -> None:
    odd = hvd.rank() == hvd.size() - 1
    cases: list[Callable[[], Any]] = [
        lambda: wrapped(network(), compression=TopK(0.1 if odd else 0.2)),
        lambda: wrapped(network(), compression=PowerSGD(1) if odd else TopK(0.2)),
        lambda: wrapped(network(), compression=hvd.Compression.fp16 if odd else Dense()),
        lambda: wrapped(network(width=128 if odd else 64), compression=PowerSGD(1)),
        lambda: wrapped(network(), compression=PowerSGD(1), skip=["0.*"] if odd else []),
    ]
    for make in cases:
        optimizer = make()
        with refused(RanksDisagree, f"[{hvd.size() - 1}]" if hvd.size() > 2 else "rank"):
            optimizer.step()


def check_a_replica_that_drifts_is_reported() -> None:
    model = network()
    optimizer = wrapped(model, compression=PowerSGD(2), guard_every=5)
    train(model, optimizer, 3)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-3
    train(model, optimizer, 1)
    with refused(ReplicasDiffer, "after step 5", "weight"):
        train(model, optimizer, 1)


def check_weights_that_were_never_broadcast() -> None:
    """Horovod's own compression warns once, on rank 0, and goes on as Horovod does; ours stops."""

    def attempt(**options: Any) -> int:
        careless = network(hvd.rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(careless, wrapped(careless, guard_every=1, **options), 4)
        rows = everywhere(weights(careless))
        assert not torch.equal(rows[0], rows[1])
        return len([w for w in caught if "replicas differ" in str(w.message)])

    for options in ({}, {"compression": hvd.Compression.fp16}, {"guard": "warn"}):
        assert attempt(**options) == (hvd.rank() == 0), options
    assert attempt(compression=TopK(0.1), guard="warn") == (hvd.rank() == 0)
    assert attempt(guard="off") == 0
    for options in ({"compression": TopK(0.1)}, {"compression": "fp16"}, {"guard": "error"}):
        with refused(ReplicasDiffer, "after step 1", "'0.weight'", "broadcast"):
            attempt(**options)
    for name, word in (("COMPRESSION", "topk:0.1"), ("GUARD", "error")):
        os.environ[f"ACCORDION_HVD_{name}"] = word
        try:
            with refused(ReplicasDiffer, "after step 1"):
                attempt()
        finally:
            del os.environ[f"ACCORDION_HVD_{name}"]


# ------------------------------------------------------------------------------------ checkpoints
OFTEN: dict[str, Any] = {"window": 3, "interval": 1, "threshold": 0.9}


def check_resuming_equals_not_stopping() -> None:
    for before in (8, 9):  # within a window, and at its end, when a decision is due
        resume(functools.partial(Accordion, PowerSGD(3), TopK(0.05), **OFTEN), before)


def check_resuming_other_policies() -> None:
    """Before, within and after LGC's training; between AdaQS' looks; among turns of a schedule."""
    ladder, turns = [PowerSGD(1), PowerSGD(2)], {0: PowerSGD(2), 4: TopK(0.05), 7: PowerSGD(1)}
    resume(lambda: AdaQS(ladder, window=5, probes=2, drop=1.0), 7)
    resume(lambda: StepSchedule(turns, window=1), 5, 4)
    resume(lambda: Fixed(LGC(0.05, dense=1, training=3)), 3, 3)
    server = LGC(0.05, "server", dense=1, training=2, innovation=0.005)
    resume(lambda: StepSchedule({0: server, 2: Dense(), 4: server}, window=1), 3, 5)


def resume(policy: Callable[[], Any], before: int, after: int = 8) -> None:
    folder = shared_folder()

    def fresh() -> tuple[Any, Any]:
        model = network()
        return model, wrapped(model, compression=policy())

    model, optimizer = fresh()
    train(model, optimizer, before, seed=1)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    hvd.save_state(folder, only=[optimizer])
    train(model, optimizer, after, seed=2)

    saved.seek(0)
    stored = torch.load(saved)
    again, resumed = fresh()
    again.load_state_dict(stored["model"])
    resumed.load_state_dict(stored["optimizer"])
    hvd.load_state(folder, only=[resumed])
    train(again, resumed, after, seed=2)
    assert_same(again)
    gap = (weights(model) - weights(again)).abs().max()
    assert gap == 0 if hvd.size() == 2 else gap < 1e-5, gap
    ours, theirs = (repr(o.exchange.policy.history) for o in (optimizer, resumed))
    assert ours == theirs
    levels = {row["level"] for row in resumed.exchange.policy.history}
    assert levels if isinstance(policy(), AdaQS) else levels != {0}, levels
    phases = [[o.exchange.phase(s) for s in o.exchange.slots] for o in (optimizer, resumed)]
    assert phases[0] == phases[1]
    remove(folder)


def check_a_missing_file_is_named() -> None:
    folder = shared_folder()
    model = network()
    optimizer = wrapped(model, compression=TopK(0.05))
    train(model, optimizer, 2)
    hvd.save_state(folder, only=[optimizer])
    hvd.barrier()
    if hvd.rank() == 0:
        os.remove(folder / f"rank-00001-of-{hvd.size():05d}.npz")
    hvd.barrier()
    with refused(RuntimeError, "ranks [1]", "missing"):
        hvd.load_state(folder, only=[optimizer])
    other = wrapped(network(), compression=PowerSGD(1))
    with refused(RuntimeError, "missing"):
        hvd.load_state(folder / "nowhere", only=[other])
    remove(folder)


def check_another_number_of_ranks_keeps_the_residuals_sum() -> None:
    folder = shared_folder()
    model = network()
    optimizer = wrapped(model, compression=TopK(0.05))
    train(model, optimizer, 3)
    hvd.save_state(folder, only=[optimizer])
    slots = [s for s in optimizer.exchange.slots if s.bucket.compress]
    total = [hvd.allreduce(s.state["error"], op=hvd.Sum, name="check.sum") for s in slots]
    for ranks in ([0], [0, hvd.size() - 1], list(range(hvd.size()))):
        everybody = len(ranks) == hvd.size()
        process_set = hvd.global_process_set if everybody else hvd.add_process_set(ranks)
        if process_set.included():
            resumed = wrapped(network(), compression=TopK(0.05), process_set=process_set)
            hvd.load_state(folder, only=[resumed])
            kept = [s for s in resumed.exchange.slots if s.bucket.compress]
            for before, slot in zip(total, kept, strict=True):
                now = hvd.allreduce(
                    slot.state["error"], op=hvd.Sum, name="check.kept", process_set=process_set
                )
                assert before.any()
                assert torch.allclose(before, now, atol=1e-5), ranks
        if not everybody:
            hvd.remove_process_set(process_set)
    remove(folder)


# ------------------------------------------------------------------------------------- accounting
def check_stats_count_what_travels() -> None:
    model = network()
    optimizer = wrapped(model, compression=PowerSGD(2))
    train(model, optimizer, 3)
    stats = optimizer.exchange.stats()
    elements = sum(p.numel() for p in model.parameters())
    assert stats["steps"] == 3
    assert stats["dense"] == 3 * 4 * elements
    factors = 2 * (64 + 32 + 64 + 64) + 64 + 64 + 10 + 640  # 10 x 64 is too small to compress
    flags = 2
    ranks = hvd.size()
    assert stats["payload"] == 3 * 4 * (factors + flags), stats
    assert np.isclose(stats["sent"], stats["payload"] * 2 * (ranks - 1) / ranks)
    assert np.isclose(stats["ratio"], stats["dense"] / stats["payload"])
    assert all(seconds > 0 for seconds in stats["seconds"].values())


def check_environment_names_a_compression() -> None:
    os.environ["ACCORDION_HVD_COMPRESSION"] = "topk:0.25"
    try:
        model = network()
        optimizer = wrapped(model)
        train(model, optimizer, 1)
        assert "TopK(ratio=0.25)" in optimizer.exchange.levels().values()
        explicit = wrapped(network(), compression=Fixed(Dense()))
        assert set(explicit.exchange.levels().values()) == {"Dense()"}
        os.environ["ACCORDION_HVD_COMPRESSION"] = "none"
        assert set(wrapped(network()).exchange.levels().values()) == {"Dense()"}
        os.environ["ACCORDION_HVD_COMPRESSION"] = "localsgd:2"
        averaged = wrapped(network())
        assert averaged.averaging.method == LocalSGD(2)
        os.environ["ACCORDION_HVD_COMPRESSION"] = "topk:7"
        with refused(ValueError, "ACCORDION_HVD_COMPRESSION is 'topk:7'", "ratio"):
            wrapped(network())
    finally:
        del os.environ["ACCORDION_HVD_COMPRESSION"]


if __name__ == "__main__":
    harness.main(globals())
