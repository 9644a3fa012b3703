"""Tests of ledgers: sums are conserved, nothing else changes, and bad input is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keepers
import numpy as np
import pytest
from frameworks import NUMPY
from hypothesis import given
from hypothesis import strategies as st

from accordion_hvd import FP16, LGC, WAGMA, Accordion, Dense, EFSignSGD, Info, PowerSGD, TopK
from accordion_hvd.comm import tcp
from accordion_hvd.compressors.lgc import CODED, DENSE, SHIPPING
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.engine.ledger import Ledger, as_ledger, files
from accordion_hvd.engine.ledger.ledger import SHARED
from accordion_hvd.engine.ledger.samples import PARTS, Samples, Series, _late, thinned
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator

MODEL = [
    TensorInfo("first", (40, 30), "float32"),
    TensorInfo("second", (40, 30), "float32"),
    TensorInfo("wide", (300, 200), "float32"),
    TensorInfo("bias", (40,), "float32"),
]


def world(compression: Any, ledgers: list[Ledger]) -> list[Exchange]:
    hub = Hub(len(ledgers))
    return [
        Exchange(
            SimulatedCommunicator(hub, rank, NUMPY.xp), as_policy(compression), MODEL,
            name="accordion.0.0", ledger=ledger,
        )
        for rank, ledger in enumerate(ledgers)
    ]  # fmt: skip


def gradient(rank: int, step: int, tensor: TensorInfo) -> np.ndarray:
    rng = np.random.default_rng([rank, step, tensor.size, len(tensor.name)])
    return rng.standard_normal(tensor.shape).astype("float32")


def train(exchanges: list[Exchange], steps: int, lr: float = 0.1) -> list[list[np.ndarray]]:
    means = []
    for step in range(steps):
        for rank, exchange in enumerate(exchanges):
            exchange.open(lr)
            grads = [gradient(rank, step, tensor) for tensor in MODEL]
            exchange.give(grads)
        while not all([exchange.advance() for exchange in exchanges]):
            pass
        assert all([exchange.close() for exchange in exchanges])
        means.append([np.copy(x) for x in exchanges[0].means()])
    return means


# --------------------------------------------------------------------------------------- the sums
@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 20)), min_size=1, max_size=300))
def test_merging_windows_conserves_the_sums(rows):
    series = Series(["a"], limit=8)
    for value, steps in rows:
        series.add({"a": value}, steps)
        assert len(series.rows) < 8
    assert series.steps == sum(steps for _, steps in rows)
    assert series.total("a") == pytest.approx(sum(value for value, _ in rows))
    assert sum(series.as_dict()["a"]) == series.total("a")


@given(st.integers(4, 50), st.integers(0, 300))
def test_thinned_rows_are_few_and_hold_the_last(limit, count):
    rows: list[int] = []
    for number in range(count):
        rows = thinned([*rows, number], limit)
    assert len(rows) < limit or count == 0
    assert rows == sorted(set(rows)) and (not rows or rows[-1] == count - 1)


def test_parts_add_up_and_bytes_are_those_of_the_exchange():
    ledgers = [Ledger(), Ledger()]
    exchanges = world(PowerSGD(2), ledgers)
    train(exchanges, 30)
    for ledger, exchange in zip(ledgers, exchanges, strict=True):
        total = ledger.series.total
        assert sum(map(total, PARTS)) == pytest.approx(total("seconds"), rel=1e-9)
        assert total("compute") > 0 and total("encode") > 0 and total("decode") > 0
        stats = exchange.stats()
        assert ledger.series.steps == stats["steps"] == 30
        assert total("sent") == stats["sent"]
        assert total("dense") == pytest.approx(stats["dense_sent"])
        groups = ledger.groups.values()
        assert sum(group["sent"] for group in groups) == stats["sent"]
        assert all(group["rounds"] >= 2 * group["steps"] for group in groups)


def test_memory_is_bounded():
    ledger = Ledger()
    exchanges = world(TopK(0.1), [ledger])
    train(exchanges, 1200)
    size = len(json.dumps(ledger.as_dict()))
    train(exchanges, 1200)
    assert len(json.dumps(ledger.as_dict())) < 1.7 * size
    assert len(ledger.recent) <= 64 and len(ledger.series.rows) < 512
    assert all(len(rows) <= 64 for rows in ledger.samples.rows.values())


def test_errors_are_measured_more_and_more_rarely():
    samples, measured = Samples(), []
    for steps in range(100_000):
        samples.begin(SimpleNamespace(steps=steps))
        if samples.measuring:
            measured.append(steps + 1)
    assert measured[:8] == [1, 2, 10, 30, 100, 200, 300, 400]
    assert len([step for step in measured if step <= 3200]) == 36
    assert len([step for step in measured if 10_000 < step <= 100_000]) < 60


def test_shadows_send_what_they_send_after_their_first_steps():
    method, info = LGC(0.01, dense=10, training=20), Info()
    assert [method.variant(step) for step in (0, 29, 30)] == [DENSE, SHIPPING, CODED]
    for ranks in (1, 4, 7):
        late = _late(method, info, ranks)
        assert (late.phase, late.size) == (CODED, ranks)
    assert _late(TopK(0.1), info, 4).phase == 0


# -------------------------------------------------------------------------- nothing else changes
@pytest.mark.parametrize("compression", [PowerSGD(2), TopK(0.05), Dense(), "qsgd:4"], ids=str)
def test_ledger_and_shadows_change_no_mean_and_no_byte(compression):
    shadows = [PowerSGD(1), FP16(), TopK(0.01)]
    plain = world(compression, [as_ledger(False), as_ledger(False)])
    watched = world(compression, [Ledger(shadow=shadows), Ledger(shadow=shadows)])
    for mine, theirs in zip(train(plain, 12), train(watched, 12), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.array_equal(a, b)
    assert plain[0].stats()["sent"] == watched[0].stats()["sent"]


def test_a_ledger_that_is_off_records_nothing(monkeypatch):
    monkeypatch.setenv("ACCORDION_HVD_LEDGER", "off")
    for ledger in (as_ledger(None), as_ledger(False)):
        train(world(TopK(0.1), [ledger]), 3)
        assert not ledger.series.rows and not ledger.samples.rows and not ledger.groups
        with pytest.raises(RuntimeError, match="no step"):
            ledger.as_dict()


# ----------------------------------------------------------------------------------------- errors
def test_errors_are_those_of_an_oracle():
    ledger = Ledger(shadow=[FP16(), TopK(0.25)])
    exchanges = world(TopK(0.1), [ledger])
    residual = np.zeros((300, 200), "float32")
    for step in range(10):
        train_step(exchanges, step)
        x = residual + gradient(0, step, MODEL[2])
        cut = np.sort(np.abs(x).ravel())[-int(0.1 * x.size)]
        residual = np.where(np.abs(x) >= cut, 0, x)
    number, norm, left, error = ledger.samples.rows["wide"][-1]
    assert number == 10
    assert norm == pytest.approx(np.linalg.norm(x), rel=1e-4)
    assert left == pytest.approx(np.linalg.norm(residual), rel=1e-3)
    assert error == pytest.approx(left / norm, rel=1e-4)
    halves, quarter = ledger.samples.shadow_rows.values()
    assert 0 < math.sqrt(halves[1] / halves[0]) < 5e-4
    assert math.sqrt(quarter[1] / quarter[0]) < error  # keeps more elements of the same x


def train_step(exchanges: list[Exchange], step: int) -> None:
    for rank, exchange in enumerate(exchanges):
        exchange.open(0.1)
        exchange.give([gradient(rank, step, tensor) for tensor in MODEL])
    while not all([exchange.advance() for exchange in exchanges]):
        pass
    assert all([exchange.close() for exchange in exchanges])


def test_bytes_of_shadows_are_those_that_they_would_send():
    shadows = [PowerSGD(1), TopK(0.01), FP16()]
    ledgers = [Ledger(shadow=shadows) for _ in range(4)]
    train(world(Dense(), ledgers), 2)
    rows = ledgers[0].samples.shadow_rows
    for shadow in shadows:
        alone = world(shadow, [Ledger() for _ in range(4)])
        train(alone, 2)
        uncompressed = 2 * 3 / 4 * 40 * 4 * 2  # the bias, in two steps
        expected = alone[0].stats()["sent"] - uncompressed
        assert rows[repr(shadow)][2] == pytest.approx(expected, rel=0.02), shadow


def test_methods_without_a_residual_are_measured_too():
    ledger = Ledger()
    train(world("qsgd:4", [ledger]), 2)
    _, norm, left, error = ledger.samples.rows["wide"][-1]
    assert math.isnan(left) and 0 < error < 2 and norm > 0


# ------------------------------------------------------------------------------ levels and events
def test_switches_of_levels_are_events():
    ledger = Ledger()
    exchanges = world(Accordion(low=PowerSGD(2), high=PowerSGD(1), window=2), [ledger])
    train(exchanges, 1)
    entry = next(x for x in exchanges[0].bucket_states if x.bucket.name == "wide")
    exchanges[0].switch(entry, 1)
    assert ledger.events[-1] == {
        "kind": "level", "step": 1, "bucket": "wide", "compressor": "PowerSGD(rank=1)"
    }  # fmt: skip
    assert ledger.as_dict()["job"]["buckets"]["wide"]["first"] == "PowerSGD(rank=2)"


def test_skipped_steps_are_events():
    ledger = Ledger()
    (exchange,) = world(TopK(0.1), [ledger])
    exchange.open(0.1)
    exchange.give([np.full(t.shape, np.nan, "float32") for t in MODEL])
    assert not exchange.finish()
    assert ledger.series.total("skipped") == 1
    assert ledger.events[-1]["kind"] == "skipped"


def test_the_last_table_of_all_ranks_is_kept():
    ledger = Ledger()
    train(world(Dense(), [ledger]), 1)
    for step in range(500):
        ledger.share(step, np.arange(30.0).reshape(2, 15) + step)
    assert len(ledger.tables) <= 64 and ledger.tables[-1][0] == 499


# ------------------------------------------------------------------------------------------ files
def test_files_hold_the_ledger(tmp_path):
    ledger = Ledger(tmp_path / "runs" / "x", price=2.5)
    train(world(TopK(0.1), [ledger]), 3)
    page = ledger.write()
    assert page == tmp_path / "runs" / "x" / "receipt.html"
    found = files.load(tmp_path / "runs" / "x" / "ledger.json")
    assert found["job"]["price"] == 2.5 and sum(found["steps"]["steps"]) == 3
    assert sorted(path.name for path in page.parent.iterdir()) == ["ledger.json", "receipt.html"]


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("lasting", [False, True])
def test_a_write_that_fails_leaves_the_older_file(
    lasting: bool, fault: int, tmp_path: Path
) -> None:
    """Any operation may fail, for ledgers and receipts: the older file or the new one is whole."""
    for number in range(1, 100):
        folder = tmp_path / str(number)
        old, new = ({"format": 1, "a": a} for a in (1, 2))
        files.write(files.receipt_of(files.save(folder, 0, old)), "old")
        failing, left = keepers.failing(number, fault, lasting)
        told = ""
        with failing:
            try:
                files.write(files.receipt_of(files.save(folder, 0, new)), "new")
            except OSError as error:
                told = str(error)
        if left() > 0:
            assert number > 8 and not told
            return
        if told:
            assert os.strerror(fault) in told and " bytes) cannot be written: " in told
        else:  # the folder need not be made
            old = new
        assert files.load(folder / "ledger.json") in (old, new)
        assert (folder / "receipt.html").read_text() in ("old", "new")
        assert lasting or not list(folder.glob("*.part"))
        files.write(files.receipt_of(files.save(folder, 0, new)), "new")
        assert len(list(folder.iterdir())) == 2
    raise AssertionError("there are more operations than were tried")


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_gets_full_ends_the_recording(
    lasting: bool, fault: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 100):
        ledger = Ledger(tmp_path / str(number))
        exchanges = world(Dense(), [ledger, Ledger()])
        failing, left = keepers.failing(number, fault, lasting)
        with failing:
            train(exchanges, 2)
            ledger.share(2, np.zeros((2, len(SHARED))))
            ledger._end()
        if left() > 0:
            assert number > 8
            return
        said = [line for line in caplog.messages if os.strerror(fault) in line]
        whole = (tmp_path / str(number) / "receipt.html").exists()
        assert len(said) in (1, 2) or whole and not said, caplog.messages
        assert exchanges[0].steps == 2
        caplog.clear()
    raise AssertionError("there are more operations than were tried")


def test_each_ledger_of_a_process_has_its_own_files(tmp_path):
    for folder in (tmp_path, tmp_path / "other", tmp_path, tmp_path):
        ledger = Ledger(folder)
        train(world(TopK(0.1), [ledger]), 1)
        ledger.write()
    assert (tmp_path / "other" / "receipt.html").exists()
    names = [path.name for path in files.ledgers(tmp_path)]
    assert names == ["ledger-1.json", "ledger-2.json", "ledger.json"]
    assert files.receipt_of(tmp_path / "ledger-1.json").name == "receipt-1.html"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"format": 99}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"ledger.json (is not the ledger|has format 99)"):
        files.load(path)


# -------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"folder": 3}, TypeError, "folder is 3"),
        ({"price": -1}, ValueError, "price is -1"),
        ({"shadow": "powersgd:1"}, TypeError, "must be a compressor"),
        ({"shadow": [TopK(0.1), WAGMA()]}, ValueError, "WAGMA.*averages gradients"),
        ({"sinks": ["x.csv"]}, TypeError, "must be callable, such as Perfetto"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        Ledger(**arguments)


def test_arguments_that_mean_a_ledger(monkeypatch, tmp_path):
    monkeypatch.delenv("ACCORDION_HVD_LEDGER", raising=False)
    assert as_ledger(None).folder is None and as_ledger(None).enabled
    assert as_ledger(tmp_path).folder == tmp_path
    assert not as_ledger("off").enabled
    monkeypatch.setenv("ACCORDION_HVD_LEDGER", str(tmp_path))
    assert as_ledger(True).folder == tmp_path and as_ledger(None).folder == tmp_path
    with pytest.raises(TypeError, match="ledger is 3"):
        as_ledger(3)
    used = Ledger()
    world(EFSignSGD(), [used])
    with pytest.raises(ValueError, match="another optimizer"):
        as_ledger(used)


def test_sinks_of_rank_0_get_each_step():
    lists: list[list[Any]] = [[], []]
    train(world(Dense(), [Ledger(sinks=[x.append]) for x in lists]), 5)
    assert [record["step"] for record in lists[0]] == [1, 2, 3, 4, 5]
    assert not lists[1]


class Broken:
    """A sink that fails from its second record on, or when it is closed."""

    def __init__(self, write: bool, close: bool) -> None:
        self.fails, self.records, self.closed = {"write": write, "close": close}, 0, 0

    def __call__(self, record: Any) -> None:
        self.records += 1
        if self.records > 1 and self.fails["write"]:
            raise ValueError("a broken sink")

    def close(self) -> None:
        self.closed += 1
        if self.fails["close"]:
            raise ValueError("a broken end")


def test_a_sink_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Broken(True, False), list[Any]()
    ledger = Ledger(sinks=[broken, whole.append])
    train(world(Dense(), [ledger, Ledger()]), 5)
    assert broken.records == 2 and len(whole) == 5
    (said,) = caplog.messages
    assert said.startswith("accordion_hvd: the sink Broken failed (ValueError: a broken sink);")


@pytest.mark.parametrize("place", ["folder", "file", "missing"])
def test_a_folder_that_cannot_be_written_does_not_end_the_training(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that writes warns once, before the first step; the ledger stays in memory."""
    folder: Path = {"folder": Path("/proc/x"), "file": tmp_path / "x", "missing": Path("x")}[place]
    if place == "file":
        folder.write_text("a file")
    if place == "missing":
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
    ledgers = [Ledger(folder), Ledger(folder)]
    exchanges = world(Dense(), ledgers)
    (said,) = [x for x in caplog.messages if "the ledger" in x][:1]
    assert "the training goes on" in said
    caplog.clear()
    train(exchanges, 3)
    ledgers[0].share(3, np.zeros((2, len(SHARED))))
    ledgers[0]._end()
    assert not caplog.messages and len(ledgers[0].recent) == 3


