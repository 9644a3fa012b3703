"""Tests of the connections that Horovod leaves open when ranks change."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psutil")  # comes with Horovod

from accordion_hvd.comm.horovod import engine  # noqa: E402


class Ranks:
    """Both ends of connections, which are opened in this process."""

    def __init__(self, family: socket.AddressFamily) -> None:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        self.listener = socket.create_server((host, 0), family=family)
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def connect(self) -> None:
        near = socket.create_connection(self.listener.getsockname()[:2])
        near.settimeout(5)
        far = self.listener.accept()[0]
        far.settimeout(5)
        self.pairs.append((near, far))

    def close(self) -> None:
        for end in [self.listener, *(end for pair in self.pairs for end in pair)]:
            end.close()


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    found = Ranks(request.param)
    yield found
    found.close()


def elastic_module(hvd: Any, calls: list[str]) -> SimpleNamespace:
    """Return a module like `horovod.torch.elastic`, whose `run` resets once."""
    module = SimpleNamespace(_reset=lambda: calls.append("horovod's own reset"))

    def run(function: Callable[..., Any]) -> Callable[..., Any]:
        reset = module._reset

        def wrapper(*arguments: Any) -> Any:
            function(*arguments)
            reset()
            return function(*arguments)

        return wrapper

    module.run = run
    return module


def test_a_reset_closes_what_horovod_has_left_open(ranks: Ranks) -> None:
    calls: list[str] = []
    hvd = SimpleNamespace(shutdown=lambda: calls.append("shutdown"), init=ranks.connect)
    ranks.connect()  # a connection that is not Horovod's
    engine.start(hvd.init)
    module = elastic_module(hvd, calls)
    own = module._reset
    train = engine.decorated(module, hvd, lambda: calls.append("train"))
    assert module._reset is own  # other users of the module keep Horovod's reset
    train()
    assert calls == ["train", "shutdown", "train"]
    (mine, other), (near, far), (newer, _) = ranks.pairs
    assert far.recv(1) == b"" and near.recv(1) == b""
    for end in (other, ranks.pairs[2][1]):
        end.sendall(b"x")
    assert mine.recv(1) == b"x" and newer.recv(1) == b"x"


def test_a_descriptor_that_was_closed_meanwhile_is_no_error(ranks: Ranks) -> None:
    ranks.connect()
    near, far = ranks.pairs[0]
    address, number = (near.getsockname(), near.getpeername()), near.fileno()
    engine._close((("127.0.0.1", 1), ("127.0.0.1", 2)), number)  # another connection's number
    far.sendall(b"x")
    assert near.recv(1) == b"x"
    near.close()
    engine._close(address, number)
