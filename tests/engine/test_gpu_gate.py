"""A gate for GPUs that needs none: what a whole step makes the host wait for, at each door.

`gpu_gate.csv` lists the waits that are left. A row may only get shorter: a step with more waits
than its row fails, and so does a row with more waits than its step. `gpu_operations.csv` lists the
operations that the hook of DDP runs beyond the backward pass, for networks of 12 and of 48 equal
layers, in the same way.
"""

from __future__ import annotations

import csv
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from card import DEVICE, Card, Mirror, Watch  # noqa: E402

import accordion_hvd.torch as hvd  # noqa: E402
from accordion_hvd import ScaleCom, compressors, parse  # noqa: E402
from accordion_hvd.comm.torch_distributed.process_sets import of_group  # noqa: E402
from accordion_hvd.ddp import BucketReducer  # noqa: E402
from accordion_hvd.engine.exchange import Exchange  # noqa: E402
from accordion_hvd.engine.guard import Guard  # noqa: E402
from accordion_hvd.engine.ledger import as_ledger  # noqa: E402
from accordion_hvd.fsdp import ShardReducer  # noqa: E402
from accordion_hvd.resolve import as_policy  # noqa: E402
from accordion_hvd.torch import hooked  # noqa: E402
from accordion_hvd.torch.engines import ENGINES  # noqa: E402

TABLE = Path(__file__).with_name("gpu_gate.csv")
OPERATIONS = Path(__file__).with_name("gpu_operations.csv")
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
ACCORDION = "Accordion(low=PowerSGD(4), high=PowerSGD(1))"
SPECS = (
    "dense", "fp16", "bf16", "topk:0.01", "topk:0.01,chunk=4096", "randomk:0.01",
    "threshold:0.02", "adacomp:50", "scalecom:0.01", "dgc:0.01", "stc:0.01", "powersgd:1",
    "powersgd:4", "powersgd:4,alternate", "powersgd:4,wire='float16'", "qsgd:4", "terngrad",
    "natural", "int8", "signsgd", "efsignsgd", "onebit", "sketchedsgd", "lgc:0.01",
    "ef21(topk(0.01))", "diana(qsgd(4))",
    "ErrorFeedback(QSGD(4))", "Gathered(TopK(0.01))", "Momentum(TopK(0.01))",
    "DoubleSqueeze(QSGD(4))", "DoubleSqueeze(EFSignSGD())", "DoubleSqueeze(OneBit())",
    "TwoLevel(TopK(0.01))", ACCORDION,
)  # fmt: skip
FEW = ("dense", "topk:0.01", "powersgd:4")
NARROW = ", bfloat16 residuals"
"""End of the specs of rows with `residual_dtype="bfloat16"`."""

ROWS = (*SPECS, *(spec + NARROW for spec in ("topk:0.01", "dgc:0.01", "powersgd:4")))
LAYERS, WIDTH, RANKS = 2, 264, 4  # a matrix is larger than those that a CPU stacks


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """Four ranks, of which this process is the first, without an engine."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "torch", replace(ENGINES["torch"], connect=Mirror))
        patch.setattr(hooked, "TorchCommunicator", Mirror)
        patch.setattr(hooked, "watch_ranks", lambda: None)
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=fake.FakeStore())
        hvd.init()
        yield
        hvd.shutdown()
        dist.destroy_process_group()


def parameters(layers: int, kind: Any = Card) -> list[tuple[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * layers
    values = [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]
    return [(f"x{i}", torch.nn.Parameter(kind(x))) for i, x in enumerate(values)]


def through_optimizer(named: Any, compression: Any, dtype: Any) -> tuple[Callable[[], None], Any]:
    inner = torch.optim.SGD([p for _, p in named], 0.1)
    optimizer = hvd.DistributedOptimizer(
        inner, named, compression, guard="off", ledger=False, residual_dtype=dtype
    )

    def step() -> None:
        loss_of(named).backward()
        optimizer.step()

    return step, optimizer._averager


def through_ddp(named: Any, compression: Any, dtype: Any) -> tuple[Callable[[], None], Any]:
    """DDP's buckets in the order of the backward pass; DDP itself does not take cards."""
    reducer = made(BucketReducer, named, compression, dtype)
    reducer.finds_unused = False
    buffer = Card(torch.zeros(sum(p.numel() for _, p in named)))
    views = buffer.split([p.numel() for _, p in named])

    def step() -> None:
        loss_of(named).backward()
        gradients = [v.view(p.shape) for v, (_, p) in zip(views, named, strict=True)]
        with reducer.communicator.watch.recording(False):
            for view, (_, p) in zip(gradients, named, strict=True):
                view.copy_(p.grad)
        whole = SimpleNamespace(
            buffer=lambda: buffer, parameters=lambda: [p for _, p in named],
            gradients=lambda: gradients, is_last=lambda: True,
        )  # fmt: skip
        reducer.average(whole)

    return step, reducer


