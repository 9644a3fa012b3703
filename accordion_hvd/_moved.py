"""Modules that have moved: an old name imports the module that has the new one, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

MOVED = {
    "averaging.agent": "engine.group_protocol",
    "averaging.alone": "averaging.point_to_point",
    "averaging.averager": "engine.model_averager",
    "averaging.doorbell": "engine.wakeup",
    "averaging.engine": "engine.wait_avoiding",
    "averaging.halving": "engine.reduce_scatter",
    "averaging.neighbourhood": "comm.neighbourhood",
    "averaging.shares": "comm.shares",
    "base": "core.base",
    "buckets": "engine.buckets",
    "build_horovod": "tools.build_horovod",
    "checkpoint": "engine.checkpoint",
    "communicator": "comm.communicator",
    "compressors.around": "compressors.compressor_wrapper",
    "compressors.topagg": "privacy.topagg",
    "conversations": "core.composition",
    "core.conversations": "core.composition",
    "core.places": "core.placement",
    "decisions": "engine.decisions",
    "doctor": "tools.doctor",
    "engine.agent": "engine.group_protocol",
    "engine.collecting": "engine.evidence_collector",
    "engine.doorbell": "engine.wakeup",
    "engine.halves": "engine.fp16_reduction",
    "engine.halving": "engine.reduce_scatter",
    "engine.saved": "engine.saved_state",
    "engine.bucket_states": "engine.bucket_state",
    "engine.units": "engine.bucket_batches",
    "exchange": "engine.exchange",
    "guard": "engine.guard",
    "halves": "engine.fp16_reduction",
    "machines": "comm.hosts",
    "packing": "comm.packing",
    "plan": "engine.plan",
    "policies.prices": "policies.cost_model",
    "policy": "policies",
    "prices": "policies.cost_model",
    "process_sets": "comm.horovod.process_sets",
    "simulate": "simulation.one_process",
    "slots": "engine.bucket_state",
    "step": "engine.step",
    "stock": "compressors.horovod_compression",
    "tensorflow.communicator": "comm.horovod.tensorflow",
    "tensorflow.refusals": "tensorflow.validation",
    "torch.communicator": "comm.horovod.torch",
    "torch.refusals": "torch.validation",
    "traffic": "comm.traffic",
    "virtual": "simulation.virtual_time",
    "words": "resolve",
}
"""Old name of a module or package, below `accordion_hvd`, and its name now."""


class Finder:
    """Finds modules by their old names; asked before the file system is."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load the module that `name` means; None if that is no old name."""
        new = now(name)
        if new is None:
            return None
        found = importlib.util.find_spec(new)
        assert found is not None, f"{name} should have moved to {new}"
        package = found.submodule_search_locations is not None
        loader: Any = _Loader(found)
        return ModuleSpec(name, loader, origin=found.origin, is_package=package)


class _Loader:
    """Loads a module that exists already, or by its new name: the same object under both."""

    def __init__(self, found: ModuleSpec) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that has the new name."""
        message = f"{spec.name} has moved: import {self._found.name} instead."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return importlib.import_module(self._found.name)

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system has just changed: the module keeps the new name's spec."""
        module.__spec__ = self._found

    def get_code(self, name: str) -> CodeType | None:
        """Return the module's code, which `python -m` runs."""
        loader: Any = self._found.loader
        return loader.get_code(self._found.name)


def now(name: str) -> str | None:
    """Return the present name of a module with an old name; None for all others."""
    package, _, rest = name.partition(".")
    if package != __package__:
        return None
    parts = rest.split(".")
    for count in range(len(parts), 0, -1):
        new = MOVED.get(".".join(parts[:count]))
        if new is not None:
            return ".".join([package, new, *parts[count:]])
    return None
