"""Example: logistic regression over a ring whose ranks exchange compressed innovations.

Eight ranks hold different parts of scikit-learn's digits, sorted by label so that the parts differ.
They minimize the mean of their regularized softmax losses with full gradients. Each method runs
until its models are within 1e-8 of the optimum, which Newton's method finds. The picture shows the
error over the bits that a rank sends to each neighbour.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from accordion_hvd import COLD, DPSGD, QSGD, Dense, DynaCOLD, TopK, check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.core.base import Info, Neighbours
from accordion_hvd.core.running import RequestGenerator, intercept
from accordion_hvd.ops import numpy as xp
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep
from examples.command_line import read_options
from examples.data import load
from examples.pictures import figure
from examples.tables import as_markdown, format_table

Array = np.ndarray


@dataclass(frozen=True)
class Softmax:
    """Regularized softmax regression with one part of the data per rank.

    Attributes:
        parts: features (count, features), with 1 as the last feature, and one-hot labels, per rank.
        penalty: factor of the squared norm / 2 in the loss, which makes the loss strongly convex.
    """

    parts: tuple[tuple[Array, Array], ...]
    penalty: float

    @property
    def size(self) -> int:
        """Return the number of parameters."""
        features, labels = self.parts[0]
        return features.shape[1] * labels.shape[1]

    def gradient(self, rank: int, x: Array) -> Array:
        """Return the gradient of the mean loss of a rank's part."""
        features, labels = self.parts[rank]
        residual = _probabilities(features, x) - labels
        return (features.T @ residual / len(features)).reshape(-1) + self.penalty * x

    @functools.cached_property
    def smoothness(self) -> float:
        """Return an upper bound on the curvature of every part's loss."""
        largest = max(np.linalg.norm(f, 2) ** 2 / len(f) for f, _ in self.parts)
        return 0.5 * float(largest) + self.penalty

    @functools.cached_property
    def optimum(self) -> Array:
        """Return the minimizer of the mean loss of all parts, by Newton's method."""
        x = np.zeros(self.size)
        for _ in range(100):
            slope = np.mean([self.gradient(rank, x) for rank in range(len(self.parts))], 0)
            if np.linalg.norm(slope) < 1e-14:
                break
            curvature = np.mean([self._curvature(rank, x) for rank in range(len(self.parts))], 0)
            x = x - np.linalg.solve(curvature, slope)
        return x

    def _curvature(self, rank: int, x: Array) -> Array:
        features, labels = self.parts[rank]
        probabilities, classes = _probabilities(features, x), labels.shape[1]
        hessian = np.zeros((features.shape[1], classes, features.shape[1], classes))
        for a in range(classes):
            for b in range(classes):
                weight = probabilities[:, a] * ((a == b) - probabilities[:, b])
                hessian[:, a, :, b] = features.T @ (features * weight[:, None]) / len(features)
        return hessian.reshape(self.size, self.size) + self.penalty * np.eye(self.size)

    def error(self, models: Sequence[Array]) -> float:
        """Return the largest distance of a rank's model from the optimum, relative to its norm."""
        distance = max(float(np.linalg.norm(model - self.optimum)) for model in models)
        return distance / float(np.linalg.norm(self.optimum))


