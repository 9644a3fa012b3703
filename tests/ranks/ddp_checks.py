"""Tests of the communication hook for DistributedDataParallel."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import held, refused, wrong_states
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import accordion_hvd.torch as hvd
from accordion_hvd import (
    FP16,
    WAGMA,
    Accordion,
    AdaComp,
    Dense,
    Displacement,
    Fixed,
    Gate,
    Int8,
    LocalSGD,
    PowerSGD,
    ScaleCom,
    TopK,
    ddp,
)
from accordion_hvd.engine.guard import ReplicasDiffer
from accordion_hvd.optimizers import OnebitAdam
from accordion_hvd.torch import torchft

torch.set_num_threads(1)


def INIT() -> None:
    dist.init_process_group("gloo")
    hvd.init()


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(8, 32, generator=generator)
    return x, torch.randint(0, 10, (8,), generator=generator)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return torch.nn.functional.cross_entropy(model(x), y)


def wrapped(net: torch.nn.Module, compression: Any = None, **options: Any) -> Any:
    """Return a DDP model of several buckets and the state of the hook, if there is one."""
    of_state = ("optimizer", "lr", "grad_scaler", "skip", "guard", "residual_dtype")
    mine = {key: options.pop(key) for key in of_state if key in options}
    model = DDP(net, bucket_cap_mb=options.pop("cap", 0.01), **options)
    return model, None if compression is None else ddp.register(model, compression, **mine)


def train(
    model: Any, steps: int = 6, first: int = 0, after: Callable[[], None] | None = None
) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after()
    return losses


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_same(model: Any) -> None:
    every = hvd.allgather(weights(model).reshape(1, -1))
    assert all(torch.equal(row, every[0]) for row in every), "ranks differ"


class Rate(float):
    """A learning rate that counts how often it is read; each read of a GPU's tensor is a wait."""

    reads = 0

    def __float__(self) -> float:
        Rate.reads += 1
        return super().__float__()


