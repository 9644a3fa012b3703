"""A training in which rank 1 stalls; other ranks write after how many seconds they failed.

Run by tests/test_timeouts.py. Arguments: "sleep" (rank 1 sleeps) or "stop" (its process stops).
"""

import os
import signal
import sys
import time

import harness
import torch

import accordion_hvd.torch as hvd

hvd.init()
parameter = torch.nn.Parameter(torch.zeros(40, 50))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([parameter], 0.1), named_parameters=[("w", parameter)], compression="topk:0.1"
)
began = 0.0
for step in range(6):
    parameter.grad = None
    if step == 3:
        began = time.monotonic()
        if hvd.rank() == 1:
            if sys.argv[1] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
    try:
        parameter.sum().backward()
        optimizer.step()
    except Exception as error:
        seconds = time.monotonic() - began
        harness.tell(rank=hvd.rank(), step=step, seconds=seconds, error=f"{error}")
        sys.stderr.write(f"[{hvd.rank()}] {type(error).__name__} after {seconds:.1f} s: {error}\n")
        raise  # the process must end although rank 1 does not
