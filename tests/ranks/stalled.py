"""A training in which rank 1 stalls; other ranks write after how many seconds they failed.

Run by tests/test_timeouts.py. Argument: what rank 1 does. "sleep": it sleeps; "stop": its process
stops; "alone": it runs a collective of its own, over process groups that the script has made.
"""

import os
import signal
import sys
import time

import harness
import torch

import accordion_hvd.torch as hvd

how = sys.argv[1]
if how == "alone":
    torch.distributed.init_process_group("gloo")  # with PyTorch's limit, half an hour
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
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "alone":
                torch.distributed.all_reduce(torch.ones(3))
            time.sleep(600)
    try:
        parameter.sum().backward()
        optimizer.step()
    except Exception as error:
        seconds = time.monotonic() - began
        harness.tell(rank=hvd.rank(), step=step, seconds=seconds, error=f"{error}")
        sys.stderr.write(f"[{hvd.rank()}] {type(error).__name__} after {seconds:.1f} s: {error}\n")
        raise  # the process must end although rank 1 does not
