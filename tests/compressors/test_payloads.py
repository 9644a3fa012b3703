"""Tests of payloads that do not decode: the error names the sender, and no state changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, installed, parameters
from laws import several, states, step

from accordion_hvd import (
    DGC,
    LGC,
    AdaComp,
    Compressor,
    DoubleSqueeze,
    Info,
    ScaleCom,
    Threshold,
    TopK,
    TwoLevel,
    simulate,
)
from accordion_hvd.check import PayloadError
from accordion_hvd.core.running import Running
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops import namespace
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator

METHODS = [TopK(0.1), TopK(0.1, "float16"), Threshold(1.0), ScaleCom(0.1), AdaComp(50), DGC(0.1)]
ODD, BAD_STEP = 1, 2
few = pytest.mark.seldom(tensorflow=lambda method: method not in (TopK(0.1), AdaComp(50)))
Spoil = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Spoiled(Compressor):
    """A wrapper that spoils one rank's payload in one step, in one of the compressor's rounds."""

    inner: Compressor
    spoil: Spoil
    rank: int = ODD
    round: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", self.inner.scope)

    @property
    def period(self) -> int:
        return self.inner.period

    def variant(self, step: int) -> int:
        return self.inner.variant(step)

    def init(self, spec: Any, info: Info) -> Any:
        return self.inner.init(spec, info)

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        running, xp = Running(self.inner.exchange(grad, state, info)), namespace(grad)
        leads = isinstance(self.inner, (ScaleCom, LGC)) and not self.round
        mine = info.rank == (info.step % info.size if leads else self.rank)
        for number in itertools.count():
            if running.done:
                return running.result
            asked = running.asked
            if number == self.round:
                asked = self.spoiled(asked, xp, info.step, mine)
            running.send((yield asked))

    def spoiled(self, asked: Any, xp: Any, step: Any, mine: Any) -> Any:
        """Return the round's requests; on the bad step's sender, the first one is spoiled."""
        if isinstance(asked, tuple):
            return self.spoiled(asked[0], xp, step, mine), *asked[1:]
        if not isinstance(step, int):  # in a graph
            spoiled = self.spoil(xp, asked.tensor)
            return replace(asked, tensor=xp.where(step == BAD_STEP, spoiled, asked.tensor))
        return (
            replace(asked, tensor=self.spoil(xp, asked.tensor))
            if mine and step == BAD_STEP
            else asked
        )


def ones(xp: Any, payload: Any) -> Any:
    """Return the payload with its last 10 bytes all ones: too many positions, or out of range."""
    kept = xp.shape(payload)[0] - 10
    tail = np.full(10, 255, np.uint8)
    return xp.concat([payload[:kept], xp.asarray(tail, xp.device(payload))])


def none(xp: Any, payload: Any) -> Any:
    """Return a payload of zero bytes: no positions, or one position many times."""
    return xp.zeros(xp.shape(payload), "uint8", xp.device(payload))


def same_word(xp: Any, payload: Any) -> Any:
    """Return a message of zeros, in which positions repeat."""
    return xp.zeros(xp.shape(payload), xp.dtype(payload))


def negative(xp: Any, payload: Any) -> Any:
    """Return the message with negative numbers, which are positions out of range."""
    return xp.cast(-xp.cast(payload, "int64") - 1, "int32")


def longer(xp: Any, payload: Any) -> Any:
    return xp.concat([payload, payload[:3]])


def shorter(xp: Any, payload: Any) -> Any:
    return payload[:-1]


def world_before(compressor: Compressor, framework: Framework) -> tuple[Any, list[Any], Any]:
    """Return a world before its spoiled step, its states, and the gradients of that step."""
    world, gradients = simulate(compressor, 3), several(3, BAD_STEP + 1)
    for now in gradients[:BAD_STEP]:
        step(world, framework, now)
    return world, states(world, framework), gradients[BAD_STEP]


def check_unchanged(world: Any, framework: Framework, before: list[Any]) -> None:
    for exchange in world.exchanges:  # as wrappers do after an error
        exchange.abort()
    for mine, was in zip(states(world, framework), before, strict=True):
        assert mine.keys() == was.keys()
        for key, x in mine.items():
            np.testing.assert_allclose(x, was[key], atol=1e-6)


@few
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("spoil", [ones, none])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_sender_is_named_and_nothing_changes(
    method: Compressor, spoil: Spoil, framework: Framework
) -> None:
    world, before, gradients = world_before(Spoiled(method, spoil), framework)
    sender = BAD_STEP % 3 if isinstance(method, ScaleCom) else ODD
    with pytest.raises(PayloadError, match=f"payload of rank {sender} does not decode: "):
        step(world, framework, gradients)
    check_unchanged(world, framework, before)


@few
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("spoil", [longer, shorter])
@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m, ScaleCom)], ids=repr)
def test_another_size_is_refused(method: Compressor, spoil: Spoil, framework: Framework) -> None:
    """A payload of the wrong size is refused.

    The error names the sender if ranks exchange the sizes of their payloads. If all sizes should be
    equal, it only tells the expected size.
    """
    if method == AdaComp(50):
        method = AdaComp(500)  # whose entries have two bytes
    world, before, gradients = world_before(Spoiled(method, spoil), framework)
    uneven = isinstance(method, (Threshold, AdaComp))
    words = f"payload of rank {ODD} does not decode" if uneven else "but .* were expected"
    with pytest.raises(PayloadError, match=words):
        step(world, framework, gradients)
    check_unchanged(world, framework, before)


@pytest.mark.seldom(tensorflow=lambda spoil: spoil in (negative, ones))
@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize(
    ("method", "spoil", "round_"),
    [
        (LGC(0.05, dense=1, training=3), negative, 0),  # the second phase
        (LGC(0.05, dense=0, training=2), same_word, 0),  # the third
        (LGC(0.05, "server", dense=0, training=2), negative, 0),
        (LGC(0.05, "server", dense=0, training=2, innovation=0.005), ones, 1),
        (LGC(0.05, "server", dense=0, training=2, innovation=0.005), none, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_leader_and_an_innovator_are_named(
    method: Compressor, spoil: Spoil, round_: int, framework: Framework
) -> None:
    world, before, gradients = world_before(Spoiled(method, spoil, round=round_), framework)
    sender = ODD if round_ else BAD_STEP % 3
    with pytest.raises(PayloadError, match=f"payload of rank {sender} does not decode: "):
        step(world, framework, gradients)
    check_unchanged(world, framework, before)


@pytest.mark.parametrize("round_", [0, 1])
@pytest.mark.parametrize("framework", parameters())
def test_senders_of_parts_and_of_means_are_named(framework: Framework, round_: int) -> None:
    def spoil(xp: Any, payload: Any) -> Any:
        return xp.cast(xp.zeros(xp.shape(payload), "uint8", xp.device(payload)) + 255, "uint8")

    method = Spoiled(DoubleSqueeze(TopK(0.1)), spoil, round=round_)
    world, before, gradients = world_before(method, framework)
    with pytest.raises(PayloadError, match=f"payload of rank {ODD} does not decode: "):
        step(world, framework, gradients)
    if not round_:
        check_unchanged(world, framework, before)


def test_between_machines_the_sender_is_a_rank() -> None:
    """Within TwoLevel, the error names the sender's rank, and not the number of its host."""
    for method, sender in ((ScaleCom(0.1), 4), (LGC(0.05, dense=0, training=2), 4)):
        bad = negative if isinstance(method, LGC) else none
        world = simulate(TwoLevel(Spoiled(method, bad)), 6, local_size=2)
        gradients = several(6, BAD_STEP + 1)
        for now in gradients[:BAD_STEP]:
            step(world, NUMPY, now)
        with pytest.raises(
            PayloadError, match=rf"payload of rank ({sender}|{sender + 1}) does not"
        ):
            step(world, NUMPY, gradients[BAD_STEP])


