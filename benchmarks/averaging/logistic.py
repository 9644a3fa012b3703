"""A worked example: logistic regression over a ring whose members exchange compressed innovations.

Eight ranks have different parts of scikit-learn's digits (sorted by label, so no part is like
another), and minimise the mean of their regularised softmax losses with full gradients. Each
method runs until its models are within 1e-8 of the optimum, which Newton's method finds; the
picture has the error over the bits that a rank has sent to each neighbour.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accordion_hvd import COLD, DPSGD, QSGD, Dense, DynaCOLD, TopK
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.core.base import Info, Neighbours
from accordion_hvd.core.composition import RequestGenerator, intercept
from accordion_hvd.ops import numpy as xp
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep
from examples.data import load
from examples.pictures import figure
from examples.report import as_markdown

Array = np.ndarray


@dataclass(frozen=True)
class Softmax:
    """Regularised softmax regression, one part of the data a rank.

    Attributes:
        parts: each rank's features (count, features), the last one 1, and labels as one-hot rows.
        penalty: half of it times the squared norm is added, which makes the loss strongly convex.
    """

    parts: tuple[tuple[Array, Array], ...]
    penalty: float

    @property
    def size(self) -> int:
        """How many parameters there are."""
        features, labels = self.parts[0]
        return features.shape[1] * labels.shape[1]

    def gradient(self, rank: int, x: Array) -> Array:
        """Of the mean loss of a rank's part."""
        features, labels = self.parts[rank]
        wrong = _chances(features, x) - labels
        return (features.T @ wrong / len(features)).reshape(-1) + self.penalty * x

    @functools.cached_property
    def smoothness(self) -> float:
        """A bound on the curvature of every part."""
        largest = max(np.linalg.norm(f, 2) ** 2 / len(f) for f, _ in self.parts)
        return 0.5 * float(largest) + self.penalty

    @functools.cached_property
    def optimum(self) -> Array:
        """Of the mean of all parts' losses, by Newton's method."""
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
        chances, classes = _chances(features, x), labels.shape[1]
        found = np.zeros((features.shape[1], classes, features.shape[1], classes))
        for a in range(classes):
            for b in range(classes):
                weight = chances[:, a] * ((a == b) - chances[:, b])
                found[:, a, :, b] = features.T @ (features * weight[:, None]) / len(features)
        return found.reshape(self.size, self.size) + self.penalty * np.eye(self.size)

    def error(self, models: Sequence[Array]) -> float:
        """The largest distance of any rank's model from the optimum, relative to its norm."""
        apart = max(float(np.linalg.norm(model - self.optimum)) for model in models)
        return apart / float(np.linalg.norm(self.optimum))


def _chances(features: Array, x: Array) -> Array:
    scores = features @ x.reshape(features.shape[1], -1)
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def digits(ranks: int = 8, penalty: float = 0.1) -> Softmax:
    """The digits, sorted by label and cut in parts of one size."""
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
    """How one method fared: `bits` sent to each neighbour, and the `errors` after each step."""

    name: str
    bits: list[float]
    errors: list[float]

    def until(self, error: float) -> tuple[int, float] | None:
        """Steps and bits to an error; None if it was not reached."""
        reached = [i for i, found in enumerate(self.errors) if found <= error]
        return (reached[0] + 1, self.bits[reached[0]]) if reached else None


def run(
    name: str, method: Averaging, problem: Softmax, lr: float, steps: int, least: float = 1e-9
) -> Curve:
    """Full-gradient descent under a method, until the error is `least`.

    Args:
        name: of the curve.
        method: how models are averaged.
        problem: what is minimised.
        lr: the step size.
        steps: at most.
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
        talks = []
        for rank in ranks:
            model = models[rank] - lr * problem.gradient(rank, models[rank])
            told = Info(step=step, rank=rank, size=hub.ranks, name="model", lr=lr)
            talks.append(method.exchange(model, states[rank], told))
        talks[0] = _counted(talks[0], sent)
        models, states = map(list, zip(*lockstep(links, talks), strict=True))
        curve.bits.append(8 * sum(sent))
        curve.errors.append(problem.error(models))
        if curve.errors[-1] <= least or not curve.errors[-1] < 1e6:
            break
    return curve


def _counted(conversation: RequestGenerator, sent: list[int]) -> RequestGenerator:
    """The same conversation; adds the bytes of each message to a neighbour to `sent`."""

    def serve(asked: Any) -> RequestGenerator:
        if isinstance(asked, Neighbours):
            sent.append(asked.tensor.nbytes)
        return (yield asked)

    return intercept(conversation, serve)


METHODS: dict[str, Averaging] = {
    "NIDS (fp64, no compression)": COLD("ring"),
    "COLD, innovations in fp32": COLD("ring", 1.0, Dense()),
    "COLD, TopK(0.3)": COLD("ring", 0.5, TopK(0.3)),
    "COLD, QSGD(4)": COLD("ring", 0.5, QSGD(4)),
    "Dyna-COLD, 1 bit": DynaCOLD("ring", 0.2, 0.99),
    "D-PSGD (not exact)": DPSGD("ring"),
}


def table(curves: Sequence[Curve], error: float) -> list[list[str]]:
    """Head and rows: steps and bits to an error."""
    rows = [["method", f"steps to {error:g}", "bits to each neighbour", "of NIDS'", "least error"]]
    base = curves[0].until(error)
    for curve in curves:
        found, cells = curve.until(error), ["-", "-", "-"]
        if found is not None and base is not None:
            steps, bits = found
            cells = [str(steps), f"{bits:.3g}", f"{bits / base[1]:.3f}"]
        rows.append([curve.name, *cells, f"{min(curve.errors):.1e}"])
    return rows


def draw(curves: Sequence[Curve], path: Path) -> None:
    """The error over bits."""
    with figure(path, (8, 5)) as (_, ((axis,),)):
        for curve in curves:
            axis.loglog(curve.bits, curve.errors, label=curve.name)
        axis.axhline(1e-8, color="black", lw=0.7, ls=":")
        axis.set(xlabel="bits sent to each neighbour", ylabel="largest distance from the optimum")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)


def main(words: Sequence[str] | None = None) -> None:
    """Run all methods; print a table, draw a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8, help="members of the ring (default 8)")
    parser.add_argument("--penalty", type=float, default=0.1, help="of squared norms (0.1)")
    parser.add_argument("--steps", type=int, default=5000, help="at most (5000)")
    parser.add_argument("--error", type=float, default=1e-8, help="to reach (1e-8)")
    parser.add_argument("--picture", type=Path, help="where to draw bits against error")
    chosen = parser.parse_args(words)
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
