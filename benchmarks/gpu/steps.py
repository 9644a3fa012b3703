"""Times, bytes and waits of steps through DDP's hook, on one rank of four (`echo`)."""

from __future__ import annotations

import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import echo
from benchmarks.gpu.models import MODELS

OURS = (
    "dense", "bf16", "fp16", "powersgd:1", "powersgd:4", "topk:0.01", "qsgd:4", "efsignsgd",
    "accordion(powersgd:4, powersgd:1)",
)  # fmt: skip
WAITING = (
    "dense", "fp16", "bf16", "topk:0.01", "randomk:0.01", "threshold:0.02", "adacomp:50",
    "dgc:0.01", "stc:0.01", "powersgd:1", "powersgd:4", "qsgd:4", "terngrad",
    "natural", "int8", "signsgd", "efsignsgd", "onebit", "sketchedsgd",
)  # fmt: skip
"""Spec strings; without ScaleCom, whose leader is often another rank (`echo` has none)."""

WARM, RUNS, STEPS = 12, 3, 4


def times(device: str) -> None:
    """Print the step time, and the bytes held per parameter, of each configuration."""
    echo.install(device)
    ways: dict[str, Callable[[Any], Any]] = {"computing alone": lambda net: net, "DDP": _plain}
    for rank in (4, 1):
        ways[f"PyTorch's PowerSGD, rank {rank}"] = functools.partial(_theirs, rank)
    for spec in OURS:
        ways[f"ours, {spec}"] = functools.partial(_hooked, spec)
    narrow = functools.partial(_hooked, "powersgd:4", residual_dtype="bfloat16")
    ways["ours, powersgd:4, bfloat16 residuals"] = narrow
    for name, make in MODELS.items():
        found: dict[str, float] = {}
        count = sum(p.numel() for p in make(device)[0].parameters())
        print(f"{name}, {count / 1e6:.1f} M parameters", flush=True)
        print(f"{'ms a step':>10} {'extra':>8} {'of DDP':>7} {'bytes held':>11}", flush=True)
        for way, wrap in ways.items():
            seconds, held = _measure(make, wrap, device)
            found[way] = seconds
            extra, ratio = seconds - found["computing alone"], seconds / found.get("DDP", seconds)
            row = f"{1e3 * seconds:10.1f} {1e3 * extra:8.1f} {ratio:7.2f} {held / count:11.1f}"
            print(f"{row}  {way}", flush=True)


def waits(device: str) -> None:
    """Print how often a step makes the host wait for the GPU; PyTorch does not tell on a CPU."""
    echo.install(device)
    print(f"{'waits':>6}")
    for spec in WAITING:
        net, loss = MODELS["GPT"]("cpu") if device == "cpu" else _short(device)
        step = _stepper(_hooked(spec, net), loss)
        for _ in range(3):
            step()
        found = _waits_of(step, device)
        print(f"{len(found) if device == 'cuda' else '-':>6}  {spec}", *sorted(set(found))[:3],
              flush=True)  # fmt: skip


def _short(device: str) -> Any:
    """Return the small GPT of the rehearsal, on the GPU."""
    net, _ = MODELS["GPT"]("cpu")
    net = net.to(device)
    text = torch.randint(0, 512, (2, 33), device=device)

    def loss(model: Any) -> torch.Tensor:
        found = model(text[:, :-1])
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten())

    return net, loss


def _waits_of(step: Callable[[], None], device: str) -> list[str]:
    """Return PyTorch's warnings of a step about waits, with the lines that cause them."""
    if device == "cpu":
        step()
        return []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    told = [x for x in caught if "synchroniz" in str(x.message)]
    return [f"{x.filename.rpartition('/accordion_hvd/')[2]}:{x.lineno}" for x in told]


def _measure(make: Callable[[str], Any], wrap: Callable[[Any], Any], device: str) -> Any:
    """Return the median seconds of a step, and the bytes that are held after it for `wrap`."""
    net, loss = make(device)
    bare = _stepper(net, loss)
    bare()
    before = _held(device)
    step = _stepper(wrap(net), loss)
    for _ in range(WARM if device == "cuda" else 2):
        step()
    found = []
    for _ in range(RUNS):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(STEPS if device == "cuda" else 1):
            step()
        _synchronize(device)
        found.append((time.perf_counter() - began) / (STEPS if device == "cuda" else 1))
    held = _held(device) - before
    del step, bare, net, loss
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(found), held


def _held(device: str) -> int:
    _synchronize(device)
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _stepper(model: Any, loss: Callable[[Any], torch.Tensor]) -> Callable[[], None]:
    """Return a function that takes a step of SGD, and keeps the memory of the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss(model).backward()
        optimizer.step()

    return step


def _ddp(net: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)


def _plain(net: Any) -> Any:
    """Return a DDP whose buckets are summed by the hook that does what DDP does without one."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = _ddp(net)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def _theirs(rank: int, net: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    model = _ddp(net)
    state = theirs.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, theirs.powerSGD_hook)
    return model


def _hooked(spec: str, net: Any, **options: Any) -> Any:
    from accordion_hvd import Accordion, ddp, parse

    echo.without_watch()
    compression = parse(spec) if "accordion" not in spec else Accordion(
        low=parse("powersgd:4"), high=parse("powersgd:1"), window=10**6
    )  # fmt: skip
    model = _ddp(net)
    rates = torch.optim.SGD(net.parameters(), lr=1e-4)  # policies read its learning rate
    ddp.register(model, compression, optimizer=rates, guard="off", ledger=False, **options)
    return model
