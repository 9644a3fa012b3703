"""An elastic training in PyTorch that a third rank joins; the argument is the compression."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch

import accordion_hvd.torch as hvd

GROWS, STEPS = 6, 30
"""Steps after which a third rank may join, and at least so many in all."""

PATIENCE = 60.0
"""Seconds to wait for it."""

hvd.init()
torch.manual_seed(0 if hvd.rank() == 0 else 100 + os.getpid())  # rank 0's weights are broadcast
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    model.named_parameters(),
    compression=sys.argv[1],
    guard_every=1,
)


def one_step(state: Any) -> None:
    rng = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
    x = torch.randn(16, 40, generator=rng)
    optimizer.zero_grad()
    (model(x) - x[:, :4]).square().mean().backward()
    optimizer.step()
    state.joined += hvd.size() == 3


@hvd.elastic.run
def train(state: Any) -> None:
    waited = 0.0
    while state.step < STEPS or hvd.size() < 3 and waited < PATIENCE:
        one_step(state)
        if state.step == GROWS and hvd.rank() == 0:
            Path(os.environ["ELASTIC_HOSTS"]).write_text("localhost:3\n")
        if state.step >= GROWS and hvd.size() < 3:
            time.sleep(0.1)  # until the third rank is here
            waited += 0.1
        state.step += 1
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, joined=0)
train(state)
harness.tell(
    rank=hvd.rank(),
    size=hvd.size(),
    joined=state.joined,
    steps=optimizer.exchange.steps,
    weights=[float(p.double().sum()) for p in model.parameters()],
)
