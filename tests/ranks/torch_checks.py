"""Tests of `accordion_hvd.torch` on real ranks."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from harness import refused

import accordion_hvd.torch as hvd
from accordion_hvd import (
    BF16,
    DGC,
    EF21,
    FP16,
    Accordion,
    AdaComp,
    Dense,
    Gate,
    PowerSGD,
    RandomK,
    ScaleCom,
    StepSchedule,
    Threshold,
    TopK,
)

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
torch.set_num_threads(1)
INIT = hvd.init

LEVELS = [Dense(), FP16(), BF16(), TopK(0.05), RandomK(0.05), PowerSGD(2)]
LEVELS += [PowerSGD(2, wire="float16")]
SPARSE = [Threshold(0.02), AdaComp(50), ScaleCom(0.05, beta=0.3)]


# --------------------------------------------------------------------------------------- helpers
def horovod() -> Any:
    """Return Horovod's own module, which jobs over torch.distributed do not have."""
    import horovod.torch

    return horovod.torch


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
    """Yield batches that differ between ranks."""
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
    """Return all ranks' tensors as rows."""
    return hvd.allgather(tensor.detach().reshape(1, -1).clone(), name="check.everywhere")


def assert_same(model: torch.nn.Module) -> None:
    rows = everywhere(weights(model))
    assert torch.isfinite(rows).all(), "weights are not finite"
    assert (rows == rows[0]).all(), "ranks hold different weights"


def shared_folder() -> Path:
    """Return a new folder that all ranks see (they share a host)."""
    name = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    return Path(hvd.broadcast_object(name, 0, name="check.folder"))


def remove(folder: Path) -> None:
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)


# ---------------------------------------------------------------------------------- what is there
def check_names_are_complete() -> None:
    stock = horovod()
    missing = [n for n in dir(stock) if not n.startswith("_") and not hasattr(hvd, n)]
    assert not missing, missing
    assert hvd.elastic.TorchState.__module__.startswith("accordion_hvd")
    missing = [n for n in stock.elastic.__all__ if not hasattr(hvd.elastic, n)]
    assert not missing, missing


def check_broadcast_of_an_optimizer_without_state() -> None:
    """Gradients are zeros afterwards, as with Horovod's function."""
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer, before = wrapped(model), weights(model)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert model[0].bias.grad is None
    assert not model[0].weight.grad.any() and torch.equal(before, weights(model))


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


def check_dense_equals_stock_horovod() -> None:
    stock = horovod()
    for op in (hvd.Average, hvd.Sum):
        theirs, ours = network(), network()
        other = stock.DistributedOptimizer(sgd(theirs), theirs.named_parameters(), op=op)
        train(theirs, other)
        train(ours, wrapped(ours, op=op))
        difference = (weights(theirs) - weights(ours)).abs().max()
        assert difference < 1e-6, difference
        assert hvd.size() > 2 or difference == 0, difference


def check_exchanges_leave_during_backward() -> None:
    """The last two layers' exchanges begin before the first layer's gradient is computed."""
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


# ------------------------------------------------------------------------------------- Accordion
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
        assert any(option.trials for option in advice.options), advice
        assert all(row.dense > 0 for row in advice.tensors), advice


