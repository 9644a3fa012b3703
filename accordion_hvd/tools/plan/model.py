"""The user's model: its gradients, and the time of a step without an exchange."""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops import backend
from accordion_hvd.simulation.programs import Gradients

WARM_UP, LEAST, SECONDS = 2, 5, 2.0
"""Steps before the measured ones, the least number of measured ones, and their duration."""

READY = "ready\n"
"""Line of a process that takes steps."""

BACKWARD = 2 / 3
"""Part of a step that is the backward pass, where it cannot be measured."""


@dataclass
class Model:
    """A model whose step is to be predicted.

    Attributes:
        gradients: the tensors in the order in which their gradients become ready.
        values: gradients with values, in the same order.
        compute: seconds of a step without an exchange.
        backward: part of the step that is the backward pass.
        overlap: whether gradients are sent during the backward pass.
        synchronize: waits until the device of the gradients has finished.
    """

    gradients: Gradients
    values: Sequence[Any]
    xp: ModuleType
    compute: float
    backward: float = BACKWARD
    overlap: bool = True
    synchronize: Callable[[], None] = lambda: None

    @property
    def parameters(self) -> int:
        """Return the number of elements of all gradients."""
        return sum(tensor.size for tensor in self.gradients.tensors)


def load(word: str) -> Callable[[], Any]:
    """Return the function "FILE.py:FUNCTION" or "MODULE:FUNCTION"; ValueError if there is none."""
    place, colon, name = word.rpartition(":")
    if not (place and colon and name):
        raise ValueError(f"--model is {word!r}, but must be FILE.py:FUNCTION or MODULE:FUNCTION.")
    sys.path.insert(0, os.getcwd())
    try:
        module = (
            _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except (ImportError, OSError) as error:
        raise ValueError(f"--model {word!r} cannot be loaded: {error}.") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"--model {word!r}: {place} has no function {name!r}.")
    return found


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def build(word: str) -> tuple[Any, Callable[[], Any] | None]:
    """Call what `word` names; return its model and step; ValueError if it returns anything else."""
    made = load(word)()
    model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not (hasattr(model, "named_parameters") or hasattr(model, "trainable_variables")):
        raise ValueError(
            f"--model {word!r} returned {type(model).__name__}, but must return a model of PyTorch "
            "or Keras, or a pair of a model and a function that takes a step."
        )
    if step is not None and not callable(step):
        raise ValueError(f"--model {word!r}: the step is {step!r}, but must be a function.")
    return model, step


def measure(word: str, compute: float | None, threads: int) -> Model:
    """Return the model that `word` names, with its step, which is measured if `compute` is None.

    Raises ValueError if the model cannot be built, or has no step to measure. `threads` are those
    of a rank, in PyTorch.
    """
    _set_threads(threads)
    model, step = build(word)
    if step is None and compute is None:
        raise ValueError(
            f"--model {word!r} returned no function that takes a step: return the pair (model, "
            "step), or pass the time of a step with --compute."
        )
    return (_torch if hasattr(model, "named_parameters") else _keras)(model, step, compute)


def _torch(model: Any, step: Callable[[], Any] | None, compute: float | None) -> Model:
    import torch

    named = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    cuda = any(x.is_cuda for _, x in named)
    synchronize = torch.cuda.synchronize if cuda else _nothing
    times: dict[str, list[float]] = {}
    seconds = 0.0
    if step is not None:
        hooks = [
            x.register_post_accumulate_grad_hook(
                lambda _, name=name: times.setdefault(name, []).append(time.perf_counter())
            )
            for name, x in named
        ]
        seconds = _seconds(step, synchronize)
        for hook in hooks:
            hook.remove()
        named = [(name, x) for name, x in named if x.grad is not None]
    order, backward = _readiness([name for name, _ in named], times, seconds)
    by_name, xp = dict(named), backend("torch")
    ordered = [(name, by_name[name]) for name, _ in order]
    infos = [TensorInfo(name, tuple(x.shape), xp.dtype(x)) for name, x in ordered]
    values = [
        torch.randn_like(x) if x.grad is None else x.grad.detach().clone() for _, x in ordered
    ]
    gradients = Gradients(tuple(infos), tuple(part for _, part in order))
    return Model(gradients, values, xp, compute or seconds, backward, True, synchronize)


def _readiness(
    names: Sequence[str], times: dict[str, list[float]], seconds: float
) -> tuple[list[tuple[str, float]], float]:
    """Return (name, part of the backward pass) in the order of readiness, and the backward part.

    The first gradient is ready shortly after the backward pass has begun.
    """
    if not times:
        count = len(names)
        return [(x, (i + 1) / count) for i, x in enumerate(reversed(names))], BACKWARD
    steps = min(len(found) for found in times.values())
    spans, parts = [], dict[str, list[float]]()
    for turn in range(1, steps + 1):
        at = {name: found[-turn] for name, found in times.items()}
        first, last = min(at.values()), max(at.values())
        spans.append(last - first)
        for name, moment in at.items():
            parts.setdefault(name, []).append((moment - first) / max(last - first, 1e-9))
    middle = {name: statistics.median(found) for name, found in parts.items()}
    order = sorted(middle.items(), key=lambda pair: pair[1])
    return order, min(1.0, statistics.median(spans) / max(seconds, 1e-9))


def _keras(model: Any, step: Callable[[], Any] | None, compute: float | None) -> Model:
    xp = backend("tensorflow")
    variables = list(reversed(model.trainable_variables))
    generator = np.random.default_rng(0)
    values = [
        xp.cast(xp.asarray(generator.normal(size=tuple(x.shape)).astype(np.float32)), str(x.dtype))
        for x in variables
    ]
    infos = [
        TensorInfo(f"{number}.{x.path}", tuple(x.shape), str(x.dtype))
        for number, x in enumerate(variables)
    ]
    seconds = 0.0 if step is None else _seconds(step, _nothing)
    gradients = Gradients(tuple(infos), tuple(1.0 for _ in infos))
    return Model(gradients, values, xp, compute or seconds, BACKWARD, overlap=False)


def _seconds(step: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Return the median seconds of a step."""
    for _ in range(WARM_UP):
        step()
    seconds: list[float] = []
    began = now = time.perf_counter()
    while len(seconds) < LEAST or now - began < SECONDS:
        synchronize()
        before = time.perf_counter()
        step()
        synchronize()
        now = time.perf_counter()
        seconds.append(now - before)
    return statistics.median(seconds)


@contextmanager
def companions(word: str, count: int, threads: int) -> Iterator[None]:
    """Let other processes take steps of the same model within the context.

    Cores that share caches and memory are slower when all of them are busy, as they are in a job.
    """
    call = f"from {__name__} import accompany; accompany({word!r}, {threads})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", call], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(max(0, count))
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            while process.stdout.readline() not in (READY, ""):
                pass
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def accompany(word: str, threads: int) -> None:
    """Take steps until standard input is closed; print `READY` after the first one."""
    _set_threads(threads)
    _, step = build(word)
    if step is None:
        return
    step()
    print(READY, end="", flush=True)
    threading.Thread(target=_end_with_input, daemon=True).start()
    while True:
        step()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def _set_threads(threads: int) -> None:
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(threads)


def _nothing() -> None:
    """Return at once: the CPU has always finished."""
