"""Trainings in which strong compression may cost accuracy: networks, data and settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from benchmarks.netbench.torch_models import Residual
from benchmarks.optbench.tasks import TASKS
from examples.data import Dataset, Shard, load

Batch = tuple[torch.Tensor, torch.Tensor]
Layers = Sequence[int | str]

FALLS = 1 / 2, 5 / 6
"""Fractions of a training after which the learning rate falls, as after epochs 150 and 250 of 300
in the paper."""


class Source(Protocol):
    """The data of all ranks of a training.

    Attributes:
        steps: number of steps of an epoch.
    """

    steps: int

    def batches(self, step: int) -> list[Batch]:
        """Return each rank's batch of a step, counted from the start of the training."""

    def score(self, model: nn.Module) -> float:
        """Return the test accuracy in %, or the test loss."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A network, its data, and two levels of compression.

    Attributes:
        title: title of the section on the page.
        about: network and data in one or two sentences.
        low: spec string of low (mild) compression.
        middle: spec string of compression between the two; "" for none.
        high: spec string of high (strong) compression.
        network: function that returns a network with weights from torch's random state.
        source: function of (seed, ranks, batch, device) that returns the data.
        epochs: number of epochs; for text, of parts of the training with equal numbers of steps.
        batch: examples per rank and step.
        lr: highest learning rate.
        warmup: epochs in which the learning rate rises linearly.
        adam: whether to train with Adam; else with SGD, Nesterov momentum 0.9.
        weight_decay: factor of the L2 penalty.
        interval: epochs between Accordion's checks.
        losses: whether the score is a loss; else an accuracy in %.
        grows: whether batch sizes are studied, too.
        gpu: whether the study is for a GPU, and not part of `make results`.
    """

    title: str
    about: str
    low: str = "powersgd:4"
    middle: str = "powersgd:2"
    high: str = "powersgd:1"
    network: Callable[[], nn.Module]
    source: Callable[[int, int, int, Any], Source]
    epochs: int = 16
    batch: int = 32
    lr: float = 0.1
    warmup: int = 1
    adam: bool = False
    weight_decay: float = 5e-4
    interval: int = 2
    losses: bool = False
    grows: bool = False
    gpu: bool = False

    def lr_at(self, epoch: float) -> float:
        """Return the learning rate at a time in epochs."""
        falls = [self.epochs * fall for fall in FALLS]
        rise = min(1.0, (epoch + 0.1) / self.warmup) if self.warmup else 1.0
        return rise * self.lr * 0.1 ** sum(epoch >= fall for fall in falls)

    @property
    def first_fall(self) -> int:
        """Return the number of epochs before the learning rate falls."""
        return int(self.epochs * FALLS[0])


