"""Tests of round-trip times, losses, and rates by host and over time: notation and effect."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path

import pytest
from rigs import rig

from benchmarks.netbench import command, links, relay, trace

TORCH = ["--backend", "torch", "--", "python", "-c"]


# ----------------------------------------------------------------------------------- without a rig
def test_round_trip_times_and_losses() -> None:
    times = [links.parse_rtt(word) for word in ("20ms", "1.5s", "500us", "none", "0", "0ms")]
    assert times == pytest.approx([0.02, 1.5, 5e-4, 0, 0, 0])
    losses = [links.parse_loss(word) for word in ("0.1%", "5%", "none", "0")]
    assert losses == pytest.approx([1e-3, 0.05, 0, 0])


def test_one_rate_or_one_for_each_host() -> None:
    assert links.parse_rates("50mbit", 3) == [50e6] * 3
    assert links.parse_rates("50mbit, none,1gbit", 3) == [50e6, None, 1e9]


def test_links_are_described() -> None:
    settings = {"rtt": "20ms", "loss": "0.1%"}
    assert links.describe("50mbit", {}) == "50 Mbit/s"
    assert links.describe("50mbit", settings) == "50 Mbit/s, RTT 20 ms, loss 0.1 %"
    assert links.describe("1gbit,none", {"rtt": "0", "loss": "none"}) == "1 Gbit/s, unlimited"
    assert links.describe("a.csv", {"rtt": "none"}) == "rates of a.csv"


def test_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("seconds,rate,host\n0,1gbit,\n 2.5, 50mbit, 1\n2.5,10mbit,0\n9,100mbit,\n")
    assert trace.changes(str(file), 2) == [
        trace.Change(0, 0, 1e9), trace.Change(0, 1, 1e9),
        trace.Change(2.5, 1, 50e6), trace.Change(2.5, 0, 10e6),
        trace.Change(9, 0, 1e8), trace.Change(9, 1, 1e8),
    ]  # fmt: skip
    file.write_text("seconds,rate\n0,1gbit\n")
    assert trace.changes(str(file), 1) == trace.changes("1gbit", 1) == [trace.Change(0, 0, 1e9)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run --rtt 20 -- true", "round-trip time '20' is invalid"),
        ("run --rtt=-1ms -- true", "round-trip time '-1ms' is invalid"),
        ("run --rtt 11s -- true", "at most '10s'"),
        ("run --loss 0.1 -- true", "loss '0.1' is invalid"),
        ("bench --loss 100%", "loss '100%' is invalid"),
        ("bench --rtt fast", "round-trip time 'fast' is invalid"),
        ("accuracy --rtt fast", "round-trip time 'fast' is invalid"),
        ("run --hosts 3 --rate 1gbit,1gbit -- true", "'1gbit,1gbit' has 2 rates"),
        ("run --hosts 2 --rate 1gbit,fast -- true", "rate 'fast' is invalid"),
        ("bench --rates nothing.csv", "trace 'nothing.csv' cannot be read"),
    ],
)
def test_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and told in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must start with the line 'seconds,rate'"),
        ("0,1gbit\n", "must start with the line 'seconds,rate'"),
        ("seconds,rate\n", "no rate of host 0 at 0 seconds"),
        ("seconds,rate\n1,1gbit\n", "no rate of host 0 at 0 seconds"),
        ("seconds,rate,host\n0,1gbit,0\n1,1gbit,1\n", "no rate of host 1 at 0 seconds"),
        ("seconds,rate\n0,fast\n", "line 2: rate 'fast' is invalid"),
        ("seconds,rate\n0,none\n", "line 2: rate 'none' is invalid"),
        ("seconds,rate\n0,1gbit,0\n", "line 2: 3 values instead of 2"),
        ("seconds,rate\n0,1gbit\n2,1gbit\n1,1gbit\n", "line 4: seconds '1' must be a number of at"),
        ("seconds,rate\n0,1gbit\nsoon,1gbit\n", "line 3: seconds 'soon' must be a number of at"),
        ("seconds,rate\n0,1gbit\nnan,1gbit\n", "line 3: seconds 'nan' must be a number of at"),
        ("seconds,rate,host\n0,1gbit,2\n", "line 2: host '2' must be in 0..1"),
        ("seconds,rate,host\n0,1gbit,rig-0\n", "line 2: host 'rig-0' must be in 0..1"),
    ],
)
def test_invalid_traces_are_refused(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        trace.changes(str(file), 2)
    assert repr(str(file)) in str(refused.value)


class Packets:
    """Stand-in for a queue of the kernel: the test says which packets arrive."""

    def __init__(self) -> None:
        self.coming: list[int] = []
        self.dropped: list[int] = []
        self.released: list[int] = []

    def arrived(self) -> list[int]:
        coming, self.coming = self.coming, []
        return coming

    def drop(self, number: int) -> None:
        self.dropped.append(number)

    def release(self, last: int) -> None:
        self.released.append(last)


def lost(batch: int, loss: float = 0.1, count: int = 20_000) -> list[int]:
    """Return the numbers of the packets that are lost if `batch` packets arrive at a time."""
    packets = Packets()
    delay = relay.Delay(packets, 0.0, loss, seed=7)
    for first in range(0, count, batch):
        packets.coming = list(range(first, first + batch))
        delay.receive()
    assert (delay.packets, delay.lost) == (count, len(packets.dropped))
    return packets.dropped


def test_losses_depend_on_the_seed_alone() -> None:
    found = lost(1)
    assert found == lost(8) == lost(20_000) == sorted(set(found))
    assert abs(len(found) - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    gaps = [later - sooner for sooner, later in zip(found, found[1:], strict=False)]
    assert statistics.mean(gap == 1 for gap in gaps) == pytest.approx(0.1, abs=0.04)
    assert lost(8, loss=0.0) == [] and len(lost(8, loss=0.99)) > 19_600


def test_no_packet_is_released_early() -> None:
    packets = Packets()
    delay = relay.Delay(packets, 10.0, 0.0, seed=0)
    before = time.monotonic()
    packets.coming = [4, 5, 6]
    delay.receive()
    due = delay.release(before + 10 - 1e-6)
    assert before + 10 <= due < before + 11 and not packets.released
    packets.coming = [7]
    delay.receive()
    later = delay.release(due)
    assert packets.released == [6] and later >= due
    assert delay.release(later) == float("inf") and packets.released == [6, 7]


# -------------------------------------------------------------------------------------- with a rig
PING = """
import os, socket, time
if os.environ["RANK"] == "1":
    with socket.create_server(("10.77.0.2", 7)) as server:
        peer, _ = server.accept()
        while word := peer.recv(1):
            peer.send(word)
