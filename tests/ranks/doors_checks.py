"""What scripts do between `backward()` and `step()`, over any engine; gradients are known by hand.

Losses are linear in the weights, so that the gradient of rank r in step t is `gradient(t, r)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import torch
from harness import refused, some

import accordion_hvd.torch as hvd
from accordion_hvd import (
    DGC,
    DPSGD,
    EF21,
    FP16,
    WAGMA,
    Accordion,
    Dense,
    DiLoCo,
    Fixed,
    LocalSGD,
    Momentum,
    PowerSGD,
    SignSGD,
    TopK,
)
from accordion_hvd.engine.guard import ReplicasDiffer

torch.set_num_threads(1)
INIT = hvd.init
SHAPE = (40, 40)


def gradient(step: int, rank: int | None = None, salt: int = 0) -> torch.Tensor:
    rank = hvd.rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * salt + 10 * step + rank)
    return torch.randn(SHAPE, generator=generator)


def total(steps: range, salt: int = 0) -> torch.Tensor:
    """Return the sum of the mean gradients of these steps."""
    every = [gradient(step, rank, salt) for step in steps for rank in range(hvd.size())]
    return torch.stack(every).sum(0) / hvd.size()


def zeros(count: int = 1) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(count)]


def wrapped(plain: torch.optim.Optimizer, compression: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(plain, compression=compression, **options)


def assert_equal_ranks(*parameters: torch.Tensor) -> None:
    rows = hvd.allgather(torch.stack([p.detach() for p in parameters])[None], name="doors.rows")
    assert torch.isfinite(rows).all() and (rows == rows[0]).all()


# ------------------------------------------------------------------------- late parameters
def add(how: str, optimizer: Any, plain: Any, parameter: torch.nn.Parameter) -> None:
    if how == "wrapped":
        optimizer.add_param_group({"params": [parameter]})
    elif how == "plain":
        plain.add_param_group({"params": [parameter]})
    else:
        optimizer.param_groups[0]["params"].append(parameter)


def check_late_parameters_take_part() -> None:
    """A parameter that joins the groups of either optimizer is averaged from its first step on."""
    for how in ("wrapped", "plain", "list"):
        for compression in some((TopK(1.0), Dense(), PowerSGD(2)), (TopK(1.0),)):
            head, body = zeros(2)
            plain = torch.optim.SGD([head], lr=1.0)
            optimizer = wrapped(plain, compression)
            for step in range(6):
                if step == 3:
                    add(how, optimizer, plain, body)
                optimizer.zero_grad()
                loss = (head * gradient(step)).sum()
                loss = loss + (body * gradient(step, salt=1)).sum() if step >= 3 else loss
                loss.backward()
                optimizer.step()
            assert_equal_ranks(head, body)
            if not isinstance(compression, PowerSGD):
                torch.testing.assert_close(body.detach(), -total(range(3, 6), salt=1))


def check_late_parameters_keep_their_names() -> None:
    """Names that were given hold for them, and no two parameters have one name."""
    body, head, late = zeros(3)
    optimizer = wrapped(
        torch.optim.SGD([body, head], lr=1.0), TopK(0.1), skip=["*head*"],
        named_parameters=[("body", body), ("head", head), ("late_head", late)],
    )  # fmt: skip
    optimizer.add_param_group({"params": [late]})
    for step in range(2):
        optimizer.zero_grad()
        ((body + head + late) * gradient(step)).sum().backward()
        optimizer.step()
    assert list(optimizer._parameter_names.values()) == ["body", "head", "late_head"]
    levels = optimizer.exchange.levels()  # of buckets: one of "body", one of both heads
    assert levels["head+1"] == "Dense()" != levels["body"], levels
    (body,) = zeros()
    optimizer = wrapped(torch.optim.SGD([body], lr=1.0), Dense())
    for step in range(3):
        (head,) = zeros()
        del optimizer.param_groups[1:]
        optimizer.add_param_group({"params": [head]})
        ((body + head) * gradient(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = list(optimizer._parameter_names.values())
    assert len(names) == len(set(names)) == 4, names


def check_parameters_added_after_the_backward_pass_are_refused() -> None:
    head, body = zeros(2)
    optimizer = wrapped(torch.optim.SGD([head], lr=1.0), TopK(1.0))
    for step in range(2):
        optimizer.zero_grad()
        ((head + body) * gradient(step)).sum().backward()
        if step == 1:
            optimizer.param_groups[0]["params"].append(body)
            with refused(RuntimeError, "group.0.1", "between backward() and step()"):
                optimizer.step()
        else:
            optimizer.step()


def check_late_parameters_of_averaged_models_are_refused() -> None:
    methods = [LocalSGD(2), DiLoCo(2), DPSGD("ring"), WAGMA()]
    methods = [m for m in methods if not isinstance(m, WAGMA) or hvd.size() > 2]
    for method in some([*methods, None], [*methods[:1], None]):
        for how in ("wrapped", "plain", "list"):
            at_times = Accordion(low=Dense(), high=LocalSGD(2), window=4)
            head, body = zeros(2)
            plain = torch.optim.SGD([head], lr=1.0)
            optimizer = wrapped(plain, method or at_times)
            (head * gradient(0)).sum().backward()
            optimizer.step()
            add(how, optimizer, plain, body)
            with refused(RuntimeError, "were added", repr(method or LocalSGD(2))):
                optimizer.step()


def check_late_parameters_of_compressed_optimizers_take_part() -> None:
    for how in ("wrapped", "list"):
        head, body = zeros(2)
        optimizer = hvd.CDAdam([head], lr=0.1)
        for step in range(6):
            if step == 3:
                add(how, optimizer, optimizer, body)
            optimizer.zero_grad()
            loss = (head * gradient(step)).sum()
            (loss + (body * gradient(step, salt=1)).sum() if step >= 3 else loss).backward()
            optimizer.step()
        assert_equal_ranks(head, body)
        assert body.abs().max() > 0


def check_late_parameters_warm_up_by_themselves() -> None:
    """After the warm-up of the others, their first steps are those of the dense stage."""
    for how in ("list", "unfrozen"):
        head, body = zeros(2)
        body.requires_grad_(how == "list")
        first = [head] if how == "list" else [head, body]
        optimizer = hvd.OnebitAdam(first, lr=0.1, warmup_steps=3)
        reference = zeros(1)
        adam = torch.optim.Adam(reference, lr=0.1)
        for step in range(10):
            if step == 5:
                body.requires_grad_(True)
                if how == "list":
                    optimizer.param_groups[0]["params"].append(body)
            optimizer.zero_grad()
            loss = (head * gradient(step)).sum()
            (loss + (body * gradient(step, salt=1)).sum() if step >= 5 else loss).backward()
            optimizer.step()
            if 5 <= step < 8:
                reference[0].grad = total(range(step, step + 1), salt=1)
                adam.step()
                torch.testing.assert_close(
                    body.detach(), reference[0].detach(), rtol=1e-3, atol=1e-4
                )
        assert set(optimizer.exchange.levels().values()) == {repr(optimizer.rule)}
        assert_equal_ranks(head, body)


def check_unfrozen_layers_take_part() -> None:
    """Of averaged models and of compressed optimizers; frozen layers do not move."""
    for make in (lambda ps: wrapped(torch.optim.SGD(ps, lr=0.1), LocalSGD(2)), hvd.CDAdam):
        head, body = zeros(2)
        body.requires_grad_(False)
        optimizer = make([head, body])
        for step in range(8):
            if step == 4:
                assert body.abs().max() == 0
                body.requires_grad_(True)
            optimizer.zero_grad()
            ((head + body) * gradient(step)).sum().backward()
            optimizer.step()
        assert_equal_ranks(head, body)
        assert body.abs().max() > 0


def check_layers_in_turn() -> None:
    """What is owed to a frozen layer stays owed until it trains again; an unused one is paid."""
    for compression in (TopK(0.1), PowerSGD(2)):
        for frozen in (True, False):
            layers_in_turn(compression, frozen)


def layers_in_turn(compression: Any, frozen: bool) -> None:
    layers = zeros(2)
    optimizer = wrapped(torch.optim.SGD(layers, lr=1.0), compression)
    for step in range(80):
        trained = [step % 2] if step < 12 else [0, 1]
        for i, layer in enumerate(layers):
            layer.requires_grad_(i in trained or not frozen)
        optimizer.zero_grad()
        factor = float(step < 12)
        sum((layers[i] * gradient(step, salt=i) * factor).sum() for i in trained).backward()
        before = [layer.detach().clone() for layer in layers]
        optimizer.step()
        for i in {0, 1} - set(trained) if frozen else ():
            assert torch.equal(before[i], layers[i])
    for i, layer in enumerate(layers):
        wanted = -sum(total(range(step, step + 1), i) for step in range(i, 12, 2))
        error = float((layer.detach() - wanted).norm() / wanted.norm())
        assert error < 2e-3, (compression, frozen, error)


def check_local_optimizers_leave_unused_layers_alone() -> None:
    """Compressed optimizers, and those of averaged models, skip what no rank has used.

    Moments and weight decay stay as they are, as in `torch.optim`.
    """
    ours, theirs = zeros(2), zeros(2)
    for p in (*ours, *theirs):
        p.data.fill_(1.0)
    optimizer = hvd.Adam(ours, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1)
    for step in range(8):
        used = [0] if step % 3 else [0, 1]
        optimizer.zero_grad()
        sum((ours[i] * gradient(step, salt=i)).sum() for i in used).backward()
        optimizer.step()
        for i, p in enumerate(theirs):
            p.grad = total(range(step, step + 1), i) if i in used else None
        reference.step()
        if step == 3:
            before = ours[1].detach().clone()
        if step in (4, 5):
            assert torch.equal(before, ours[1])
    torch.testing.assert_close(ours[0].detach(), theirs[0].detach(), rtol=1e-4, atol=1e-5)
    averaged = wrapped(torch.optim.AdamW(ours, lr=0.1, weight_decay=0.1), LocalSGD(1))
    for optimizer in (hvd.CDAdam(ours, lr=0.1), averaged):
        for step in range(6):
            optimizer.zero_grad()
            (ours[step % 2] * gradient(step)).sum().backward()
            before = ours[1 - step % 2].detach().clone()
            optimizer.step()
            torch.testing.assert_close(before, ours[1 - step % 2].detach())
        assert_equal_ranks(*ours)


# ------------------------------------------------------------------- changes of the gradients
CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "clip_grad_norm_": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0),
    "clip_grad_value_": lambda ps: torch.nn.utils.clip_grad_value_(ps, 1e-3),
    "add_": lambda ps: [p.grad.add_(p.detach(), alpha=0.1) for p in ps],
    "replaced": lambda ps: [setattr(p, "grad", p.grad * 0.5) for p in ps],
}


def check_changed_gradients_are_refused() -> None:
    """In the first step, whose exchange begins in `step()`, and in later ones."""
    for changed in CHANGES.values():
        for passes in (1, 2):
            for last in (0, 2):
                (w,) = zeros()
                plain = torch.optim.SGD([w], lr=1.0)
                optimizer = wrapped(plain, TopK(1.0), backward_passes_per_step=passes)
                for step in range(last + 1):
                    optimizer.zero_grad()
                    for _ in range(passes):
                        (w * gradient(step)).sum().backward()
                    if step < last:
                        optimizer.step()
                        continue
                    changed([w])
                    before = w.detach().clone()
                    with refused(RuntimeError, "allreduce.noname.0.0", "synchronize()"):
                        optimizer.step()
                    assert torch.equal(before, w)


def check_changes_after_synchronize_are_honoured() -> None:
    (w,) = zeros()
    optimizer = wrapped(torch.optim.SGD([w], lr=1.0), TopK(1.0))
    for step in range(3):
        optimizer.zero_grad()
        (w * gradient(step)).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        before = w.detach().clone()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert abs(float((w - before).norm()) - 1) < 1e-4
    assert_equal_ranks(w)


def check_local_gradients_may_be_changed() -> None:
    """Averaged models and compressed optimizers use what `.grad` holds when `step()` is called."""
    (w,) = zeros()
    optimizer = wrapped(torch.optim.SGD([w], lr=1.0), LocalSGD(1))
    (w * gradient(0)).sum().backward()
    w.grad.mul_(0.5)
    optimizer.step()
    torch.testing.assert_close(w.detach(), -0.5 * total(range(1)))
    (w,) = zeros()
    optimizer = hvd.Adam([w], lr=1.0)
    (w * gradient(0)).sum().backward()
    w.grad.copy_(torch.ones(SHAPE))
    optimizer.step()
    torch.testing.assert_close(w.detach(), -torch.ones(SHAPE))


def check_changes_that_pytorch_does_not_count_are_refused() -> None:
    """`.grad.data` has a count of its own: a script that clips so is refused in its first step."""
    for compression in (Dense(), TopK(0.1)):
        (weight,) = zeros()
        optimizer = wrapped(torch.optim.SGD([weight], lr=1.0), compression)
        (weight * gradient(0)).sum().backward()
        weight.grad.data.clamp_(-0.001, 0.001)
        with refused(RuntimeError, "was changed between backward() and step()"):
            optimizer.step()


def check_steps_without_synchronize_are_refused() -> None:
    (weight,) = zeros()
    optimizer = wrapped(torch.optim.SGD([weight], lr=1.0), Dense())
    for step in range(2):
        (weight * gradient(step)).sum().backward()
        with refused(RuntimeError, "call optimizer.synchronize() before it"):
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), -total(range(2)))


def check_layers_frozen_before_the_step_are_refused() -> None:
    """An optimizer applies a gradient that is there, whether or not its weight is frozen."""
    for after in (0, 1):
        body, head = zeros(2)
        optimizer = wrapped(torch.optim.SGD([body, head], lr=1.0), Dense())
        for step in range(after + 1):
            optimizer.zero_grad()
            ((head * gradient(step)).sum() + (body * gradient(step, salt=1)).sum()).backward()
            if step < after:
                optimizer.step()
        body.requires_grad_(False)
        with refused(RuntimeError, "noname.0.0", "was frozen between backward() and step()"):
            optimizer.step()


def check_a_discarded_step_frees_accumulated_batches() -> None:
    """After `synchronize()`, `zero_grad()` discards gradients also where batches may grow."""
    (weight,) = zeros()
    policy = Accordion(batch_size=(8, 16), window=100)
    optimizer = wrapped(torch.optim.SGD([weight], lr=1.0), policy)
    for step in range(3):
        optimizer.zero_grad()
        (weight * gradient(step)).sum().backward()
        optimizer.synchronize()
        if step == 0:
            continue  # as where the norm is not finite
        with optimizer.skip_synchronize():
            optimizer.step()
    torch.testing.assert_close(weight.detach(), -total(range(1, 3)))


class Outer(torch.optim.Optimizer):
    """An optimizer that shares its groups with one within it, as SAM and Lookahead do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def check_rates_of_an_inner_optimizer_follow() -> None:
    (weight,) = zeros()
    optimizer = wrapped(Outer([weight], lr=1.0), Dense())
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about the order of the first calls
        schedule.step()
    (weight * gradient(0)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -0.5 * total(range(1)))


