"""Start of ranks on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SHARED = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Open MPI refuses to start as root (containers) or more ranks than cores unless told.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
_MPI_BUILT = "import sys, horovod.torch as hvd; sys.exit(not hvd.mpi_built())"


class NoLauncher(Exception):
    """Raised with a sentence when the ranks cannot be started."""


def command(ranks: int, program: Sequence[str | Path], *, mpi: bool = True) -> list[str]:
    """Return the command that starts a Python program on several ranks.

    Args:
        ranks: number of ranks.
        program: script and its arguments.
        mpi: whether to prefer MPI, over which several ranks per core exchange faster than over
            Gloo; else Gloo is used.

    Raises:
        NoLauncher: if Horovod's launcher is missing.
    """
    python = [sys.executable, *map(str, program)]
    mpirun = _find("mpirun") if mpi else None
    if mpirun and _has_mpi():
        return [mpirun, "-np", str(ranks), *python]
    horovodrun = _find("horovodrun")
    if horovodrun is None:
        raise NoLauncher(
            f"horovodrun was not found beside {sys.executable} or on PATH; run make setup."
        )
    return [horovodrun, "--gloo", "-np", str(ranks), *python]


def torchrun(ranks: int, program: Sequence[str | Path]) -> list[str]:
    """Return the command that starts a Python program on several ranks of torch.distributed."""
    module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *module, *map(str, program)]


def environment() -> Mapping[str, str]:
    """Return the environment of a command: ranks share the cores and find the project."""
    paths = {"PATH": _path(), "PYTHONPATH": _first(ROOT, "PYTHONPATH")}
    return {**_SHARED, **os.environ, **paths}


def _has_mpi() -> bool:
    """Return whether Horovod was built with MPI."""
    done = subprocess.run([sys.executable, "-c", _MPI_BUILT], capture_output=True, check=False)
    return done.returncode == 0


def _find(name: str) -> str | None:
    return shutil.which(name, path=_path())


def _path() -> str:
    return _first(Path(sys.executable).parent, "PATH")


def _first(folder: Path, variable: str) -> str:
    return f"{folder}{os.pathsep}{os.environ.get(variable, '')}"
