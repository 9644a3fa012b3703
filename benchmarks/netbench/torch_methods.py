"""Contestants in PyTorch."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accordion_hvd.comm import fp16_reduction
from accordion_hvd.resolve import parse
from benchmarks.netbench import contestants, receipts
from benchmarks.netbench.contestants import (
    BETWEEN,
    COMPUTE,
    DDP,
    FP16,
    HOOK,
    HOROVOD,
    OPTIMIZER,
    OURS,
    OVER,
    SHARDED,
    UNRECORDED,
    WITHIN,
)
from benchmarks.netbench.torch_models import MODELS, UNITS, describe

BATCHES = 32
ONE_BUCKET_MB = 1000
"""Bucket size for the PowerSGD hook. With several buckets it aborts over Gloo, because ranks start
collectives in different orders."""

FIRST_COMPRESSED = 2
"""First step in which the hook compresses; 2 is the smallest value with a warm start."""


class Torch:
    """Methods of one launch, each with its own network and optimizer.

    Args:
        methods: names of the methods.
        model: key of `MODELS`.
        batch: number of examples per rank and step.
    """

    def __init__(self, methods: Sequence[str], model: str, batch: int) -> None:
        torch.set_num_threads(1)
        if contestants.group(methods[0]) == HOROVOD:
            import horovod.torch as hvd

            hvd.init()
            self.rank = hvd.rank()
        else:
            import accordion_hvd.torch as ours

            torch.distributed.init_process_group("gloo")
            ours.init()
            self.rank = ours.rank()
        make, batches = MODELS[model]
        self._nets: dict[str, Any] = {}
        self._optimizers: dict[str, Any] = {}
        self._states: dict[str, Any] = {}
        for method in sorted(methods, key=contestants.is_unrecorded):
            recorded = method.removesuffix(UNRECORDED)
            if recorded != method and recorded in self._nets:
                # The same network, because the place of another one in memory costs some percent.
                for kept in (self._nets, self._optimizers, self._states):
                    kept[method] = kept[recorded]
                continue
            torch.manual_seed(1)
            made = contestant(recorded, make())
            self._nets[method], self._optimizers[method], self._states[method] = made
        torch.manual_seed(100 + self.rank)
        self._batches = [batches(batch) for _ in range(BATCHES)]
        self._next = 0
        self.facts = describe(self._nets[methods[0]])

    def steps(
        self, method: str, count: int, together: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Train for some steps; return wall and CPU milliseconds per step, and the last loss.

        Args:
            method: name of the method.
            count: number of steps.
            together: function that synchronizes all workers, called before the first step.
        """
        net, optimizer = self._nets[method], self._optimizers[method]
        if method.startswith((OURS, OVER)):
            optimizer.exchange.ledger.enabled = not contestants.is_unrecorded(method)
        together()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            inputs, labels = self._batches[self._next % BATCHES]
            self._next += 1
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        if method.startswith(OPTIMIZER) and optimizer.exchange.skipped:
            raise RuntimeError(f"{method!r} diverged: it skipped steps, which send fewer bytes.")
        return {"ms": 1000 * seconds / count, "cpu_ms": 1000 * busy / count, "loss": loss.item()}

    def receipt(self, method: str, count: int) -> dict[str, Any]:
        """Return what a job of `count` steps takes, and what its receipt says of others."""
        averager = self._optimizers[method]._averager
        return receipts.job(averager, count, lambda: self.steps(method, 1))

    def warm(self, method: str, count: int) -> None:
        """End a window after each step, so that Accordion leaves its initial critical regime."""
        state = self._states[method]
        for _ in range(count):
            self.steps(method, 1)
            if contestants.is_ours(method):
                state.end_window()
        if contestants.adapts(method):
            contestants.check_level(method, state.exchange.policy.current)

    def restart_gate(self, method: str, count: int) -> str:
        """Restart the method's gate on the current link; return its verdict.

        Args:
            method: name of the method.
            count: number of steps in which the gate must decide.

        Raises:
            RuntimeError: if the gate has not decided.
        """
        gate = self._states[method].exchange.policy.gate
        gate.restart()
        for _ in range(count):
            self.steps(method, 1)
            if gate.decided:
                return gate.verdict
        raise RuntimeError(f"the gate of {method!r} has no verdict after {count} steps.")

    def judge(self, method: str, count: int) -> None:
        """Measure again whether the engine should add 16-bit floats itself."""
        exchange = self._states[method].exchange
        exchange.communicator.native_fp16_allreduce = None
        fp16_reduction.choose_reduction(exchange.communicator, exchange.policy.fp16_reduction)

    def digest(self, method: str) -> str:
        """Return a hash that is equal on two ranks if their weights are bitwise equal."""
        digest = hashlib.sha256()
        for parameter in self._nets[method].parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.detach().numpy().tobytes())
        return digest.hexdigest()


