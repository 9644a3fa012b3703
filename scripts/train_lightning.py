"""Train on digits with Lightning; gradients are compressed by a hook of DDP.

torchrun --nproc-per-node 2 scripts/train_lightning.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accordion_hvd import Accordion, PowerSGD, ddp  # noqa: E402
from examples.data import load  # noqa: E402

EPOCHS, BATCH = 10, 64


class Digits(lightning.LightningModule):
    """A network of three linear layers.

    Args:
        inputs: number of pixels.
        classes: number of classes.
    """

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(inputs, 256), torch.nn.ReLU(),
            torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, classes),
        )  # fmt: skip

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Compression(lightning.Callback):
    """Compresses gradients by a hook of DDP, and ends a window of the policy after each epoch.

    Lightning registers the hook of `DDPStrategy(ddp_comm_hook=...)` on GPUs only; this callback
    does it everywhere.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.state: Any = None

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Register the hook."""
        model, optimizer = trainer.strategy.model, trainer.optimizers[0]
        self.state = ddp.register(model, self._policy, optimizer=optimizer)

    def on_train_epoch_end(self, *_: Any) -> None:
        """End the window."""
        self.state.end_window()


def main() -> None:
    """Train, and print the test accuracy and the bytes that were saved."""
    data = load("digits")
    images, tests = (
        torch.from_numpy(data.prepared(split.images, "NCHW")) for split in (data.train, data.test)
    )
    labels, answers = (torch.from_numpy(split.labels) for split in (data.train, data.test))
    torch.manual_seed(0)
    module = Digits(images[0].numel(), data.classes)
    compression = Compression(Accordion(low=PowerSGD(4), high=PowerSGD(1), window=None))
    trainer = lightning.Trainer(
        accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=EPOCHS, callbacks=[compression], strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(images, labels), BATCH, shuffle=True))
    with torch.no_grad():
        found = module.network(tests).argmax(1)
    accuracy = float((found == answers).float().mean())
    stats = compression.state.exchange.stats()
    if trainer.is_global_zero:
        print(
            f"test accuracy {100 * accuracy:.1f} %, {stats['dense_sent'] / stats['sent']:.1f} "
            "times fewer bytes than without compression"
        )


if __name__ == "__main__":
    main()
