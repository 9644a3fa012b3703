"""Tests of the optimizers of `accordion_hvd.torch` on real ranks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import decay_oracle
import harness
import torch
from harness import held, some, wrong_states
from torch_checks import (
    assert_same,
    batches,
    everywhere,
    loss_of,
    network,
    refused,
    remove,
    shared_folder,
    train,
    weights,
)

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, TopK, optimizers, simulate
from accordion_hvd.engine.layout import span

INIT = hvd.init
NAMES = optimizers.NATIVE
FIRST, SECOND = NAMES[::2], NAMES[1::2]  # `make test` has each rule in half of the checks
EARLY: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"warmup_steps": 3},
    "SketchedAMSGrad": {"warmup_steps": 3, "ratio": 0.02},
    "OnebitLamb": {"warmup_steps": 3},
    "ZeroOneAdam": {"var_freeze_step": 3},
}
"""Settings with which the stages change within a few steps."""


def made(name: str, model: torch.nn.Module, **options: Any) -> Any:
    options = {"lr": 1e-2} | EARLY.get(name, {}) | options
    return getattr(hvd, name)(model.named_parameters(), **options)


def check_weights_follow_the_simulation() -> None:
    """In fp64, real ranks take the same steps as ranks that are simulated in one process."""
    for name in NAMES:
        model, twin = network().double(), network().double()
        optimizer = made(name, model)
        world = simulate(getattr(optimizers, name)(**EARLY.get(name, {})), hvd.size())
        ranks = [list(batches(8, rank=rank)) for rank in range(hvd.size())]
        for step in range(8):
            optimizer.zero_grad()
            x, y = ranks[hvd.rank()][step]
            loss_of(model, (x.double(), y)).backward()
            optimizer.step()
            simulated_step(world, twin, [mine[step] for mine in ranks])
        assert_same(model)
        apart = (weights(model) - weights(twin)).abs().max().item()
        assert apart < 1e-9, (name, apart)


def simulated_step(world: Any, model: torch.nn.Module, given: list[Any]) -> None:
    named = list(reversed(list(model.named_parameters())))  # as gradients are expected
    gradients = []
    for x, y in given:
        model.zero_grad()
        loss_of(model, (x.double(), y)).backward()
        gradients.append({name: p.grad.clone() for name, p in named})
    known = {name: p.detach().clone() for name, p in named}
    found = world.step(gradients, lr=1e-2, weights=[known] * len(given))[0]
    entries = world.exchanges[0].entry_of
    with torch.no_grad():
        for number, (name, p) in enumerate(named):
            if entries[number].compressor.returns_weights:
                p.copy_(found[name])
            else:
                p.sub_(found[name], alpha=1e-2)


def check_ranks_meet_again_after_steps_of_their_own() -> None:
    model = network()
    options = {"var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 4}
    optimizer = made("ZeroOneAdam", model, **options, guard_every=1, weight_decay=0.01,
                     decoupled_weight_decay=True)  # fmt: skip
    alike = []
    for batch in batches(18):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        rows = everywhere(weights(model))
        alike.append(bool((rows == rows[0]).all()))
        assert alike[-1] == bool(
            span(optimizer.exchange.bucket_states, optimizer.exchange.counted)
        ), alike
    assert not all(alike) and sum(alike[8:]) >= 2, alike


def check_the_yardsticks_are_pytorchs_on_the_mean() -> None:
    plain, decoupled = torch.optim.Adam, torch.optim.AdamW
    for name, decay in (("Adam", False), ("Adam", True), ("AMSGrad", False), ("AMSGrad", True)):
        ours, theirs = network(), network()
        optimizer = made(name, ours, weight_decay=0.1, decoupled_weight_decay=decay)
        kind = decoupled if decay else plain
        other = kind(theirs.parameters(), 1e-2, weight_decay=0.1, amsgrad=name == "AMSGrad")
        train(ours, optimizer)
        for batch in batches(6):
            other.zero_grad()
            loss_of(theirs, batch).backward()
            for p in theirs.parameters():
                p.grad = hvd.allreduce(p.grad, name="check.mean")
            other.step()
        assert torch.allclose(weights(ours), weights(theirs), atol=1e-5)


def check_weight_decay_is_the_papers() -> None:
    """Weight decay has the form of the rule's paper, unless the script chooses a form."""
    for name in NAMES:
        for given in (None, True, False):
            decoupled = name in decay_oracle.DECOUPLED if given is None else given
            start = decay_oracle.start()
            parameters = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in start.items()}
            optimizer = getattr(hvd, name)(
                parameters.items(), lr=decay_oracle.LR, weight_decay=decay_oracle.DECAY,
                decoupled_weight_decay=given, **decay_oracle.DENSE.get(name, {}),
            )  # fmt: skip
            for step in range(decay_oracle.STEPS):
                for key, parameter in parameters.items():
                    mine = decay_oracle.gradients(key, step, hvd.size())[hvd.rank()]
                    parameter.grad = torch.tensor(mine)
                optimizer.step()
            for key, wanted in decay_oracle.end(name, hvd.size(), decoupled).items():
                apart = (parameters[key].detach() - torch.tensor(wanted)).abs().max().item()
                assert apart < 1e-10, (name, given, key, apart)


