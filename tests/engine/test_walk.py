"""The walk of a gradient in docs/architecture.md is the one that a step takes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from launch import ranks

import accordion_hvd

PACKAGE = Path(accordion_hvd.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
SHAPES = [(64, 64), (64,), (64, 64), (64,), (10, 64), (10,)]


def files_on_the_page() -> tuple[set[str], set[str]]:
    """Return the files of the tables for PyTorch and for Keras."""
    walk, _, others = PAGE.read_text().partition("A step in Keras also looks")
    torch, keras = set(), set()
    for first, second in re.findall(r"^\| (`.*?) \| (.*?) \|", walk, re.MULTILINE):
        torch |= (mine := set(re.findall(r"`(.*?)`", first)))
        keras |= set(re.findall(r"`(.*?)`", second)) | (mine if "the same" in second else set())
    for row in re.findall(r"^\| (`.*?) \|", others, re.MULTILINE):
        keras |= set(re.findall(r"`(.*?)`", row))
    return torch, keras


def files_of(step: Callable[[], Any]) -> set[str]:
    """Return the package's files whose functions run in a step."""
    found = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            found.add(frame.f_code.co_filename[len(str(PACKAGE)) + 1 :])

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


@ranks(2, launcher="torchrun")
def test_the_walk_in_pytorch() -> None:
    import torch

    import accordion_hvd.torch as hvd

    hvd.init()
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
        compression="powersgd:4",
    )  # fmt: skip
    hvd.broadcast_parameters(model.state_dict(), 0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    for _ in range(6):  # the first steps set up what later ones use
        step()
    on_page, found = files_on_the_page()[0], files_of(step)
    assert found == on_page, (found - on_page, on_page - found)
    assert len(found) <= 20, found


@ranks(2, launcher="gloo")
def test_the_walk_in_keras() -> None:
    import keras
    import tensorflow as tf

    import accordion_hvd.tensorflow.keras as hvd

    hvd.init()
    variables = [
        keras.Variable(np.zeros(shape, "f"), name=f"v{i}") for i, shape in enumerate(SHAPES)
    ]
    optimizer: Any = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="powersgd:4")

    def step() -> None:
        optimizer.apply([tf.random.normal(v.shape) for v in variables], variables)

    step()
    optimizer._averager._traceable = False  # Python sees the operations of a graph only as traced
    for _ in range(5):
        step()
    on_page, found = files_on_the_page()[1], files_of(step)
    assert found == on_page, (found - on_page, on_page - found)
