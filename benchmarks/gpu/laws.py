"""Laws on real ranks that share one device: weights equal NumPy's, and replicas agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, PowerSGD, TopK, averaging, ddp, optimizers, parse, simulate

SPECS = (
    "dense", "fp16", "bf16", "topk:0.01", "randomk:0.01", "threshold:0.02", "adacomp:50",
    "scalecom:0.01", "dgc:0.01", "stc:0.01", "lgc:0.01", "powersgd:1", "powersgd:4",
    "powersgd:4,alternate", "powersgd:4,wire='float16'", "qsgd:4", "terngrad", "natural", "int8",
    "signsgd", "efsignsgd", "onebit", "sketchedsgd", "ef21(topk(0.01))", "diana(qsgd(4))",
)  # fmt: skip
"""Spec strings of the compressors to check."""

EARLY: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"warmup_steps": 3},
    "SketchedAMSGrad": {"warmup_steps": 3, "ratio": 0.02},
    "OnebitLamb": {"warmup_steps": 3},
    "ZeroOneAdam": {"var_freeze_step": 3},
}
"""Settings with which the stages of an optimizer change within a few steps."""

METHODS = (
    averaging.LocalSGD(2), averaging.WAGMA(wait_avoiding=False), averaging.DPSGD("ring"),
    averaging.DiLoCo(2, averaging.Nesterov(1.0, 0.0)), averaging.COLD("ring", 0.5, TopK(0.5)),
)  # fmt: skip
"""Methods that average models."""

SHAPES = {"w": (96, 200), "b": (7,)}
STEPS = 6
TOLERANCE = 2e-3
"""Largest difference from NumPy, relative to the largest element: sums are in fp32."""

Rows = list[tuple[str, float, float]]


def check(backend: str, device: str) -> None:
    """Check all laws as one of the ranks; print them on rank 0, and exit with 1 if one fails."""
    dist.init_process_group(backend)
    hvd.init()
    rows = [(spec, _compressor(spec, device), TOLERANCE) for spec in SPECS]
    rows += [(name, _optimizer(name, device), TOLERANCE) for name in optimizers.NATIVE]
    rows += [(repr(method), _average(method, device), 1e-5) for method in METHODS]
    policy = Accordion(low=PowerSGD(4), high=TopK(0.1), window=10, interval=2)
    rows += [(f"training, {name}", _training(make, device), 0.5) for name, make in (
        ("DistributedOptimizer", lambda net, opt: (net, _wrapped(opt, net, policy))),
        ("DDP hook", lambda net, opt: (_hooked(net), opt)),
    )]  # fmt: skip
    worst = hvd.allgather_object([error for _, error, _ in rows])
    failed = False
    for place, (name, _, bound) in enumerate(rows):
        error = max(found[place] for found in worst)
        failed |= not error <= bound
        if hvd.rank() == 0:
            print(f"{'ok    ' if error <= bound else 'FAILED'} {error:9.1e}  {name}", flush=True)
    hvd.shutdown()
    dist.destroy_process_group()  # else its threads may outlive Python
    raise SystemExit(1 if failed else 0)


def _gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([step, rank])
    return {name: draw.standard_normal(shape).astype("f") for name, shape in SHAPES.items()}


def _parameters(device: str) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.zeros(shape, device=device))
        for name, shape in SHAPES.items()
    }


def _backward(weights: dict[str, torch.nn.Parameter], step: int) -> None:
    given = _gradients(step, hvd.rank())
    for name, weight in weights.items():
        weight.grad = None
        given_here = torch.from_numpy(given[name]).to(weight.device)
        (weight * given_here).sum().backward()


def _wrapped(optimizer: Any, net: Any, compression: Any) -> Any:
    named = net.named_parameters() if hasattr(net, "named_parameters") else list(net.items())
    return hvd.DistributedOptimizer(optimizer, named, compression=compression, ledger=False)


def _hooked(net: Any) -> Any:
    net = torch.nn.parallel.DistributedDataParallel(net)
    ddp.register(net, PowerSGD(4))
    return net


def _compressor(spec: str, device: str) -> float:
    """Return the largest difference of the weights from NumPy's ranks, after a few steps."""
    weights, oracle = _parameters(device), simulate(parse(spec), hvd.size())
    optimizer = _wrapped(torch.optim.SGD(weights.values(), lr=0.1), weights, parse(spec))
    wanted = {name: np.zeros(shape, "f") for name, shape in SHAPES.items()}
    for step in range(STEPS):
        _backward(weights, step)
        optimizer.step()
        given = [_gradients(step, rank) for rank in range(hvd.size())]
        means: Any = oracle.step(given, 0.1)[0]
        wanted = {name: x - np.float32(0.1) * means[name] for name, x in wanted.items()}
    return _apart(weights, wanted)


