"""Networks of the private experiments: a generator, batched teachers, and a classifier.

Generator and teachers are small class-conditional networks: multi-layer perceptrons or, like those
of the authors of DataLens but much smaller, convolutional networks.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

Tensor: TypeAlias = torch.Tensor


class Generator(nn.Module):
    """A generator of images of given classes.

    Args:
        pixels: number of pixels of an image.
        classes: number of classes.
        noise: number of dimensions of the noise.
        width: number of hidden units.
        shade: mean pixel value of initial images, in (-1, 1).
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
        """Return images (count, pixels) in (-1, 1), for z (count, noise) and labels (count,)."""
        return self.layers(torch.cat([z, F.one_hot(labels, self.classes).float()], 1))

    def draw(self, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return noise, uniform in (-1, 1), and labels with equally frequent classes."""
        z = 2 * torch.rand(count, self.noise, generator=random) - 1
        first = int(torch.randint(self.classes, (), generator=random))
        return z, (torch.arange(count) + first) % self.classes


class ConvolutionalGenerator(Generator):
    """A generator with two transposed convolutions, as in DCGAN (Radford et al., ICLR 2016).

    Ours: few channels and no batch normalisation.

    Args:
        pixels: number of pixels of a square image, whose side is a multiple of 4.
        classes: number of classes.
        noise: number of dimensions of the noise.
        width: number of channels before the last layer.
        shade: mean pixel value of initial images, in (-1, 1).
    """

    def __init__(
        self, pixels: int, classes: int, noise: int, width: int, shade: float = 0.0
    ) -> None:
        nn.Module.__init__(self)
        self.noise, self.classes = noise, classes
        quarter = side_of(pixels) // 4
        again = {"kernel_size": 5, "stride": 2, "padding": 2, "output_padding": 1}
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, 2 * width * quarter**2),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, quarter, quarter)),
            nn.ConvTranspose2d(2 * width, width, **again),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, **again),
            nn.Flatten(),
            nn.Tanh(),
        )
        nn.init.constant_(self.layers[-3].bias, math.atanh(shade))


def side_of(pixels: int) -> int:
    """Return the side of a square image.

    Raises:
        ValueError: if the image is not square or its side is not a multiple of 4.
    """
    side = math.isqrt(pixels)
    if side * side != pixels or side % 4:
        raise ValueError(
            f"convolutional networks: images have {pixels} pixels, but must be square, with a side "
            "that is a multiple of 4."
        )
    return side


class Teachers:
    """A batch of discriminators, each with its own part of the data.

    Discriminators are conditional by projection (Miyato & Koyama, ICLR 2018): the class selects the
    vector that multiplies the hidden layer. Parameters are stacked, so that one matrix
    multiplication serves all teachers. Teachers do not influence each other: Adam is elementwise.
    Initial weights are small, so that the votes of a teacher depend on its data rather than on its
    initialization.

    Args:
        images: (teachers, count, pixels): training images of each teacher.
        labels: (teachers, count).
        classes: number of classes.
        width: number of hidden units.
        lr: learning rate of Adam.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, classes: int, width: int, lr: float = 5e-3
    ) -> None:
        self.images, self.labels = images, labels
        self.weights = [weight.requires_grad_() for weight in self.start(classes, width)]
        self.optimizer = torch.optim.Adam(self.weights, lr, betas=(0.5, 0.999))
        self.knows = F.one_hot(labels, classes).amax(1).float()

    def __len__(self) -> int:
        return len(self.images)

    def start(self, classes: int, width: int) -> list[Tensor]:
        """Return the initial weights of all teachers."""
        number, _, pixels = self.images.shape
        return [
            0.1 * pixels**-0.5 * torch.randn(number, pixels, width),
            torch.zeros(number, 1, width),
            width**-0.5 * torch.randn(number, classes, width),
            torch.zeros(number, classes),
        ]

    def features(self, images: Tensor) -> Tensor:
        """Return the hidden layer, (teachers, count, units)."""
        weight, bias = self.weights[:2]
        return F.leaky_relu(torch.baddbmm(bias, images, weight), 0.2)

    def judge(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return logits of being real, (teachers, count), for images (teachers, count, pixels)."""
        chosen, offset = self.weights[-2:]
        hidden = self.features(images)
        index = labels.expand(len(self), labels.shape[-1])
        wide = index[:, :, None].expand(-1, -1, hidden.shape[2])
        return (hidden * chosen.gather(1, wide)).sum(2) + offset.gather(1, index)

    def learn(self, images: Tensor, labels: Tensor) -> None:
        """Train all teachers for a step, on their own and on generated images (count, pixels)."""
        real = self.judge(self.images, self.labels)
        fake = self.judge(images.expand(len(self), *images.shape), labels)
        losses = F.softplus(-real).mean(1) + F.softplus(fake).mean(1)
        self.optimizer.zero_grad()
        losses.sum().backward()
        self.optimizer.step()

    def wishes(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return each teacher's gradient of log D by each image, (teachers, count, pixels).

        The gradient of a teacher is zero for classes without an image of its own (ours).
        """
        copies = images.detach().expand(len(self), *images.shape).clone().requires_grad_()
        log_d = -F.softplus(-self.judge(copies, labels)).sum()
        (gradients,) = torch.autograd.grad(log_d, [copies])
        return gradients * self.knows[:, labels][:, :, None]


class ConvolutionalTeachers(Teachers):
    """Discriminators with two convolutions of stride 2, as in DCGAN.

    The layers have `width` and 2 `width` channels. Initial weights are normal with a standard
    deviation of 0.02, as in DCGAN. Ours: few channels, no batch normalisation, and classes by
    projection.
    """

    def start(self, classes: int, width: int) -> list[Tensor]:
        """Return the initial weights of all teachers."""
        number, _, pixels = self.images.shape
        units = 2 * width * (side_of(pixels) // 4) ** 2
        return [
            0.02 * torch.randn(number, width, 25),
            torch.zeros(number, width),
            0.02 * torch.randn(number, 2 * width, 25 * width),
            torch.zeros(number, 2 * width),
            0.02 * torch.randn(number, classes, units),
            torch.zeros(number, classes),
        ]

    def features(self, images: Tensor) -> Tensor:
        """Return the second hidden layer, (teachers, count, units)."""
        side = side_of(images.shape[2])
        x = images.unflatten(2, (1, side, side))
        for weight, bias in (self.weights[:2], self.weights[2:4]):
            x = F.leaky_relu(_convolve(x, weight, bias), 0.2)
        return x.flatten(2)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve images (teachers, count, channels, side, side) with each teacher's 5 x 5 kernels.

    The stride is 2. `weight` is (teachers, channels out, 25 channels). The channels of all teachers
    are those of one grouped convolution, which takes a fifth of the time of matrix products.
    """
    teachers, count, channels, side, _ = x.shape
    kernels = weight.reshape(-1, channels, 5, 5)
    stacked = x.transpose(0, 1).reshape(count, teachers * channels, side, side)
    out = F.conv2d(stacked, kernels, bias.flatten(), stride=2, padding=2, groups=teachers)
    return out.unflatten(1, (teachers, -1)).transpose(0, 1)


class Committee:
    """Groups of teachers that compute one after the other, so that activations fit in memory."""

    def __init__(self, groups: list[Teachers]) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)

    def learn(self, images: Tensor, labels: Tensor) -> None:
        """See `Teachers.learn`."""
        for group in self.groups:
            group.learn(images, labels)

    def wishes(self, images: Tensor, labels: Tensor) -> Tensor:
        """See `Teachers.wishes`."""
        return torch.cat([group.wishes(images, labels) for group in self.groups])


def classifier(pixels: int, classes: int, width: int = 128) -> nn.Sequential:
    """Return a classifier that is trained to evaluate generated images."""
    return nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, classes))


def accuracy_after(
    images: Tensor, labels: Tensor, test: tuple[Tensor, Tensor], classes: int, seed: int
) -> float:
    """Return the test accuracy of a classifier trained on the given images."""
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
    """Return the accuracy in [0, 1]."""
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())
