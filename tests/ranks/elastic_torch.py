"""An elastic training in PyTorch; the arguments are the compression and the stages.

The compression "local" is `LocalSGD(4)`. The stages are those of `elastic.Stages`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import elastic
import harness
import numpy as np
import torch

import accordion_hvd.torch as hvd
from accordion_hvd import LocalSGD
from benchmarks.storm.conserved import conserved

hvd.init()
stages = elastic.Stages(sys.argv[2:])
torch.manual_seed(0 if hvd.rank() == 0 else 100 + os.getpid())  # rank 0's weights are broadcast
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    model.named_parameters(),
    compression=LocalSGD(4) if sys.argv[1] == "local" else sys.argv[1],
    guard_every=1,
)


def one_step(state: Any) -> None:
    rng = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
    x = torch.randn(16, 40, generator=rng)
    optimizer.zero_grad()
    (model(x) - x[:, :4]).square().mean().backward()
    optimizer.step()
    state.step += 1


@hvd.elastic.run
def train(state: Any) -> None:
    def add(x: np.ndarray) -> np.ndarray:
        return hvd.allreduce(torch.tensor(x), op=hvd.Sum, name="total").numpy()

    def total() -> np.ndarray:
        weights = [p.detach().numpy() for p in model.parameters()]
        return conserved(optimizer, weights, hvd.size(), add)

    stages.enter(state, hvd.size(), total())
    while not stages.over(state):
        one_step(state)
        state.total = total()
        stages.act(state, hvd.rank())
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, **elastic.BEGIN)
train(state)
if sys.argv[1] == "local":
    optimizer.average_now(model)
harness.tell(
    rank=hvd.rank(),
    size=hvd.size(),
    sizes=state.sizes,
    leaders=state.leaders,
    changes=state.changes,
    steps=state.step,
    resumed=stages.resumed,
    weights=[float(p.double().sum()) for p in model.parameters()],
)