# ------------------------------------------------------------------- Horovod's calls, and better
def check_a_residual_goes_beside_though_one_rank_has_none() -> None:
    """The next level is EF21, which takes no residual of another; rank 0 alone has gradients."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40, bias=False)
    schedule = StepSchedule({0: TopK(0.1), 1: EF21(TopK(0.1))}, window=2)
    optimizer = wrapped(model, sgd(model, momentum=0.0), compression=schedule)
    for step in range(4):
        optimizer.zero_grad()
        (model.weight * (step + 1.0) * (hvd.rank() == 0)).square().sum().backward()
        optimizer.step()
    exchange = optimizer.exchange
    assert "EF21" in str(exchange.levels())
    assert exchange.bucket_states[0].carried is None, "it is sent once"
    assert_same(model)


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


def check_other_numbers_of_passes_than_announced() -> None:
    """More passes than announced are refused; after fewer, `step` exchanges the gradients."""
    model, (batch,) = network(), batches(1)
    optimizer = wrapped(model, backward_passes_per_step=2)
    optimizer.set_backward_passes_per_step(1)
    loss_of(model, batch).backward()
    with refused(AssertionError, "backward_passes_per_step"):
        loss_of(model, batch).backward()
    with refused(RuntimeError, "was changed between backward() and step()"):
        optimizer.step()
    optimizer.set_backward_passes_per_step(3)
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
    assert_same(model)
    assert optimizer.exchange.steps == 1


def check_clipping_comes_after_the_average() -> None:
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


def check_loss_scaling() -> None:
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
        entry = optimizer.exchange.bucket_states[0]
        return weights(model), entry.compressor.residual(entry.state).clone()

    plain, error = run([1.0] * 6, None)
    scaled, scaled_error = run([1024.0, 1024.0, 8.0, 8.0, 65536.0, 1.0], None)
    assert torch.allclose(plain, scaled, atol=1e-6)
    assert torch.allclose(error, scaled_error, atol=1e-6), "errors depend on the scale"
    skipped, _ = run([1024.0] * 6, bad=3)
    assert torch.isfinite(skipped).all()


def check_spikes_cost_a_step() -> None:
    """Means are zeros where a finite gradient of some rank is huge, but NaN after ten in a row."""
    for compression in (TopK(0.05), PowerSGD(2)):
        model = network()
        optimizer = wrapped(model, compression=compression)
        for step, batch in enumerate(batches(20)):
            spike = step == 1 or step > 4
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            (loss * (1e24 if spike and hvd.rank() == 1 else 1)).backward()
            optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert (norm > 0) == (not spike), (step, norm)
            with optimizer.skip_synchronize():
                optimizer.step()
            if step == 14:
                assert_same(model)
                assert all(torch.isfinite(p).all() for p in model.parameters())
                assert optimizer.exchange.skipped == 11
            if step == 15:
                assert norm.isnan()
                break


def check_spikes_leave_frozen_layers_alone() -> None:
    """Momentum would move a layer whose gradient is zeros instead of None."""
    model = network()
    optimizer = wrapped(model, sgd(model), compression=TopK(0.05))
    for step, batch in enumerate(batches(5)):
        frozen = step > 1
        model[0].requires_grad_(not frozen)
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        (loss_of(model, batch) * (1e24 if step == 3 and hvd.rank() == 1 else 1)).backward()
        optimizer.step()
        assert torch.equal(before, model[0].weight) == frozen, step
    assert_same(model)
    assert optimizer.exchange.skipped == 1


def check_sparse_gradients() -> None:
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


def check_channels_last() -> None:
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


def check_half_precision() -> None:
    """Ranks stay equal with weights in half and double precision."""
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
    with refused(ValueError, "unique", "twice"):
        pairs = [("twice", p) for p in model.parameters()]
        hvd.DistributedOptimizer(sgd(model), named_parameters=pairs)
    with refused(ValueError, "named"):
        hvd.DistributedOptimizer(sgd(model), named_parameters=[("one", model[0].weight)])
    with refused(ValueError, "DGC(ratio=0.001)", "returns finished updates", "plain SGD"):
        wrapped(model, torch.optim.Adam(model.parameters()), compression=DGC())


def check_stock_wrapper_refuses_ours() -> None:
    stock = horovod()
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


# ------------------------------------------------------------------------------------ checkpoints
def check_resuming_from_a_file_equals_not_stopping() -> None:
    """A resumed training has the weights and decisions of a training that does not stop.

    It loads the `state_dict()` of model and optimizer, and the files of `hvd.save_state`.
    """
    folder = shared_folder()

    def fresh() -> tuple[Any, Any]:
        model = network()
        policy = Accordion(PowerSGD(3), TopK(0.05), window=3, interval=1, threshold=0.9)
        return model, wrapped(model, compression=policy)

    model, optimizer = fresh()
    train(model, optimizer, 8, seed=1)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    hvd.save_state(folder, only=[optimizer])
    train(model, optimizer, 8, seed=2)

    saved.seek(0)
    stored = torch.load(saved)
    again, resumed = fresh()
    again.load_state_dict(stored["model"])
    resumed.load_state_dict(stored["optimizer"])
    hvd.load_state(folder, only=[resumed])
    train(again, resumed, 8, seed=2)
    assert_same(again)
    gap = (weights(model) - weights(again)).abs().max()
    assert gap == 0 if hvd.size() == 2 else gap < 1e-5, gap
    ours, theirs = (repr(o.exchange.policy.history) for o in (optimizer, resumed))
    assert ours == theirs
    assert {row["level"] for row in resumed.exchange.policy.history} == {0, 1}
    remove(folder)


if __name__ == "__main__":
    harness.main(globals())
