"""Tests of compression between the replicas of sharded models."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_checks import Heads
from harness import held, refused, wrong_states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from accordion_hvd import (
    EF21,
    WAGMA,
    Accordion,
    AdaComp,
    Dense,
    Displacement,
    PowerSGD,
    TopK,
    fsdp,
)

torch.set_num_threads(1)


def INIT() -> None:
    dist.init_process_group("gloo")


class Meshes:
    """A cache of the mesh of two replicas, each of which has half of the ranks."""

    found: Any = None


def mesh() -> Any:
    if Meshes.found is None:
        shape = (2, dist.get_world_size() // 2)
        Meshes.found = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return Meshes.found


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 65), torch.nn.ReLU(), torch.nn.Linear(65, 64), torch.nn.ReLU(),
        torch.nn.Linear(64, 3),
    )  # fmt: skip


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 32, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return torch.nn.functional.cross_entropy(model(x).float(), y)


def sharded(
    net: torch.nn.Module, compression: Any = None, native: bool = False, **options: Any
) -> Any:
    """Return a model that is sharded by layer, and the state of its replicas' exchange, if any."""
    over = mesh() if native else mesh()["shards"]
    mixed = options.pop("mp_policy", None)
    more = {} if mixed is None else {"mp_policy": mixed}
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=over, **more)
    fully_shard(net, mesh=over, **more)
    if compression is None:
        return net, None
    return net, fsdp.between(net, mesh()["replicas"], compression, **options)


def train(model: Any, steps: range = range(6), parts: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            loss = loss_of(model, step + 100 * part)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def assert_same(model: Any) -> None:
    mine = weights(model)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(row, mine) for row in every), "ranks differ"


def check_no_compression_equals_hybrid_sharding() -> None:
    theirs, _ = sharded(network(), native=True)
    ours, _ = sharded(network(), Dense())
    torch.testing.assert_close(train(ours), train(theirs), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-6, rtol=1e-5)
    assert_same(ours)


def check_replicas_receive_the_first_ones_weights() -> None:
    model, _ = sharded(network(seed=dist.get_rank()), TopK(0.1))
    assert_same_replicas(model)


def assert_same_replicas(model: Any) -> None:
    group = mesh()["replicas"].get_group()
    for parameter in model.parameters():
        mine = parameter.to_local().detach()
        every = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(every, mine, group)
        assert torch.equal(every[0], every[1]), "replicas differ"


def check_replicas_are_equal() -> None:
    for level, dtype in (
        (TopK(0.1), "float32"), (PowerSGD(2), "float32"), (AdaComp(), "float32"),
        (PowerSGD(4, wire="float16"), "float32"),
        (TopK(0.1), "bfloat16"), (PowerSGD(2), "bfloat16"),
    ):  # fmt: skip
        model, state = sharded(network(), level, residual_dtype=dtype)
        train(model, range(20))
        assert_same(model)
        stats = state.exchange.stats()
        assert stats["steps"] == 20 and stats["sent"] < stats["dense_sent"]
        stored = [entry.stored or {} for entry in state.exchange.bucket_states]
        kind = torch.int16 if dtype == "bfloat16" else torch.float32
        assert {x["error"].dtype for x in stored if "error" in x} == {kind}


def check_accordion_switches() -> None:
    policy = Accordion(low=PowerSGD(2), high=PowerSGD(1), window=2, interval=1, threshold=1e9)
    model, state = sharded(network(), policy, lr=lambda: 0.1)
    train(model, range(8))
    assert_same(model)
    assert "PowerSGD(rank=1)" in state.exchange.levels().values()
    state.end_window()


def check_exchanges_are_rehearsed() -> None:
    """For a ledger that was asked for, replicas time other exchanges; weights do not change."""
    found = []
    for ledger in (True, False):
        model, state = sharded(network(), PowerSGD(2), guard_every=2, ledger=ledger)
        train(model, range(12))
        assert_same(model)
        found.append(weights(model))
        names = [set(row["seconds"]) for row in state.exchange.ledger.rehearsals]
        assert names == ([{"own", "Dense()", "FP16()"}] if ledger else []), names
    assert torch.equal(*found)


