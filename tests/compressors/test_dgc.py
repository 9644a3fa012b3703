"""Tests of DGC: compressed momentum, and the rules for compressors that return updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, Ranks, installed, normals, parameters
from laws import step

from accordion_hvd import (
    DGC,
    Accordion,
    Compressor,
    Dense,
    Fixed,
    Info,
    Replay,
    TopK,
    TwoLevel,
    simulate,
)
from accordion_hvd.resolve import Resolved, as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, World
from accordion_hvd.validate import Use, validate

SHAPE = (24, 50)


@pytest.mark.parametrize("framework", parameters())
def test_it_follows_the_paper(framework: Framework) -> None:
    """Two ranks follow the paper's momentum correction and factor masking (Algorithm 4)."""
    ours, size = Ranks(DGC(0.1, momentum=0.9), 2, framework), 1200
    u, v = [np.zeros(size) for _ in range(2)], [np.zeros(size) for _ in range(2)]
    for gradients in normals(SHAPE, 2, steps=8):
        wanted = np.zeros(size)
        for rank, g in enumerate(gradients):
            u[rank] = 0.9 * u[rank] + g.reshape(-1)
            v[rank] = v[rank] + u[rank]
            largest = np.argsort(-np.abs(v[rank]))[:120]
            wanted[largest] += v[rank][largest] / 2
            u[rank][largest] = v[rank][largest] = 0
        np.testing.assert_allclose(ours.step(gradients)[1].reshape(-1), wanted, atol=2e-5)
    for rank, state in enumerate(ours.states):
        np.testing.assert_allclose(framework.array(state["momentum"]), u[rank], atol=2e-5)
        np.testing.assert_allclose(framework.array(state["error"]), v[rank], atol=2e-5)


@pytest.mark.parametrize("framework", parameters())
def test_without_sparsity_it_is_momentum_sgd(framework: Framework) -> None:
    """At ratio 1, the updates of large and small tensors are the velocity of the mean gradients."""
    world = simulate(DGC(1.0, momentum=0.9), 3)
    check_momentum(world, framework, ("w", "b"))


def test_small_tensors_get_plain_momentum() -> None:
    world = simulate(DGC(0.01, momentum=0.9), 3)
    check_momentum(world, NUMPY, ("b",))
    levels = world.exchanges[0].levels()
    assert levels == {"w": "DGC(ratio=0.01)", "b": "DGC(ratio=1.0)"}
    exempt = simulate(DGC(0.01, momentum=0.5), 2, skip=["w"])
    check_momentum(exempt, NUMPY, ("w", "b"), 0.5)


def check_momentum(
    world: World, framework: Framework, names: tuple[str, ...], momentum: float = 0.9
) -> None:
    shapes, velocity = {"w": SHAPE, "b": (7,)}, dict.fromkeys(names, 0.0)
    streams = {k: normals(s, world._hub.ranks, i) for i, (k, s) in enumerate(shapes.items())}
    for _ in range(6):
        now = {k: next(stream) for k, stream in streams.items()}
        ranks = range(world._hub.ranks)
        means = step(world, framework, [{k: g[r] for k, g in now.items()} for r in ranks])
        for name in names:
            velocity[name] = momentum * velocity[name] + np.mean(now[name], 0)
            for mean in means:
                assert mean is not None
                np.testing.assert_allclose(mean[name], velocity[name], atol=2e-5)


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
def test_weights_move_as_with_torch_s_momentum() -> None:
    import torch

    world, ranks = simulate(DGC(1.0, momentum=0.9), 2), 2
    ours = torch.nn.Parameter(torch.ones(SHAPE))
    theirs = torch.nn.Parameter(torch.ones(SHAPE))
    plain = torch.optim.SGD([ours], lr=0.1)
    momentum = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for number, gradients in enumerate(normals(SHAPE, ranks, steps=12)):
        if number == 6:
            plain.param_groups[0]["lr"] = momentum.param_groups[0]["lr"] = 0.01
        updates = world.step([{"w": torch.tensor(g)} for g in gradients])
        assert updates[0] is not None
        ours.grad = updates[0]["w"]
        theirs.grad = torch.tensor(np.mean(gradients, 0))
        plain.step()
        momentum.step()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
