"""Check this package on one GPU, in parts of a few minutes with one table each.

python scripts/gpu_check.py laws times shared waits     on the GPU
python scripts/gpu_check.py --device cpu                a rehearsal without a GPU
python scripts/gpu_check.py keras                       Keras over Horovod, if both are installed
python scripts/gpu_check.py times --before FOLDER       beside the package in another folder

The first four parts need PyTorch and NumPy, nothing else, and no network.

- laws: compressors, compressed optimizers and methods that average models, on two ranks that share
  the GPU over Gloo, against NumPy.
- times: step times, and bytes held after a step, beside DDP and PyTorch's own hooks. There is one
  rank, and collectives of four ranks that cost nothing (`echo`): what is measured is the host and
  the GPU, not a network.
- shared: the laws over NCCL, between ranks that share the GPU.
- waits: how often a step makes the host wait for the GPU.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("laws", "times", "shared", "waits")
LIMIT = 240.0
"""Seconds that a part may take."""

NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""NCCL refuses two ranks on one GPU, unless it takes them for hosts (see `NCCL_HOSTID`, too)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts; exit with status 1 if one fails, with status 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="laws, times, shared, waits; keras. Default: four")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", default="", help="commit of this package, for the heading")
    parser.add_argument("--before", type=Path, help="folder of another version, for `times`")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in (*PARTS, "keras"):
            parser.error(f"part {part!r} must be one of {', '.join((*PARTS, 'keras'))}")
    if options.rank:
        if options.before:  # the package of this folder instead of this one
            sys.path.insert(0, str(options.before))
        _run_rank(options.rank, options.device)
        return
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: PyTorch finds no GPU, so nothing was checked.", file=sys.stderr)
        raise SystemExit(2)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU (a rehearsal)"
    print(f"{name}, PyTorch {torch.__version__}, commit {options.commit or 'not given'}")
    failed = [p for p in options.parts or PARTS if not _passes(p, options.device, options.before)]
    print(f"FAILED: {', '.join(failed)}" if failed else "all passed")
    raise SystemExit(1 if failed else 0)


def _run_rank(part: str, device: str) -> None:
    """Run a part in a process that `_passes` has started."""
    if part in ("laws", "shared"):
        from benchmarks.gpu.laws import check

        shares = part == "shared" and device == "cuda"
        check("cpu:gloo,cuda:nccl" if shares else "gloo", device)
    elif part == "keras":
        from benchmarks.gpu.keras_laws import train

        train()
    else:
        from benchmarks.gpu import steps

        {"times": steps.times, "waits": steps.waits}[part](device)


def _passes(part: str, device: str, before: Path | None) -> bool:
    """Run the processes of a part; return whether all of them succeed."""
    began = time.monotonic()
    print(f"\n--- {part}", flush=True)
    if part == "keras":
        passed = _ends_well([_started(part, device, {}, "horovodrun", "-np", "2")])
    elif part == "times":
        passed = _ends_well([_started(part, device, {})])
        if before:
            print(f"the package in {before}", flush=True)
            passed &= _ends_well([_started(part, device, {}, before=before.resolve())])
    elif part == "waits":
        passed = _ends_well([_started(part, device, {})])
    else:
        passed = _ends_well([_started(part, device, rank) for rank in _two_ranks()])
    seconds, verdict = time.monotonic() - began, "ok" if passed else "FAILED"
    print(f"--- {part}: {seconds:.0f} s, {verdict}", flush=True)
    return passed


def _two_ranks() -> list[dict[str, str]]:
    """Return the environments of two ranks that share the GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **NCCL,
    }  # fmt: skip
    return [
        common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
        for rank in range(2)
    ]


def _started(
    part: str, device: str, environment: Mapping[str, str], *launcher: str,
    before: Path | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    script = str(ROOT / "scripts" / "gpu_check.py")
    command = [*launcher, sys.executable, script, "--rank", part, "--device", device]
    command += ["--before", str(before)] if before else []
    return subprocess.Popen(command, env={**os.environ, **environment})


def _ends_well(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Wait for processes, no longer than `LIMIT`; return whether all succeed."""
    until = time.monotonic() + LIMIT
    try:
        return not any([x.wait(max(until - time.monotonic(), 0.1)) for x in processes])
    except subprocess.TimeoutExpired:
        print(f"gpu_check: a process took more than {LIMIT:g} s", file=sys.stderr)
        return False
    finally:
        for process in processes:
            process.kill()
            process.wait()
