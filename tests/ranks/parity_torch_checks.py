"""Checks of `tests/parity/behaviours.py` in PyTorch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import horovod.torch
import numpy as np
import torch

import accordion_hvd.torch
from accordion_hvd.ops import torch as xp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))
from behaviours import ZEROS, Arrays, Switch, bound  # noqa: E402

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
torch.set_num_threads(1)


class Job:
    """Parameters whose gradients come from a backward pass of their products with constants."""

    def __init__(
        self,
        compression: Any,
        lr: float,
        momentum: float,
        adam: bool,
        first: Arrays,
        options: dict[str, Any],
    ) -> None:
        model = torch.nn.Module()
        for name, values in first.items():
            model.register_parameter(name, torch.nn.Parameter(torch.tensor(values)))
        plain: torch.optim.Optimizer = (
            torch.optim.Adam(model.parameters(), lr)
            if adam
            else torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        )
        if compression is not None:
            options = {"compression": compression, **options}
        self.optimizer = accordion_hvd.torch.DistributedOptimizer(
            plain, named_parameters=model.named_parameters(), **options
        )
        self._named = dict(model.named_parameters())

    def step(self, gradients: Arrays) -> None:
        """Take a step with this rank's gradients; an array that is not named has no gradient."""
        self.accumulate([gradients])

    def accumulate(self, passes: Sequence[Arrays]) -> None:
        """Take one step with the gradients of several backward passes."""
        self.optimizer.zero_grad()
        for gradients in passes:
            self._backward(gradients)
        self.optimizer.step()

    def averages(self, gradients: Arrays) -> Arrays:
        """Exchange gradients and return the averages, without a step."""
        self.optimizer.zero_grad()
        self._backward(gradients)
        self.optimizer.synchronize()
        found = {name: p.grad.numpy().copy() for name, p in self._named.items()}
        self.optimizer.zero_grad()
        return found

    def weights(self) -> Arrays:
        """Return the current values of all arrays."""
        return {name: p.detach().numpy().copy() for name, p in self._named.items()}

    def assign(self, name: str, values: np.ndarray) -> None:
        """Change an array on this rank."""
        with torch.no_grad():
            self._named[name].copy_(torch.tensor(values))

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _backward(self, gradients: Arrays) -> None:
        parts = [(self._named[name] * torch.tensor(x)).sum() for name, x in gradients.items()]
        torch.stack(parts).sum().backward()


class Torch:
    """An implementation of `behaviours.Adapter` for PyTorch."""

    hvd, horovod, xp, adasum = accordion_hvd.torch, horovod.torch, xp, horovod.torch.Adasum
    traced = False
    failed: tuple[type[BaseException], ...] = ()

    def job(
        self,
        compression: Any = None,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        adam: bool = False,
        first: Arrays = ZEROS,
        **options: Any,
    ) -> Job:
        """Begin a training; `options` go to `DistributedOptimizer`."""
        return Job(compression, lr, momentum, adam, first, options)

    def switch(self) -> Switch:
        """Return a new switch."""
        return Switch()

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Return every rank's array, as rows."""
        rows = self.hvd.allgather(torch.tensor(values[None]), name="parity.gather")
        return np.asarray(rows.numpy())

    def shared(self, text: str) -> str:
        """Return rank 0's text."""
        return str(self.hvd.broadcast_object(text, 0, name="parity.shared"))


if __name__ == "__main__":
    harness.main({"__name__": "behaviours", "INIT": accordion_hvd.torch.init, **bound([Torch()])})
