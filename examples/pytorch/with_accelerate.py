"""Train with Accelerate, with gradients compressed by a hook of DDP.

    torchrun --nproc-per-node 2 examples/pytorch/with_accelerate.py

`accelerate launch` starts the same script. The main process prints the test accuracy on
scikit-learn's digits, and its bytes, with those of averaged gradients.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accordion_hvd import Accordion, PowerSGD, ddp

EPOCHS, BATCH = 10, 32  # images per rank and step


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def main() -> None:
    """Train and test."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    policy = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=len(loader))
    state = ddp.register(model, policy, optimizer=optimizer)  # after prepare()
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    with torch.no_grad():
        found = model.module(test_images.to(accelerator.device)).argmax(1).cpu()
    accuracy = (found == test_labels).float().mean().item()
    stats = state.exchange.stats()
    sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
    accelerator.print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")
    accelerator.end_training()


if __name__ == "__main__":
    main()
