"""D-PSGD: decentralised parallel SGD (Lian et al., NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.topology import topology
from accordion_hvd.core.base import ExchangeGenerator, Info, Neighbours, State, Tensor


@dataclass(frozen=True)
class DPSGD(Averaging):
    """After each local step, average the model with those of the neighbours in a graph.

    x_i = sum over j of W[i, j] x_j. The paper averages models from before the step and then adds
    the gradient; here, as in this package's other methods, the step comes first, which is the same
    recursion shifted by half a step. The mean over ranks does not change. Models are never equal;
    average them before evaluating.

    Sent: a model to each neighbour a step.

    Args:
        topology: a `Topology`, the name of one, or a doubly stochastic matrix.
    """

    neighbours_only: ClassVar[bool] = True
    synchronizes: ClassVar[bool] = False

    topology: Any = "ring"

    def __post_init__(self) -> None:
        """Raises: ValueError when the topology is none."""
        object.__setattr__(self, "topology", topology(self, self.topology))

    def equal(self, step: int) -> bool:
        """Return False: models never become exactly equal."""
        return False

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """None; refuses a topology that does not suit."""
        self.topology.weights(size)
        return ()

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Exchange models with the neighbours."""
        graph, weights = self.topology, self.topology.weights(info.size)[info.rank]
        of = graph.of(info.rank, info.size)
        parts = yield Neighbours(model, to=graph.to(info.rank, info.size), of=of)
        mean = model * float(weights[info.rank])
        for rank, part in zip(of, parts, strict=True):
            mean = mean + part * float(weights[rank])
        return mean, state