def test_a_graph_makes_updates_and_is_traced_anew_for_each_stage() -> None:
    """In a graph, ratio 1 is Keras' momentum, and each ratio of the warm-up has its own trace."""
    import tensorflow as tf

    pytest.importorskip("horovod.tensorflow")
    from accordion_hvd.engine.layout import TensorInfo
    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    def exchange_of(compressor: Compressor) -> TensorFlowExchange:
        link = SimulatedCommunicator(Hub(1), 0, TENSORFLOW.xp)
        tensors = [TensorInfo("w", SHAPE, "float32")]
        return TensorFlowExchange(link, as_policy(compressor), tensors)

    exchange, rate = exchange_of(DGC(1.0)), tf.constant(0.1)
    assert not exchange.switching
    exchange.prepare_trace()
    run = tf.function(exchange.traced, autograph=False)
    ours, theirs = tf.Variable(tf.ones(SHAPE)), tf.Variable(tf.ones(SHAPE))
    plain, momentum = tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.SGD(0.1, momentum=0.9)
    for (gradient,) in normals(SHAPE, 1, steps=6):
        plain.apply([run([tf.constant(gradient)], rate)[0]], [ours])
        momentum.apply([tf.constant(gradient)], [theirs])
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-5)

    exchange, versions = exchange_of(DGC(0.01, warmup=8)), set()
    assert exchange.switching
    oracle = Ranks(DGC(0.01, warmup=8), 1)
    functions: dict[int, Any] = {}
    for (gradient,) in normals(SHAPE, 1, steps=10):
        exchange.prepare_trace()
        versions.add(exchange.version)
        if exchange.version not in functions:
            functions[exchange.version] = tf.function(exchange.traced, autograph=False)
        mean = functions[exchange.version]([tf.constant(gradient)], rate)[0].numpy()
        np.testing.assert_array_equal(mean, oracle.step([gradient])[0])
    assert len(versions) == 5


def test_the_warm_up() -> None:
    """The n-th quarter of the warm-up sends 1 / 4^n of the elements, but at least the ratio."""
    compressor = DGC(0.01, warmup=8)
    assert [compressor.variant(n) for n in range(10)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert compressor.period == 0 and DGC(0.01).period == 1 and DGC(0.01).variant(0) == 4
    world, kept = simulate(compressor, 2), []
    for gradients in normals(SHAPE, 2, steps=9):
        mean = step(world, NUMPY, [{"w": gradients[0]}] * 2)[0]
        assert mean is not None
        kept.append(np.count_nonzero(mean["w"]))
    assert kept == [300, 300, 75, 75, 18, 18, 12, 12, 12]
    assert TwoLevel(compressor).variant(3) == 1


def test_gradients_are_clipped_before_all_else() -> None:
    """Each rank clips its gradient to a norm of clip / sqrt(N), and keeps shorter gradients."""
    for scale in (10.0, 1e-3):
        ours = Ranks(DGC(1.0, momentum=0.9, clip=2.0), 4)
        (gradients,) = normals(SHAPE, 4, steps=1)
        gradients = [np.float32(g * scale) for g in gradients]
        wanted = [g * min(1.0, 1.0 / np.linalg.norm(g)) for g in gradients]
        np.testing.assert_allclose(ours.step(gradients)[0], np.mean(wanted, 0), atol=1e-6)
    assert DGC(clip=1.0).batching == "" and DGC().batching == "alike"


def test_without_momentum_it_is_topk() -> None:
    ours, topk = Ranks(DGC(0.1, momentum=0.0), 2), Ranks(TopK(0.1), 2)
    for gradients in normals(SHAPE, 2, steps=5):
        np.testing.assert_array_equal(ours.step(gradients)[0], topk.step(gradients)[0])
    assert DGC(0.1, momentum=0.0).plain() is None


def test_levels_hand_over_what_waits_and_the_momentum() -> None:
    """A switch to a dense level sends the whole residual, and unmasked momentum goes on."""
    policy = Accordion(low=DGC(0.1), high=DGC(1.0), window=1)
    (exchange,) = simulated(policy)
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(2))
    sent = one(exchange, first)
    entry = exchange.bucket_states[0]
    exchange.switch(entry, 1)
    rest = np.where(sent == 0, first, 0)
    np.testing.assert_allclose(one(exchange, second), 1.9 * rest + second, atol=1e-5)
    assert not entry.state["error"].any()
    exchange.switch(entry, 0)
    np.testing.assert_allclose(
        entry.state["momentum"].reshape(SHAPE), 0.9 * rest + second, atol=1e-5
    )


def simulated(policy: Any) -> list[Any]:
    world = simulate(policy, 1)
    world._build({"w": np.zeros(SHAPE, np.float32)})
    return world.exchanges


