"""Save checkpoints, and resume on another number of ranks.

    torchrun --nproc-per-node 4 examples/pytorch/resume_elsewhere.py
    torchrun --nproc-per-node 2 examples/pytorch/resume_elsewhere.py

Each launch adds five epochs to the last complete checkpoint in runs/resume_elsewhere, or in the
folder that follows as an argument. Rank 0 saves the model and the optimizer. All ranks save the
state of compression, because the residuals differ; on another number of ranks, their mean stays the
same. Rank 0 prints the test accuracy on scikit-learn's digits, and its bytes in this launch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, PowerSGD

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/resume_elsewhere")
EPOCHS, BATCH = 5, 128  # images per step of all ranks


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def main() -> None:
    """Resume, train, save and test."""
    hvd.init()
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=Accordion(low=PowerSGD(4), high=PowerSGD(1), interval=3),
    )
    first, complete = 0, sorted(FOLDER.glob("epoch-*/model.pt"))
    if complete:
        saved = torch.load(complete[-1], weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        hvd.load_state(complete[-1].parent)
        first = saved["epoch"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(first + 1, first + EPOCHS + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            part = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
        optimizer.end_window()
        folder = FOLDER / f"epoch-{epoch:03}"
        hvd.save_state(folder)
        if hvd.rank() == 0:  # model.pt is written last: the checkpoint is complete
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch}, folder / "part")
            (folder / "part").rename(folder / "model.pt")
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"epochs {first + 1} to {epoch} on {hvd.size()} ranks:")
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
