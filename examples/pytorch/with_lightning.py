"""Train with Lightning, with gradients compressed by a hook of DDP.

A callback registers the hook, because Lightning passes on the hook of `DDPStrategy` on GPUs only.

    torchrun --nproc-per-node 2 examples/pytorch/with_lightning.py

Rank 0 prints the test accuracy on scikit-learn's digits, and its bytes, with those of averaged
gradients.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accordion_hvd import Accordion, PowerSGD, ddp


class Digits(lightning.LightningModule):
    """A network of three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Compression(lightning.Callback):
    """Callback that compresses gradients by Accordion, with a window per epoch."""

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Register the hook."""
        window = int(trainer.num_training_batches)
        policy = Accordion(low=PowerSGD(4), high=PowerSGD(1), window=window)
        model, optimizer = trainer.strategy.model, trainer.optimizers[0]
        self.state = ddp.register(model, policy, optimizer=optimizer)


def main() -> None:
    """Train and test."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = map(
        torch.from_numpy,
        train_test_split((pixels / 16).astype("float32"), labels, test_size=360, random_state=0),
    )
    module, compression = Digits(), Compression()
    trainer = lightning.Trainer(
        strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), max_epochs=10,
        callbacks=[compression], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(images, labels), 32, shuffle=True))
    accuracy = (module.network(test_images).argmax(1) == test_labels).float().mean().item()
    if trainer.is_global_zero:
        stats = compression.state.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test accuracy {accuracy:.1%}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