def through_fsdp(
    named: Any, compression: Any, dtype: Any = "float32"
) -> tuple[Callable[[], None], Any]:
    reducer = made(ShardReducer, named, compression, dtype)
    return lambda: loss_of(named).backward(), reducer


def made(kind: Any, named: Any, compression: Any, dtype: Any) -> Any:
    optimizer = torch.optim.SGD([p for _, p in named], 0.1)
    reducer = kind(
        named, as_policy(compression), of_group(None), lambda: optimizer,
        ledger=as_ledger(False), guard=Guard("off"), residual_dtype=dtype,
    )  # fmt: skip
    reducer.own = frozenset(id(p) for _, p in named)
    return reducer


def loss_of(named: Any) -> Any:
    return sum((p * p).sum() for _, p in named)


DOORS = {"optimizer": through_optimizer, "ddp": through_ddp, "fsdp": through_fsdp}


@contextmanager
def trained(door: str, row: str, layers: int = LAYERS) -> Iterator[Watch]:
    """Take steps through a door; yield the record of the last one."""
    compression = parse(row.removesuffix(NARROW))
    dtype = "bfloat16" if row.endswith(NARROW) else "float32"
    watch = Mirror.watch = Watch()
    with watch:
        named = parameters(layers)
        step, owner = DOORS[door](named, compression, dtype)
        for number in range(3):
            for _, p in named:
                p.grad = None
            if number and isinstance(compression, ScaleCom):
                owner.communicator.rank = number % RANKS  # the leader; else rank 0 does most
            with watch.recording(number == 2):
                step()
        yield watch
    if hasattr(owner, "close"):
        owner.close()


@functools.cache
def table() -> dict[tuple[str, str], dict[str, int]]:
    """Return (door, spec) -> line of the package -> number of waits."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    with open(TABLE, newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["door"], row["spec"]), {})[row["where"]] = int(row["waits"])
    return found


@pytest.mark.parametrize("spec", ROWS)
@pytest.mark.parametrize("door", DOORS)
def test_a_step_waits_for_no_more_than_is_listed(door: str, spec: str) -> None:
    with trained(door, spec) as watch:
        waits = Counter(f"{place} {kind} {name}" for kind, name, place in watch.waits)
    if "GPU_GATE" in os.environ:  # a file, which gets the rows of this run
        with open(os.environ["GPU_GATE"], "a", newline="") as file:
            csv.writer(file).writerows([door, spec, x, n] for x, n in sorted(waits.items()))
        return
    assert dict(waits) == table().get((door, spec), {}), "the list only shrinks: see GPU_GATE"


def operations(row: str, layers: int) -> int:
    """Return the number of operations of a step of DDP's hook beyond the backward pass.

    All messages are one fusion group; a step has four of them or more.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "group_bytes", math.inf)
        with trained("ddp", row, layers) as watch:
            whole = sum(watch.operations.values())
            named = parameters(layers)
            watch.operations.clear()
            with watch.recording():
                loss_of(named).backward()
    return whole - sum(watch.operations.values())


