"""A torchft job of three replicas and a lighthouse; the argument is the compression.

Replica 1 dies in the middle of a backward pass and is restarted. Replica 2 leaves in order before
the end. The processes are forked, so that the frameworks are imported once.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

from accordion_hvd import parse
from accordion_hvd.engine import checkpoint
from accordion_hvd.torch import torchft as compressed

DIES, LATER, LEAVES = 12, 14, 6  # steps before a death, after the return, after replica 2 leaves
PACE = 0.02  # seconds between steps
LIMIT = datetime.timedelta(seconds=20)
FOLDER = Path(os.environ["CHECK_FOLDER"])


def publish(name: str, value: float | str) -> None:
    """Write a small file, which others see whole or not at all."""
    FOLDER.joinpath(f"new-{name}").write_text(str(value))
    FOLDER.joinpath(f"new-{name}").rename(FOLDER / name)


def lighthouse() -> None:
    """Serve the address in the file "lighthouse" until this process is ended."""
    server = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    publish("lighthouse", server.address())
    signal.pause()


def replica(number: int, life: int) -> None:
    """Train to the end, from the first step or from the current step of the other replicas."""
    torch.manual_seed(number)  # the first quorum makes the weights equal
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = make_manager(model, optimizer, f"replica_{number}", store.port)
    averager = compressed.average(manager, model, parse(sys.argv[1]), optimizer=optimizer)
    losses: list[float] = []
    commits: list[float] = []
    restored: list[bool] = []
    while (step := manager.current_step()) < (last := end()):
        if step == last - LEAVES:
            averager.hand_over()
            if number == 2:
                break
        before = tensors_of(averager)
        averager.start_quorum()
        optimizer.zero_grad()
        if (number, life) == (1, 1) and step >= DIES:  # it may have joined later
            model[0].bias.register_post_accumulate_grad_hook(die)
        loss = loss_of(model, step, number)
        loss.backward()
        if averager.should_commit():
            optimizer.step()
            commits.append(time.monotonic())
            losses.append(loss.item())
        else:
            restored.append(equal(tensors_of(averager), before))
        if (number, life, len(losses)) == (1, 2, 1) and not (FOLDER / "end").exists():
            publish("end", manager.current_step() + LATER)
        time.sleep(PACE)
    harness.tell(
        number=number, life=life, step=manager.current_step(), steps=averager.exchange.steps,
        levels=averager.exchange.levels(), losses=losses, restored=restored,
        paused=min(t for t in commits if t > died()) - died(),
        weights=[float(p.detach().double().sum()) for p in model.parameters()],
    )  # fmt: skip
    os._exit(0)  # without waiting for the manager's threads


def make_manager(model: Any, optimizer: Any, name: str, port: int) -> Any:
    """Return a manager that restores model and optimizer, asynchronously with topk."""

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return torchft.Manager(
        torchft.ProcessGroupGloo(timeout=LIMIT), load,
        lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2, use_async_quorum=sys.argv[1].startswith("topk"), timeout=LIMIT,
        replica_id=name, store_addr="localhost", store_port=port, rank=0, world_size=1,
        lighthouse_addr=(FOLDER / "lighthouse").read_text(), hostname="localhost",
    )  # fmt: skip


def loss_of(model: Any, step: int, number: int) -> torch.Tensor:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * step + number))
    return (model(x) - x[:, :4]).square().mean()


def tensors_of(averager: Any) -> dict[str, np.ndarray]:
    """Return copies of all tensors of the compressors."""
    tensors = checkpoint.named(checkpoint.saved_of(averager.exchange))
    return {key: value.copy() for key, value in tensors.items()}


def equal(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> bool:
    same = all(np.array_equal(value, others.get(key)) for key, value in some.items())
    return same and some.keys() == others.keys()


def end() -> int:
    """Return the step at which the training ends, which is known once replica 1 has returned."""
    file = FOLDER / "end"
    return int(file.read_text()) if file.exists() else sys.maxsize


def died() -> float:
    """Return the time at which replica 1 died."""
    return float((FOLDER / "died").read_text())


def die(_: Any) -> None:
    publish("died", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Start the processes, restart replica 1, and return 0 if all processes ended as planned."""
    fork = multiprocessing.get_context("fork")
    server = fork.Process(target=lighthouse)
    server.start()
    while not (FOLDER / "lighthouse").exists():
        time.sleep(0.01)

    def start(number: int, life: int = 1) -> Any:
        process = fork.Process(target=replica, args=(number, life))
        process.start()
        return process

    replicas = [start(number) for number in range(3)]
    replicas[1].join()
    replicas.append(start(1, life=2))
    for process in replicas:
        process.join()
    server.kill()
    return int([process.exitcode for process in replicas] != [0, -signal.SIGKILL, 0, 0])


if __name__ == "__main__":
    sys.exit(main())
