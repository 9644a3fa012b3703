"""Reference weights of the optimizers with weight decay, in dense and in compressed stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from accordion_hvd import optimizers, simulate

STEPS, DECAY = 5, 0.1
LR = 2.0**-6  # the same number in fp32, in which Keras keeps it
SHAPES = {"matrix": (40, 30), "vector": (30,)}
"""A tensor that is compressed after the dense stage, and one that never is."""

SIZES = {"matrix": 1.0, "vector": 1e-4}
"""Of the weights at the beginning; LAMB's ratio of the vector is below its lower bound."""

DECOUPLED = {"Birder", "Lamb", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"}
"""Optimizers whose papers, or their authors' code, take weight decay off the weights."""

DENSE: dict[str, dict[str, Any]] = {"Birder": {"skip": ("*",)}, "CDAdam": {"skip": ("*",)}}
"""Settings of those that have no dense stage at the beginning by default."""


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {key: SIZES[key] * rng.normal(size=shape) for key, shape in SHAPES.items()}


def gradients(key: str, step: int, ranks: int) -> np.ndarray:
    """Return the gradients of all ranks for one tensor, one row per rank."""
    rng = np.random.default_rng([len(key), step])
    return rng.normal(size=(ranks, *SHAPES[key]))


def end(name: str, ranks: int, decoupled: bool) -> dict[str, np.ndarray]:
    """Return the weights after all steps of the dense stage."""
    return {key: _trained(name, key, x, ranks, decoupled) for key, x in start().items()}


def _trained(name: str, key: str, x: np.ndarray, ranks: int, decoupled: bool) -> np.ndarray:
    method = Moments(name)
    for step in range(STEPS):
        local = gradients(key, step, ranks)
        w = method.direction(local if decoupled else local + DECAY * x)
        w = w + DECAY * x if decoupled else w
        ratio = np.clip(np.linalg.norm(x) / np.linalg.norm(w), 0.01, 10.0)
        x = x - LR * (ratio if name.endswith("Lamb") else 1.0) * w
    return x


COMPRESSED: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"warmup_steps": 2},
    "SketchedAMSGrad": {"warmup_steps": 2, "ratio": 0.02},
    "CDAdam": {},
    "Birder": {},
}
"""Optimizers whose compressed stage begins within `STEPS`, and which leave decay to the step.

(LAMB and 0/1 Adam apply it themselves; `end` has their dense stage.)
"""


def compressed_end(name: str, exchange: Any, ranks: int) -> dict[str, np.ndarray]:
    """Return the weights after all steps with decoupled decay, which messages do not contain.

    Tensors are named as in the `exchange` of the optimizer, because random numbers depend on names.
    """
    shapes = {shape: key for key, shape in SHAPES.items()}
    keys = {tensor.name: shapes[tuple(tensor.shape)] for tensor in exchange.tensors}
    world = simulate(getattr(optimizers, name)(**COMPRESSED[name]), ranks)
    x = start()
    for step in range(STEPS):
        drawn = {key: gradients(key, step, ranks) for key in x}
        given = [{n: drawn[key][rank].copy() for n, key in keys.items()} for rank in range(ranks)]
        known = {n: x[key] for n, key in keys.items()}
        found = world.step(given, lr=LR, weights=[known] * ranks)[0]
        assert found is not None
        x = {key: (1 - LR * DECAY) * x[key] - LR * found[n] for n, key in keys.items()}
    return x


class Moments:
    """The directions of Adam and its variants; rows of `local` are the ranks' gradients."""

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.m, self.b = name, 0, 0.0, 0.0
        self.floored = name == "SketchedAMSGrad"
        self.b2 = 0.99 if name in ("CDAdam", "SketchedAMSGrad") else 0.999
        self.v = self.largest = 1e-8 if self.floored else 0.0

    def direction(self, local: np.ndarray) -> np.ndarray:
        self.steps += 1
        if self.name == "Birder":
            self.m = 0.95 * self.m + 0.05 * local
            self.b = 0.95 * self.b + 0.05 * np.abs(local)
            return (self.m / self.b).mean(0)
        mean = local.mean(0)
        self.m = 0.9 * self.m + 0.1 * mean
        self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        self.largest = np.maximum(self.largest, self.v)
        if self.floored:
            return self.m / np.sqrt(self.largest)
        v = self.largest if self.name in ("AMSGrad", "CDAdam") else self.v
        first, second = 1 - 0.9**self.steps, 1 - self.b2**self.steps
        return self.m / first / (np.sqrt(v / second) + 1e-8)