def _probabilities(features: Array, x: Array) -> Array:
    scores = features @ x.reshape(features.shape[1], -1)
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def digits(ranks: int = 8, penalty: float = 0.1) -> Softmax:
    """Return the problem on the digits, sorted by label and split into equal parts."""
    data = load("digits")
    order = np.argsort(data.train.labels, kind="stable")
    order = order[: len(order) // ranks * ranks]
    images = data.train.images[order].reshape(len(order), -1) / 16.0
    features = np.hstack([images, np.ones((len(order), 1))])
    labels = np.eye(data.classes)[data.train.labels[order]]
    cut = zip(np.split(features, ranks), np.split(labels, ranks), strict=True)
    return Softmax(tuple(cut), penalty)


@dataclass
class Curve:
    """Progress of one method: `bits` sent to each neighbour and `errors` after each step."""

    name: str
    bits: list[float]
    errors: list[float]

    def until(self, error: float) -> tuple[int, float] | None:
        """Return the steps and bits until an error is reached; None if it was not reached."""
        reached = [i for i, value in enumerate(self.errors) if value <= error]
        return (reached[0] + 1, self.bits[reached[0]]) if reached else None


def run(
    name: str, method: Averaging, problem: Softmax, lr: float, steps: int, least: float = 1e-9
) -> Curve:
    """Run full-gradient descent with a method until the error is at most `least`.

    Args:
        name: name of the curve.
        method: averaging method.
        problem: problem to minimize.
        lr: step size.
        steps: largest number of steps.
        least: error at which to stop.
    """
    hub, ranks = Hub(len(problem.parts)), range(len(problem.parts))
    links = [SimulatedCommunicator(hub, rank, xp) for rank in ranks]
    models = [np.zeros(problem.size) for _ in ranks]
    infos = [Info(rank=rank, size=hub.ranks, name="model", lr=lr) for rank in ranks]
    states = [method.start(model, info) for model, info in zip(models, infos, strict=True)]
    curve = Curve(name, [], [])
    sent: list[int] = []
    for step in range(steps):
        exchanges = []
        for rank in ranks:
            model = models[rank] - lr * problem.gradient(rank, models[rank])
            info = Info(step=step, rank=rank, size=hub.ranks, name="model", lr=lr)
            exchanges.append(method.exchange(model, states[rank], info))
        exchanges[0] = _counted(exchanges[0], sent)
        models, states = map(list, zip(*lockstep(links, exchanges), strict=True))
        curve.bits.append(8 * sum(sent))
        curve.errors.append(problem.error(models))
        if curve.errors[-1] <= least or not curve.errors[-1] < 1e6:
            break
    return curve


def _counted(exchange: RequestGenerator, sent: list[int]) -> RequestGenerator:
    """Return an exchange generator that appends the bytes of each message to `sent`."""

    def serve(request: Any) -> RequestGenerator:
        if isinstance(request, Neighbours):
            sent.append(request.tensor.nbytes)
        return (yield request)

    return intercept(exchange, serve)


METHODS: dict[str, Averaging] = {
    "NIDS (fp64, no compression)": COLD("ring"),
    "COLD, innovations in fp32": COLD("ring", 1.0, Dense()),
    "COLD, TopK(0.3)": COLD("ring", 0.5, TopK(0.3)),
    "COLD, QSGD(4)": COLD("ring", 0.5, QSGD(4)),
    "Dyna-COLD, 1 bit": DynaCOLD("ring", 0.2, 0.99),
    "D-PSGD (not exact)": DPSGD("ring"),
}


def table(curves: Sequence[Curve], error: float) -> pd.DataFrame:
    """Return a table of the steps and bits to an error; a dash if it was not reached."""
    columns = {
        "method": "{name}",
        f"steps to {error:g}": "{steps:.0f}",
        "bits to each neighbour": "{bits:.3g}",
        "of NIDS'": "{share:.3f}",
        "least error": "{least:.1e}",
    }
    found = pd.DataFrame(
        [curve.until(error) or (np.nan, np.nan) for curve in curves], columns=["steps", "bits"]
    )
    found["share"] = found["bits"] / found["bits"][0]
    names, least = [curve.name for curve in curves], [min(curve.errors) for curve in curves]
    return format_table(columns, found.assign(name=names, least=least))


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the error over bits."""
    with figure(path, (8, 5)) as (_, ((axis,),)):
        for curve in curves:
            axis.loglog(curve.bits, curve.errors, label=curve.name)
        axis.axhline(1e-8, color="black", lw=0.7, ls=":")
        axis.set(xlabel="bits sent to each neighbour", ylabel="largest distance from the optimum")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)


@dataclass(frozen=True)
class Options:
    """Solve logistic regression over a ring whose ranks exchange compressed innovations.

    Args:
        ranks: ranks of the ring.
        penalty: weight of squared norms.
        steps: largest number of steps.
        error: error to reach.
        picture: file for a picture of the error over bits.
    """

    ranks: int = 8
    penalty: float = 0.1
    steps: int = 5000
    error: float = 1e-8
    picture: Path | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        check.integer("logistic.py", "--ranks", self.ranks, least=3)
        check.integer("logistic.py", "--steps", self.steps, least=1)


def main(words: Sequence[str] | None = None) -> None:
    """Run all methods, print a table and draw a picture."""
    chosen: Options = read_options(Options, words, owner="logistic.py")
    problem = digits(chosen.ranks, chosen.penalty)
    lr = 1.9 / problem.smoothness
    curves = []
    for name, method in METHODS.items():
        curves.append(run(name, method, problem, lr, chosen.steps, 0.5 * chosen.error))
        print(
            f"{name}: {len(curves[-1].errors)} steps, error {curves[-1].errors[-1]:.1e}", flush=True
        )
    print(as_markdown(table(curves, chosen.error), left=[0]))
    if chosen.picture:
        draw(curves, chosen.picture)