def test_a_receipt_that_fails_is_told_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path, sinks=[Broken(False, True)])
    train(world(Dense(), [ledger, Ledger()]), 3)
    monkeypatch.setattr(files, "page", lambda found: {}["page"])
    ledger._end()
    ledger.sinks = ()  # at the end of this process
    assert [x.partition(";")[0] for x in caplog.messages] == [
        "accordion_hvd: the sink Broken failed (ValueError: a broken end)",
        "accordion_hvd: the receipt failed (KeyError: 'page')",
    ]


class Fails(TopK):
    def exchange(self, *arguments: Any) -> Any:
        raise ValueError("a broken shadow")


def test_a_shadow_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(shadow=Fails(0.1))
    means = train(world(TopK(0.1), [ledger, Ledger()]), 12)
    assert len(means) == 12 and not ledger.samples.measuring
    (said,) = caplog.messages
    assert said.endswith("errors are not measured any more (ValueError: a broken shadow).")


# ------------------------------------------------------------------------------------ connections
def test_the_kernel_counts_the_bytes_of_connections():
    before = tcp.connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            other, _ = server.accept()
            received = threading.Thread(target=drain, args=(other, 3_000_000))
            received.start()
            client.sendall(bytes(3_000_000))
            received.join(30)
            found = tcp.slowest(before, tcp.connections())
            ours = [x for x in tcp.connections() if x.port == client.getsockname()[1]]
            other.close()
    assert found is not None and 3e6 <= found.sent <= 3e6 + 10 and [found] == ours
    assert found.rate > 0 and 0 < found.rtt < 1
    assert tcp.address(found.peer) == "127.0.0.1" and tcp.address(0) == ""


def test_the_slowest_connection_is_that_of_the_measurement():
    def connection(port: int, sent: float, busy: float, last: float = 1e9) -> tcp.Connection:
        return tcp.Connection(port, 1, sent, busy, last, 0.001)

    before = [connection(1, 1e6, 1.0), connection(2, 5e6, 0.1), connection(3, 0, 0)]
    after = [connection(1, 3e6, 1.1), connection(2, 7e6, 0.3), connection(3, 10, 9.0)]
    found = tcp.slowest(before, [*after, connection(4, 1e6, 0.0)])
    assert found is not None and found.port == 2 and found.rate == pytest.approx(1e7)
    assert tcp.slowest(after, after) is None


def drain(connection: socket.socket, count: int) -> None:
    while count > 0:
        count -= len(connection.recv(1 << 16))