def one(exchange: Any, gradient: np.ndarray) -> np.ndarray:
    exchange.open(0.1)
    exchange.give([gradient.copy()])
    assert exchange.finish()
    return np.array(exchange.means()[0])


# ------------------------------------------------- general rules of compressors that return updates
def test_levels_that_return_gradients_are_refused_beside_it() -> None:
    for policy in (
        lambda: Accordion(low=Dense(), high=DGC(0.01)),
        lambda: Fixed(DGC(0.01), overrides={"w": TopK(0.01)}),
        lambda: Accordion(low=TwoLevel(DGC(0.1)), high=TopK(0.01)),
        lambda: Replay([row("DGC(0.1)"), row("TopK(0.1)")]),
    ):
        with pytest.raises(ValueError, match="levels must agree in output: .*'update'"):
            policy()
    with pytest.raises(ValueError, match="levels must agree in the compressor of exempt tensors"):
        Accordion(low=DGC(0.1, momentum=0.9), high=DGC(0.01, momentum=0.5))
    with pytest.raises(ValueError, match="gate is 'auto', but must be None"):
        Fixed(DGC(0.01), gate="auto")
    assert Accordion(low=DGC(0.1), high=TwoLevel(DGC(0.01))).output == "update"


def row(compressor: str) -> dict[str, Any]:
    return {"step": 1, "name": "w", "compressor": compressor, "level": 0}


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
def test_only_plain_sgd_takes_updates_in_torch() -> None:
    import torch

    pytest.importorskip("horovod.torch")
    weights, policy, optim = [torch.nn.Parameter(torch.ones(3))], as_policy(DGC()), torch.optim
    check_torch(policy, optim.SGD(weights, lr=0.1, weight_decay=1e-4))
    check_torch(as_policy("topk"), optim.Adam(weights))
    for inner in (
        optim.SGD(weights, lr=0.1, momentum=0.9),
        optim.SGD([{"params": weights, "momentum": 0.9}], lr=0.1),
        *[kind(weights) for kind in (optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad)],
        *[kind(weights) for kind in (optim.Adadelta, optim.Rprop, optim.ASGD, optim.LBFGS)],
    ):
        with pytest.raises(ValueError, match=f"DGC.* returns finished updates.*{name(inner)}"):
            check_torch(policy, inner)


def check_torch(policy: Any, inner: Any) -> None:
    from accordion_hvd.torch.validation import is_plain

    validate(Resolved(policy), Use("torch", 1, 1, name(inner), plain=is_plain(inner)))


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
def test_only_plain_sgd_takes_updates_in_keras() -> None:
    import keras

    pytest.importorskip("horovod.tensorflow")
    policy, optim = as_policy(DGC()), keras.optimizers
    check_keras(policy, optim.SGD(0.1))
    check_keras(policy, optim.LossScaleOptimizer(optim.SGD(0.1)))
    check_keras(as_policy("topk"), optim.Adam())
    for inner in (
        optim.SGD(0.1, momentum=0.9),
        *[kind() for kind in (optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad)],
        *[kind() for kind in (optim.Adadelta, optim.Ftrl, optim.Lion, optim.Nadam)],
        optim.LossScaleOptimizer(optim.Adam()),
    ):
        with pytest.raises(ValueError, match="returns finished updates, momentum included"):
            check_keras(policy, inner)


def check_keras(policy: Any, inner: Any) -> None:
    from accordion_hvd.tensorflow.validation import is_plain

    validate(Resolved(policy), Use("keras", 1, 1, name(inner), plain=is_plain(inner)))


def name(x: Any) -> str:
    return type(x).__name__


def test_masking_is_what_the_paper_says() -> None:
    """Negative control: without factor masking, the momentum of sent elements is applied again."""

    class Unmasked(DGC):
        def exchange(self, grad: Any, state: Any, info: Info) -> Any:
            momentum = state["momentum"] * self.momentum + grad.reshape(-1)
            mean, new = yield from super().exchange(grad, state, info)
            return mean, new | {"momentum": momentum.astype(np.float32)}

    ours, wrong = Ranks(DGC(0.1), 1), Ranks(Unmasked(0.1), 1)
    found = [[ranks.step(g)[0] for g in normals(SHAPE, 1, steps=2)][1] for ranks in (ours, wrong)]
    assert np.abs(found[0] - found[1]).max() > 0.1