def check_learning_rates_are_read_once_a_group() -> None:
    layers = [torch.nn.Linear(10, 10) for _ in range(10)]
    model = DDP(torch.nn.Sequential(*layers))
    groups = [{"params": layers[0].parameters()}, {"params": list(model.parameters())[2:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ddp.register(model, TopK(0.1), optimizer=optimizer, guard="off")
    for group in optimizer.param_groups:
        group["lr"] = Rate(0.1)
    for _ in range(3):
        Rate.reads = 0
        model(torch.ones(4, 10)).sum().backward()
        assert Rate.reads == 2, Rate.reads
        optimizer.step()


def check_no_compression_equals_ddp() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        theirs, _ = wrapped(network(), **options)
        ours, state = wrapped(network(), Dense(), **options)
        expected, losses = train(theirs), train(ours)
        torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
        assert_same(ours)
        assert state.exchange.steps == 6


def check_states_are_registered_directly() -> None:
    """As frameworks do it: the first step, which makes the reducer, is averaged, too."""
    for options in ({}, {"find_unused_parameters": True}):
        theirs, _ = wrapped(network(), **options)
        ours = DDP(network(), **options)
        ours.register_comm_hook(ddp.State(Dense(), ours.module), ddp.hook)
        torch.testing.assert_close(train(ours), train(theirs), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-6, rtol=1e-5)
        assert_same(ours)


def check_layers_frozen_before_registration() -> None:
    """DDP averages what it was made with: also a layer that is frozen since, and unfrozen later."""
    results = []
    for compression in (None, Dense(), TopK(1.0)):
        model = DDP(network(), find_unused_parameters=True)
        model.module[0].requires_grad_(False)
        if compression is not None:
            ddp.register(model, compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            if step == 2:
                model.module[0].requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert_same(model)
        results.append(weights(model))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], atol=1e-6, rtol=1e-5)


def check_compressors_equal_the_wrapper() -> None:
    """The hook gives the same weights as `DistributedOptimizer` on the same engine, bit for bit."""
    levels = (
        TopK(0.1), PowerSGD(2), PowerSGD(4, wire="float16"), FP16(), AdaComp(),
        ScaleCom(0.05, beta=0.3), Int8(),
    )  # fmt: skip
    narrow = [(level, "bfloat16") for level in (TopK(0.1), PowerSGD(2))]
    for level, dtype in [*((level, "float32") for level in levels), *narrow]:
        hooked, state = wrapped(network(), level, residual_dtype=dtype)
        plain = network()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
            plain.named_parameters(), level, residual_dtype=dtype,
        )  # fmt: skip
        train(hooked)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(plain, step).backward()
            optimizer.step()
        assert_same(hooked)
        assert torch.equal(weights(hooked), weights(plain)), level
        if dtype == "bfloat16":
            for exchange in (state.exchange, optimizer.exchange):
                stored = [entry.stored or {} for entry in exchange.bucket_states]
                assert {x["error"].dtype for x in stored if "error" in x} == {torch.int16}


def check_losses_equal_those_of_ddps_own_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    theirs, _ = wrapped(network())
    theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ours, _ = wrapped(network(), FP16())
    torch.testing.assert_close(train(ours), train(theirs), atol=2e-3, rtol=2e-3)


def levels(state: Any) -> set[str]:
    return set(state.exchange.levels().values()) - {"Dense()"}


def check_accordion_switches_by_windows() -> None:
    policy = Accordion(low=PowerSGD(2), high=PowerSGD(1), window=2, interval=1, threshold=1e9)
    net = network()
    model, state = wrapped(net, policy, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    train(model, 8)
    assert_same(model)
    assert levels(state) == {"PowerSGD(rank=1)"}
    by_hand = Accordion(low=PowerSGD(2), high=PowerSGD(1), window=None, interval=1, threshold=1e9)
    model, state = wrapped(network(), by_hand, lr=lambda: 0.1)
    train(model, 3)
    assert levels(state) == {"PowerSGD(rank=2)"}
    train(model, 3, after=state.end_window)
    assert levels(state) == {"PowerSGD(rank=1)"}


def check_displacement_with_adam() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    policy = Displacement(PowerSGD(2), PowerSGD(1), window=2, bound=1e9)
    model, state = wrapped(net, policy, optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert_same(model)
    assert levels(state) == {"PowerSGD(rank=1)"}
    for name, parameter in net.named_parameters():
        moments = optimizer.state[parameter]["exp_avg_sq"].mean().item()
        expected = ((1 - 0.999**6) / moments) ** 0.5 if moments else 1e8
        assert abs(state.exchange.gains([name])[name] / expected - 1) < 1e-3, name


def check_accumulation_and_clipping() -> None:
    results = []
    for compression in (None, Dense(), TopK(0.2)):
        model, state = wrapped(network(), compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                with model.no_sync() if part < 2 else nullcontext():
                    loss_of(model, 10 * step + part).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms = hvd.allgather(norm.reshape(1))
            assert (norms == norms[0]).all(), "norms are taken before the average"
            optimizer.step()
        assert_same(model)
        assert state is None or state.exchange.steps == 4
        results.append(weights(model))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)


class Branches(torch.nn.Module):
    """A network with a layer that only some ranks use and a layer that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = network(), torch.nn.Linear(10, 10)
        self.odd, self.idle = torch.nn.Linear(10, 200), torch.nn.Linear(10, 200)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(x) + (self.odd(x)[:, :10] if odd else 0)


def check_parameters_without_gradients() -> None:
    results = []
    for compression in (None, Dense(), PowerSGD(2)):
        torch.manual_seed(0)
        model, _ = wrapped(Branches(), compression, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step)
            odd = dist.get_rank() == 1 and step % 2 == 0
            torch.nn.functional.cross_entropy(model(x, odd), y).backward()
            assert model.module.idle.weight.grad is None
            optimizer.step()
        assert_same(model)
        results.append(weights(model))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)


class Heads(torch.nn.Module):
    """A model whose gradients are its inputs; a head that is not named has none."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict({name: torch.zeros(40, 40) for name in names})

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.weights[name] * x).sum() for name, x in inputs.items()]).sum()


