"""The networks of the private experiments: a generator, teachers side by side, a classifier.

Small multi-layer perceptrons, conditional on the class; the authors of DataLens use convolutions.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

Tensor: TypeAlias = torch.Tensor


class Generator(nn.Module):
    """Images of given classes from noise.

    Args:
        pixels: of an image.
        classes: how many there are.
        noise: dimensions of the noise.
        width: hidden units.
        shade: of the images that it begins with, in (-1, 1).
    """

    def __init__(
        self, pixels: int, classes: int, noise: int, width: int, shade: float = 0.0
    ) -> None:
        super().__init__()
        self.noise, self.classes = noise, classes
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, pixels),
            nn.Tanh(),
        )
        nn.init.constant_(self.layers[-2].bias, math.atanh(shade))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """(count, pixels) in (-1, 1), from z (count, noise) and labels (count,)."""
        return self.layers(torch.cat([z, F.one_hot(labels, self.classes).float()], 1))

    def draw(self, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise, uniform in (-1, 1), and labels: each class equally often."""
        z = 2 * torch.rand(count, self.noise, generator=random) - 1
        first = int(torch.randint(self.classes, (), generator=random))
        return z, (torch.arange(count) + first) % self.classes


class Teachers:
    """Discriminators side by side, each with a part of the data of its own.

    Conditional by projection (Miyato & Koyama, ICLR 2018): the class chooses with which vector the
    hidden layer is multiplied. Parameters are stacked, so that one multiplication serves all;
    nothing goes from one to another, and Adam works element by element. First weights are small,
    for what a teacher wishes should come from its data, not from where its weights began.

    Args:
        images: (teachers, count, pixels): what each of them knows.
        labels: (teachers, count).
        classes: how many there are.
        width: hidden units.
        lr: learning rate of Adam.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, classes: int, width: int, lr: float = 5e-3
    ) -> None:
        self.images, self.labels = images, labels
        number, _, pixels = images.shape
        self.weights = [
            (0.1 * pixels**-0.5 * torch.randn(number, pixels, width)).requires_grad_(),
            torch.zeros(number, 1, width, requires_grad=True),
            (width**-0.5 * torch.randn(number, classes, width)).requires_grad_(),
            torch.zeros(number, classes, requires_grad=True),
        ]
        self.optimizer = torch.optim.Adam(self.weights, lr, betas=(0.5, 0.999))
        self.knows = F.one_hot(labels, classes).amax(1).float()

    def __len__(self) -> int:
        return len(self.images)

    def judge(self, images: Tensor, labels: Tensor) -> Tensor:
        """Logits (teachers, count) of being real, of (teachers, count, pixels) and labels."""
        weight, bias, chosen, offset = self.weights
        hidden = F.leaky_relu(torch.baddbmm(bias, images, weight), 0.2)
        index = labels.expand(len(self), labels.shape[-1])
        wide = index[:, :, None].expand(-1, -1, hidden.shape[2])
        return (hidden * chosen.gather(1, wide)).sum(2) + offset.gather(1, index)

    def learn(self, images: Tensor, labels: Tensor) -> None:
        """One step of all on their own images against generated ones, (count, pixels)."""
        real = self.judge(self.images, self.labels)
        fake = self.judge(images.expand(len(self), *images.shape), labels)
        losses = F.softplus(-real).mean(1) + F.softplus(fake).mean(1)
        self.optimizer.zero_grad()
        losses.sum().backward()
        self.optimizer.step()

    def wishes(self, images: Tensor, labels: Tensor) -> Tensor:
        """How each of them would change each image to take it for real.

        The negative gradient of -log D: (teachers, count, pixels). A teacher that knows no image
        of a class has no wish (ours).
        """
        shown = images.detach().expand(len(self), *images.shape).clone().requires_grad_()
        liking = -F.softplus(-self.judge(shown, labels)).sum()
        (slope,) = torch.autograd.grad(liking, [shown])
        return slope * self.knows[:, labels][:, :, None]


def classifier(pixels: int, classes: int, width: int = 128) -> nn.Sequential:
    """What is trained to tell how good images are."""
    return nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, classes))


def accuracy_after(
    images: Tensor, labels: Tensor, test: tuple[Tensor, Tensor], classes: int, seed: int
) -> float:
    """Of a classifier trained on some images and tested on others."""
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = classifier(images.shape[1], classes)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-4)
    for _ in range(600):
        index = torch.randint(len(images), (128,), generator=random)
        loss = F.cross_entropy(model(images[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return accuracy(model, test)


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """In [0, 1]."""
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())
