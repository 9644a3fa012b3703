"""A training that only an error ends; the last host is cut off after ten steps."""

import os
import time
from pathlib import Path

import torch

import accordion_hvd.torch as hvd

hvd.init()
parameter = torch.nn.Parameter(torch.zeros(40, 50))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([parameter], 0.1), named_parameters=[("w", parameter)], compression="topk:0.1"
)
for step in range(10_000):
    if step == 10 and hvd.rank() == 0:
        Path(os.environ["CHECK_FOLDER"], "cut").touch()
    parameter.grad = None
    parameter.sum().backward()
    optimizer.step()
    time.sleep(0.05)
