"""The three frameworks in tests: conversion from and to NumPy, and ranks of one compressor."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from accordion_hvd.core.base import Compressor, Info, consecutive
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep


@dataclass(frozen=True)
class Framework:
    """A framework in which a test runs.

    Attributes:
        name: name in the ids of tests. In "numpy-poisoned", NumPy operations fill the arguments
            that they consume with NaN.
        backend: name of the framework's package and of its module in `accordion_hvd.ops`.
    """

    name: str
    backend: str

    @property
    def xp(self) -> ModuleType:
        return importlib.import_module(f"accordion_hvd.ops.{self.backend}")

    def tensor(self, values: np.ndarray, dtype: str | None = None) -> Any:
        """Return the values as a tensor of the framework, in memory of its own."""
        x = self.xp.asarray(np.array(values))
        return self.xp.cast(x, dtype) if dtype else x

    def array(self, x: Any) -> np.ndarray:
        """Return a copy of a tensor as a NumPy array; bfloat16 becomes fp32."""
        return np.array(self.xp.to_numpy(x))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which to compute with the framework's tensors."""
        if self.name == "numpy-poisoned":
            from accordion_hvd.ops.journal import poisoning

            return poisoning()
        return contextlib.nullcontext()

    @property
    def exact_undo(self) -> bool:
        """Return whether undoing a step restores every bit of the state."""
        return self.name in ("numpy-poisoned", "tensorflow")


NUMPY = Framework("numpy", "numpy")
POISONED = Framework("numpy-poisoned", "numpy")
TORCH = Framework("torch", "torch")
TENSORFLOW = Framework("tensorflow", "tensorflow")
FRAMEWORKS = (NUMPY, POISONED, TORCH, TENSORFLOW)


def installed(framework: Framework) -> bool:
    return importlib.util.find_spec(framework.backend) is not None


def parameters(frameworks: Sequence[Framework] = FRAMEWORKS) -> list[Any]:
    """Return the frameworks for pytest.mark.parametrize, with a skip if one is not installed."""
    return [
        pytest.param(
            f,
            id=f.name,
            marks=[] if installed(f) else pytest.mark.skip(reason=f"{f.backend} not installed"),
        )
        for f in frameworks
    ]


def combined(choices: dict[Framework, Sequence[Any]]) -> list[Any]:
    """Return (framework, value) pairs for pytest.mark.parametrize: each framework's `choices`."""
    return [
        pytest.param(*known.values, value, id=f"{known.id}-{value}", marks=known.marks)
        for known, values in zip(parameters(tuple(choices)), choices.values(), strict=True)
        for value in values
    ]


def local_size(ranks: int) -> int:
    """Return the number of ranks per host in tests: half of all ranks, but at least one."""
    return max(1, ranks // 2)


class Ranks:
    """Ranks that run one compressor on one tensor, without policy, buckets or non-finite flags."""

    def __init__(
        self, compressor: Compressor, ranks: int, framework: Framework = NUMPY, name: str = "w"
    ) -> None:
        self.compressor, self.ranks, self.framework, self.name = compressor, ranks, framework, name
        self.hosts = consecutive(ranks, local_size(ranks))
        self.spec: Any = None
        self.steps = 0
        self.states: list[dict[str, Any]] = []
        hub = Hub(ranks)
        self.communicators = [SimulatedCommunicator(hub, r, framework.xp) for r in range(ranks)]

    def info(self, rank: int, step: Any = None) -> Info:
        step, phase = self.steps if step is None else step, self.compressor.variant(self.steps)
        shape = () if self.spec is None else tuple(self.spec.shape)
        return Info(step, rank, self.ranks, self.name, 0.1, self.hosts, phase, shape=shape)

    def init(self, like: Any) -> list[dict[str, Any]]:
        self.spec = self.framework.xp.spec(like)
        return [self.compressor.init(self.spec, self.info(rank)) for rank in range(self.ranks)]

    def exchange(self, tensors: Sequence[Any], states: Any, step: Any = None) -> list[Any]:
        """Run one step from the given states; return (mean, new state) for each rank."""
        generators = [
            self.compressor.exchange(tensor, state, self.info(rank, step))
            for rank, (tensor, state) in enumerate(zip(tensors, states, strict=True))
        ]
        return lockstep(self.communicators, generators)

    def step(self, gradients: Sequence[np.ndarray], dtype: str | None = None) -> list[np.ndarray]:
        """Run one step on NumPy gradients, and store the states; return each rank's mean."""
        with self.framework.running():
            tensors = [self.framework.tensor(g, dtype) for g in gradients]
            self.states = self.states or self.init(tensors[0])
            results = self.exchange(tensors, self.states)
            self.states = [state for _, state in results]
            self.steps += 1
            return [self.framework.array(mean) for mean, _ in results]

    def residuals(self) -> list[np.ndarray | None]:
        """Return each rank's residual of the full tensor, a vector; None without error feedback."""
        carried: list[np.ndarray | None] = []
        for rank, state in enumerate(self.states):
            x = self.compressor.residual(state)
            if x is not None:
                x = self.framework.array(
                    self.compressor.expand_residual(x, self.spec, self.info(rank))
                )
            carried.append(None if x is None else x.reshape(-1))
        return carried

    def mean_residual(self, size: int) -> np.ndarray:
        """Return the mean of the ranks' residuals; zeros without error feedback."""
        known = [np.zeros(size) if x is None else x.astype(np.float64) for x in self.residuals()]
        return np.mean(known, 0)


def normals(
    shape: Sequence[int], ranks: int, seed: int = 0, steps: int | None = None
) -> Iterator[list[np.ndarray]]:
    """Yield normally distributed gradients: for each step, a list with one gradient per rank."""
    rng, count = np.random.default_rng(seed), 0
    while steps is None or count < steps:
        count += 1
        yield [rng.standard_normal(tuple(shape)).astype(np.float32) for _ in range(ranks)]


def exact_mean(gradients: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean([g.astype(np.float64) for g in gradients], 0)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
