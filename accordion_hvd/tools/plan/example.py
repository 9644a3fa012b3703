"""The model of a plan without `--model`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

BATCH, LENGTH, WIDTH, DEPTH = 8, 64, 384, 6


def build() -> tuple[Any, Callable[[], Any]]:
    """Return a network of about ten million parameters and its step: a Transformer in PyTorch.

    Without PyTorch, the network is a perceptron in Keras.
    """
    return _keras() if importlib.util.find_spec("torch") is None else _torch()


def _torch() -> tuple[Any, Callable[[], Any]]:
    import torch

    layer = torch.nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
    inputs = torch.randn(BATCH, LENGTH, WIDTH)
    return model, lambda: model(inputs).square().mean().backward()


def _keras() -> tuple[Any, Callable[[], Any]]:
    import keras
    import numpy as np

    layers: list[Any] = [keras.Input((LENGTH, WIDTH))]
    for _ in range(DEPTH + 2):
        layers += [keras.layers.Dense(4 * WIDTH, "relu"), keras.layers.Dense(WIDTH)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    inputs = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH), np.float32)
    return model, lambda: model.train_on_batch(inputs, inputs)
