"""Initialization of torch.distributed: for torchrun, for Horovod's launchers, for a single rank."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import itertools
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments keep the process group alive

from accordion_hvd.comm import tcp, timeouts
from accordion_hvd.comm.torch_distributed.communicator import ConnectionLost
from accordion_hvd.comm.torch_distributed.watch import LOST, watch

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables from which torch.distributed learns the ranks."""

_starts = itertools.count()


def timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=timeouts.seconds())


def launched() -> bool:
    """Return whether a launcher with torchrun's variables has started this process."""
    return all(os.environ.get(name) for name in _TORCHRUN)


def backend() -> str:
    """Return the default backend: NCCL for CUDA tensors if each rank has a GPU of its own."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_gpus and torch.cuda.device_count() >= local else "gloo"


def start_alone_or_launched() -> bool:
    """Initialize torch.distributed if nobody has done so; return whether this call did."""
    if dist.is_initialized():
        watch_ranks()
        return False
    if launched():
        limit = timeout()
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        # The launcher's store may still hold the addresses of an earlier initialization, or of the
        # ranks before a restart.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"accordion.{restarts}.{size}.{next(_starts)}", store)
        dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=limit)
        own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process
        watch.start(store, rank, size, keeper=None if own else 0)
        _end_with_process()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return True


def watch_ranks() -> None:
    """Watch the ranks that the script has connected, if they have a store for it."""
    if watch.on or dist.get_world_size() == 1:
        return
    with contextlib.suppress(RuntimeError):  # there is no store, or it cannot be cloned
        store = dist.distributed_c10d._get_default_store()
        watch.start(store, dist.get_rank(), dist.get_world_size())
        _end_with_process(False)


def start_under(hvd: Any) -> None:
    """Initialize torch.distributed for the ranks that Horovod connects; collective.

    Raises:
        RuntimeError: if torch.distributed is initialized with other ranks.
    """
    rank, size = hvd.rank(), hvd.size()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise RuntimeError(
                f"torch.distributed knows this process as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, but Horovod as rank {rank} of {size}."
            )
        return
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    own = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()  # which others can reach
    hosts, store, place, limit = hvd.allgather_object(own), None, None, timeout()
    if rank == 0:
        store, place = open_store(tcp.own_address(hosts[0], hosts), limit)
    place = hvd.broadcast_object(place, name="accordion.store")
    store = store or dist.TCPStore(*place, is_master=False, timeout=limit)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=limit)
    watch.start(store, rank, size, keeper=0)
    _end_with_process()


def open_store(address: str, limit: datetime.timedelta) -> tuple[Any, tuple[str, int]]:
    """Return a new store at one address of this host, and the address and port of its socket.

    PyTorch itself would listen on all interfaces, to whoever reaches this host.
    """
    with socket.socket() as listening:
        listening.bind((address, 0))
        listening.listen(socket.SOMAXCONN)
        place = listening.getsockname()
        store = dist.TCPStore(
            *place, is_master=True, wait_for_workers=False, timeout=limit,
            master_listen_fd=os.dup(listening.fileno()),
        )  # fmt: skip
    return store, place


def end() -> None:
    watch.end()
    if dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def _end_with_process(ours: bool = True) -> None:
    """End torch.distributed before Python ends, if it is `ours`; tell how this rank ends.

    A thread of PyTorch that needs Python's lock after that aborts the process. After an error there
    is no orderly end, because other ranks may never join this rank's last operations.
    """
    timeouts.at_exit(functools.partial(_leave, ours))
    os.register_at_fork(after_in_child=_let_child_end)


def _let_child_end() -> None:
    if dist.is_initialized():
        # Destructors would wait for threads that a forked child lacks: nothing is destroyed there.
        world = dist.group.WORLD
        kept = [world, dist.distributed_c10d._get_default_store()]
        with contextlib.suppress(RuntimeError):  # there is no backend for CPUs
            kept.append(world._get_backend(torch.device("cpu")))
        for thing in kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _leave(ours: bool) -> None:
    error = getattr(sys, "last_value", None)
    if isinstance(error, ConnectionLost):
        watch.end(LOST)
        timeouts.leave()  # an operation may still wait
    elif error is not None:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        watch.end(f"has failed ({why[:200]})")
    elif ours:
        end()
    else:
        watch.end()