def check_a_momentum_that_comes_later_is_refused() -> None:
    """A schedule such as OneCycleLR writes momentum into plain SGD after it was wrapped."""
    for compression in (Momentum(Dense()), SignSGD()):
        (weight,) = zeros()
        optimizer = wrapped(torch.optim.SGD([weight], lr=1.0), compression)
        optimizer.param_groups[0]["momentum"] = 0.9
        (weight * gradient(0)).sum().backward()
        with refused(ValueError, "wrap plain SGD without momentum"):
            optimizer.step()


def check_groups_keep_their_settings() -> None:
    """Compressed optimizers use a group's settings also after another one has left."""

    def train(make: Callable[[Any], Any]) -> torch.Tensor:
        first, second = zeros(2)
        groups = [{"params": [first]}, {"params": [second], "betas": (0.5, 0.6)}]
        optimizer = make(groups)
        for step in range(5):
            if step == 2:
                optimizer.param_groups.pop(0)
            optimizer.zero_grad()
            (second * total(range(step, step + 1))).sum().backward()
            optimizer.step()
        return second.detach()

    found = train(lambda groups: hvd.Adam(groups, lr=0.01))
    wanted = train(lambda groups: torch.optim.Adam(groups, lr=0.01))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def check_blocks_unfrozen_one_by_one() -> None:
    """Biases of several blocks are stacked with none of another block, whose sizes differ."""
    for name in some(("Adam", "Lamb", "SignSGD", "DGC"), ("Adam", "SignSGD")):
        torch.manual_seed(0)
        sizes = [torch.nn.Parameter(torch.zeros(n)) for _ in range(3) for n in (64, 40, 40)]
        blocks = [sizes[i : i + 3] for i in (0, 3, 6)]
        for parameter in sizes[3:]:
            parameter.requires_grad_(False)
        if name in ("Adam", "Lamb"):
            optimizer = getattr(hvd, name)(sizes, lr=0.01)
        else:
            method = SignSGD() if name == "SignSGD" else DGC(0.1)
            optimizer = wrapped(torch.optim.SGD(sizes, lr=0.01), method)
        for epoch, block in enumerate(blocks):
            for parameter in block:
                parameter.requires_grad_(True)
            for step in range(2):
                optimizer.zero_grad()
                used = [p for known in blocks[: epoch + 1] for p in known]
                draw = [gradient(step + 10 * epoch, salt=2).reshape(-1)[: len(p)] for p in used]
                sum((p * g).sum() for p, g in zip(used, draw, strict=True)).backward()
                optimizer.step()
        assert_equal_ranks(torch.cat([p.detach() for p in sizes]))


