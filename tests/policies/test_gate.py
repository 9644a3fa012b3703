"""Tests of the gate: it finds the fastest method in simulated worlds, and all ranks follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case
from frameworks import NUMPY, Framework, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import several, step

from accordion_hvd import (
    BF16,
    FP16,
    LGC,
    Accordion,
    Codec,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    Fixed,
    Gate,
    PowerSGD,
    TopK,
    simulate,
)
from accordion_hvd.policies import gate as gates
from accordion_hvd.policies.cost_model import bytes_sent
from accordion_hvd.policies.gate import Cost, Link

NAMES = [f"layer{i}" for i in range(6)]


class World:
    """A rank whose step times follow from a model.

    A step takes 0.05 s, the work of every compressed bucket, and the time of the bytes, less the
    `hide` seconds that backward hides. Each bucket has 1 MB, of which compression leaves `left`.
    """

    def __init__(
        self,
        work: list[float],
        left: float,
        bandwidth: float,
        noise: float = 0.0,
        hide: float = 0.0,
    ) -> None:
        self.work, self.left, self.bandwidth, self.hide = work, left, bandwidth, hide
        self.noise, self.rng = noise, np.random.default_rng(0)
        self.now, self.step, self.decisions = 0.0, 0, 0
        self.wanted, self.names = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, "PowerSGD(rank=1)")
        self.gate = Gate(every=100)

    def seconds(self, served: list[str]) -> float:
        """Return the duration of a step in which these methods serve the buckets."""
        share = {"wanted": self.left, "FP16()": 0.5, "Dense()": 1.0}
        sent = sum(1e6 * share[method] for method in served)
        work = sum(w for w, method in zip(self.work, served, strict=True) if method == "wanted")
        return 0.05 + work + max(0.0, sent / self.bandwidth - self.hide)

    def served(self) -> list[str]:
        """Return the methods that serve the buckets now."""
        methods = ["wanted", *map(repr, self.gate.fallbacks)]
        levels = [self.gate.level(name, self.wanted[name], 1) for name in NAMES]
        return [methods[level] for level in levels]

    def costs(self) -> dict[str, Cost]:
        """Return the costs that an exchange would measure."""
        return {n: Cost(w, 1e6 * self.left, 1e6) for n, w in zip(NAMES, self.work, strict=True)}

    def run(self, steps: int) -> None:
        """Train for some steps, and apply the gate's decisions."""
        for _ in range(steps):
            if self.gate.due(self.step, self.wanted):
                link = Link(self.bandwidth, 1e-4) if self.gate.probes(self.wanted) else None
                decision = self.gate.decide(self.step, self.wanted, self.names, self.costs(), link)
                self.gate.apply(decision, self.wanted)
                self.decisions += 1
            self.gate.tick(self.step)
            self.now += self.seconds(self.served()) * (1 + self.noise * self.rng.random())
            self.step += 1


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def make(*args: Any, **options: Any) -> World:
        world = World(*args, **options)
        monkeypatch.setattr(gates.time, "perf_counter", lambda: world.now)
        return world

    return make


PURE = [["wanted"] * 6, ["FP16()"] * 6, ["Dense()"] * 6]


@pytest.mark.parametrize("bandwidth", [1e6, 6e6, 25e6, 125e6, 1.25e9, 1e11])
@pytest.mark.parametrize("hide", [0.0, 0.03])
@pytest.mark.parametrize("work", [[1e-3] * 6, [1e-2] * 6, [1e-1] * 6, [1e-4, 1e-2] * 3])
def test_never_slower_than_the_best_way(
    clocked: Callable[..., World], work: list[float], hide: float, bandwidth: float
) -> None:
    world = clocked(work, 0.02, bandwidth, hide=hide)
    world.run(90)
    best = min(map(world.seconds, PURE))
    assert world.seconds(world.served()) <= gates.MARGIN * best
    assert world.gate.verdict.startswith("accordion_hvd: link ")