else:
    for _ in range(200):
        try:
            peer = socket.create_connection(("10.77.0.2", 7))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    for _ in range(20):
        began = time.perf_counter()
        peer.send(b"x")
        peer.recv(1)
        print(time.perf_counter() - began)
"""


@pytest.mark.launch
@pytest.mark.parametrize("rtt", ["none", "40ms"])
def test_round_trips_last_as_long_as_told(rtt: str, token: str) -> None:
    words = ["run", "--hosts", "2", "--rate", "200mbit", "--rtt", rtt, *TORCH, PING]
    status, out, err = rig(token, *words)
    assert status == 0, err
    seconds, asked = [float(line) for line in out.split()], links.parse_rtt(rtt)
    assert len(seconds) == 20 and min(seconds) > asked
    assert statistics.median(seconds) < 1.1 * asked + 0.005


COUNTED = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("10.77.0.1", 7))
        own.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE
        own.settimeout(10)
        count = 0
        while own.recv(9) != b"end":
            count += 1
            own.settimeout(3)
        print(count)
else:
    time.sleep(1.5)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        for number in range(4000):
            own.sendto(b"one", ("10.77.0.1", 7))
        time.sleep(0.5)
        for number in range(20):
            own.sendto(b"end", ("10.77.0.1", 7))
            time.sleep(0.001)
"""