def test_the_unspoiled_goes_through() -> None:
    """Negative control: a step succeeds if the wrapper leaves the payload unchanged."""
    world, _, gradients = world_before(Spoiled(TopK(0.1), lambda xp, payload: payload), NUMPY)
    assert step(world, NUMPY, gradients)[0] is not None


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@pytest.mark.parametrize(
    "method", [TopK(0.1), DGC(0.1), ScaleCom(0.1), LGC(0.1, dense=0, training=5)], ids=repr
)
def test_a_graph_refuses_too(method: Compressor) -> None:
    """In a graph, the error names the rank, and the state's variables keep their values."""
    import tensorflow as tf

    pytest.importorskip("horovod.tensorflow")
    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    def spoil(xp: Any, payload: Any) -> Any:
        return (
            -xp.cast(payload, xp.dtype(payload))
            if xp.dtype(payload) == "int32"
            else none(xp, payload)
        )

    policy = as_policy(Spoiled(method, spoil, rank=0))
    link = SimulatedCommunicator(Hub(1), 0, TENSORFLOW.xp)
    exchange = TensorFlowExchange(link, policy, [TensorInfo("w", (24, 50), "float32")])
    exchange.prepare_trace()
    run = tf.function(exchange.traced, autograph=False)
    rng = np.random.default_rng(0)
    for number in range(BAD_STEP + 1):
        before = {k: x.numpy() for k, x in exchange.bucket_states[0].state.items()}
        grad = tf.constant(rng.standard_normal((24, 50)), tf.float32)
        if number < BAD_STEP:
            assert np.isfinite(run([grad], tf.constant(0.1))[0].numpy()).all()
            continue
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"does not decode.*\[0\]"):
            run([grad], tf.constant(0.1))
    for key, x in exchange.bucket_states[0].state.items():
        np.testing.assert_array_equal(x.numpy(), before[key])
    assert exchange.steps == BAD_STEP
