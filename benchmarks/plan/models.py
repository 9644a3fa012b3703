"""The models of the cells, as `accordion-hvd plan --model` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.netbench.torch_models import MODELS
from benchmarks.plan.measure import BATCH

Made = tuple[Any, Callable[[], Any]]


def vgg() -> Made:
    """Return a convolutional network and its step."""
    return _made("vgg")


def resnet() -> Made:
    """Return a residual network and its step."""
    return _made("resnet")


def gpt() -> Made:
    """Return a Transformer and its step."""
    return _made("gpt")


def _made(name: str) -> Made:
    make, batches = MODELS[name]
    torch.manual_seed(1)
    network = make()
    inputs, labels = batches(BATCH)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()

    return network, step