def check_views_of_a_flat_buffer_stay_views() -> None:
    for compression in (Dense(), EF21(TopK(1.0)), TopK(1.0), LocalSGD(1), hvd.Adam):
        shapes = [(300, 300), (40, 50), (300,)]
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        plain, ours = torch.optim.SGD(parameters, lr=1.0), compression is hvd.Adam
        optimizer = hvd.Adam(parameters) if ours else wrapped(plain, compression)
        for step in range(4):
            flat.zero_()
            factor = float(step + 1) * (hvd.rank() + 1)
            torch.stack([p.sum() * factor for p in parameters]).sum().backward()
            optimizer.step()
        wanted = -10 * (hvd.size() + 1) / 2
        for p in parameters:
            assert ours or torch.allclose(p, torch.full_like(p, wanted))
            assert p.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        flat.fill_(1.0)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # without a backward pass, it is no change


# --------------------------------------------------------------------------- mixed precision
def scaled_steps(optimizer: Any, w: Any, steps: range, bad: int = -1, **more: Any) -> Any:
    """Train as PyTorch's manual does; in the step `bad`, the last rank has an infinite gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    for step in steps:
        optimizer.zero_grad()
        factors = gradient(step)
        if step == bad and hvd.rank() == hvd.size() - 1:
            factors[0, 0] = float("inf")
        scaler.scale((w * factors).sum()).backward()
        before = w.detach().clone()
        scaler.step(optimizer, **more)
        assert (step == bad) == torch.equal(before, w), step
        scaler.update()
    return scaler


def check_a_grad_scaler_as_in_the_manual() -> None:
    """It need not be passed, though its scale grows, and one rank's overflow skips all steps."""
    for compression in (Dense(), TopK(1.0), hvd.Compression.none):
        for bad in (-1, 3):
            (w,) = zeros()
            optimizer = wrapped(torch.optim.SGD([w], lr=1.0), compression)
            scaler = scaled_steps(optimizer, w, range(6), bad)
            assert scaler.get_scale() != 2.0**16
            wanted = -total(range(6)) + (total(range(3, 4)) if bad == 3 else 0)
            torch.testing.assert_close(w.detach(), wanted, rtol=1e-4, atol=1e-5)
            assert_equal_ranks(w)