def check_displacement_with_adam() -> None:
    model, _ = sharded(network())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    policy = Displacement(PowerSGD(2), PowerSGD(1), window=2, bound=1e-9)
    state = fsdp.between(model, mesh()["replicas"], policy, optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert_same(model)
    name, parameter = next(iter(model.named_parameters()))
    moments = optimizer.state[parameter]["exp_avg_sq"].to_local()
    expected = ((1 - 0.999**6) / moments.mean().item()) ** 0.5
    assert abs(state.exchange.gains([name])[name] / expected - 1) < 1e-4
    assert {row.reason for row in policy.history} == {"displaced"}


def check_accumulation() -> None:
    """Gradients of several passes are summed before the replicas exchange them."""
    theirs, _ = sharded(network(), native=True)
    expected = train(theirs, parts=2)
    ours, state = sharded(network(), Dense(), passes=2)
    torch.testing.assert_close(train(ours, parts=2), expected, atol=1e-6, rtol=1e-5)
    assert state.exchange.steps == 6
    local, state = sharded(network(), TopK(0.1))
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            local.set_requires_gradient_sync(part == 2)
            loss_of(local, 10 * step + part).backward()
        optimizer.step()
    assert state.exchange.steps == 4
    assert_same(local)


def check_an_accumulation_that_ends_early_is_refused() -> None:
    model, state = sharded(network(), Dense(), passes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, step).backward()
        if step == 2:
            with refused(ValueError, "passes is 2", "follows 1 of these backward passes"):
                optimizer.step()
        elif step == 1:
            optimizer.step()
            optimizer.zero_grad()
    assert state.exchange.steps == 1


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a bad batch")


def check_batches_that_raise_errors_are_skipped() -> None:
    """A backward pass that fails on all ranks leaves nothing behind for the next one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(2)))
    for part in (*model, model):
        fully_shard(part, mesh=mesh()["shards"])
    state = fsdp.between(model, mesh()["replicas"], Dense())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        hidden = model[0](torch.full((8, 40), 1.0 + dist.get_rank()))
        hidden = Broken.apply(hidden) if step == 1 else hidden
        try:
            model[1](hidden).square().mean().backward()
        except ArithmeticError:
            optimizer.zero_grad()
            continue
        mine = model[0].weight.grad.to_local()
        every = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(every, mine, mesh()["replicas"].get_group())
        assert torch.equal(*every) and state.exchange.steps == max(step, 1), step
        optimizer.step()
        optimizer.zero_grad()


def check_one_exchange_for_several_roots() -> None:
    """Each part of a model that is called by itself is a root of FSDP."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(40, 40, bias=False) for _ in range(3))
    for part in model:
        fully_shard(part, mesh=mesh()["shards"])
    state = fsdp.between(model, mesh()["replicas"], Dense())
    for step in range(2):
        hidden = torch.full((8, 40), 1.0 + dist.get_rank())
        for part in model:
            hidden = part(hidden)
        model.zero_grad()
        hidden.square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        assert state.exchange.steps == step + 1
    assert_same(model)


def check_reentrant_checkpoints_are_refused() -> None:
    model, _ = sharded(network(), Dense())
    x, y = batch(0)
    hidden = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    with refused(ValueError, "use_reentrant=False"):
        torch.nn.functional.cross_entropy(hidden, y).backward()


def check_mixed_precision() -> None:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = sharded(network(), PowerSGD(2), mp_policy=mixed)
    losses = train(model, range(20))
    assert_same(model)
    assert next(model.parameters()).grad.dtype == torch.float32
    assert all(loss == loss for loss in losses)


def check_infinite_gradients_are_skipped() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model, state = sharded(network(), TopK(0.1), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 2 and dist.get_rank() == 0:
            loss = loss * float("inf")
        before = weights(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weights(model)) == (step == 2)
    assert_same(model)
    assert state.exchange.skipped == 1


def check_spikes_cost_a_step() -> None:
    model, state = sharded(network(), PowerSGD(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (loss * (1e24 if step == 2 and dist.get_rank() == 0 else 1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        assert (norm > 0) == (step != 2)
        optimizer.step()
    assert_same(model)
    assert state.exchange.skipped == 1 and torch.isfinite(weights(model)).all()


def check_spikes_leave_unused_layers_alone() -> None:
    """Momentum would move a layer whose gradient is zeros instead of None."""
    model = Heads("a", "b")
    fully_shard(model, mesh=mesh()["shards"])
    state = fsdp.between(model, mesh()["replicas"], TopK(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        names = "ab" if step < 2 else "a"
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        spike = 1e24 if step == 3 and dist.get_rank() == 0 else 1.0
        model({n: torch.randn(40, 40, generator=generator) * spike for n in names}).backward()
        before = model.weights["b"].full_tensor().detach().clone()
        optimizer.step()
        assert torch.equal(before, model.weights["b"].full_tensor()) == (step >= 2), step
    assert state.exchange.skipped == 1
    assert_same(model)


def check_a_scaler_that_is_not_passed_is_refused() -> None:
    model, _ = sharded(network(), TopK(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, 0)).backward()
    with refused(ValueError, "fsdp.between: grad_scaler is None"):
        scaler.step(optimizer)


def check_several_losses_in_a_step() -> None:
    """Each backward pass exchanges what it adds; steps without gradients pay what is owed."""
    model = Heads("w")
    fully_shard(model, mesh=mesh()["shards"])
    state = fsdp.between(model, mesh()["replicas"], TopK(0.1))
    wanted = torch.zeros(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(24):
        optimizer.zero_grad()
        for part in range(2):
            generator = torch.Generator().manual_seed(10 * step + 100 * dist.get_rank() + part)
            x = torch.randn(40, 40, generator=generator) * (step < 4)
            model({"w": x}).backward()
            wanted -= x
        optimizer.step()
    dist.all_reduce(wanted)
    found = model.weights["w"].full_tensor().detach()
    torch.testing.assert_close(found, wanted / dist.get_world_size(), rtol=1e-4, atol=1e-5)
    assert state.exchange.steps == 48


def check_heads_in_turn() -> None:
    """What is owed to a head stays owed while no rank uses it, and its gradient stays None."""
    for compression in (TopK(0.1), Dense()):
        model = Heads("a", "b")
        fully_shard(model, mesh=mesh()["shards"])
        fsdp.between(model, mesh()["replicas"], compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        wanted = {name: torch.zeros(40, 40) for name in "ab"}
        for step in range(60):
            optimizer.zero_grad()
            names = "ab"[step % 2] if step < 12 else "ab"
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            inputs = {n: torch.randn(40, 40, generator=generator) * (step < 12) for n in names}
            model(inputs).backward()
            optimizer.step()
            unused = [n for n, p in model.weights.items() if p.grad is None]
            assert unused == [n for n in "ab" if n not in names]
            for name, x in inputs.items():
                wanted[name] -= x
        for name, total in wanted.items():
            dist.all_reduce(total)
            found = model.weights[name].full_tensor().detach()
            torch.testing.assert_close(
                found, total / dist.get_world_size(), rtol=1e-4, atol=1e-5, msg=str(compression)
            )


def check_views_of_a_flat_buffer_stay_views() -> None:
    for compression in (Dense(), EF21(TopK(0.5))):
        expected, _ = sharded(network(), compression)
        model, _ = sharded(network(), compression)
        parameters = [*model.parameters()]
        sizes = [p.to_local().numel() for p in parameters]
        flat = torch.zeros(sum(sizes))
        for p, part in zip(parameters, flat.split(sizes), strict=True):
            p.grad = DTensor.from_local(
                part.view_as(p.to_local()), p.device_mesh, p.placements,
                shape=p.shape, stride=p.stride(), run_check=False,
            )  # fmt: skip
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (expected, model)]
        for step in range(4):
            flat.zero_()
            optimizers[0].zero_grad()
            for net, optimizer in zip((expected, model), optimizers, strict=True):
                loss_of(net, step).backward()
                optimizer.step()
        for p in parameters:
            place = p.grad.to_local().untyped_storage().data_ptr()
            assert place == flat.untyped_storage().data_ptr()
        assert torch.equal(weights(model), weights(expected))


def check_resuming_equals_not_stopping() -> None:
    def run(model: Any, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    whole, _ = sharded(network(), TopK(0.1))
    run(whole, range(8))
    first, state = sharded(network(), TopK(0.1))
    run(first, range(4))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"model": first.state_dict(), "compression": state}, checkpoint_id=folder[0])
    second, state = sharded(network(seed=5), TopK(0.1))
    target = {"model": second.state_dict(), "compression": state}
    dcp.load(target, checkpoint_id=folder[0])
    second.load_state_dict(target["model"])
    run(second, range(4, 8))
    assert torch.equal(weights(second), weights(whole))
    key, before = f"rank{dist.get_rank()}", held(state.exchange, torch.Tensor.numpy)
    with refused(ValueError, "state_dict", key):
        state.load_state_dict({"rank99": b""})
    content = state.state_dict()[key]
    for cut in (0, 100, len(content) - 9):
        with refused(ValueError, "fsdp.State", key):
            state.load_state_dict({key: content[:cut]})
    snapshot = {"exchange": torch.load(io.BytesIO(content), weights_only=True)}
    for label, wrong in wrong_states(snapshot, lambda x: [x.reshape(-1)[1:], x.double()]):
        if "exchange" in wrong:
            file = io.BytesIO()
            torch.save(wrong["exchange"], file)
            with refused(ValueError):
                state.load_state_dict({key: file.getvalue()})
            assert held(state.exchange, torch.Tensor.numpy) == before, label
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


def check_unfrozen_layers_take_part() -> None:
    net = network()
    net[0].requires_grad_(False)
    model, state = sharded(net, TopK(0.3), guard_every=1)
    for step in range(6):
        if step == 3:
            net[0].requires_grad_(True)
        model.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
    assert_same(model)
    assert any(name.startswith("0.") for name in state.exchange.levels())


def check_the_optimizer_may_have_empty_shards() -> None:
    """A tensor with fewer rows than there are shards has no rows on some ranks."""
    net, _ = sharded(torch.nn.Sequential(torch.nn.Linear(32, 40), torch.nn.Linear(40, 1)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    fsdp.between(net, mesh()["replicas"], TopK(0.3), optimizer=optimizer)
    for step in range(3):
        optimizer.zero_grad()
        net(batch(step)[0]).square().mean().backward()
        optimizer.step()
    assert_same(net)


def check_other_parameters_of_the_optimizer_are_refused() -> None:
    net, _ = sharded(network())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    fsdp.between(net, mesh()["replicas"], TopK(0.3), optimizer=optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with refused(ValueError, "fsdp.between: optimizer is", "(3,)"):
        loss_of(net, 0).backward()


def check_what_ddp_averages_already_is_refused() -> None:
    net = network()
    outer = DistributedDataParallel(net)
    model, _ = sharded(net)
    with refused(ValueError, "fsdp.between: model is 'a DistributedDataParallel'"):
        fsdp.between(model, mesh()["replicas"], TopK(0.1))
    del outer


def check_refusals() -> None:
    plain = network()
    with refused(ValueError, "'0.weight' is not sharded"):
        fsdp.between(plain, mesh(), TopK(0.1))
    model, _ = sharded(copy.deepcopy(plain))
    with refused(ValueError, "WAGMA"):
        fsdp.between(model, mesh(), WAGMA())
    with refused(ValueError, "fsdp.between: skip is 'haed*'"):
        fsdp.between(model, mesh()["replicas"], TopK(0.1), skip="haed*")
    with refused(ValueError, "fsdp.between: residual_dtype is 'half'", "'bfloat16'"):
        fsdp.between(model, mesh(), TopK(0.1), residual_dtype="half")  # type: ignore[arg-type]
    with refused(ValueError, "backward_passes_per_step is 0"):
        fsdp.between(model, mesh(), TopK(0.1), passes=0)


if __name__ == "__main__":
    harness.main(globals())
