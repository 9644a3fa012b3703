"""Tests of ranks of torch.distributed: a rank that dies, other launchers, unsuitable engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import fork_server, modules_of
from launch import RANKS, command_for, need

from accordion_hvd.comm import tcp

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]

DYING = """
import os, sys, torch, accordion_hvd.torch as hvd
from accordion_hvd import TopK
hvd.init()
net = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(4)])
hvd.broadcast_parameters(net.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), TopK(0.1))
for step in range(1000):
    if step == 5 and hvd.rank() == RANK:
        HOW
    optimizer.zero_grad()
    net(torch.randn(8, 200)).square().mean().backward()
    optimizer.step()
"""


def environment(**more: str) -> dict[str, str]:
    launchers = ("OMPI_", "PMI", "HOROVOD_", "RANK", "WORLD_SIZE", "MASTER_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(command: list[str], ranks: int) -> list[subprocess.Popen[str]]:
    """Start ranks without a launcher, which would end all of them if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            command, text=True, stderr=subprocess.PIPE,
            env=environment(
                RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
            ),
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "rank", "says"),
    [
        ("os._exit(9)", 1, "rank 1 has ended"),
        ("sys.exit(0)", 1, "rank 1 has left"),
        ("raise ValueError('intended')", 1, "rank 1 has failed (ValueError: intended)"),
        ("os._exit(9)", 0, "rank 0, which keeps the ranks' store, does not answer"),
    ],
)
def test_a_rank_that_ends_is_named_by_all(how: str, rank: int, says: str, tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING.replace("HOW", how).replace("RANK", str(rank)))
    processes = start(fork_server(modules_of(script)).program([str(script)]), 3)
    try:
        processes[rank].wait(120)
        died = time.monotonic()
        for other in {0, 1, 2} - {rank}:
            _, text = processes[other].communicate(timeout=30)
            assert f"rank {other} of 3 failed: a rank has ended" in text and says in text
        assert time.monotonic() - died < 30
    finally:
        for process in processes:
            process.kill()
            process.wait()


FORKING = """
import os, sys, torch, accordion_hvd.torch as hvd
hvd.init()
parameter = torch.nn.Parameter(torch.zeros(200))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([parameter], 0.1), [("w", parameter)], "topk:0.1", ledger=FOLDER)
for step in range(6):
    if step == 3:
        child = os.fork()
        if not child:
            sys.exit(5)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("child", status, os.listdir(FOLDER), file=sys.stderr)
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()
print("goes on", file=sys.stderr)
"""


def test_a_forked_child_may_leave(tmp_path: Path) -> None:
    """It neither ends the ranks' connections nor writes the receipt, nor waits for threads."""
    processes = start([sys.executable, "-c", FORKING.replace("FOLDER", repr(str(tmp_path)))], 2)
    try:
        for process in processes:
            _, text = process.communicate(timeout=60)
            assert process.returncode == 0 and "goes on" in text
            assert "child 5" in text and "receipt" not in text
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (tmp_path / "receipt.html").exists()


def test_errors_of_signal_handlers_are_no_lost_ranks() -> None:
    """PyTorch's data loader has such a handler: it raises if a worker has been killed."""
    from accordion_hvd.comm.torch_distributed.communicator import (
        ConnectionLost,
        Handle,
        TorchCommunicator,
    )

    class Work:
        def __init__(self, wait: Callable[[], None]) -> None:
            self._wait = wait

        def wait(self, *limit: object) -> None:
            self._wait()

    def handler(*arguments: object) -> None:
        raise RuntimeError("a worker is killed")

    def fail() -> None:
        raise RuntimeError("a connection is closed")

    communicator = TorchCommunicator.__new__(TorchCommunicator)
    communicator.rank, communicator.size = 0, 2
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="a worker is killed") as raised:
            work = Work(lambda: os.kill(os.getpid(), signal.SIGUSR1))
            communicator.wait(Handle([work], list, "x"))
        assert not isinstance(raised.value, ConnectionLost)
        with pytest.raises(ConnectionLost, match="'x' of rank 0 of 2 failed: .*is closed"):
            communicator.wait(Handle([Work(fail)], list, "x"))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.nightly
