"""Tests of training at default arguments: every compressor and policy, on real digits."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from policies import POLICIES
from test_sparse_training import Weights, digits, gradients

from accordion_hvd import (
    EF21,
    QSGD,
    Accordion,
    Compressor,
    Dense,
    Diana,
    DoubleSqueeze,
    ErrorFeedback,
    Gathered,
    Momentum,
    Policy,
    Replay,
    TopK,
    compressors,
    parse,
    simulate,
)
from accordion_hvd.policies.accordion import HIGH

pytest.importorskip("sklearn")
RANKS, BATCH, EPOCH, EPOCHS = 2, 32, 10, 24


def loss(w: Weights) -> float:
    """Return the mean cross entropy of all training images."""
    x, y, _, _ = digits()
    scores = np.maximum(x @ w["in"], 0) @ w["out"] + w["b"]
    scores -= scores.max(1, keepdims=True)
    return float((np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]).mean())


def trained(compression: Any, lr: float, epochs: int = EPOCHS) -> tuple[float, float, Any]:
    """Train a small network; return the losses before and after, and rank 0's exchange."""
    x, y, _, _ = digits()
    rng = np.random.default_rng(0)
    w = {
        "in": rng.standard_normal((64, 128)).astype(np.float32) * 0.15,
        "out": rng.standard_normal((128, 10)).astype(np.float32) * 0.1,
        "b": np.zeros(10, np.float32),
    }
    before, world = loss(w), simulate(compression, RANKS)
    for number in range(EPOCH * epochs):
        chosen = rng.integers(0, len(y), (RANKS, BATCH))
        given = [gradients(w, x[i], y[i]) for i in chosen]
        means = world.step(given, lr=lr, weights=[dict(w) for _ in given])
        assert means[0] is not None
        w = {k: v - np.float32(lr) * means[0][k] for k, v in w.items()}
        if (number + 1) % EPOCH == 0:
            world.end_window()
    return before, loss(w), world.exchanges[0]


WRAPPERS = [EF21(TopK()), Diana(QSGD()), ErrorFeedback(TopK()), Gathered(TopK()), Momentum(TopK()),
            DoubleSqueeze(QSGD())]  # fmt: skip
KINDS = [getattr(compressors, name) for name in compressors.__all__]
DEFAULTS = [
    *[
        kind()
        if all(x.default is not x.empty for x in inspect.signature(kind).parameters.values())
        else parse(kind.summary[0])
        for kind in KINDS
        if kind not in map(type, WRAPPERS)
    ],
    *WRAPPERS,
]
"""Every compressor with its default arguments, or in its usual setting; wrappers around codecs with
default arguments."""

RARE = [compressors.SketchedSGD(), *WRAPPERS[2:]]
"""Compressors that `make test` does not train: they take long, or repeat TopK."""

RATES = {"SignSGD": 0.002, "DGC": 0.02, "Momentum": 0.02, "SketchedSGD": 0.01}
"""Learning rates other than 0.2: of signs, and of updates with momentum."""

MOST = {"RandomK": 0.25, "Gathered": 0.3, "SketchedSGD": 0.9}
"""Losses that are allowed where more than 0.15 is left: few elements without error feedback, or
few elements that are chosen at random or from a sketch."""


def test_every_compressor_is_trained() -> None:
    assert {type(compressor) for compressor in DEFAULTS} == set(KINDS)


@pytest.mark.seldom(where=lambda compressor: compressor.period != 1 or compressor in RARE)
@pytest.mark.parametrize("compressor", DEFAULTS, ids=repr)
def test_compressors_train(compressor: Compressor) -> None:
    """Each compressor reduces the loss from about 2.8 to below 0.15, or the limit in `MOST`.

    Training takes 240 steps, in which dense training reaches 0.06; a compressor with phases takes
    560 steps.
    """
    name = type(compressor).__name__
    epochs = 56 if compressor.period != 1 else EPOCHS  # until the last phase has begun
    before, after, exchange = trained(compressor, RATES.get(name, 0.2), epochs)
    assert before > 2.5 and after < MOST.get(name, 0.15)
    assert exchange.stats()["ratio"] > 1.9 or compressor == Dense()


@pytest.mark.parametrize(("policy", "lr"), POLICIES, ids=lambda x: repr(x)[:40])
def test_policies_train(policy: Policy, lr: float) -> None:
    _, after, exchange = trained(policy, lr)
    assert after < 0.15
    if isinstance(policy, Accordion):
        history = exchange.policy.history
        assert HIGH in {row["level"] for row in history}
        assert trained(Replay(history), lr)[1] == after
