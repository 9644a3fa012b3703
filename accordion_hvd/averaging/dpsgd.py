"""D-PSGD: decentralized parallel SGD (Lian et al., NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from accordion_hvd import check
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.topology import topology
from accordion_hvd.core.base import ExchangeGenerator, Info, Neighbours, State, Tensor


@dataclass(frozen=True)
class DPSGD(Averaging):
    """D-PSGD: after each local step, average the model with the neighbours' models.

    Each rank sends its model to its neighbours in the topology and replaces it with a weighted
    mean: x_i = sum over j of W[i, j] x_j.

    The paper averages the models from before the step and then adds the gradient. Here the step
    comes first, as in the other methods of this package; this is the same recursion, shifted by
    half a step. The mean over all ranks does not change.

    Args:
        topology: a `Topology`, the name of one, or a doubly stochastic matrix. Default: "ring".

    Traffic: a model to each neighbour per step. Models are never equal; average them before
    evaluation.
    """

    neighbours_only: ClassVar[bool] = True
    synchronizes: ClassVar[bool] = False

    topology: Any = "ring"

    def __post_init__(self) -> None:
        check.settle(self, "topology", topology(self, self.topology))

    def equal(self, step: int) -> bool:
        return False

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        self.topology.weights(size)
        return ()

    def exchange(self, model: Tensor, state: State, info: Info) -> ExchangeGenerator:
        graph, weights = self.topology, self.topology.weights(info.size)[info.rank]
        senders = graph.of(info.rank, info.size)
        parts = yield Neighbours(model, to=graph.to(info.rank, info.size), of=senders)
        mean = model * float(weights[info.rank])
        for rank, part in zip(senders, parts, strict=True):
            mean = mean + part * float(weights[rank])
        return mean, state