# ------------------------------------------------------------------------------------------ images
class Images:
    """Images of CIFAR-10, shifted by up to two pixels (four if all images are used).

    Args:
        count: number of training images; None for all.
        seed: seed of their order.
        ranks: number of ranks.
        batch: images per rank and step.
        device: device of the batches.
    """

    def __init__(self, count: int | None, seed: int, ranks: int, batch: int, device: Any) -> None:
        data, self.device = _cifar10(count), device
        shift = 4 if count is None else 2
        self._shards = [Shard(data, r, ranks, batch, seed, "NCHW", shift) for r in range(ranks)]
        self.steps, self._epoch = len(self._shards[0]), 0

    def batches(self, step: int) -> list[Batch]:
        """Return each rank's images and labels."""
        epoch, place = divmod(step, self.steps)
        if epoch != self._epoch:
            self._epoch = epoch
            for shard in self._shards:
                shard.shuffle(epoch)
        return [self._on_device(*shard[place]) for shard in self._shards]

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Return the test accuracy in %."""
        model.eval()
        right = total = 0
        for shard in self._shards:
            for images, labels in map(lambda pair: self._on_device(*pair), shard.test_batches()):
                right += int((model(images).argmax(1) == labels).sum())
                total += len(labels)
        model.train()
        return 100 * right / total

    def _on_device(self, images: np.ndarray, labels: np.ndarray) -> Batch:
        x, y = torch.from_numpy(images), torch.from_numpy(labels)
        return x.to(self.device), y.to(self.device)


@functools.cache
def _cifar10(count: int | None) -> Dataset:
    data = load("cifar10")
    return data if count is None else replace(data, train=data.train.chosen(count, 0))


def images(count: int | None) -> Callable[[int, int, int, Any], Source]:
    """Return the source of a study on CIFAR-10 with `count` training images; None for all."""
    return functools.partial(Images, count)


# -------------------------------------------------------------------------------------------- text
class Letters:
    """Batches of Tiny Shakespeare, of as many steps per epoch as the benchmark of optimizers has.

    Args:
        seed: seed of the batches.
        ranks: number of ranks.
        batch: sequences per rank and step.
        device: device of the batches.
    """

    steps = 60

    def __init__(self, seed: int, ranks: int, batch: int, device: Any) -> None:
        self.seed, self.ranks, self.batch, self.device = seed, ranks, batch, device
        self._problem = _characters()

    def batches(self, step: int) -> list[Batch]:
        """Return each rank's sequences and the sequences of the letters that follow."""
        draws = [np.random.default_rng([self.seed, step, rank]) for rank in range(self.ranks)]
        return [self._on_device(self._problem.draw(draw, self.batch)) for draw in draws]

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Return the test loss in nats per character."""
        judged = [self._on_device(batch) for batch in self._problem.judged]
        losses = [float(self._problem.loss(model, batch)) for batch in judged]
        return float(np.average(losses, weights=[len(batch[0]) for batch in judged]))

    def _on_device(self, batch: Batch) -> Batch:
        return batch[0].to(self.device), batch[1].to(self.device)


@functools.cache
def _characters() -> Any:
    return TASKS["characters"].problem()


# ---------------------------------------------------------------------------------------- networks
def vgg(layers: Layers, normalized: bool = True) -> nn.Module:
    """Return convolutions of 3 x 3 with ReLU, and one linear layer.

    Args:
        layers: channels of each convolution; "pool" halves height and width.
        normalized: whether batch normalisation follows each convolution.
    """
    parts: list[nn.Module] = []
    channels = 3
    for layer in layers:
        if isinstance(layer, str):
            parts.append(nn.MaxPool2d(2))
            continue
        parts.append(nn.Conv2d(channels, layer, 3, padding=1, bias=not normalized))
        parts += [nn.BatchNorm2d(layer)] if normalized else []
        parts.append(nn.ReLU())
        channels = layer
    network = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return network


def resnet(widths: Sequence[int], blocks: int, first_stride: int = 1) -> nn.Module:
    """Return a ResNet (He et al., 2016) for images of 32 x 32.

    Args:
        widths: channels of each stage; each but the first halves height and width.
        blocks: residual blocks per stage.
        first_stride: stride of the first convolution.
    """
    stem = nn.Conv2d(3, widths[0], 3, first_stride, 1, bias=False)
    parts: list[nn.Module] = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU()]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            parts.append(Residual(channels, width, 2 if stage and not block else 1))
            channels = width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


SMALL: Layers = (16, "pool", 32, 32, "pool", 64, 64, "pool", 128, 128)
VGG19: Layers = (
    64, 64, "pool", 128, 128, "pool", *[256] * 4, "pool", *[512] * 4, "pool", *[512] * 4, "pool",
)  # fmt: skip
TRAINED = "10,000 images of CIFAR-10, shifted by up to two pixels"

VGG = Study(
    title="VGG with batch normalisation",
    about=f"Seven convolutions with batch normalisation, 293,000 parameters; {TRAINED}.",
    network=functools.partial(vgg, SMALL),
    source=images(10_000),
    grows=True,
)

STUDIES: dict[str, Study] = {
    "vgg": VGG,
    "vgg-plain": replace(
        VGG,
        title="VGG without batch normalisation",
        grows=False,
        about=f"The same seven convolutions without batch normalisation; {TRAINED}.",
        network=functools.partial(vgg, SMALL, normalized=False),
        lr=0.05,
    ),
    "resnet": replace(
        VGG,
        title="ResNet",
        about="A stem of stride 2 and three residual blocks of 16, 32 and 64 channels, 78,000 "
        "parameters; 20,000 images of CIFAR-10, shifted by up to two pixels.",
        network=functools.partial(resnet, (16, 32, 64), 1, 2),
        source=images(20_000),
    ),
    "vgg-topk": replace(
        VGG,
        title="VGG with TopK",
        grows=False,
        about="The network and images of the first section, with TopK in place of PowerSGD.",
        low="topk:0.1",
        middle="topk:0.01",
        high="topk:0.001",
    ),
    "characters": Study(
        title="Characters",
        about="Tiny Shakespeare, character by character: a Transformer of two layers of width 64, "
        "trained with Adam. An epoch stands for 60 steps.",
        network=lambda: _characters().make(),
        source=Letters,
        epochs=20,
        batch=16,
        lr=0.004,
        adam=True,
        weight_decay=0.0,
        losses=True,
    ),
    "paper-resnet18": Study(
        title="ResNet-18 as in the paper",
        about="ResNet-18 on all of CIFAR-10, 300 epochs, four ranks of 128 images.",
        network=functools.partial(resnet, (64, 128, 256, 512), 2),
        source=images(None),
        epochs=300,
        batch=128,
        lr=0.4,
        warmup=5,
        interval=10,
        weight_decay=1e-4,
        low="powersgd:2",
        middle="",
        gpu=True,
    ),
    "paper-vgg19": Study(
        title="VGG-19 with batch normalisation as in the paper",
        about="VGG-19bn on all of CIFAR-10, 300 epochs, four ranks of 128 images.",
        network=functools.partial(vgg, VGG19),
        source=images(None),
        epochs=300,
        batch=128,
        lr=0.4,
        warmup=5,
        interval=10,
        weight_decay=1e-4,
        gpu=True,
    ),
}
"""Studies by name."""
