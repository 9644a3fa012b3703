"""Tasks: a convex problem, a network on digits, and a small Transformer on characters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.task import Task
from examples.data import load
from examples.data.text import load_tinyshakespeare

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Problem:
    """Data and a loss.

    Attributes:
        make: function that returns a new network with weights from torch's random state.
        loss: training loss of a network on a batch.
        draw: function that draws a batch of some examples with a generator.
        judged: batches on which the loss is evaluated, weighted by their lengths.
        least: lowest possible loss, if known.
        right: batches on which accuracy is measured; empty if it is not.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    draw: Callable[[np.random.Generator, int], Batch]
    judged: list[Batch]
    least: float | None = None
    right: list[Batch] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepTask(Task):
    """Training with a fixed number of steps.

    Attributes:
        what: description in a sentence or two.
        loss: description of the reported loss.
        problem: function that creates the problem.
        steps: number of steps of a training.
        every: number of steps between evaluations.
    """

    what: str
    loss: str
    problem: Callable[[], Problem]
    steps: int
    every: int
    warmup: float = 0.05
    decay: Literal["linear", "cosine"] = "cosine"


# --------------------------------------------------------------------------------- a convex problem
FEATURES = 1024
DECAY = 1e-2


def convex() -> Problem:
    """Return regularized softmax regression on random features of digits, with a known optimum."""
    data = load("digits")
    images = torch.from_numpy(data.prepared(data.train.images, "NCHW")).flatten(1)
    labels = torch.from_numpy(data.train.labels)
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((images.shape[1], FEATURES)) / math.sqrt(images.shape[1])
    shifts = draw.uniform(-1, 1, FEATURES)
    inputs = torch.relu(images @ torch.tensor(weights).float() + torch.tensor(shifts).float())
    optimum = least_loss(inputs.double().numpy(), labels.numpy())

    def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
        squares = sum(parameter.square().sum() for parameter in net.parameters())
        return nn.functional.cross_entropy(net(batch[0]), batch[1]) + DECAY / 2 * squares

    def draw_batch(generator: np.random.Generator, count: int) -> Batch:
        index = torch.from_numpy(generator.choice(len(labels), count, replace=False))
        return inputs[index], labels[index]

    return Problem(
        lambda: nn.Linear(FEATURES, data.classes), loss, draw_batch, [(inputs, labels)], optimum
    )


def least_loss(inputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the minimum of the regularized loss of a softmax regression, by L-BFGS in fp64.

    Args:
        inputs: (examples, features), fp64.
        labels: (examples,).

    Raises:
        RuntimeError: if the minimum was not found.
    """
    from scipy.optimize import minimize

    count, classes = len(labels), int(labels.max()) + 1
    extended = np.concatenate([inputs, np.ones((count, 1))], axis=1)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(-1, classes)
        scores = extended @ weights
        scores -= scores.max(axis=1, keepdims=True)
        parts = np.exp(scores)
        sums = parts.sum(axis=1, keepdims=True)
        value = np.mean(np.log(sums[:, 0]) - scores[np.arange(count), labels])
        parts /= sums
        parts[np.arange(count), labels] -= 1
        gradient = extended.T @ parts / count + DECAY * weights
        return value + DECAY / 2 * float(flat @ flat), gradient.reshape(-1)

    start = np.zeros(extended.shape[1] * classes)
    options = {"maxiter": 5000, "ftol": 1e-14, "gtol": 1e-8}
    result = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    if np.abs(result.jac).max() > 1e-5:
        raise RuntimeError(f"the optimum of the convex problem was not found: {result.message}")
    return float(result.fun)


# ------------------------------------------------------------------------------------------- digits
SMOOTHING = 0.1
WIDTH = 256


def digits() -> Problem:
    """Return the digits for three linear layers; smoothed labels keep the least loss above 0."""
    data = load("digits")
    images, tests = (
        torch.from_numpy(data.prepared(split.images, "NCHW")) for split in (data.train, data.test)
    )
    labels, answers = (torch.from_numpy(split.labels) for split in (data.train, data.test))

    def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1], label_smoothing=SMOOTHING)

    def draw_batch(generator: np.random.Generator, count: int) -> Batch:
        index = torch.from_numpy(generator.choice(len(labels), count, replace=False))
        return images[index], labels[index]

    other = SMOOTHING / data.classes
    true = 1 - SMOOTHING + other
    least = -true * math.log(true) - (data.classes - 1) * other * math.log(other)
    return Problem(
        functools.partial(_layers, images[0].numel(), data.classes), loss, draw_batch,
        [(images, labels)], least, [(tests, answers)],
    )  # fmt: skip


def _layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, outputs),
    )  # fmt: skip


# --------------------------------------------------------------------------------------- characters
LENGTH = 64
JUDGED = 128
"""Number of evenly spaced pieces of the test text on which the loss is evaluated."""


class Characters(nn.Module):
    """Decoder whose positions attend only to themselves and earlier positions.

    Args:
        letters: size of the alphabet.
        width: width of all layers; feed-forward layers are four times as wide.
        depth: number of layers.
    """

    def __init__(self, letters: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, bias=False
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters, bias=False)
        for table in (self.letters, self.places, self.head):
            nn.init.normal_(table.weight, std=0.02 if table is self.head else 0.2)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of the next letter at each position: (batch, letters, LENGTH)."""
        embedded = self.letters(x) + self.places.weight
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True)).transpose(1, 2)


def characters() -> Problem:
    """Return the prediction of the next letter in Tiny Shakespeare."""
    text = load_tinyshakespeare()
    train, test = torch.from_numpy(text.train), torch.from_numpy(text.test)
    starts = np.linspace(0, len(test) - LENGTH - 1, JUDGED).astype(int)

    def pieces(source: torch.Tensor, where: Any) -> Batch:
        rows = torch.stack([source[i : i + LENGTH + 1] for i in where])
        return rows[:, :-1], rows[:, 1:]

    def draw_batch(generator: np.random.Generator, count: int) -> Batch:
        return pieces(train, generator.integers(0, len(train) - LENGTH, count))

    def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    judged = [pieces(test, starts[i : i + 32]) for i in range(0, JUDGED, 32)]
    return Problem(lambda: Characters(len(text.alphabet)), loss, draw_batch, judged)


TaskName = Literal["convex", "digits", "characters"]
TASKS: dict[str, StepTask] = {
    "convex": StepTask(
        title="a convex problem",
        what=f"Softmax regression on {FEATURES} random features (relu) of scikit-learn's digits, "
        f"with an L2 penalty of {DECAY:g} / 2; L-BFGS in fp64 found the optimum.",
        loss="training loss, all examples", problem=convex, steps=1200, batch=256, every=20,
    ),
    "digits": StepTask(
        title="digits",
        what=f"Scikit-learn's digits, two hidden layers of {WIDTH}, labels smoothed by "
        f"{SMOOTHING}, so that the minimum of the loss is not 0.",
        loss="training loss, all examples", problem=digits, steps=1200, batch=128, every=20,
    ),
    "characters": StepTask(
        title="a Transformer on characters",
        what="Tiny Shakespeare, character by character: two layers of width 64, four heads, "
        f"a context of {LENGTH} characters.",
        loss="test loss (nats per character)", problem=characters, steps=1200, batch=16, every=20,
    ),
}  # fmt: skip
"""Tasks by name."""
