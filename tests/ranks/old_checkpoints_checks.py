"""Tests of trainings that resume from an older version's PyTorch checkpoints, on two ranks."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, Dense, DiLoCo, TopK

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
from saved import LR, MORE, SAVED, digest, results, values  # noqa: E402

INIT = hvd.init
STOP = 8
"""Steps before the checkpoints."""

SHAPES = {"w": (32, 32), "small": (3, 3), "b": (4,)}


class Model(torch.nn.Module):
    """A model of three parameters, whose gradients do not depend on their values."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self, step: int) -> torch.Tensor:
        parts = []
        for name, p in self.named_parameters():
            gradient = values(name, SHAPES[name], hvd.rank(), step)
            parts.append((p * torch.from_numpy(gradient)).sum())
        return torch.stack(parts).sum()


def wrapped(model: Model, compression: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)


def by_turns() -> Accordion:
    """Return a policy that averages gradients for four steps, then models."""
    return Accordion(low=Dense(), high=DiLoCo(4), window=2, interval=1, threshold=99.0)


WRAPPED: dict[str, Callable[[Model], Any]] = {
    "torch_topk": lambda model: wrapped(model, TopK(0.1)),
    "torch_models": lambda model: wrapped(model, by_turns()),
}
OWN: dict[str, Callable[[Model], Any]] = {
    "torch_cd_adam": lambda model: hvd.CDAdam(model.named_parameters(), lr=LR),
    "torch_onebit_adam": lambda model: hvd.OnebitAdam(
        model.named_parameters(), lr=LR, warmup_steps=3
    ),
}


def train(model: Model, optimizer: Any, first: int, count: int) -> np.ndarray:
    """Train, and return digests of this rank's weights after each step."""
    rows = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        rows.append(digest({name: p.detach().numpy() for name, p in model.named_parameters()}))
    return np.array(rows)


def file_of(name: str) -> Path:
    """Return the file of this rank's weights and its optimizer's `state_dict()`."""
    return SAVED / name / f"rank-{hvd.rank():05d}.pt.gz"


def loaded(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with gzip.open(file_of(name)) as file:
        return torch.load(file, weights_only=True)


def goes_on(name: str, model: Model, optimizer: Any) -> None:
    """Assert that training goes on as the recorded training, which did not stop."""
    found, wanted = train(model, optimizer, STOP, MORE), results(SAVED / name)[hvd.rank()]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def check_saved_states_go_on() -> None:
    for name, make in (WRAPPED | OWN).items():
        (weights, state), model = loaded(name), Model()
        model.load_state_dict(weights)
        optimizer = make(model)
        if name in WRAPPED:
            optimizer.load_state_dict(state)
        hvd.load_state(SAVED / name, only=[optimizer])
        goes_on(name, model, optimizer)


def check_optimizers_own_states_go_on() -> None:
    for name, make in OWN.items():
        (weights, state), model = loaded(name), Model()
        model.load_state_dict(weights)
        optimizer = make(model)
        optimizer.load_state_dict(state)
        goes_on(name, model, optimizer)


def check_they_do_not_without() -> None:
    """A training that loads only the weights does not go on as the recorded training."""
    for name, make in (WRAPPED | OWN).items():
        model = Model()
        model.load_state_dict(loaded(name)[0])
        with harness.refused(AssertionError, name):
            goes_on(name, model, make(model))


if __name__ == "__main__":
    harness.main(globals())