def check_decoupled_decay_is_no_part_of_messages() -> None:
    """In compressed stages, decoupled decay changes the weights, but not the messages.

    Keras' check has the same oracle, so that both frameworks take the same steps.
    """
    for name, settings in decay_oracle.COMPRESSED.items():
        start = decay_oracle.start()
        parameters = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in start.items()}
        optimizer = getattr(hvd, name)(
            parameters.items(), lr=decay_oracle.LR, weight_decay=decay_oracle.DECAY,
            decoupled_weight_decay=True, **settings,
        )  # fmt: skip
        for step in range(decay_oracle.STEPS):
            for key, parameter in parameters.items():
                mine = decay_oracle.gradients(key, step, hvd.size())[hvd.rank()]
                parameter.grad = torch.tensor(mine)
            optimizer.step()
        assert repr(optimizer.rule) in optimizer.exchange.levels().values(), name
        end = decay_oracle.compressed_end(name, optimizer.exchange, hvd.size())
        for key, wanted in end.items():
            apart = (parameters[key].detach() - torch.tensor(wanted)).abs().max().item()
            assert apart < 1e-9, (name, key, apart)


def check_default_arguments_train() -> None:
    """With default arguments, losses fall and ranks stay equal."""
    for name in some(NAMES, FIRST):
        model = network()
        optimizer = getattr(hvd, name)(model.named_parameters())
        losses = []
        for _ in range(2):
            with torch.no_grad():
                losses.append(sum(loss_of(model, batch).item() for batch in batches(30)))
            train(model, optimizer, 30)
        assert_same(model)
        assert losses[1] < losses[0], (name, losses)


def check_a_state_keeps_its_form_of_weight_decay() -> None:
    """An optimizer that loads a state keeps the state's form of weight decay."""
    for name in NAMES:
        model, twin = network(), network()
        optimizer = made(name, model, weight_decay=0.1, decoupled_weight_decay=False)
        train(model, optimizer, 4)
        twin.load_state_dict(model.state_dict())
        again = made(name, twin, weight_decay=0.1)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, 3, seed=8)
        train(twin, again, 3, seed=8)
        assert torch.equal(weights(model), weights(twin)), name


def check_groups_have_settings_of_their_own() -> None:
    model, twin = network(), network()
    first, rest = [model[0].weight, model[0].bias], [*model[2:].parameters()]
    optimizer = hvd.Adam([{"params": first, "betas": (0.5, 0.9), "lr": 1e-3}, {"params": rest}])
    theirs = [[twin[0].weight, twin[0].bias], [*twin[2:].parameters()]]
    groups = [{"params": theirs[0], "betas": (0.5, 0.9), "lr": 1e-3}, {"params": theirs[1]}]
    other = torch.optim.Adam(groups)
    train(model, optimizer)
    for batch in batches(6):
        other.zero_grad()
        loss_of(twin, batch).backward()
        for p in twin.parameters():
            p.grad = hvd.allreduce(p.grad, name="check.mean")
        other.step()
    assert torch.allclose(weights(model), weights(twin), atol=1e-5)
    with refused(ValueError, "betas is (0.5, 1.5)"):
        hvd.Adam([{"params": first, "betas": (0.5, 1.5)}])