def test_only_some_tensors(clocked: Callable[..., World]) -> None:
    """Tensors whose compression takes longer than it saves go FP16; the others stay compressed."""
    world = clocked([1e-4, 1e-4, 1e-4, 5e-2, 5e-2, 5e-2], 0.02, 125e6)
    world.run(90)
    assert world.served() == ["wanted"] * 3 + ["FP16()"] * 3
    assert "PowerSGD(rank=1) pays on 3 of 6 tensors; the rest go FP16()" in world.gate.verdict
    assert world.seconds(world.served()) < min(map(world.seconds, PURE))


def test_steps_of_trials_are_counted(clocked: Callable[..., World]) -> None:
    world, steps, seconds = clocked([1e-4, 1e-2] * 3, 0.02, 125e6), 0, 0.0
    for _ in range(90):
        began = world.now
        world.run(1)
        if world.step > gates.WARM and not world.gate.decided:
            steps, seconds = steps + 1, seconds + world.now - began
    assert world.gate.decided and world.gate.trial_steps == steps > 0
    assert world.gate.trial_seconds == pytest.approx(seconds)


def test_a_restart_judges_anew(clocked: Callable[..., World]) -> None:
    world = clocked([1e-3] * 6, 0.02, 1e11)
    assert not world.gate.decided
    world.run(90)
    assert world.gate.decided and world.served() == ["Dense()"] * 6
    world.bandwidth = 1e6
    world.gate.restart()
    assert not world.gate.decided
    world.run(3)
    assert not world.gate.decided  # trials are under way
    world.run(60)
    assert world.gate.decided and world.served() == ["wanted"] * 6


def test_a_fast_link_gets_dense(clocked: Callable[..., World]) -> None:
    world = clocked([1e-3] * 6, 0.02, 1e11, noise=0.02)
    world.run(90)
    assert world.served() == ["Dense()"] * 6
    assert "pays on none of 6 tensors; all go dense" in world.gate.verdict


def test_hopeless_ways_are_not_tried(clocked: Callable[..., World]) -> None:
    """The gate does not try Dense on a link on which dense steps would take seconds."""
    world = clocked([1e-4] * 6, 0.01, 1e6)
    world.run(40)
    assert world.served() == ["wanted"] * 6
    assert world.now < 45 * world.seconds(["wanted"] * 6)
    assert "over 6000 -> " in world.gate.verdict


def test_a_link_that_changes_is_noticed(clocked: Callable[..., World]) -> None:
    world = clocked([2e-3] * 6, 0.02, 1e11)
    world.run(90)
    assert world.served() == ["Dense()"] * 6
    before = world.decisions
    world.run(100)
    assert world.decisions == before + 2  # comparisons, no trial
    world.bandwidth = 5e6
    world.run(gates.CHECK + 60)
    assert world.served() == ["wanted"] * 6


def test_other_levels_are_judged_anew(clocked: Callable[..., World]) -> None:
    """Other levels need only a few decisions, because the times of the fallbacks are known."""
    world = clocked([1e-3] * 6, 0.02, 1e9)
    world.run(90)
    first = world.served()
    world.wanted = dict.fromkeys(NAMES, 1)
    world.gate.level = lambda name, wanted, own: Gate.level(world.gate, name, 0, 1)  # type: ignore[method-assign]
    before = world.decisions
    world.run(30)
    assert 2 <= world.decisions - before <= 4
    assert world.served() == first


@settings(deadline=None, max_examples=60)
@given(
    work=st.lists(st.floats(1e-5, 0.2), min_size=6, max_size=6),
    left=st.floats(0.001, 0.9),
    bandwidth=st.floats(5e5, 1e11),
)
def test_any_world(work: list[float], left: float, bandwidth: float) -> None:
    world = World(work, left, bandwidth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates.time, "perf_counter", lambda: world.now)
        world.run(90)
    assert world.seconds(world.served()) <= gates.MARGIN * min(map(world.seconds, PURE)) * 1.0001


