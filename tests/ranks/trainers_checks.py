"""Trainings by Accelerate, Lightning and transformers, and of compiled models, over DDP.

Gradients are accumulated, clipped, and computed in bfloat16. With `Dense()`, the hook's weights
are those of DDP; with Accordion, ranks stay equal, losses fall, and windows of batches end.
"""

from __future__ import annotations

import tempfile
from typing import Any

import accelerate
import harness
import lightning
import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, Dense, PowerSGD, ddp

torch.set_num_threads(1)
INIT = hvd.init
BATCHES, PASSES, EPOCHS = 8, 2, 3


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 48), torch.nn.Linear(48, 1)
    )


def dataset() -> TensorDataset:
    """Return examples for both ranks, whose samplers divide them."""
    x = torch.randn(dist.get_world_size() * BATCHES * 8, 32, generator=torch.manual_seed(1))
    return TensorDataset(x, x[:, :1] * 2 + 1)


def compressions() -> list[Any]:
    window = {"window": BATCHES, "interval": 1, "threshold": 9.0}
    return [None, Dense(), Accordion(low=PowerSGD(4), high=PowerSGD(1), **window)]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in module.parameters()])


def judge(ends: list[torch.Tensor], losses: list[float], policy: Accordion) -> None:
    """Assert what this file's docstring says of the weights of the three trainings."""
    for end in ends:
        rows = [torch.empty_like(end) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, end)
        assert all(torch.equal(row, rows[0]) for row in rows)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    assert not torch.equal(ends[2], ends[0])
    assert losses[-1] < 0.9 * losses[0], losses
    assert {row["window"] for row in policy.history} == {0, 1}, policy.history


def check_accelerate() -> None:
    ends, losses = [], []
    for compression in compressions():
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=PASSES
        )
        model, losses = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        loader = DataLoader(dataset(), 8)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if compression is not None:
            ddp.register(model, compression, optimizer=optimizer)
        for _ in range(EPOCHS):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, x, y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(float(loss))
        ends.append(weights(model))
    judge(ends, losses, compression)


class Module(lightning.LightningModule):
    """The network, and its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.losses = network(), []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = loss_of(self.network, *batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Hook(lightning.Callback):
    """A callback that registers the hook."""

    def __init__(self, compression: Any) -> None:
        self.compression = compression

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.compression is not None:
            optimizer = trainer.optimizers[0]
            ddp.register(trainer.strategy.model, self.compression, optimizer=optimizer)


def check_lightning() -> None:
    ends = []
    for compression in compressions():
        module = Module()
        trainer = lightning.Trainer(
            strategy="ddp", devices=dist.get_world_size(), accelerator="cpu", max_epochs=EPOCHS,
            accumulate_grad_batches=PASSES, gradient_clip_val=1.0, precision="bf16-mixed",
            callbacks=[Hook(compression)], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(dataset(), 8))
        ends.append(weights(module))
    judge(ends, module.losses, compression)


class Model(torch.nn.Module):
    """The network as transformers.Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.losses = network(), []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = loss_of(self.network, x, labels)
        self.losses.append(float(loss))
        return {"loss": loss}


class TrainerHook(transformers.TrainerCallback):
    """A callback that registers the hook."""

    def __init__(self, compression: Any) -> None:
        self.compression, self.trainer = compression, None

    def on_train_begin(self, *args: Any, optimizer: Any = None, **more: Any) -> None:
        if self.compression is not None:
            model: Any = self.trainer.model_wrapped
            ddp.register(model, self.compression, optimizer=optimizer)


def check_transformers() -> None:
    ends, rows = [], [{"x": x, "labels": y} for x, y in dataset()]
    for compression in compressions():
        model, hook = Model(), TrainerHook(compression)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, use_cpu=True, ddp_backend="gloo", num_train_epochs=EPOCHS, bf16=True,
                per_device_train_batch_size=8, gradient_accumulation_steps=PASSES,
                max_grad_norm=1.0, learning_rate=0.05, optim="sgd", save_strategy="no",
                report_to=[], disable_tqdm=True, lr_scheduler_type="cosine", seed=3,
            )  # fmt: skip
            trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[hook])
            hook.trainer = trainer
            trainer.train()
        ends.append(weights(model))
    judge(ends, model.losses, compression)


def check_compiled_models() -> None:
    """Compiled from outside, and within DDP."""
    for outside in (True, False):
        ends, losses = [], []
        for compression in compressions():
            net = network()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
            inner = net if outside else torch.compile(net, backend="aot_eager")
            model, losses = DDP(inner), []
            if compression is not None:
                ddp.register(model, compression, optimizer=optimizer)
            forward = torch.compile(model, backend="aot_eager") if outside else model
            parts = list(DataLoader(dataset(), 8))[dist.get_rank() :: dist.get_world_size()]
            for _ in range(EPOCHS):
                for number, (x, y) in enumerate(parts):
                    model.require_backward_grad_sync = number % PASSES == PASSES - 1
                    loss = loss_of(forward, x, y)
                    loss.backward()
                    losses.append(float(loss))
                    if model.require_backward_grad_sync:
                        optimizer.step()
                        optimizer.zero_grad()
            ends.append(weights(net))
        judge(ends, losses, compression)


if __name__ == "__main__":
    harness.main(globals())