def check_groups_may_come_later() -> None:
    for name in some(NAMES, SECOND):
        model = network()
        optimizer = getattr(hvd, name)(model[:3].parameters(), lr=1e-2, **EARLY.get(name, {}))
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": [*model[4].parameters()], "lr": 1e-3})
        before = model[4].weight.detach().clone()
        train(model, optimizer, 4)
        assert_same(model)
        assert not torch.equal(before, model[4].weight)


def check_learning_rate_schedules_and_closures() -> None:
    for name in some(NAMES, FIRST):
        model = network()
        optimizer = made(name, model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for batch in batches(6):
            assert torch.isfinite(optimizer.step(closure_of(model, optimizer, batch)))
            schedule.step()
        assert_same(model)
        assert abs(optimizer.param_groups[0]["lr"] - 1e-5) < 1e-9


def closure_of(model: torch.nn.Module, optimizer: Any, batch: Any) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


def check_gradients_are_local_until_the_step() -> None:
    """Gradients can be accumulated in several passes before the step.

    `max_grad_norm` clips the local gradients by one norm for all ranks.
    """
    whole, parts = network(), network()
    one, two = made("Adam", whole), made("Adam", parts)
    for a, b in zip(batches(4), batches(4, seed=8), strict=True):
        one.zero_grad()
        loss_of(whole, (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]]))).backward()
        one.step()
        two.zero_grad()
        for half in (a, b):
            (loss_of(parts, half) / 2).backward()
        two.step()
    assert torch.allclose(weights(whole), weights(parts), atol=1e-5)
    for name in NAMES:
        model = network()
        optimizer = made(name, model, max_grad_norm=0.01)
        train(model, optimizer, 5)
        assert_same(model)
    model = network()
    optimizer = made("Adam", model, max_grad_norm=0.01, betas=(0.0, 0.999))
    loss_of(model, next(batches(1))).backward()
    raw = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    mean = everywhere(raw.square().sum().reshape(1)).mean().sqrt()
    optimizer._prepare()
    clipped = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert torch.allclose(clipped, raw * (0.01 / mean), rtol=1e-3, atol=1e-8)
    optimizer.step()


def check_steps_that_are_not_finite_count_nowhere() -> None:
    for name in NAMES:
        model, twin = network().double(), network().double()
        ours, other = made(name, model), made(name, twin)
        for step, (x, y) in enumerate(batches(8)):
            for each, optimizer in ((model, ours), (twin, other)):
                optimizer.zero_grad()
                loss_of(each, (x.double(), y)).backward()
            if step in (5, 6):
                before = weights(model)
                if hvd.rank() == hvd.size() - 1:
                    model[2].weight.grad[3, 3] = float("inf") if step == 5 else 1e20
                ours.step()
                assert torch.equal(before, weights(model))
                other.exchange.steps += 1
                other.exchange.skipped += 1
                continue
            ours.step()
            other.step()
        assert_same(model)
        assert ours.exchange.skipped == 2
        if name == "Birder":
            continue  # its draws depend on the moments to the bit
        assert torch.allclose(weights(model), weights(twin), atol=1e-4), name


def check_grad_scaler_needs_no_help() -> None:
    for name in some(NAMES, SECOND):
        model = network()
        optimizer = made(name, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for step, batch in enumerate(batches(7)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if step == 4 and hvd.rank() == 0:
                model[0].weight.grad[0, 0] = float("nan")
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
        assert_same(model)
        assert optimizer.exchange.skipped == 1
    plain, scaled = network(), network()
    one, two = made("Adam", plain), made("Adam", scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, one, 3)
    for batch in batches(3):
        two.zero_grad()
        scaler.scale(loss_of(scaled, batch)).backward()
        scaler.step(two)
        scaler.update()
    assert torch.allclose(weights(plain), weights(scaled), atol=1e-6)


def check_half_precision_weights() -> None:
    for name in some(NAMES, FIRST):
        model = network().bfloat16()
        optimizer = made(name, model)
        for x, y in batches(5):
            optimizer.zero_grad()
            loss_of(model, (x.bfloat16(), y)).backward()
            optimizer.step()
        assert_same(model)


def check_parameters_unused_on_some_ranks() -> None:
    for name in some(NAMES, SECOND):
        model, side = network(), torch.nn.Linear(32, 40)
        hvd.broadcast_parameters(side.state_dict(), 0)
        both = torch.nn.ModuleList([model, side])
        optimizer = made(name, both)
        for step, batch in enumerate(batches(5)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            if (hvd.rank() + step) % 2:
                loss = loss + side(batch[0]).square().mean()
            loss.backward()
            optimizer.step()
        assert_same(both)


def check_process_sets() -> None:
    """Half of the ranks exchange; the others take steps of their own."""
    half = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    try:
        for name in some(NAMES, FIRST):
            model = network()
            optimizer = made(name, model, process_set=half, guard="off")
            train(model, optimizer)
            rows = everywhere(weights(model))
            assert torch.isfinite(rows).all()
            evens = rows[0::2]
            assert (evens == evens[0]).all()
            assert not torch.equal(rows[0], rows[1])
    finally:
        hvd.remove_process_set(half)


def check_accordion_moves_between_stages() -> None:
    for name in NAMES:
        model = network()
        rule = getattr(optimizers, name)()
        if rule.dense() == rule:
            with refused(ValueError, f"{name}: policy is", "only one stage"):
                made(name, model, policy=Accordion(window=2))
            continue
        policy = Accordion(window=2, interval=1, threshold=0.4)
        optimizer = made(name, model, policy=policy)
        seen = set()
        for batch in batches(16):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            seen |= set(optimizer.exchange.levels().values())
        assert_same(model)
        assert {repr(rule.dense()), repr(optimizer.rule)} <= seen, seen
    with refused(ValueError, "low is missing"):
        hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), 0.1), None, Accordion())
    with refused(ValueError, "policy is", "accordion_hvd.optimizers"):
        hvd.Adam(network().parameters(), policy=Accordion(low=TopK(0.1), high=TopK(0.01)))


def check_each_rank_resumes_from_its_own() -> None:
    for name in some(NAMES, SECOND):
        model = network()
        optimizer = made(name, model)
        train(model, optimizer, 6)
        buffer = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), buffer)
        train(model, optimizer, 4, seed=8)
        buffer.seek(0)
        saved, state = torch.load(buffer, weights_only=True)
        resumed = network(5)
        resumed.load_state_dict(saved)
        again = made(name, resumed)
        again.load_state_dict(state)
        train(resumed, again, 4, seed=8)
        assert torch.equal(weights(model), weights(resumed)), name


def check_a_state_before_the_first_step_begins_anew() -> None:
    model, twin = network(), network()
    optimizer = made("OnebitAdam", model)
    beginning = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 5)  # beyond its warm-up
    model.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(beginning)
    assert optimizer.exchange.policy.history == []
    train(model, optimizer, 5)
    train(twin, made("OnebitAdam", twin), 5)
    assert torch.equal(weights(model), weights(twin))


