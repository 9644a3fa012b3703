"""Train on digits with torchft; replicas may end, and return, at any time.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --quorum_tick_ms 10 &
export TORCHFT_LIGHTHOUSE=http://localhost:29510
for REPLICA in 0 1; do
    REPLICA=$REPLICA torchrun --standalone --max-restarts 3 scripts/train_torchft.py &
done
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torchft

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd import Accordion, PowerSGD  # noqa: E402
from accordion_hvd.torch.torchft import average  # noqa: E402
from examples.data import load  # noqa: E402

STEPS, BATCH, REPORT = 200, 64, 50


def main() -> None:
    """Train, and print the test accuracy and the bytes that were saved."""
    replica, data = int(os.environ["REPLICA"]), load("digits")
    images, tests = (
        torch.from_numpy(data.prepared(split.images, "NCHW")) for split in (data.train, data.test)
    )
    labels, answers = (torch.from_numpy(split.labels) for split in (data.train, data.test))
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(images[0].numel(), 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, data.classes),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

    def heal(state: dict[str, Any]) -> None:
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])

    limit = datetime.timedelta(seconds=30)
    manager = torchft.Manager(
        torchft.ProcessGroupGloo(timeout=limit), heal,
        lambda: {"network": network.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1, timeout=limit, replica_id=f"digits_{replica}", hostname="localhost",
    )  # fmt: skip
    policy = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(images) // BATCH)
    averager = average(manager, network, policy, optimizer=optimizer)
    while (step := manager.current_step()) < STEPS:
        chosen = torch.Generator().manual_seed(1000 * step + replica)
        batch = torch.randint(len(images), (BATCH,), generator=chosen)
        averager.start_quorum()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images[batch]), labels[batch])
        loss.backward()
        if averager.should_commit():
            optimizer.step()
        if step % REPORT == 0:
            print(f"step {step}, {manager.num_participants()} replicas: loss {loss.item():.3f}")
    with torch.no_grad():
        accuracy = float((network(tests).argmax(1) == answers).float().mean())
    stats = averager.exchange.stats()
    print(
        f"test accuracy {100 * accuracy:.1f} %, {stats['dense'] / max(stats['payload'], 1):.1f} "
        "times fewer bytes than without compression"
    )
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