@pytest.mark.launch
def test_losses_are_as_frequent_as_told(token: str) -> None:
    """A tenth of the datagrams is lost, and the relay reports nearly the number that is missing."""
    words = ["run", "--hosts", "2", "--loss", "10%", *TORCH, COUNTED]
    status, out, err = rig(token, *words)
    assert status == 0, err
    missing = 4000 - int(out)
    assert abs(missing - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5
    told = re.findall(r"([\d,]+) of ([\d,]+) packets to rig\d+-(\d) lost", err)
    counts = {host: (int(few), int(all.replace(",", ""))) for few, all, host in told}
    assert counts["0"][1] == 4020 and 0 <= counts["0"][0] - missing <= 20


FLOW = """
import os
from benchmarks.netbench import goodput
rank = int(os.environ["RANK"])
for sender in range(1, int(os.environ["WORLD_SIZE"])):
    goodput.PORT = 5000 + sender
    if rank == 0:
        print(goodput.receive("10.77.0.1"))
    elif rank == sender:
        goodput.send("10.77.0.1", 1.2)
"""


@pytest.mark.launch
def test_goodput_reaches_the_rate_in_spite_of_the_round_trip_time(token: str) -> None:
    words = ["run", "--hosts", "2", "--rate", "60mbit", "--rtt", "20ms", *TORCH, FLOW]
    status, out, err = rig(token, *words)
    assert status == 0, err
    assert 0.8 * 60e6 < 8 * float(out) < 60e6


@pytest.mark.launch
def test_each_host_has_its_own_rate(token: str) -> None:
    rates = ["60mbit", "40mbit", "15mbit"]
    words = ["run", "--hosts", "3", "--rate", ",".join(rates), *TORCH, FLOW]
    status, out, err = rig(token, *words)
    assert status == 0, err
    for line, bits in zip(out.splitlines(), (40e6, 15e6), strict=True):
        assert 0.85 * bits < 8 * float(line) < bits


WINDOWS = """
import os, socket, time
from benchmarks.netbench import goodput
if os.environ["RANK"] == "1":
    goodput.send("10.77.0.1", 5.0)
else:
    with socket.create_server(("10.77.0.1", goodput.PORT)) as server:
        peer, _ = server.accept()
        began, count = time.perf_counter(), 0
        while size := len(peer.recv(1 << 18)):
            count += size
            now = time.perf_counter()
            if now - began > 0.4:
                print(8 * count / (now - began))
                began, count = now, 0
"""


@pytest.mark.launch
def test_rates_change_as_the_trace_says(token: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("seconds,rate,host\n0,80mbit,\n3,10mbit,1\n")
    words = ["run", "--hosts", "2", "--rate", str(file), *TORCH, WINDOWS]
    status, out, err = rig(token, *words)
    assert status == 0, err
    rates = [float(line) for line in out.split()]
    assert 0.8 * 80e6 < max(rates) < 1.1 * 80e6
    assert 0.7 * 10e6 < statistics.median(rates[-3:]) < 1.3 * 10e6


@pytest.mark.launch
def test_a_relay_that_ends_is_told(token: str) -> None:
    program = (
        "import os, signal, time\n"
        "for name in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if b'benchmarks.netbench.relay' in open(f'/proc/{name}/cmdline', 'rb').read():\n"
        "        os.kill(int(name), signal.SIGKILL)\n"
        "time.sleep(100)\n"
    )
    status, _, err = rig(token, "run", "--hosts", "1", "--rtt", "1ms", *TORCH, program)
    assert status == 2 and "the process that delays packets ended: status -9." in err
