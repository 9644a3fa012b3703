"""Check this package on one GPU: laws of the compressors, times of their kernels, one training.

python scripts/gpu_check.py                 on the GPU
python scripts/gpu_check.py --device cpu    a rehearsal on a machine without a GPU

It needs PyTorch and NumPy, nothing else, and no network: two ranks share the GPU over Gloo.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from accordion_hvd import Accordion, PowerSGD, TopK, parse, simulate  # noqa: E402
from accordion_hvd.comm.local import LocalCommunicator  # noqa: E402
from accordion_hvd.core.base import Info  # noqa: E402
from accordion_hvd.ops import namespace  # noqa: E402

SPECS = (
    "dense", "fp16", "bf16", "topk:0.01", "randomk:0.01", "threshold:0.02", "adacomp:50",
    "scalecom:0.01", "dgc:0.01", "stc:0.01", "powersgd:1", "powersgd:4", "powersgd:4,alternate",
    "qsgd:4", "terngrad", "natural", "int8", "signsgd", "efsignsgd", "onebit", "sketchedsgd",
    "ef21(topk(0.01))", "diana(qsgd(4))",
)  # fmt: skip
"""Spec strings of the compressors to check."""

RANKS, STEPS, SHAPE = 4, 3, (96, 200)
TOLERANCE = 2e-3
"""Largest difference from NumPy, relative to the largest element: factors are sums in fp32."""

SIDE, REPETITIONS = 2048, 20


def main() -> None:
    """Run all checks; exit with status 1 if one fails, with status 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--side", type=int, default=SIDE, help="rows and columns of the gradient")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.device)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: PyTorch finds no GPU, so nothing was checked.", file=sys.stderr)
        raise SystemExit(2)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
    print(f"PyTorch {torch.__version__} on {name}")
    began = time.monotonic()
    failed = laws(options.device)
    kernels(options.device, options.side)
    failed += training(options.device)
    print(f"{time.monotonic() - began:.0f} s; " + (f"FAILED: {failed}" if failed else "all passed"))
    raise SystemExit(1 if failed else 0)


def laws(device: str) -> list[str]:
    """Compare the means of simulated ranks with those of NumPy; return the specs that differ."""
    failed = []
    draw = np.random.default_rng(0)
    steps = [[draw.standard_normal(SHAPE).astype("f") for _ in range(RANKS)] for _ in range(STEPS)]
    for spec in SPECS:
        oracle, world = simulate(parse(spec), RANKS), simulate(parse(spec), RANKS)
        worst = 0.0
        for gradients in steps:
            expected = oracle.step([{"w": gradient.copy()} for gradient in gradients], 0.1)
            on_device = [{"w": torch.from_numpy(g.copy()).to(device)} for g in gradients]
            found = world.step(on_device, 0.1)
            values = [mean["w"].cpu().numpy() for mean in found]
            assert all((value == values[0]).all() for value in values), f"{spec}: ranks disagree"
            scale = np.abs(expected[0]["w"]).max() or 1.0
            worst = max(worst, float(np.abs(values[0] - expected[0]["w"]).max() / scale))
        verdict = "ok" if worst <= TOLERANCE else "DIFFERS"
        print(f"law  {spec:<24} {verdict}  largest difference from NumPy {worst:.1e}", flush=True)
        failed += [spec] if worst > TOLERANCE else []
    return failed


def kernels(device: str, side: int) -> None:
    """Print the time of one exchange of each compressor, without a network."""
    gradient = torch.randn(side, side, device=device)
    xp, target = namespace(gradient), torch.empty_like(gradient)
    copy = median(lambda: target.copy_(gradient), device)
    print(f"copy of a gradient of {side} x {side}: {1e3 * copy:.3f} ms")
    communicator = LocalCommunicator(xp, RANKS)
    for spec in SPECS:
        compressor = parse(spec)
        info = Info(0, 0, RANKS, "w", 0.1, shape=(side, side))
        box = [compressor.init(xp.spec(gradient), info)]

        def exchange(compressor: Any = compressor, box: Any = box, info: Any = info) -> None:
            target.copy_(gradient)
            _, box[0] = communicator.run("gpu", compressor.exchange(target, box[0], info))

        spent = median(exchange, device) - copy
        print(f"time {spec:<24} {1e3 * spent:8.3f} ms  {spent / copy:7.1f} copies", flush=True)


def median(action: Any, device: str) -> float:
    """Return the median seconds of an action."""
    times = []
    for number in range(REPETITIONS + 3):
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        if number >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def training(device: str) -> list[str]:
    """Train on two ranks that share the GPU; return the failure, if any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, str(HERE), "--device", device, "--rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    try:
        statuses = [rank.wait(240) for rank in ranks]
    except subprocess.TimeoutExpired:
        return ["training took too long"]
    finally:
        for rank in ranks:
            rank.kill()
    return [] if not any(statuses) else [f"training ended with status {statuses}"]


def train(device: str) -> None:
    """Train as one of two ranks: with the optimizer's wrapper, and with the hook of DDP."""
    import accordion_hvd.torch as hvd
    from accordion_hvd import ddp

    torch.distributed.init_process_group("gloo")
    hvd.init()
    truth = torch.randn(64, 10, generator=torch.Generator().manual_seed(5)).to(device)
    policy = Accordion(low=PowerSGD(4), high=TopK(0.1), window=10, interval=2)
    for form, compression in (("DistributedOptimizer", policy), ("DDP hook", PowerSGD(4))):
        torch.manual_seed(0)
        net: Any = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
            torch.nn.Linear(256, 10),
        ).to(device)  # fmt: skip
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if form == "DDP hook":
            net = torch.nn.parallel.DistributedDataParallel(net)
            ddp.register(net, compression)
        else:
            optimizer = hvd.DistributedOptimizer(
                optimizer, net.named_parameters(), compression=compression
            )
        draw, losses = torch.Generator().manual_seed(hvd.rank()), []
        for _ in range(150):
            x = torch.randn(64, 64, generator=draw).to(device)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), (x @ truth).argmax(1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        sums = hvd.allgather_object([float(p.detach().double().sum()) for p in net.parameters()])
        assert sums[0] == sums[1], f"{form}: replicas differ"
        first, last = statistics.mean(losses[:10]), statistics.mean(losses[-10:])
        assert last < 0.5 * first, f"{form}: the loss fell from {first:.2f} to {last:.2f} only"
        if hvd.rank() == 0:
            print(f"training, {form}: loss {first:.2f} to {last:.2f}, replicas equal", flush=True)
    hvd.shutdown()
    torch.distributed.destroy_process_group()  # else its threads may outlive Python


if __name__ == "__main__":
    main()
