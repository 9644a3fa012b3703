"""A training that torchrun restarts; the arguments: a folder, and the step at which rank 1 dies."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path

import harness
import torch

import accordion_hvd.torch as hvd

EVERY, STEPS = 5, 20
"""Steps between checkpoints, and in all."""

folder, death = Path(sys.argv[1]), int(sys.argv[2])
facts: dict[str, object] = {}


@atexit.register  # before `init` registers its own end, which therefore runs first
def tell() -> None:
    """Write the result of a rank that has not failed, and the threads that are left."""
    if not facts:
        return
    threads = [Path("/proc/self/task", task, "comm") for task in os.listdir("/proc/self/task")]
    harness.tell(**facts, threads=sorted(name.read_text().strip() for name in threads))


hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(40, 30)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression="topk:0.1"
)
begun = 0
if (folder / "model.pt").exists():
    model.load_state_dict(torch.load(folder / "model.pt"))
    hvd.load_state(folder)
    begun = optimizer.exchange.steps
for step in range(begun, STEPS):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
    optimizer.zero_grad()
    (model(x) - x[:, :30]).square().mean().backward()
    optimizer.step()
    if step == death and hvd.rank() == 1 and not begun:
        os.kill(os.getpid(), signal.SIGKILL)
    if (step + 1) % EVERY == 0:
        if hvd.rank() == 0:
            torch.save(model.state_dict(), folder / "model.pt")
        hvd.save_state(folder)
facts.update(begun=begun, weights=[float(p.detach().double().sum()) for p in model.parameters()])
