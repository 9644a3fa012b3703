"""One process of `netbench.py accuracy`, which trains one method at a time on request."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accordion_hvd.policies import Accordion
from benchmarks.netbench import accuracy_tasks, contestants, torch_methods
from benchmarks.netbench.contestants import HOROVOD, OURS
from benchmarks.netbench.network import read_counters
from benchmarks.netbench.torch_models import Batch, describe
from examples.data import Shard


def digits() -> nn.Sequential:
    """Return three linear layers: 301,066 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


def cifar10() -> nn.Sequential:
    """Return two convolutions and two linear layers: 546,634 parameters.

    Most of them are in the first linear layer.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


NETWORKS = {"digits": digits, "cifar10": cifar10}
"""Networks by task."""


def network(name: str) -> nn.Sequential:
    """Return a new network for a task; its weights depend only on torch's random state."""
    net = NETWORKS[name]()
    for layer in net:
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    nn.init.normal_(net[-1].weight, std=0.01)  # type: ignore[arg-type]
    return net


class Accuracy:
    """Training of one task with one method at a time; `worker` calls this class.

    Args:
        methods: methods of this launch.
        task: key of `accuracy_tasks.TASKS`.
        batch: number of images per rank and step.
    """

    def __init__(self, methods: Sequence[str], task: str, batch: int) -> None:
        torch.set_num_threads(1)
        if contestants.group(methods[0]) == HOROVOD:
            import horovod.torch as hvd

            hvd.init()
            self.rank, self.size = hvd.rank(), hvd.size()
        else:
            torch.distributed.init_process_group("gloo")
            self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._name, self._task, self._batch = task, accuracy_tasks.TASKS[task], batch
        self._data = accuracy_tasks.images(task)
        self._net: Any = None
        self._wrapped: Any = None
        self._optimizer: Any = None
        self.facts = describe(network(task))
        self.facts |= {"train": len(self._data.train), "test": len(self._data.test)}

    def warm(self, method: str, seed: int) -> None:
        """Begin a training; `seed` determines weights and order, equally for all methods."""
        self._net = self._wrapped = self._optimizer = None
        gc.collect()  # free the last training now, not while the clock runs
        torch.manual_seed(seed)
        self._net = network(self._name)
        spelled = accuracy_tasks.spelled(method, self._task.window)
        self._wrapped, self._optimizer, _ = torch_methods.contestant(spelled, self._net)
        part = (self._data, self.rank, self.size, self._batch, seed, "NCHW", self._task.shift)
        self._shard = Shard(*part)
        self._tests = [_tensors(*batch) for batch in self._shard.test_batches()]
        self._done, self._high = 0, 0.0

    def steps(
        self, method: str, count: int, together: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Train for some steps, then evaluate on this rank's part of the test images.

        The clock covers neither the preparation of images nor the evaluation.

        Args:
            method: name of the method.
            count: number of steps.
            together: function that synchronizes all workers, called before the first step.

        Returns:
            `seconds` and bytes `sent` by this host in these steps, the last `loss`, the numbers of
            `right` answers and `tested` images, and the CPU seconds `busy` for all of this.
        """
        batches = [self._next(self._done + step) for step in range(count)]
        together()
        began, busy, sent = time.perf_counter(), time.process_time(), _sent()
        for images, labels in batches:
            lr = self._task.lr_at(self._task.lr, self._done, self._task.limit)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self._wrapped(images), labels)
            loss.backward()
            self._optimizer.step()
            self._done += 1
        seconds, sent = time.perf_counter() - began, _sent() - sent
        correct, tested = self._evaluate()
        self._high += count * self._share_high(method)
        busy = time.process_time() - busy
        return {
            "seconds": seconds, "sent": sent, "loss": loss.item(), "right": correct,
            "tested": tested, "busy": busy,
        }  # fmt: skip

    def digest(self, method: str) -> dict[str, Any]:
        """Return the final facts; equal `weights` mean bitwise equal weights on two ranks."""
        digest = hashlib.sha256()
        for parameter in self._net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        gate = self._optimizer.exchange.policy.gate if method.startswith(OURS) else None
        return {
            "weights": digest.hexdigest(),
            "high": self._high / max(1, self._done),
            "verdict": gate.verdict if gate is not None else "",
            "trials": [gate.trial_steps, gate.trial_seconds] if gate is not None else [0, 0.0],
        }

    def _next(self, step: int) -> Batch:
        epoch, place = divmod(step, len(self._shard))
        if place == 0:
            self._shard.shuffle(epoch)
        return _tensors(*self._shard[place])

    def _evaluate(self) -> tuple[int, int]:
        """Return the numbers of correct and of all answers, without the exchanging wrapper."""
        correct = tested = 0
        with torch.no_grad():
            for images, labels in self._tests:
                correct += int((self._net(images).argmax(1) == labels).sum())
                tested += len(labels)
        return correct, tested

    def _share_high(self, method: str) -> float:
        """Return the share of layers that are at Accordion's high level."""
        policy = self._optimizer.exchange.policy if method.startswith(OURS) else None
        if not isinstance(policy, Accordion) or not policy.current:
            return 0.0
        return sum(policy.current.values()) / len(policy.current)


def _tensors(images: Any, labels: Any) -> Batch:
    return torch.from_numpy(images), torch.from_numpy(labels)


def _sent() -> int:
    """Return the bytes that this host has sent so far."""
    return read_counters(Path("/proc/self/net/dev").read_text())[1]
