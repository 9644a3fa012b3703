"""The networks of the GPU's checks, in PyTorch alone: a GPT and a ResNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Callable[[Any], torch.Tensor]]
"""A network, and the function that returns its loss on a fixed batch."""


class GPT(nn.Module):
    """A decoder of text whose last layer is not that of the embedding."""

    def __init__(self, words: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        norm = nn.LayerNorm(width)
        self.layers = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next words."""
        places = torch.arange(x.shape[1], device=x.device)
        inner = self.words(x) + self.places(places)
        return self.head(self.layers(inner, mask=self.mask, is_causal=True))


class Bottleneck(nn.Module):
    """A block of a ResNet-50: three convolutions and a skip connection."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if before != 4 * width:
            self.skip = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations of the next block."""
        return torch.relu(self.body(x) + self.skip(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """Return a ResNet-50: 25.6 M parameters in 161 tensors."""
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    parts.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for number in range(count):
            parts.append(Bottleneck(before, width, 2 if stage and not number else 1))
            before = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def make_gpt(device: str) -> Made:
    """Return a GPT of 163 M parameters in bf16; of 0.9 M in fp32 on the CPU."""
    large = device == "cuda"
    sizes = (50257, 1024, 768, 12, 8) if large else (512, 32, 128, 4, 2)
    words, length, width, depth, batch = sizes
    net = GPT(words, length, width, depth).to(device, torch.bfloat16 if large else torch.float32)
    text = torch.randint(0, words, (batch, length + 1), device=device)

    def loss(model: Any) -> torch.Tensor:
        found = model(text[:, :-1])
        return nn.functional.cross_entropy(found.flatten(0, 1).float(), text[:, 1:].flatten())

    return net, loss


def make_resnet(device: str) -> Made:
    """Return a ResNet-50 in fp32, with 64 images of 224 x 224; a shorter one on the CPU."""
    large = device == "cuda"
    net = (resnet() if large else resnet((1, 1, 1, 1), 10)).to(device)
    side, batch, classes = (224, 64, 1000) if large else (32, 2, 10)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(0, classes, (batch,), device=device)
    return net, lambda model: nn.functional.cross_entropy(model(images), labels)


MODELS = {"GPT": make_gpt, "ResNet-50": make_resnet}