def test_never_lossier_than_wanted(clocked: Callable[..., World]) -> None:
    world = clocked([1e-3] * 6, 1.0, 6e6)
    world.names = dict(
        zip(NAMES, ["Dense()", "FP16()", "BF16()", "TopK(ratio=0.1)"] * 2, strict=False)
    )
    seen = set()
    for _ in range(90):
        world.run(1)
        seen |= {(name, world.gate.assignment.get(name, 0)) for name in NAMES}
    lossy = [name for name, wanted in world.names.items() if wanted == "TopK(ratio=0.1)"]
    assert not [name for name, number in seen if number == 1 and name not in lossy]
    assert not [name for name, number in seen if number and world.names[name] == "Dense()"]


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("signal", ["local", "reduced"])
def test_ranks_follow_and_nothing_is_lost(framework: Framework, signal: str) -> None:
    """Methods change while training, and averages plus residuals add up to the gradients."""
    policy = Accordion(
        low=TopK(0.5), high=TopK(0.1), window=9, interval=1, signal=signal,
        gate=Gate(steps=2, every=7),
    )  # fmt: skip
    world, rng = simulate(policy, 2), np.random.default_rng(0)
    given, averaged, levels = np.zeros((24, 50)), np.zeros((24, 50)), set()
    for _ in range(60):
        mine = [rng.standard_normal((24, 50)).astype(np.float32) for _ in range(2)]
        given += np.mean(mine, 0)
        with framework.running():
            means = world.step(
                [{"w": framework.tensor(x), "b": framework.tensor(x[:9])} for x in mine]
            )
        ranks = [framework.array(mean["w"]) for mean in means if mean is not None]
        np.testing.assert_array_equal(ranks[0], ranks[1])
        averaged += ranks[0]
        assert len({repr(exchange.levels()) for exchange in world.exchanges}) == 1
        levels |= set(world.exchanges[0].levels().values())
    assert {"TopK(ratio=0.5)", "FP16()", "Dense()"} <= levels
    carried = np.zeros((24, 50))
    for exchange in world.exchanges:
        entry = exchange.bucket_states[0]
        if entry.carried is not None:
            carried += framework.array(entry.carried).reshape(24, 50) / 2
        elif entry.state:
            carried += framework.array(entry.state["error"]).reshape(24, 50) / 2
    np.testing.assert_allclose(averaged + carried, given, atol=2e-2)  # fp16 loses what it rounds
    text = str(world.exchanges[0].advice())
    assert "tensor" in text and "w " in text and "link" in text