def _optimizer(name: str, device: str) -> float:
    """Return the same difference for a compressed optimizer."""
    weights, options = _parameters(device), EARLY.get(name, {})
    optimizer = getattr(hvd, name)(list(weights.items()), lr=1e-2, **options)
    oracle = simulate(getattr(optimizers, name)(**options), hvd.size())
    now = [{k: np.zeros(s, "f") for k, s in SHAPES.items()} for _ in range(hvd.size())]
    for step in range(STEPS):
        _backward(weights, step)
        optimizer.step()
        given = [_gradients(step, rank) for rank in range(hvd.size())]
        found: Any = oracle.step(given, 1e-2, now)
        exchange = oracle.exchanges[0]
        whole = {
            exchange.tensors[i].name
            for i, entry in exchange.entry_of.items()
            if getattr(entry.compressor, "returns_weights", False)
        }
        now = [
            {k: row[k] if k in whole else x - np.float32(1e-2) * row[k] for k, x in mine.items()}
            for mine, row in zip(now, found, strict=True)
        ]
    return _apart(weights, now[hvd.rank()])


def _apart(weights: dict[str, torch.nn.Parameter], wanted: dict[str, np.ndarray]) -> float:
    found = {name: weight.detach().cpu().numpy() for name, weight in weights.items()}
    differences = [np.abs(found[k] - x).max() / (np.abs(x).max() or 1) for k, x in wanted.items()]
    return float(max(differences))


def _average(method: Any, device: str) -> float:
    """Return by how much the mean of the ranks' models differs from that of models on their own.

    The gradients do not depend on the weights, so the means are equal. The result is 1 if averages
    bring the models no nearer to each other.
    """
    weights, alone = _parameters(device), np.zeros(SHAPES["w"], "f")
    optimizer = _wrapped(torch.optim.SGD(weights.values(), lr=0.1), weights, method)
    for step in range(2 * STEPS):
        _backward(weights, step)
        optimizer.step()
        alone -= np.float32(0.1) * _gradients(step, hvd.rank())["w"]
    own = weights["w"].detach().cpu().numpy()
    pairs = hvd.allgather_object((own, alone))
    found, wanted = (np.stack(x) for x in zip(*pairs, strict=True))
    nearer = found.std(0).mean() < 0.8 * wanted.std(0).mean()
    moved = np.abs(found.mean(0) - wanted.mean(0)).max() / np.abs(wanted.mean(0)).max()
    return float(moved) if nearer else 1.0


def _training(make: Callable[[Any, Any], tuple[Any, Any]], device: str) -> float:
    """Return the loss after a training as a part of the loss before; 1 if replicas differ."""
    truth = torch.randn(64, 10, generator=torch.Generator().manual_seed(5)).to(device)
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    ).to(device)  # fmt: skip
    net, optimizer = make(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    draw, losses = torch.Generator().manual_seed(hvd.rank()), []
    for _ in range(150):
        x = torch.randn(64, 64, generator=draw).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), (x @ truth).argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sums = hvd.allgather_object([float(p.detach().double().sum()) for p in net.parameters()])
    return sum(losses[-10:]) / sum(losses[:10]) if sums[0] == sums[1] else 1.0
