"""Tests of training on real digits: compressed training ends about where dense training does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY
from laws import step

from accordion_hvd import DGC, AdaComp, Dense, ScaleCom, Threshold, TopK, simulate
from examples.data.digits import load_digits

pytest.importorskip("sklearn")
RANKS, STEPS, BATCH = 4, 240, 16
Weights = dict[str, np.ndarray]


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    data = load_digits()
    x, test = ((s.images.reshape(len(s.labels), -1) - 4.88) / 6.02 for s in (data.train, data.test))
    return x, data.train.labels, test, data.test.labels


def gradients(w: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """Return gradients of the cross entropy of a network with one hidden layer."""
    hidden = np.maximum(x @ w["in"], 0)
    scores = hidden @ w["out"] + w["b"]
    share = np.exp(scores - scores.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    share[np.arange(len(y)), y] -= 1
    share /= len(y)
    back = (share @ w["out"].T) * (hidden > 0)
    found = {"in": x.T @ back, "out": hidden.T @ share, "b": share.sum(0)}
    return {k: g.astype(np.float32) for k, g in found.items()}


def accuracy(compressor: Any, lr: float) -> float:
    """Return the test accuracy after training on simulated ranks, each with its own batches."""
    x, y, test, labels = digits()
    rng = np.random.default_rng(0)
    w = {
        "in": rng.standard_normal((64, 128)).astype(np.float32) * 0.15,
        "out": rng.standard_normal((128, 10)).astype(np.float32) * 0.1,
        "b": np.zeros(10, np.float32),
    }
    world = simulate(compressor, RANKS)
    for _ in range(STEPS):
        chosen = rng.integers(0, len(y), (RANKS, BATCH))
        means = step(world, NUMPY, [gradients(w, x[i], y[i]) for i in chosen])
        assert means[0] is not None
        w = {k: v - np.float32(lr) * means[0][k] for k, v in w.items()}
    scores = np.maximum(test @ w["in"], 0) @ w["out"] + w["b"]
    return float((scores.argmax(1) == labels).mean())


def test_training_ends_where_dense_training_does() -> None:
    dense = accuracy(Dense(), 0.2)
    assert dense > 0.94
    for compressor in (
        TopK(0.01),
        Threshold(0.02),
        ScaleCom(0.02),
        ScaleCom(0.02, beta=0.3, selection="exact"),
        AdaComp(50),
    ):
        assert accuracy(compressor, 0.2) > dense - 0.03, compressor
    for compressor in (DGC(0.01), DGC(0.01, warmup=80, clip=4.0)):
        assert accuracy(compressor, 0.02) > dense - 0.03, compressor
