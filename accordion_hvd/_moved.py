"""Old names of modules: importing an old name gives the module of the new name, with a warning."""

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
    "engine.fp16_reduction": "comm.fp16_reduction",
    "engine.halves": "comm.fp16_reduction",
    "engine.halving": "engine.reduce_scatter",
    "engine.saved": "engine.saved_state",
    "engine.bucket_states": "engine.bucket_state",
    "engine.units": "engine.bucket_batches",
    "exchange": "engine.exchange",
    "guard": "engine.guard",
    "halves": "comm.fp16_reduction",
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
"""Old name of a module or package, below `accordion_hvd`, and its new name."""

SAME = {"keras": "tensorflow.keras"}
"""Second name of a module, without a warning: Horovod has `horovod.keras`, too."""


class Finder:
    """Finder of modules by their old names, which Python asks before it searches the file system.

    It is a meta path finder; see `sys.meta_path`.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module with the old name `name`; None for all other names."""
        new = now(name)
        if new is None:
            return None
        found = importlib.util.find_spec(new)
        assert found is not None, f"{name} should have moved to {new}"
        package = found.submodule_search_locations is not None
        loader: Any = _Loader(found)
        return ModuleSpec(name, loader, origin=found.origin, is_package=package)


class _Simulate(ModuleType):
    """Class of a module with the name of a function: calling the module calls the function.

    An import of `accordion_hvd.simulate` replaces the function `accordion_hvd.simulate`.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.simulate(*args, **options)


class _Loader:
    """Loader that imports a module by its new name, so that both names give the same object."""

    def __init__(self, found: ModuleSpec) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import and return the module with the new name."""
        if spec.name.split(".")[1] not in SAME:
            message = f"{spec.name} has moved: import {self._found.name} instead."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        return importlib.import_module(self._found.name)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the new name, which the import system has just replaced."""
        assert module.__spec__ is not None
        if module.__spec__.name == f"{__package__}.simulate":
            module.__class__ = _Simulate
        module.__spec__ = self._found

    def get_code(self, name: str) -> CodeType | None:
        """Return the module's code, which `python -m` runs."""
        loader: Any = self._found.loader
        return loader.get_code(self._found.name)


def now(name: str) -> str | None:
    """Return the proper name of a module that has moved or has two; None for all other names."""
    package, _, path = name.partition(".")
    if package != __package__:
        return None
    names, parts = MOVED | SAME, path.split(".")
    for count in range(len(parts), 0, -1):
        new = names.get(".".join(parts[:count]))
        if new is not None:
            return ".".join([package, new, *parts[count:]])
    return None
