"""The contestants in PyTorch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accordion_hvd.engine import halves
from benchmarks.netbench import contestants
from benchmarks.netbench.contestants import COMPUTE, DDP, FP16, HOROVOD, OPTIMIZER, OURS
from benchmarks.netbench.torch_models import MODELS, describe

BATCHES = 32
ONE_BUCKET_MB = 1000
"""With several buckets the PowerSGD hook aborts over Gloo: ranks start collectives in any order."""

FIRST_COMPRESSED = 2
"""The step from which the hook compresses; 2 is the least with a warm start."""


class Torch:
    """Ways of one launch, each with a network and an optimizer of its own.

    Args:
        ways: their names.
        model: a key of `MODELS`.
        batch: examples of each rank in a step.
    """

    def __init__(self, ways: Sequence[str], model: str, batch: int) -> None:
        torch.set_num_threads(1)
        if contestants.group(ways[0]) == HOROVOD:
            import horovod.torch as hvd

            hvd.init()
            self.rank = hvd.rank()
        else:
            torch.distributed.init_process_group("gloo")
            self.rank = torch.distributed.get_rank()
        make, batches = MODELS[model]
        self._nets, self._optimizers = {}, {}
        for way in ways:
            torch.manual_seed(1)
            self._nets[way], self._optimizers[way] = contestant(way, make())
        torch.manual_seed(100 + self.rank)
        self._batches = [batches(batch) for _ in range(BATCHES)]
        self._next = 0
        self.facts = describe(self._nets[ways[0]])

    def steps(
        self, way: str, count: int, together: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Train for some steps; milliseconds and CPU milliseconds a step, and the last loss.

        Args:
            way: its name.
            count: steps.
            together: called before the first.
        """
        net, optimizer = self._nets[way], self._optimizers[way]
        together()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            inputs, labels = self._batches[self._next % BATCHES]
            self._next += 1
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
        spent, busy = time.perf_counter() - began, time.process_time() - busy
        if way.startswith(OPTIMIZER) and optimizer.exchange.skipped:
            raise RuntimeError(f"{way!r} has left out steps, which send less: it has diverged.")
        return {"ms": 1000 * spent / count, "cpu_ms": 1000 * busy / count, "loss": loss.item()}

    def warm(self, way: str, count: int) -> None:
        """Steps after each of which a window ends, so that Accordion leaves its critical start."""
        optimizer = self._optimizers[way]
        for _ in range(count):
            self.steps(way, 1)
            if way.startswith(OURS):
                optimizer.end_window()
        if contestants.adapts(way):
            contestants.check_level(way, optimizer.exchange.policy.current)

    def settle(self, way: str, count: int) -> str:
        """Let the way's gate judge the link as it is now; its verdict.

        Args:
            way: its name.
            count: steps after which it must have done so.

        Raises:
            RuntimeError: it has not.
        """
        gate = self._optimizers[way].exchange.policy.gate
        gate.restart()
        for _ in range(count):
            self.steps(way, 1)
            if gate.decided:
                return gate.verdict
        raise RuntimeError(f"the gate of {way!r} has given no verdict after {count} steps.")

    def judge(self, way: str, count: int) -> None:
        """Let the way measure anew who should add its 16-bit floats."""
        exchange = self._optimizers[way].exchange
        exchange.communicator.half_allreduce = None
        halves.meet(exchange.communicator, exchange.policy)

    def digest(self, way: str) -> str:
        """The same on two ranks if their weights are, bit by bit."""
        found = hashlib.sha256()
        for parameter in self._nets[way].parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()


def contestant(way: str, net: Any) -> tuple[Any, Any]:
    """(network, optimizer) that exchange gradients in this way."""
    if way.startswith(DDP):
        net = _ddp(way.removeprefix(DDP).strip(), net)
    plain = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if way == COMPUTE or way.startswith(DDP):
        return net, plain
    named = [(f"{way}.{name}", parameter) for name, parameter in net.named_parameters()]
    if way.startswith(OURS):
        import accordion_hvd.torch as ours

        word = contestants.compression(way)
        return net, ours.DistributedOptimizer(plain, named, compression=word, guard="off")
    if way.startswith(OPTIMIZER):
        import accordion_hvd.torch as ours

        name = way.removeprefix(OPTIMIZER)
        made = getattr(ours, name.partition(",")[0])
        return net, made(named, lr=1e-4, guard="off", **contestants.RULES[name])
    import horovod.torch as hvd

    wire = hvd.Compression.fp16 if way.endswith(FP16) else hvd.Compression.none
    return net, hvd.DistributedOptimizer(plain, named, compression=wire)


def _ddp(hook: str, net: Any) -> Any:
    """DistributedDataParallel with one of its communication hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrap = torch.nn.parallel.DistributedDataParallel
    if not hook:
        return wrap(net)
    if hook == FP16.strip():
        wrapped = wrap(net)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped
    wrapped = wrap(net, bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=int(hook.removeprefix("powersgd:")),
        start_powerSGD_iter=FIRST_COMPRESSED,
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped
