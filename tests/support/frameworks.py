"""The three frameworks seen from a test: how a NumPy array gets in and out, and how ranks of one
compressor are driven by hand.
"""

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

from accordion_hvd.core.base import Compressor, Info
from accordion_hvd.core.placement import consecutive
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, lockstep


@dataclass(frozen=True)
class Framework:
    """One way to run: a framework, and for NumPy whether consumed arguments are poisoned."""

    name: str
    backend: str

    @property
    def xp(self) -> ModuleType:
        return importlib.import_module(f"accordion_hvd.ops.{self.backend}")

    def tensor(self, values: np.ndarray, dtype: str | None = None) -> Any:
        """A tensor of its own memory."""
        x = self.xp.asarray(np.array(values))
        return self.xp.cast(x, dtype) if dtype else x

    def array(self, x: Any) -> np.ndarray:
        """A copy as a NumPy array (bfloat16 as fp32)."""
        return np.array(self.xp.to_numpy(x))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the framework's tensors are computed with."""
        if self.name == "numpy-poisoned":
            from accordion_hvd.ops.journal import poisoning

            return poisoning()
        return contextlib.nullcontext()

    @property
    def exact_undo(self) -> bool:
        """Whether taking back a step restores state to the bit."""
        return self.name in ("numpy-poisoned", "tensorflow")


NUMPY = Framework("numpy", "numpy")
POISONED = Framework("numpy-poisoned", "numpy")
TORCH = Framework("torch", "torch")
TENSORFLOW = Framework("tensorflow", "tensorflow")
FRAMEWORKS = (NUMPY, POISONED, TORCH, TENSORFLOW)


def installed(framework: Framework) -> bool:
    return importlib.util.find_spec(framework.backend) is not None


def parameters(frameworks: Sequence[Framework] = FRAMEWORKS) -> list[Any]:
    """For pytest.mark.parametrize; those not installed are skipped."""
    return [
        pytest.param(
            f,
            id=f.name,
            marks=[] if installed(f) else pytest.mark.skip(reason=f"{f.backend} not installed"),
        )
        for f in frameworks
    ]


def combined(choices: dict[Framework, Sequence[Any]]) -> list[Any]:
    """For pytest.mark.parametrize: each framework with each value that is chosen for it."""
    return [
        pytest.param(*known.values, value, id=f"{known.id}-{value}", marks=known.marks)
        for known, values in zip(parameters(tuple(choices)), choices.values(), strict=True)
        for value in values
    ]


def local_size(ranks: int) -> int:
    """How many ranks share a machine in tests: there are two machines, if there are two ranks."""
    return max(1, ranks // 2)


class Ranks:
    """Ranks that run one compressor on one tensor: no policy, no buckets, no flags."""

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
        """One step; for each rank (mean, new state)."""
        talks = [
            self.compressor.exchange(tensor, state, self.info(rank, step))
            for rank, (tensor, state) in enumerate(zip(tensors, states, strict=True))
        ]
        return lockstep(self.communicators, talks)

    def step(self, gradients: Sequence[np.ndarray], dtype: str | None = None) -> list[np.ndarray]:
        """One step; each rank's mean."""
        with self.framework.running():
            tensors = [self.framework.tensor(g, dtype) for g in gradients]
            self.states = self.states or self.init(tensors[0])
            results = self.exchange(tensors, self.states)
            self.states = [state for _, state in results]
            self.steps += 1
            return [self.framework.array(mean) for mean, _ in results]

    def residuals(self) -> list[np.ndarray | None]:
        """What each rank owes of the whole tensor, as a vector."""
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
        """The ranks' mean of what they owe; zeros without error feedback."""
        known = [np.zeros(size) if x is None else x.astype(np.float64) for x in self.residuals()]
        return np.mean(known, 0)


def normals(
    shape: Sequence[int], ranks: int, seed: int = 0, steps: int | None = None
) -> Iterator[list[np.ndarray]]:
    """A stream of gradients, one list of the ranks' a step."""
    rng, count = np.random.default_rng(seed), 0
    while steps is None or count < steps:
        count += 1
        yield [rng.standard_normal(tuple(shape)).astype(np.float32) for _ in range(ranks)]


def exact_mean(gradients: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean([g.astype(np.float64) for g in gradients], 0)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