def contestant(method: str, net: Any) -> tuple[Any, Any, Any]:
    """Return (network, optimizer, state) of a method; the state has our `exchange`."""
    if method.startswith(HOOK):
        return _hooked(method, net)
    if method.startswith(SHARDED):
        return _sharded(method, net)
    if method.startswith(DDP):
        net = _ddp(method.removeprefix(DDP).strip(), net)
    plain = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if method == COMPUTE or method.startswith(DDP):
        return net, plain, None
    named = [(f"{method}.{name}", parameter) for name, parameter in net.named_parameters()]
    if method.startswith((OURS, OVER)):
        import accordion_hvd.torch as ours

        compression = contestants.compression(method)
        made = ours.DistributedOptimizer(plain, named, compression=compression, guard="off")
        return net, made, made
    if method.startswith(OPTIMIZER):
        import accordion_hvd.torch as ours

        name = method.removeprefix(OPTIMIZER)
        optimizer = getattr(ours, name.partition(",")[0])
        made = optimizer(named, lr=1e-4, guard="off", **contestants.RULES[name])
        return net, made, made
    import horovod.torch as hvd

    wire = hvd.Compression.fp16 if method.endswith(FP16) else hvd.Compression.none
    return net, hvd.DistributedOptimizer(plain, named, compression=wire), None


def _hooked(method: str, net: Any) -> tuple[Any, Any, Any]:
    """Return (network, optimizer, state) with our hook in a DistributedDataParallel."""
    from accordion_hvd import ddp

    wrapped = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    state = ddp.register(wrapped, contestants.compression(method), guard="off")
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9), state


def _sharded(method: str, net: Any) -> tuple[Any, Any, Any]:
    """Return (network, optimizer, state) of a model that is sharded within each host.

    Raises:
        ValueError: if there is only one process per host.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accordion_hvd import fsdp

    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    if per_host < 2:
        raise ValueError(f"{method!r} needs --per-host 2 or more, since hosts shard the model.")
    shape = (torch.distributed.get_world_size() // per_host, per_host)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    ours = method.startswith(BETWEEN)
    over = mesh["shards"] if ours or method == WITHIN else mesh
    for module in [x for x in net.modules() if isinstance(x, UNITS)]:
        fully_shard(module, mesh=over)
    fully_shard(net, mesh=over)
    state = None
    if ours:
        compression = contestants.compression(method)
        state = fsdp.between(net, mesh["replicas"], compression, guard="off")
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), state


def _ddp(hook: str, net: Any) -> Any:
    """Return a DistributedDataParallel with a communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    wrap = torch.nn.parallel.DistributedDataParallel
    if not hook:
        return wrap(net)
    if hook == FP16.strip():
        wrapped = wrap(net)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped
    wrapped = wrap(net, bucket_cap_mb=ONE_BUCKET_MB)
    theirs, compression = powerSGD_hook.powerSGD_hook, parse(hook)
    if compression.wire == "float16":
        theirs = default_hooks.fp16_compress_wrapper(theirs)
    state = powerSGD_hook.PowerSGDState(
        None, compression.rank, start_powerSGD_iter=FIRST_COMPRESSED
    )
    wrapped.register_comm_hook(state, theirs)
    return wrapped