@pytest.mark.launch
def test_a_restart_by_torchrun_continues_from_the_last_checkpoint(tmp_path: Path) -> None:
    """A restarted training ends with the weights of an undisturbed one.

    No thread of Gloo remains at the end of a rank.
    """
    need("torchrun")
    ends = []
    for name, death in (("killed", 12), ("undisturbed", 1000)):
        folder = tmp_path / name
        folder.mkdir()
        script = [sys.executable, str(RANKS / "restarted.py"), str(folder), str(death)]
        command = command_for("torchrun", 2, script)
        command[2:2] = ["--max-restarts", "1"]
        done = subprocess.run(
            command, env=environment(CHECK_FOLDER=str(folder)), capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        told = [json.loads(file.read_text()) for file in folder.glob("told*")]
        assert done.returncode == 0 and len(told) == 2, done.stderr
        assert all(row == told[0] for row in told)
        assert not [name for name in told[0].pop("threads") if "gloo" in name]
        ends.append(told[0])
    assert [end["begun"] for end in ends] == [10, 0]
    assert ends[0]["weights"] == ends[1]["weights"]


def run(program: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import accordion_hvd.torch as hvd\n" + program]
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=120
    )


def test_engines_that_do_not_suit_are_refused() -> None:
    done = run("hvd.init()", ACCORDION_HVD_ENGINE="mpi")
    assert "ACCORDION_HVD_ENGINE is 'mpi', but must be 'horovod' or 'torch'" in done.stderr
    done = run("hvd.init(engine='nccl')")
    assert "engine is 'nccl', but must be" in done.stderr
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run("hvd.init(engine='horovod')", **launched)
    assert "engine is 'horovod', but torchrun" in done.stderr


HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "horovod" else find(name)
"""


def test_a_single_rank_needs_no_horovod() -> None:
    program = """
import torch
hvd.init()
net = torch.nn.Linear(40, 50)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))
net(torch.randn(4, 40)).sum().backward()
optimizer.step()
print(hvd.rank(), hvd.size(), hvd.local_size(), "horovod" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"{HIDE}\nimport accordion_hvd.torch as hvd\n{program}"],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "1", "1", "False"], done.stderr


def test_ranks_of_other_launchers_need_horovod() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{HIDE}\nimport accordion_hvd.torch as hvd\nhvd.init()"],
        env=environment(HOROVOD_RANK="0"), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Horovod is not installed" in done.stderr


def listening(port: int) -> list[str]:
    """Return the addresses on which this machine listens to a port, as the kernel writes them."""
    rows = [x.split() for name in ("tcp", "tcp6") for x in Path("/proc/net", name).open()]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [address for address, number in places if int(number, 16) == port]


def test_a_store_listens_on_one_address() -> None:
    """PyTorch's own store, the negative control, listens on all of them."""
    import datetime

    import torch.distributed as dist

    from accordion_hvd.comm.torch_distributed import start

    limit = datetime.timedelta(seconds=20)
    store, (address, port) = start.open_store("127.0.0.1", limit)
    assert listening(port) == ["0100007F"] and address == "127.0.0.1"
    store.set("key", "value")
    other = dist.TCPStore(address, port, is_master=False, timeout=limit)
    assert other.get("key") == b"value"
    plain = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert set("".join(listening(plain.port))) == {"0"}


@pytest.mark.parametrize(
    ("names", "found"),
    [(["a"], "127.0.0.1"), (["a", "a"], "127.0.0.1"), (["a", "localhost"], "127.0.0.1"),
     (["a", "no.such.host.invalid"], "127.0.0.1")],
)  # fmt: skip
def test_the_address_of_a_host(names: list[str], found: str) -> None:
    assert tcp.own_address("a", names) == found


def test_the_address_is_that_of_the_route_to_the_others() -> None:
    """To an address of another network, it is that of the default route, if there is one."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))
        assert tcp.own_address("a", ["a", "198.51.100.1"]) == probe.getsockname()[0]


def test_means_that_are_in_place_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that reduce in place leave the means in DDP's bucket."""
    import torch

    from accordion_hvd import ddp

    reducer = ddp.BucketReducer.__new__(ddp.BucketReducer)
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    bucket = torch.arange(18.0)
    reducer._views = dict(zip(parameters, bucket.view(3, 2, 3), strict=True))
    copied: list[int] = []
    copy = torch._foreach_copy_

    def counted(into: list[torch.Tensor], means: list[torch.Tensor]) -> None:
        copied.append(len(into))
        copy(into, means)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    in_place = [bucket[6 * i : 6 * i + 6].view(2, 3) for i in range(3)]
    reducer._put(parameters, in_place, True)
    reducer._put(parameters, [in_place[0], torch.full((2, 3), -1.0), in_place[2]], True)
    assert copied == [1] and bucket.tolist() == [*range(6), *[-1] * 6, *range(12, 18)]


@pytest.mark.parametrize("gpu", [True, False])
def test_futures_know_the_devices_of_their_buckets(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise PyTorch does not wait for the streams of a GPU that fill the bucket."""
    import torch

    from accordion_hvd import ddp

    made: list[object] = []

    class Future:
        def __init__(self, *, devices: object) -> None:
            made.append(devices)

        def set_result(self, value: object) -> None:
            pass

    monkeypatch.setattr(torch.futures, "Future", Future)
    monkeypatch.setattr(ddp.BucketReducer, "idle", True)
    buffer = SimpleNamespace(is_cuda=gpu, device="cuda:0" if gpu else "cpu")
    ddp.BucketReducer.__new__(ddp.BucketReducer).average(SimpleNamespace(buffer=lambda: buffer))
    assert made == [["cuda:0"] if gpu else None]
