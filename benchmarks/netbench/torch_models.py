"""Networks in PyTorch for the rig, small enough that links are the bottleneck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def vgg() -> nn.Module:
    """Return four convolutions and three large linear layers: 6.5 M parameters in 14 tensors."""
    layers: list[nn.Module] = []
    for before, after, pool in ((3, 32, True), (32, 64, True), (64, 128, False), (128, 128, True)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
    layers += [nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


class Residual(nn.Module):
    """A block of a ResNet: two convolutions with batch normalisation, and a skip connection.

    Args:
        before: number of channels before the block.
        after: number of channels after it.
        stride: stride of the first convolution.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        same = before == after and stride == 1
        self.skip: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations of the next layer."""
        return torch.relu(self.body(x) + self.skip(x))


def resnet() -> nn.Module:
    """Return ResNet-18 of half the width for images of 32 x 32: 2.8 M parameters in 62 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    width = 32
    for stage in (32, 64, 128, 256):
        for block in range(2):
            layers.append(Residual(width, stage, 2 if block == 0 and stage > 32 else 1))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


WORDS, LENGTH = 65, 24


class _Transformer(nn.Module):
    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.layers = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.words(x) + self.places.weight
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True)).transpose(1, 2)


def gpt() -> nn.Module:
    """Return six Transformer layers of width 256: 4.8 M parameters in 78 tensors."""
    return _Transformer()


def _images(size: int) -> Callable[[int], Batch]:
    return lambda count: (torch.randn(count, 3, size, size), torch.randint(0, 10, (count,)))


def _texts(count: int) -> Batch:
    words = torch.randint(0, WORDS, (count, LENGTH + 1))
    return words[:, :-1], words[:, 1:]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "vgg": (vgg, _images(32)),
    "resnet": (resnet, _images(32)),
    "gpt": (gpt, _texts),
}
"""Name -> (network, batch of a size)."""

UNITS = (nn.TransformerEncoderLayer, Residual)
"""Modules that are sharded one by one."""


def describe(model: Any) -> dict[str, int]:
    """Return the numbers of parameters and tensors."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    return {"parameters": sum(sizes), "tensors": len(sizes)}