def test_words_and_refusals() -> None:
    for policy in (Fixed(TopK(0.1), gate="auto"), Fixed(TopK(0.1), gate=Gate(every=5))):
        assert repr(policy) in (
            "Fixed(TopK(ratio=0.1), gate='auto')",
            "Fixed(TopK(ratio=0.1), gate=Gate(steps=4, every=5, fallbacks=[FP16(), Dense()]))",
        )
    for wrong in ("yes", 1, True):
        with pytest.raises(ValueError, match="Fixed: gate is .* must be None, 'auto' or a Gate"):
            Fixed(TopK(0.1), gate=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Gate: steps is 1, but must be an integer of at least 2"):
        Gate(steps=1)
    with pytest.raises(ValueError, match=r"fallbacks is \[Dense\(\), FP16.* different compressors"):
        Gate(fallbacks=(Dense(), FP16(), Dense()))
    world = simulate(PowerSGD(1), 2)
    world.step([{"w": NUMPY.tensor(np.ones((40, 40), np.float32))} for _ in range(2)])
    with pytest.raises(RuntimeError, match="needs a gate"):
        world.exchanges[0].advice()


def test_what_has_to_settle_is_judged_when_it_has(clocked: Callable[..., World]) -> None:
    """A compressor that sends everything in its first steps is judged after these steps.

    If the gate does not know of these steps, it rejects the compressor.
    """
    verdicts = []
    for startup_steps in (40, 0):
        world = clocked([1e-3] * 6, 0.02, 125e6)
        world.served_so_far = 0  # type: ignore[attr-defined]
        plain, decide = world.seconds, world.gate.decide

        def seconds(served: list[str], world: Any = world, plain: Any = plain) -> float:
            world.served_so_far += served[0] == "wanted"
            early = world.served_so_far <= 40 and served[0] == "wanted"
            return plain(served) + (0.98 * 6e6 / world.bandwidth if early else 0.0)

        def decided(*args: Any, world: Any = world, decide: Any = decide, **more: Any) -> Any:
            left = max(0, startup_steps - world.served_so_far) if startup_steps else 0  # noqa: B023
            return decide(*args, left, **more)

        world.seconds, world.gate.decide = seconds, decided  # type: ignore[method-assign]
        world.run(120)
        verdicts.append(world.served()[0])
    assert verdicts[0] == "wanted" and verdicts[1] != "wanted", verdicts


def test_codes_are_what_lgc_is_judged_by() -> None:
    """LGC is judged by the bytes of its codes, not of the gradients that it sends at first."""
    lgc = LGC(0.05, dense=6, training=3)
    world, seen = simulate(Fixed(lgc, gate=Gate(steps=2, every=50)), 2), []
    for gradients in several(2, 30):
        step(world, NUMPY, gradients)
        seen.append(world.exchanges[0].levels()["w+1"])
    assert seen[:12] == [repr(lgc)] * 12 and set(seen) >= {"FP16()", "Dense()"}
    (row,) = world.exchanges[0].advice().tensors
    assert row.sent < 0.2 * row.dense, row
    (entry, *_) = world.exchanges[0].bucket_states
    assert (
        lgc.variant(entry.served_by_level.get(0, world.exchanges[0].counted - entry.served_from))
        == 3
    )


@pytest.mark.parametrize("compressor", [Dense(), FP16(), BF16()], ids=repr)
def test_nothing_to_gate(compressor: Any) -> None:
    """A compressor that loses nothing or little is not replaced by one that loses more."""
    rounding = {Dense(): 0.0, FP16(): 2.0**-11, BF16(): 2.0**-8}[compressor]
    world = simulate(Fixed(compressor, gate=Gate(steps=2)), 2)
    draw = np.random.default_rng(1)
    for _ in range(40):
        x = draw.uniform(1, 2, (40, 40)).astype(np.float32)
        means = world.step([{"w": x.copy()} for _ in range(2)])
        np.testing.assert_allclose(means[0]["w"], x, rounding)  # type: ignore[index]
    served = world.exchanges[0].levels()["w"]
    assert served in (repr(compressor), "Dense()")


def test_a_mixture_is_not_lossier_either(clocked: Callable[..., World]) -> None:
    """A tensor that the policy wants dense stays dense while others get methods of their own."""
    world = clocked([1e-5, 1e-4, 1e-4, 5e-2, 5e-2, 5e-2], 0.02, 125e6)
    world.names[NAMES[0]] = "Dense()"
    costs = world.costs() | {NAMES[0]: Cost(1e-5, 1e6, 1e6)}
    world.costs = lambda: costs  # type: ignore[method-assign]
    seen = set()
    for _ in range(90):
        world.run(1)
        seen.add(world.gate.assignment.get(NAMES[0], 0))
    assert seen == {0}
    assert world.served()[1:] == ["wanted"] * 2 + ["FP16()"] * 3


def test_without_anything_to_compress_nothing_is_asked() -> None:
    """No decision is due if no tensor is compressed, so the link is not probed at each step."""
    world = simulate(Fixed(TopK(0.1), gate="auto"), 2)
    for _ in range(8):
        world.step([{"b": np.ones(9, np.float32)} for _ in range(2)])
        (exchange, _) = world.exchanges
        assert not exchange.sync.due(exchange.rates(0.0))


@pytest.mark.parametrize("bandwidth", [2.5e6, 25e6, 125e6, 1.25e9])
@pytest.mark.parametrize("latency", [1e-4, 5e-3])
def test_a_slow_link_is_measured_with_fewer_bytes(
    bandwidth: float, latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured bandwidth and latency are right, and measuring takes less than 0.5 s.

    A slow link is measured with an eighth of the bytes. Above 1 GB/s, bandwidth is not checked.
    """
    now, ranks = [0.0], 4
    monkeypatch.setattr(gates.time, "perf_counter", lambda: now[0])
    measuring = gates.probe(np.zeros(1 << 18, np.float32), NUMPY.xp, ranks)
    request, largest = next(measuring), 0
    while True:
        now[0] += latency + 2 * (ranks - 1) / ranks * request.tensor.nbytes / bandwidth
        largest = max(largest, request.tensor.size)
        try:
            request = measuring.send(request.tensor)
        except StopIteration as end:
            link = end.value
            break
    assert link.bandwidth == pytest.approx(bandwidth, rel=0.01) or bandwidth > 1e9
    assert link.latency == pytest.approx(latency, rel=0.1)
    assert (largest == 1 << 15) == (4 * latency < 1.5 * (1 << 17) / bandwidth + latency)
    assert now[0] < 0.5


# ------------------------------------------------------------------------------- averages in parts
@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_in_parts_follow_from_those_of_the_codec(case: Case, ranks: int) -> None:
    codec, shape = case.compressor, (256, 384)
    found = gates.sent_in_parts(codec, 1.0, ranks)
    try:
        parts = DoubleSqueeze(codec)  # type: ignore[arg-type]
    except ValueError:
        parts = None
    if parts is None or codec.exchange.__func__ is not Codec.exchange:  # type: ignore[attr-defined]
        assert math.isinf(found)
        return
    sent = bytes_sent(codec, shape, "float32", ranks)
    assert found * sent == pytest.approx(bytes_sent(parts, shape, "float32", ranks), rel=0.2)


@pytest.mark.parametrize("bandwidth", [1e6, 25e6, 1e9])
@pytest.mark.parametrize("ranks", [2, 16])
def test_parts_are_mentioned_where_they_would_be_fastest(
    clocked: Callable[..., World], ranks: int, bandwidth: float
) -> None:
    """The verdict says how long a step would take; the gate does not choose another algorithm."""
    world = clocked([1e-3] * 6, 0.4, bandwidth)
    plain = world.costs
    world.costs = lambda: {
        name: replace(cost, parts=cost.sent * 2 / ranks) for name, cost in plain().items()
    }
    world.run(90)
    seconds = 0.05 + 6e-3 + 2.4e6 * 2 / ranks / bandwidth
    verdict = world.gate.verdict
    faster = gates.MARGIN * seconds < world.seconds(world.served())
    assert ("in parts" in verdict) == faster == (ranks > 2 and bandwidth < 1e9)
    assert f"(DoubleSqueeze), it might be {1000 * seconds:.0f}" in verdict or not faster
    assert set(world.served()) <= {"wanted", "FP16()", "Dense()"}


def test_a_gate_between_parts_and_messages() -> None:
    """If a user names both forms, the gate tries both, and nothing is lost in between."""
    gate = Gate(steps=2, every=9, fallbacks=(EFSignSGD(), Dense()))
    world, levels = simulate(Fixed(DoubleSqueeze(EFSignSGD()), gate=gate), 4), set()
    rng, owed, given, averaged = np.random.default_rng(0), np.zeros(2400), 0.0, 0.0
    for _ in range(40):
        mine = [rng.standard_normal((24, 100)).astype(np.float32) for _ in range(4)]
        given = given + np.mean(mine, 0)
        mean = world.step([{"w": x} for x in mine])[0]
        assert mean is not None
        averaged = averaged + mean["w"]
        levels |= set(world.exchanges[0].levels().values())
    assert {"DoubleSqueeze(codec=EFSignSGD())", "EFSignSGD()", "Dense()"} <= levels
    for exchange in world.exchanges:
        entry = exchange.bucket_states[0]
        if entry.carried is not None:
            owed += np.reshape(entry.carried, -1) / 4
        elif entry.state:
            rest = entry.compressor.residual(entry.state)
            info = exchange.info(entry)
            if entry.compressor.sharded:
                rest = entry.compressor.expand_residual(rest, entry.spec, info)
            owed += np.reshape(rest, -1) / 4
    np.testing.assert_allclose(np.reshape(averaged, -1) + owed, np.reshape(given, -1), atol=1e-3)
