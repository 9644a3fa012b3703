"""Train on digits with Accelerate; gradients are compressed by a hook of DDP.

torchrun --nproc-per-node 2 scripts/train_accelerate.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd import Accordion, PowerSGD, ddp  # noqa: E402
from examples.data import load  # noqa: E402

EPOCHS, BATCH = 10, 64


def main() -> None:
    """Train, and print the test accuracy and the bytes that were saved."""
    accelerator, data = Accelerator(cpu=not torch.cuda.is_available()), load("digits")
    images, tests = (
        torch.from_numpy(data.prepared(split.images, "NCHW")) for split in (data.train, data.test)
    )
    labels, answers = (torch.from_numpy(split.labels) for split in (data.train, data.test))
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(images[0].numel(), 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, data.classes),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    policy = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(loader))
    state = ddp.register(network, policy, optimizer=optimizer)  # after prepare()
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(x), y)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    with torch.no_grad():
        found = network.module(tests.to(accelerator.device)).argmax(1).cpu()
    accuracy = float((found == answers).float().mean())
    stats = state.exchange.stats()
    accelerator.print(
        f"test accuracy {100 * accuracy:.1f} %, {stats['dense_sent'] / stats['sent']:.1f} times "
        "fewer bytes than without compression"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