def check_heads_in_turn() -> None:
    """What is owed to a head stays owed while no rank uses it, and DDP leaves its gradient alone.

    In some steps, the ranks use different heads.
    """
    for compression in (TopK(0.1), PowerSGD(2), Dense()):
        model, _ = wrapped(Heads("trunk", "a", "b"), compression, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # only decides which have moments
        wanted = {name: torch.zeros(40, 40) for name in ("trunk", "a", "b")}
        for step in range(72):
            optimizer.zero_grad()
            head = "ab"[(step // 2 + (step % 4 == 3) * dist.get_rank()) % 2]
            names = ["trunk", head] if step < 12 else ["trunk", "a", "b"]
            seeds = {name: 1000 * step + 10 * i + dist.get_rank() for i, name in enumerate(names)}
            made = {n: torch.Generator().manual_seed(seed) for n, seed in seeds.items()}
            inputs = {n: torch.randn(40, 40, generator=g) * (step < 12) for n, g in made.items()}
            model(inputs).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.module.weights.values():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad)
            for name, x in inputs.items():
                wanted[name] -= x
            if step == 1:
                assert len(optimizer.state) == 2
        for name, total in wanted.items():
            dist.all_reduce(total)
            mean, found = total / dist.get_world_size(), model.module.weights[name].detach()
            assert float((found - mean).norm() / mean.norm()) < 1e-3, (compression, name)


def check_loss_scaling() -> None:
    for compression in (None, TopK(0.2)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        options = {} if compression is None else {"grad_scaler": scaler}
        model, state = wrapped(network(), compression, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step == 4 and dist.get_rank() == 1:
                loss = loss * float("inf")
            before = weights(model)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, weights(model)) == (step == 4)
        assert_same(model)
        assert state is None or state.exchange.skipped == 1
        assert scaler.get_scale() == 2 * 1024


def check_spikes_cost_a_step() -> None:
    for compression in (TopK(0.2), PowerSGD(2)):
        model, state = wrapped(network(), compression)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            (loss * (1e24 if step == 2 and dist.get_rank() == 1 else 1)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert (norm > 0) == (step != 2)
            optimizer.step()
        assert_same(model)
        assert state.exchange.skipped == 1 and torch.isfinite(weights(model)).all()


def check_spikes_leave_unused_layers_alone() -> None:
    """Momentum would move a layer whose gradient is zeros instead of None."""
    model = torch.nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = ddp.register(model, TopK(0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        before = model.module.odd.weight.detach().clone()
        loss = model(x, odd=step < 2).square().mean()
        (loss * (1e24 if step == 3 and dist.get_rank() == 1 else 1)).backward()
        optimizer.step()
        assert torch.equal(before, model.module.odd.weight) == (step >= 2), step
    assert_same(model)
    assert state.exchange.skipped == 1


def check_a_scaler_that_is_not_passed_is_refused() -> None:
    """In the first step that it takes, unless compression keeps nothing that follows the scale."""
    for compression, fits in ((FP16(), True), (TopK(0.2), False)):
        for fused in (False, True):
            model, _ = wrapped(network(), compression)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            disabled = torch.amp.GradScaler("cpu", enabled=False)
            disabled.scale(loss_of(model, 0)).backward()
            disabled.step(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 1)).backward()
            before = weights(model)
            words = "ddp.register: grad_scaler is None"
            with nullcontext() if fits else refused(ValueError, words):
                scaler.step(optimizer)
            assert torch.equal(before, weights(model)) != fits


def check_several_losses_in_a_step() -> None:
    """Each backward pass exchanges what it adds; steps without gradients pay what is owed."""
    model, state = wrapped(Heads("w"), TopK(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted = torch.zeros(40, 40)
    for step in range(24):
        optimizer.zero_grad()
        for part in range(2):
            generator = torch.Generator().manual_seed(10 * step + 100 * dist.get_rank() + part)
            x = torch.randn(40, 40, generator=generator) * (step < 4)
            model({"w": x}).backward()
            wanted -= x
        optimizer.step()
    dist.all_reduce(wanted)
    torch.testing.assert_close(
        model.module.weights["w"].detach(), wanted / dist.get_world_size(), rtol=1e-4, atol=1e-5
    )
    assert state.exchange.steps == 48


def check_a_gate_tries_and_chooses() -> None:
    gate = Gate(steps=2, every=20)
    model, state = wrapped(network(), Fixed(PowerSGD(2), gate=gate))
    seen: set[str] = set()
    train(model, 70, after=lambda: seen.update(state.exchange.levels().values()))
    assert_same(model)
    assert {"PowerSGD(rank=2)", "FP16()"} <= seen, seen
    verdicts = hvd.allgather_object(gate.verdict)
    assert " a step" in verdicts[0] and len({*verdicts}) == 1, verdicts


def check_compiled_models() -> None:
    model, _ = wrapped(network(), PowerSGD(2), cap=1)  # torch.compile takes whole megabytes
    compiled = torch.compile(model, backend="eager")
    plain, _ = wrapped(network(), PowerSGD(2))
    torch.testing.assert_close(train(compiled), train(plain))
    assert_same(model)


def check_resuming_equals_not_stopping() -> None:
    whole, _ = wrapped(network(), TopK(0.1))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)

    def run(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    run(whole, optimizer, range(8))
    for by_file in (False, True):
        first, state = wrapped(network(), TopK(0.1))
        run(first, torch.optim.SGD(first.parameters(), lr=0.1), range(4))
        folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), 0))
        saved = state.state_dict()
        if by_file:
            hvd.save_state(folder, only=[state])
        second = network()
        second.load_state_dict(first.module.state_dict())
        model, state = wrapped(second, TopK(0.1))
        if by_file:
            hvd.load_state(folder, only=[state])
        else:
            state.load_state_dict(saved)
        run(model, torch.optim.SGD(model.parameters(), lr=0.1), range(4, 8))
        assert torch.equal(weights(model), weights(whole)), by_file


def check_a_refused_state_changes_nothing() -> None:
    for policy in (TopK(0.1), Accordion(PowerSGD(2), PowerSGD(1), window=2, interval=1)):
        model, state = wrapped(network(), policy, lr=lambda: 0.1)
        for step in range(3):
            loss_of(model, step).backward()
        saved, before = state.state_dict(), held(state.exchange, torch.Tensor.numpy)
        longer = lambda x: [torch.cat([x.reshape(-1), x.new_zeros(3)]), x.double()]  # noqa: E731
        for label, wrong in wrong_states(saved, longer):
            with refused(ValueError):
                state.load_state_dict(wrong)
            assert held(state.exchange, torch.Tensor.numpy) == before, label
        with refused(ValueError, "state_dict has no 'exchange'"):
            state.load_state_dict({})
        folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), 0))
        assert hvd.save_state(folder, only=[state], step=12) == 12
        other, late = wrapped(network(), TopK(0.3))
        with refused(RuntimeError, "the compression is", "when saved"):
            hvd.load_state(folder, only=[late])
        loss_of(other, 0).backward()
        assert late.exchange.steps == 1
        assert hvd.load_state(folder, only=[state]) == 12
        assert held(state.exchange, torch.Tensor.numpy) == before


def check_windows_count_passes_without_sync() -> None:
    """`window=len(loader)` is an epoch although `no_sync()` accumulates gradients."""
    net = network()
    policy = Accordion(low=PowerSGD(2), high=PowerSGD(1), window=8, interval=1, threshold=1e9)
    model, state = wrapped(net, policy, lr=lambda: 0.1)
    for step in range(12):
        if step % 4 < 3:
            with model.no_sync():
                loss_of(model, step).backward()
        else:
            loss_of(model, step).backward()
    assert {row["window"] for row in policy.history} == {0}, policy.history
    assert state.exchange.steps == 3
    state.load_state_dict(state.state_dict())
    for step in range(4):
        with nullcontext() if step == 3 else model.no_sync():
            loss_of(model, step).backward()
    assert policy.passes == 4


def check_compiled_modules_have_the_modules_names() -> None:
    for make in (lambda m: DDP(torch.compile(m, backend="eager")), DDP):
        net = network()
        model = make(net)
        state = ddp.register(model, Fixed(TopK(0.1), overrides={"2.weight": Dense()}))
        loss_of(model, 0).backward()
        levels = state.exchange.levels()
        assert levels["2.weight"] == "Dense()" and levels["0.weight"] == repr(TopK(0.1)), levels


def check_parameters_that_ddp_does_not_average_are_refused() -> None:
    """Those that are unfrozen after DDP was made, and those that only the optimizer has."""
    net = network()
    net[0].requires_grad_(False)
    model, _ = wrapped(net, TopK(0.1))
    loss_of(model, 0).backward()
    net[0].requires_grad_(True)
    with refused(RuntimeError, "'0.", "requires a gradient now", "DistributedDataParallel"):
        loss_of(model, 1).backward()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, _ = wrapped(net, TopK(0.1), optimizer=optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with refused(ValueError, "optimizer is", "(3,)"):
        loss_of(model, 0).backward()


def check_learning_rates_that_differ_are_reported() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1 + 0.1 * (dist.get_rank() == 1))
    model, _ = wrapped(net, TopK(0.1), optimizer=optimizer)
    with refused(ReplicasDiffer, "learning rates"):
        loss_of(model, 0).backward()


def check_two_averages_of_one_gradient_are_refused() -> None:
    """`DistributedOptimizer` refuses the parameters of a DDP module, whatever their names."""
    net = network()
    model = DDP(net)
    for named in ([*model.named_parameters()], [*net.named_parameters()]):
        for compression in (TopK(0.1), LocalSGD(2)):
            plain = torch.optim.SGD(net.parameters(), 0.1)
            with refused(ValueError, "DistributedDataParallel", "ddp.register"):
                hvd.DistributedOptimizer(plain, named, compression)
    with refused(ValueError, "DistributedDataParallel"):
        hvd.OnebitAdam(net.parameters())
    manager = type("Manager", (), {"_pg": None, "_quorum_id": None})()
    with refused(ValueError, "torchft.average: model is 'a DistributedDataParallel'"):
        torchft.average(manager, net, TopK(0.1))
    del model


def check_a_group_of_some_ranks() -> None:
    members = list(range(1, dist.get_world_size()))
    group = dist.new_group(members)
    if dist.get_rank() in members:
        model, _ = wrapped(network(dist.get_rank()), TopK(0.1), process_group=group)
        train(model)
        table = [torch.empty_like(weights(model)) for _ in members]
        dist.all_gather(table, weights(model), group)
        assert all(torch.equal(row, table[0]) for row in table)
    dist.barrier()


def check_refusals() -> None:
    net = network()
    with refused(TypeError, "model is a Sequential", "DistributedDataParallel"):
        ddp.register(net, TopK(0.1))
    model = DDP(net)
    with refused(ValueError, "WAGMA", "DistributedOptimizer"):
        ddp.register(model, WAGMA())
    with refused(ValueError, "ddp.register: residual_dtype is 'half'", "'bfloat16'"):
        ddp.register(model, TopK(0.1), residual_dtype="half")  # type: ignore[arg-type]
    with refused(ValueError, "batch_size"):
        ddp.register(model, Accordion(batch_size=(64, 512)))
    with refused(ValueError, "OnebitAdam"):
        ddp.register(model, OnebitAdam())
    displacement = Displacement(PowerSGD(4), PowerSGD(1), window=5)
    with refused(ValueError, "ddp.register does not know the optimizer", "pass optimizer="):
        ddp.register(model, displacement)
    with refused(ValueError, "optimizer is None", "lr="):
        ddp.register(model, Accordion(PowerSGD(4), PowerSGD(1), window=5))
    ddp.register(model, TopK(0.1))
    with refused(RuntimeError, "register_comm_hook"):
        ddp.register(model, TopK(0.1))
    sparse = DDP(torch.nn.Embedding(100, 20, sparse=True))
    ddp.register(sparse, TopK(0.1))
    with refused(ValueError, "a gradient is sparse"):
        sparse(torch.arange(5)).sum().backward()


if __name__ == "__main__":
    harness.main(globals())