def check_one_ranks_state_serves_all() -> None:
    for name in some(NAMES, FIRST):
        model = network()
        optimizer = made(name, model)
        train(model, optimizer, 6)
        state = hvd.broadcast_object(optimizer.state_dict(), 0, name="check.state")
        again = made(name, model)
        again.load_state_dict(state)
        train(model, again, 4)
        assert_same(model)
        fresh = made(name, model)
        if hvd.rank() == 0:
            fresh.load_state_dict(optimizer.state_dict())
        hvd.broadcast_optimizer_state(fresh, 0)
        assert fresh.exchange.steps == 6
        train(model, fresh, 3)
        assert_same(model)
    optimizer = made("CDAdam", model)
    train(model, optimizer, 3)
    hvd.broadcast_optimizer_state(optimizer, hvd.size() - 1)  # in the middle of a training
    train(model, optimizer, 2)
    assert_same(model)
    state, late = optimizer.state_dict(), made("CDAdam", model)
    if hvd.rank() == 0:
        late.load_state_dict(state)
    with refused(RuntimeError, "continue after [5, 0", "on all ranks"):
        train(model, late, 1)
    with refused(ValueError, "no 'exchange'"):
        made("Adam", model).load_state_dict(torch.optim.SGD(model.parameters(), 0.1).state_dict())


def check_a_refused_state_changes_nothing() -> None:
    """Whatever is missing or wrong: one sentence, and settings, weights and moments stay."""

    def all_of(optimizer: Any, model: torch.nn.Module) -> str:
        groups = [{k: x for k, x in g.items() if k != "params"} for g in optimizer.param_groups]
        moments = held(optimizer.exchange, torch.Tensor.numpy)
        return repr((groups, weights(model).tolist(), moments))

    for name in some(NAMES, ("OnebitAdam", "ZeroOneAdam")):
        model, other = network(), network()
        optimizer, late = made(name, model), made(name, other)
        train(model, optimizer, 5)
        train(other, late, 1, seed=3)
        saved = copy.deepcopy(optimizer.state_dict())
        before = all_of(late, other)
        for label, wrong in wrong_states(saved, other_tensors):
            with refused(ValueError):
                late.load_state_dict(wrong)
            assert all_of(late, other) == before, (name, label)
        for key in ("params", "lr", "weight_decay"):
            wrong = copy.deepcopy(saved)
            del wrong["param_groups"][0][key]
            with refused(ValueError, f"parameter group 0 has no '{key}'"):
                late.load_state_dict(wrong)
            assert all_of(late, other) == before, (name, key)
        late.load_state_dict(saved)
        assert late.exchange.steps == 5


def other_tensors(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat([x.reshape(-1), x.new_zeros(3)]), x.to(torch.int8)]


def check_state_is_saved_for_any_number_of_ranks() -> None:
    for name in some(NAMES, SECOND):
        folder, model = shared_folder(), network()
        optimizer = made(name, model)
        train(model, optimizer, 6)
        hvd.save_state(folder, only=[optimizer])
        twin = network()
        twin.load_state_dict(model.state_dict())
        again = made(name, twin)
        hvd.load_state(folder, only=[again])
        small = hvd.add_process_set([0])
        if small.included():
            alone = copy.deepcopy(twin)
            resumed = made(name, alone, process_set=small)
            hvd.load_state(folder, only=[resumed])
            train(alone, resumed, 2)
            assert torch.isfinite(weights(alone)).all()
        hvd.remove_process_set(small)
        train(model, optimizer, 3, seed=8)
        train(twin, again, 3, seed=8)
        assert torch.equal(weights(model), weights(twin)), name
        remove(folder)


def check_refusals() -> None:
    model = network()
    optimizer = made("OnebitAdam", model)
    with refused(RuntimeError, "averages no gradients"):
        optimizer.synchronize()
    with refused(TypeError, "state_dict()"):
        pickle.dumps(optimizer)
    with refused(ValueError, "OnebitAdam is an optimizer", "accordion_hvd.torch.OnebitAdam"):
        plain = torch.optim.SGD(model.parameters(), 0.1)
        hvd.DistributedOptimizer(plain, compression=optimizers.OnebitAdam())
    with refused(ValueError, "already distributed"):
        hvd.DistributedOptimizer(optimizer)
    with refused(TypeError, "momentum"):
        hvd.OnebitAdam(model.parameters(), momentum=0.9)
    for options, words in [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0"),
        ({"betas": (0.9, 1.0)}, "betas is (0.9, 1.0)"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
    ]:
        with refused(ValueError, words):
            hvd.OnebitAdam(model.parameters(), **options)


if __name__ == "__main__":
    harness.main(globals())