@pytest.mark.parametrize("spec", ROWS)
@pytest.mark.seldom(where=lambda spec: spec.removesuffix(NARROW) not in FEW)
def test_a_step_runs_no_more_operations_than_are_listed(spec: str) -> None:
    found = [operations(spec, layers) for layers in (12, 48)]
    if "GPU_GATE" in os.environ:
        with open(os.environ["GPU_GATE"], "a", newline="") as file:
            csv.writer(file).writerow([spec, *found])
        return
    with open(OPERATIONS, newline="") as file:
        listed = {row["spec"]: [int(row["12"]), int(row["48"])] for row in csv.DictReader(file)}
    assert found == listed[spec], "the list only shrinks: see GPU_GATE"
    plain = spec.removesuffix(NARROW)
    label = f"`{plain}`{spec.removeprefix(plain)}"
    assert f"| {label} | {found[0]} | {found[1]} |" in PAGE.read_text()
    if getattr(parse(plain), "batching", "alike"):  # a policy's levels have stacks
        assert found[1] <= 1.05 * found[0], "stacks take as many operations, whatever their height"
    assert spec != "powersgd:4" or max(found) <= 60


OPTIMIZERS = {
    "Adam()": {}, "Lamb()": {}, "OnebitAdam(warmup_steps=1)": {"floor": 0.01},
    "OnebitLamb(warmup_steps=1)": {"floor": 0.01}, "ZeroOneAdam()": {}, "Birder()": {},
    "CDAdam()": {}, "CDAMSGrad()": {}, "SketchedAMSGrad(warmup_steps=1)": {},
}  # fmt: skip


def operations_of_optimizer(name: str, layers: int) -> tuple[int, list[str]]:
    """Return the operations of a step beyond the backward pass, and the reads of the host."""
    kind, _, arguments = name.rstrip(")").partition("(")
    key, _, value = arguments.partition("=")
    settings = OPTIMIZERS[name] | ({key: int(value)} if key else {})
    watch = Mirror.watch = Watch()
    with watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "group_bytes", math.inf)
        named = parameters(layers)
        rate = torch.tensor(0.1, device=DEVICE)  # read in the first step only
        optimizer = getattr(hvd, kind)(
            [p for _, p in named], rate, named_parameters=named, guard="off", weight_decay=0.1,
            **settings,
        )  # fmt: skip
        for number in range(4):
            for _, p in named:
                p.grad = None
            loss_of(named).backward()
            with watch.recording(number == 3):
                optimizer.step()
    return sum(watch.operations.values()), [place for _, _, place in watch.waits]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.seldom(where=lambda name: not name.startswith("OnebitAdam"))
def test_a_step_of_an_optimizer_runs_no_more_operations_than_are_listed(name: str) -> None:
    found, reads = zip(*(operations_of_optimizer(name, layers) for layers in (12, 48)), strict=True)
    assert reads == (["engine/step.py:_read_flags"],) * 2
    if "GPU_GATE" in os.environ:
        with open(os.environ["GPU_GATE"], "a", newline="") as file:
            csv.writer(file).writerow([name, *found])
        return
    with open(OPERATIONS, newline="") as file:
        listed = {row["spec"]: (int(row["12"]), int(row["48"])) for row in csv.DictReader(file)}
    assert found == listed[name], "the list only shrinks: see GPU_GATE"
    assert f"| `{name}` | {found[0]} | {found[1]} |" in PAGE.read_text()