def check_residuals_do_not_follow_the_scale() -> None:
    """With and without `grad_scaler=`, what is owed is paid while the scale doubles."""
    for passed in (True, False):
        (w,) = zeros()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        options = {"grad_scaler": scaler} if passed else {}
        optimizer = wrapped(torch.optim.SGD([w], lr=1.0), TopK(0.1), **options)
        for step in range(34):  # the last ones have zero gradients and flush the residuals
            optimizer.zero_grad()
            scaler.scale((w * gradient(step) * float(step < 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update(2.0 ** (10 + step % 3))
        torch.testing.assert_close(w.detach(), -total(range(4)), rtol=1e-4, atol=1e-4)


def check_small_gradients_survive_half_precision() -> None:
    """Fp16 values are those of scaled gradients, also if a script does not pass its scaler.

    The ranks' scales then differ after a step that only some of them skip.
    """
    cases = [(x, passed) for x in (FP16(), hvd.Compression.fp16) for passed in (True, False)]
    for compression, passed in cases:
        (w,) = zeros()
        scale = 2.0**16 if passed else 2.0 ** (16 - hvd.rank())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        more = {"grad_scaler": scaler} if passed else {}
        optimizer = wrapped(torch.optim.SGD([w], lr=1e7), compression, **more)
        scaler.scale((w * gradient(0) * 1e-7).sum()).backward()
        scaler.step(optimizer)
        error = float((w.detach() + total(range(1))).norm() / total(range(1)).norm())
        assert error < 1e-3, (compression, error)


def check_scaled_averages_with_residuals_are_refused() -> None:
    """Horovod's recipe averages scaled gradients, which only suits what keeps no residuals."""
    for compression, fits in ((Dense(), True), (TopK(0.1), False)):
        (w,) = zeros()
        optimizer = wrapped(torch.optim.SGD([w], lr=1.0), compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale((w * gradient(0)).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        with told(fits, "grad_scaler is None"), optimizer.skip_synchronize():
            scaler.step(optimizer)
        assert not fits or abs(float(w.detach().norm()) - 1) < 1e-4


@contextmanager
def told(fits: bool, *words: str) -> Iterator[None]:
    if fits:
        yield
    else:
        with refused(ValueError, *words):
            yield


def check_clipping_of_unscaled_gradients_needs_the_scaler() -> None:
    for passed in (True, False):
        (w,) = zeros()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options = {"grad_scaler": scaler} if passed else {}
        optimizer = wrapped(torch.optim.SGD([w], lr=1.0), TopK(1.0), **options)
        scaler.scale((w * gradient(0)).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        if passed:
            scaler.step(optimizer)
            assert abs(float(w.detach().norm()) - 1) < 1e-4
        else:
            with refused(RuntimeError, "grad_scaler="):
                scaler.step(optimizer)


# --------------------------------------------------------------------------------- schedules
def check_schedules_made_before_wrapping() -> None:
    """Rates fall on all ranks after a broadcast or a load of the optimizer's state."""
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    for kind, compression in ((sgd, PowerSGD(2)), (adamw, Dense()), (adamw, LocalSGD(3))):
        for how in ("broadcast", "load"):
            (w,) = zeros()
            plain = kind([w], lr=1.0)
            schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
            optimizer = wrapped(plain, compression)
            if how == "broadcast":
                hvd.broadcast_optimizer_state(optimizer, 0)
            else:
                optimizer.load_state_dict(optimizer.state_dict())
            rates = []
            for step in range(4):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                (w * gradient(step)).sum().backward()
                optimizer.step()
                schedule.step()
            assert rates == [1.0, 0.5, 0.25, 0.125], (kind, how, rates)
            assert plain.state is optimizer.state or isinstance(compression, LocalSGD)


# ------------------------------------------------------------------------------------- names
def check_names_have_no_prefixes() -> None:
    """Patterns match the names of a module that is compiled, wrapped, or both."""
    for make in (torch.compile, torch.nn.DataParallel, lambda m: torch.nn.DataParallel(m)):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        outer = make(network)
        plain = torch.optim.SGD(outer.parameters(), lr=0.1)
        policy = Fixed(TopK(0.1), overrides={"1.weight": Dense()})
        optimizer = hvd.DistributedOptimizer(plain, outer.named_parameters(), policy)
        network(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        levels = optimizer.exchange.levels()
        assert levels["1.weight"] == "Dense()" and levels["0.weight"] == repr(TopK(0.1)), levels


def check_compression_by_position_is_refused() -> None:
    for compression in (PowerSGD(2), LocalSGD(2), Accordion, "topk:0.1"):
        plain = torch.optim.SGD(zeros(), lr=1.0)
        with refused(ValueError, "named_parameters is", "compression= by keyword"):
            hvd.DistributedOptimizer(plain, compression)  # type: ignore[arg-type]

    with refused(ValueError, "Adam: lr is PowerSGD"):
        hvd.Adam(zeros(), PowerSGD(2))  # type: ignore[arg-type]


def check_rates_and_patterns_of_compressed_optimizers() -> None:
    """The guard compares their learning rates, and a pattern must match a name."""
    (w,) = zeros()
    with refused(ValueError, "skip is 'haed*'"):
        hvd.Adam([("head", w)], skip="haed*")
    optimizer = hvd.Adam([("head", w)], lr=0.1, guard_every=2)
    for step in range(4):
        optimizer.zero_grad()
        (w * 0.0).sum().backward()
        if step == 3 and hvd.rank() == hvd.size() - 1:
            optimizer.param_groups[0]["lr"] = 0.2
        with differing(step == 3):
            optimizer.step()


def check_rates_of_averaged_models() -> None:
    """The guard compares the learning rates of all groups, also of a policy that alternates."""
    for method in (LocalSGD(1), Accordion(low=Dense(), high=LocalSGD(1), window=4)):
        (w, v) = zeros(2)
        plain = torch.optim.SGD([{"params": [w]}, {"params": [v]}], lr=0.1)
        optimizer = wrapped(plain, method, guard_every=2)
        for step in range(4):
            optimizer.zero_grad()
            ((w + v) * 0.0).sum().backward()
            if step == 3 and hvd.rank() == hvd.size() - 1:
                optimizer.param_groups[1]["lr"] = 0.2
            with differing(step == 3):
                optimizer.step()


@contextmanager
def differing(expected: bool) -> Iterator[None]:
    if expected:
        with refused(ReplicasDiffer, "learning rates"):
            yield
    else:
        yield


def check_mean_gradients_need_no_warning() -> None:
    """A plain training raises no warning at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (w,) = zeros()
        optimizer = wrapped(torch.optim.SGD([w], lr=1.0), TopK(1.0))
        for step in range(4):
            optimizer.zero_grad()
            (w * gradient(step)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(w.detach(), -total(range(4)))


if __name__ == "__main__":
    harness.main(globals())