@pytest.mark.parametrize(("spec", "reads"), [("powersgd:1", 0), (ACCORDION, 1)])
def test_a_learning_rate_on_an_accelerator_is_read_once_a_change(spec: str, reads: int) -> None:
    """Accordion compares rates; nothing needs them with one level."""
    watch = Mirror.watch = Watch()
    with watch:
        named, found = parameters(LAYERS), []
        step, reducer = through_fsdp(named, parse(spec))
        reducer.optimizer().param_groups[0]["lr"] = rate = torch.tensor(0.1, device=DEVICE)
        for number in range(4):
            for _, p in named:
                p.grad = None
            if number == 2:
                rate.mul_(0.5)
            watch.waits.clear()
            with watch.recording():
                step()
            found.append(sum(place.startswith("torch/") for _, _, place in watch.waits))
    assert found[1:] == [0, reads, 0]
    rate = reducer.exchange.info(reducer.exchange.bucket_states[0]).lr
    assert float(getattr(rate, "inner", rate)) == pytest.approx(0.05)


RANDOM = (
    "randomk", "qsgd", "terngrad", "natural", "int8", "sketched", "diana", "Error",
    "DoubleSqueeze(Q",
)  # fmt: skip
EQUAL = [spec for spec in SPECS if not spec.startswith(RANDOM)]


@pytest.mark.parametrize("spec", EQUAL)
@pytest.mark.seldom(where=lambda spec: spec not in FEW)
def test_stacks_of_an_accelerator_give_the_means_of_a_cpu(spec: str) -> None:
    means = []
    for kind in (Card, lambda x: x):
        Mirror.watch = watch = Watch()
        with watch:
            named = parameters(3, kind)
            step, _ = through_fsdp(named, parse(spec))
            for _ in range(4):
                for _, p in named:
                    p.grad = None
                step()
        means.append([p.grad.inner if kind is Card else p.grad for _, p in named])
    for mine, other in zip(*means, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_the_gate_takes_every_compressor() -> None:
    mine = {type(parse(spec)).__name__ for spec in SPECS}
    assert mine - {"Accordion"} == set(compressors.__all__)


PLANTED = {
    "an element is read": ("read", lambda x: float(x[0, 0])),
    "a tensor is copied to the host": ("read", lambda x: x.cpu()),
    "a condition is read": ("read", lambda x: bool((x > 0).any())),
    "the host must know how many": ("read", lambda x: x[x > 0]),
    "positions are read": ("read", lambda x: x.nonzero()),
    "tensors are compared": ("read", lambda x: torch.equal(x, x)),
    "a scalar is assigned": ("copy", lambda x: x.__setitem__(torch.arange(2, device=x.device), 1)),
    "a value becomes a tensor": ("copy", lambda x: torch.tensor(2.0, device=x.device)),
    "a list becomes a tensor": ("copy", lambda x: x + torch.tensor([1.0] * 3, device=x.device)),
    "a tensor of the host is copied": ("copy", lambda x: x.copy_(torch.ones(3, 3))),
    "QR": ("slow", torch.linalg.qr),
    "the device is waited for": ("read", lambda x: torch.cuda.synchronize()),
}


@pytest.mark.parametrize("what", PLANTED)
def test_the_gate_sees_planted_waits(what: str) -> None:
    kind, call = PLANTED[what]
    with Watch() as watch:
        x = torch.ones(3, 3, device=DEVICE)
        assert isinstance(x, Card)
        with watch.recording():
            call(x)
    assert [found for found, *_ in watch.waits] == [kind]


def test_the_gate_lets_work_pass() -> None:
    """Arithmetic, scalars as arguments, and sorting wait for nothing; results are right."""
    with Watch() as watch:
        x = torch.arange(6.0, device=DEVICE).view(2, 3)
        with watch.recording():
            y = torch.where(x > 2, x * 2 + 1, 0.0).index_fill_(1, torch.arange(1, device=DEVICE), 7)
            values, _ = torch.topk(y.flatten(), 2)
    assert not watch.waits and watch.operations["aten.topk.default"] == 1
    assert y.inner.tolist() == [[7, 0, 0], [7, 9, 11]] and values.inner.tolist() == [11, 9]
