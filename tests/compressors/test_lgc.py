"""Tests of LGC: its autoencoder against PyTorch, its phases, and its accuracy in training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frameworks import (
    NUMPY,
    TENSORFLOW,
    TORCH,
    Framework,
    Ranks,
    exact_mean,
    installed,
    normals,
    parameters,
    same_bits,
)
from laws import SHAPE, several, step

from accordion_hvd import (
    LGC,
    Accordion,
    Broadcast,
    Dense,
    Fixed,
    Replay,
    TopK,
    TwoLevel,
    parse,
    simulate,
)
from accordion_hvd.compressors.autoencoder import (
    DECODER,
    ENCODER,
    Autoencoder,
    Layer,
    code_length,
    signals_of,
)
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.checkpoint_files import read_manifest
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator, World

FORMS = pytest.mark.parametrize("form", ["ring", "server"])
RNG = np.random.default_rng(0)
needs_torch = pytest.mark.skipif(not installed(TORCH), reason="torch not installed")


# --------------------------------------------------------------------------------- the autoencoder
def of_torch(layers: Any, parameters: Any, x: Any) -> Any:
    """Apply layers by PyTorch's convolutions to signals of shape (signals, channels, length)."""
    from torch.nn import functional

    start = 0
    for layer in layers:
        rows, columns = layer.matrix
        mine = parameters[start : start + layer.size]
        start += layer.size
        weights, bias = mine[: rows * columns], mine[rows * columns :]
        weights = weights.reshape(layer.width, -1, columns).permute(2, 1, 0)
        convolution = functional.conv_transpose1d if layer.transposed else functional.conv1d
        x = convolution(x, weights, bias, stride=layer.stride)
        x = functional.leaky_relu(x, 0.01) if layer.leaky else x
    return x


def loss_of_torch(networks: Autoencoder, weights: Any, x: Any, mix: Any, news: Any) -> Any:
    """Return the paper's loss: reconstruction plus, for innovations, similarity of codes."""
    import torch

    own = sum(layer.size for layer in ENCODER)
    codes = of_torch(ENCODER, weights[:own], x[:, None])
    mixed = torch.einsum("ij,jcl->icl", mix, codes)
    decoders = weights[own:].reshape(networks.decoders, -1)
    wanted = x if networks.innovates else mix @ x
    loss = 0.0
    for i in range(len(mixed)):
        mine = decoders[i if networks.decoders > 1 else 0]
        decoded = of_torch(DECODER, mine, mixed[i : i + 1])[0, 0]
        if networks.innovates:
            decoded = decoded + mine[-1] * news[i]
        loss = loss + ((decoded - wanted[i]) ** 2).mean()
    if networks.innovates:
        pairs = [(i, j) for i in range(len(x)) for j in range(len(x)) if i != j]
        loss = loss + sum(((codes[i] - codes[j]) ** 2).mean() for i, j in pairs)
    return loss


@needs_torch
@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("networks", [Autoencoder(), Autoencoder(3, innovates=True)], ids=str)
def test_derivatives_are_those_of_autograd(framework: Framework, networks: Autoencoder) -> None:
    import torch

    parts = [RNG.standard_normal(100).astype(np.float32) for _ in range(3)]
    weights = networks.draw("test") + RNG.normal(0, 0.01, networks.size).astype(np.float32)
    one_hot = np.float32([[0, 1, 0]] * 3)
    mix = one_hot if networks.innovates else np.full((1, 3), 1 / 3, np.float32)
    with framework.running():
        scale = framework.tensor(np.float32([2.0]))
        x = signals_of([framework.tensor(part) for part in parts], scale)
        news = x * framework.xp.cast(x > 1, "float32") if networks.innovates else None
        ours = [framework.tensor(values) for values in (weights, mix)]
        wanted = x if networks.innovates else ours[1] @ x
        slope, off = networks.slopes(ours[0], x, ours[1], wanted, news, float(networks.innovates))
    x, weights = torch.tensor(framework.array(x)), torch.tensor(weights, requires_grad=True)
    told = None if news is None else torch.tensor(framework.array(news))
    loss = loss_of_torch(networks, weights, x, torch.tensor(mix), told)
    loss.backward()
    theirs = weights.grad.numpy()
    np.testing.assert_allclose(framework.array(slope), theirs, atol=1e-4 * np.abs(theirs).max())
    assert framework.array(off).shape == (3 if networks.innovates else 1, 16 * 6 + 15)


def test_sizes_are_the_papers() -> None:
    assert sum(layer.size for layer in ENCODER) == 172_996
    assert Autoencoder().size == 172_996 + 43_681
    assert Autoencoder(5, innovates=True).size == 172_996 + 5 * 43_682
    for values in (1, 30, 31, 32, 47, 48, 1000, 25_557, 45_000):
        positions = code_length(values)
        longest = 16 * positions + 15
        assert longest >= values and (positions == 1 or longest - 16 < values)
        x = signals_of([np.ones(values, np.float32)], np.ones(1, np.float32))
        assert x.shape == (1, longest)
        if values < 2000:
            networks = Autoencoder()
            code = networks.encode(networks.draw("a"), x)
            assert code.shape == (1, 4 * positions)
            assert networks.decode(networks.draw("a"), code, None).shape == x.shape
        if values >= 10_000:
            assert 3.99 < values / (4 * positions) < 4.01


def leader_s(totals: np.ndarray, leader: int, count: int) -> tuple[np.ndarray, float]:
    """Return positions of the leader's largest elements, ordered by value, and their rms."""
    index = np.argsort(-np.abs(totals[leader]))[:count]
    index = index[np.argsort(totals[leader][index])]
    return index, float(np.sqrt(np.mean(totals[leader][index] ** 2)))


def innovation_of(values: np.ndarray, few: int) -> np.ndarray:
    """Return a rank's values with zeros in place of all but the `few` largest magnitudes."""
    kept = np.zeros_like(values)
    largest = np.argsort(-np.abs(values))[:few]
    kept[largest] = values[largest]
    return kept


@needs_torch
@FORMS
def test_the_autoencoder_learns_what_the_paper_says(form: str) -> None:
    """Adam's moments are those of the paper's losses, at the leader's largest elements.

    "ring": the loss compares the decoded mean of the codes with the mean of the values. "server":
    the loss compares each rank's values with the output of the rank's decoder, whose input is the
    leader's code and the rank's innovation, and it compares the codes with each other.
    """
    import torch

    ranks, count, few, server = 3, 100, 10, form == "server"
    world = Ranks(LGC(0.05, form, dense=0, training=4, innovation=0.005), ranks)
    networks = Autoencoder(ranks if server else 1, server)
    carried = np.zeros((ranks, 2000))
    moments = [np.zeros(networks.size), np.zeros(networks.size)]
    for number, gradients in enumerate(alike(ranks, 3, 2000)):
        carried += gradients
        index, scale = leader_s(carried, number % ranks, count)
        values = carried[:, index]
        carried[:, index] = 0
        x = np.pad(values, [(0, 0), (0, 16 * code_length(count) + 15 - count)], mode="edge") / scale
        told = [np.pad(innovation_of(v, few), (0, x.shape[1] - count), mode="edge") for v in values]
        mix = np.full((1, ranks), 1 / ranks)
        if server:
            mix = np.tile(np.eye(ranks)[number % ranks], (ranks, 1))
        before = world.states[0]["weights"] if world.states else networks.draw("lgc.w")
        weights = torch.tensor(before, dtype=torch.float64, requires_grad=True)
        tensors = [torch.tensor(a) for a in (x, mix, np.array(told) / scale)]
        loss = loss_of_torch(networks, weights, *tensors)
        loss.backward()
        slope = weights.grad.numpy()
        moments = [0.9 * moments[0] + 0.1 * slope, 0.999 * moments[1] + 0.001 * slope**2]
        world.step(gradients)
        for state in world.states:
            for ours, wanted in zip(state["moments"], moments, strict=True):
                np.testing.assert_allclose(ours, wanted, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("transposed", [False, True])
def test_signals_keep_their_size(transposed: bool) -> None:
    """Initial weights neither blow a signal up nor let it vanish."""
    layers = [Layer(16, 16, transposed=transposed) for _ in range(3)]
    x = RNG.standard_normal((2, 16 * 63)).astype(np.float32)
    for i, layer in enumerate(layers):
        x = layer.forward(layer.draw(f"layer {i}")[None], x)
    assert 0.3 < np.sqrt(np.mean(x**2)) < 2.0


# ------------------------------------------------------------------------------------- the phases
def phases(world: World) -> set[int]:
    """Return the set of all ranks' phases, which has one element if the ranks agree."""
    return {exchange.phase(exchange.bucket_states[0]) for exchange in world.exchanges}


def alike(ranks: int, steps: int, size: int = 20_000, seed: int = 0) -> Iterator[list[np.ndarray]]:
    """Yield gradients with a common part and a smaller part of each rank, as in the paper."""
    common = normals((size,), 1, seed, steps)
    own = normals((size,), ranks, seed + 1, steps)
    for (whole,), parts in zip(common, own, strict=True):
        yield [whole + 0.3 * part for part in parts]


@FORMS
def test_phases_follow_each_other_on_all_ranks(form: str) -> None:
    """All ranks change phase at the same steps, and each phase returns its kind of mean.

    The first phase returns the plain mean. The training phase returns the exact mean at the
    leader's largest elements. The last phase returns decoded values at no more elements.
    """
    lgc = LGC(0.05, form, dense=2, training=3)
    world, plain = simulate(lgc, 3), simulate(Dense(), 3)
    errors = np.zeros((3, 2400))
    for number, gradients in enumerate(several(3, 9)):
        copied = [{k: g.copy() for k, g in mine.items()} for mine in gradients]
        means = step(world, NUMPY, gradients)
        assert phases(world) == {lgc.variant(number + 1)}
        wanted = step(plain, NUMPY, [{k: g.copy() for k, g in mine.items()} for mine in copied])[0]
        assert means[0] is not None and wanted is not None
        for name in ("b", "s"):  # small tensors travel as they are
            assert same_bits(means[0][name], wanted[name])
        if number < 2:
            assert same_bits(means[0]["w"], wanted["w"])
        elif number < 5:
            errors += [np.concatenate([mine[k].reshape(-1) for k in "wv"]) for mine in copied]
            largest = [np.argsort(-np.abs(part))[:60] for part in errors[number % 3].reshape(2, -1)]
            index = np.concatenate([largest[0], largest[1] + 1200])
            mean = np.zeros(2400)
            mean[index] = errors[:, index].mean(0)
            errors[:, index] = 0
            found = np.concatenate([means[0]["w"].reshape(-1), means[0]["v"].reshape(-1)])
            np.testing.assert_allclose(found, mean, atol=1e-5)
        else:
            assert 0 < np.count_nonzero(means[0]["w"]) <= 60
            assert 0 < np.count_nonzero(means[0]["v"]) <= 60


def test_each_tensor_has_its_share() -> None:
    """Each tensor sends its share of elements, even if its gradient is a thousand times smaller."""
    world = simulate(LGC(0.05, dense=0, training=5), 2)
    (gradients,) = several(2, 1)
    means = step(world, NUMPY, [{**mine, "w": mine["w"] * 1e-3} for mine in gradients])
    assert means[0] is not None
    assert np.count_nonzero(means[0]["w"]) == np.count_nonzero(means[0]["v"]) == 60


@FORMS
def test_phases_wait_while_another_level_serves(form: str) -> None:
    lgc = LGC(0.05, form, dense=1, training=3)
    rows = [(0, lgc), (3, Dense()), (6, lgc)]
    named = [{"step": at, "name": "w+1", "compressor": repr(level)} for at, level in rows]
    world = simulate(Replay(named), 2)
    served: list[int] = []
    total = np.zeros((24, 50))
    for number, gradients in enumerate(several(2, 10)):
        total += exact_mean([mine["w"] for mine in gradients])
        means = step(world, NUMPY, gradients)
        (entry, *_) = [s for s in world.exchanges[0].bucket_states if s.bucket.compress]
        served += world.exchanges[0].layout.phases or [0]
        assert means[0] is not None
        total -= means[0]["w"]
        if number == 2:
            learned = entry.state["weights"].copy()
        if number == 3:
            assert np.abs(total).max() < 1e-5, "Dense sends the residual"
        if 3 <= number < 6:
            assert same_bits(entry.inactive[0]["weights"], learned)
    assert served == [0, 1, 1, 0, 0, 0, 2, 3, 3, 3]
    assert not same_bits(entry.state["weights"], learned)


LAST = {"fc*": TopK(0.05)}


@pytest.mark.seldom(tensorflow=lambda form: form == "server")
@pytest.mark.parametrize("framework", parameters())
@FORMS
def test_the_last_layer_is_sent_by_top_k_only(form: str, framework: Framework) -> None:
    """An override sends the last layer by top-k, with the same result as TopK alone.

    The first layer is not compressed, as in the paper, and the others share an autoencoder.
    """
    shapes = {"conv": SHAPE, "mid": (40, 30), "fc": (30, 50), "end": SHAPE, "fc2": (7,)}
    lgc = LGC(0.05, form, dense=1, training=2)
    ours = simulate(Fixed(lgc, overrides={"conv": Dense(), **LAST}), 2)
    without = simulate(lgc, 2, skip=["conv", "fc*"])
    alone = simulate(TopK(0.05), 2)
    streams = [normals(shape, 2, seed, 5) for seed, shape in enumerate(shapes.values())]
    for parts in zip(*streams, strict=True):
        gradients = [dict(zip(shapes, own, strict=True)) for own in zip(*parts, strict=True)]
        head = [{"fc": own["fc"].copy()} for own in gradients]
        copies = [{k: g.copy() for k, g in own.items()} for own in gradients]
        mean, coded, sparse = (
            step(world, framework, given)[0]
            for world, given in ((ours, gradients), (without, copies), (alone, head))
        )
        assert mean is not None and coded is not None and sparse is not None
        assert same_bits(mean["fc"], sparse["fc"])
        assert all(same_bits(mean[name], coded[name]) for name in ("conv", "mid", "end", "fc2"))
    served, last = ours.exchanges[0].levels(), repr(LAST["fc*"])
    assert served == {"conv": "Dense()", "mid+1": repr(lgc), "fc": last, "fc2": "Dense()"}
    assert parse(repr(Fixed(lgc, overrides=LAST))).levels("fc2") == (LAST["fc*"],)


def test_overrides_choose_a_joint_message() -> None:
    """Tensors that match the same override share a message.

    Patterns match a bucket's name without the suffix for its number of tensors, such as "+1".
    """
    lgc, other = LGC(0.05, dense=1), LGC(0.1, dense=1)
    gradients = {k: np.ones(SHAPE, np.float32) for k in ("a1", "b1", "a2", "b2", "c")}
    for policy, wanted in (
        (Fixed(lgc, overrides={"b*": other, "*1": Dense()}), {"a1": Dense(), "b1+1": other}),
        (Fixed(TopK(), overrides={"b?": other}), {"a1": TopK(), "b1+1": other, "c": TopK()}),
        (Accordion(low=lgc, high=other, overrides={"b*": TopK()}, window=1), {"b1": TopK()}),
    ):
        world = simulate(policy, 2)
        step(world, NUMPY, [dict(gradients), dict(gradients)])
        served = world.exchanges[0].levels()
        assert served.items() >= {name: repr(kind) for name, kind in wanted.items()}.items()


@FORMS
def test_only_the_leader_sends_indices_and_code(form: str) -> None:
    """The leader broadcasts indices and, in the "server" form, its code; other ranks send nothing.

    A broadcast costs each rank half the traffic of an allreduce, which graphs need instead.
    """
    lgc, ranks, size = LGC(0.05, form, dense=0, training=1, innovation=0.001), 4, 2000
    world, number = Ranks(lgc, ranks), 0
    for gradients in normals((size,), ranks, steps=5):
        state = world.states or world.init(gradients[0])
        for rank in range(ranks):
            own = {key: x.copy() for key, x in state[rank].items()}
            asked = next(lgc.exchange(gradients[rank].copy(), own, world.info(rank)))
            assert isinstance(asked, Broadcast) and asked.root == number % ranks
            coded = 4 * code_length(100) if form == "server" and number > 0 else 0
            assert asked.tensor.shape == (100 + 1 + coded,)
            assert asked.tensor.any() == (rank == number % ranks)
        world.step(gradients)
        number += 1


def test_levels_of_any_scope() -> None:
    assert Accordion(low=Dense(), high=LGC()).scope == "joint"
    with pytest.raises(ValueError, match="agree in scope"):
        Accordion(low=TopK(), high=LGC())


@FORMS
def test_steps_that_are_skipped_are_not_counted(form: str) -> None:
    """Skipped steps do not advance the phase, so the step that shares the weights is never lost."""
    world, number = simulate(LGC(0.05, form, dense=1, training=2), 2), 0
    for gradients in several(2, 12):
        if number % 3 == 0:
            gradients[1]["v"][3, 3] = np.nan
        means = step(world, NUMPY, gradients)
        assert (means[0] is None) == (number % 3 == 0)
        number += 1
        assert phases(world) == {[0, 0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3][number]}
    assert [(e.steps, e.skipped) for e in world.exchanges] == [(12, 4)] * 2


@FORMS
def test_ranks_share_an_autoencoder_that_they_trained_apart(form: str) -> None:
    """From the third phase on, all ranks have rank 0's weights.

    Hosts may round differently, so that the weights differ while ranks train.
    """
    world = Ranks(LGC(0.05, form, dense=0, training=3), 3)
    for number, gradients in enumerate(alike(3, 6, 2000)):
        means = world.step(gradients)
        if number == 1:
            for rank, state in enumerate(world.states):
                state["weights"] = state["weights"] + np.float32(1e-4 * rank)
            assert not same_bits(world.states[0]["weights"], world.states[1]["weights"])
        if number >= 2:
            assert all(same_bits(s["weights"], world.states[0]["weights"]) for s in world.states)
        assert all(same_bits(mean, means[0]) for mean in means)


# ------------------------------------------------------------------------------ what comes through
def residual(exchange: Any) -> np.ndarray:
    return exchange.bucket_states[0].state["error"]


@FORMS
def test_reconstruction_improves_and_is_reported(form: str) -> None:
    ranks, training = 2, 120
    world = simulate(LGC(0.02, form, dense=1, training=training, innovation=2e-4), ranks)
    reports, lost, power = [], 0.0, 0.0
    for number, gradients in enumerate(alike(ranks, training + 12)):
        totals = gradients + np.array([residual(e) for e in world.exchanges] or 0.0)
        (mean, *_) = step(world, NUMPY, [{"w": g.reshape(100, 200)} for g in gradients])
        reports += [e.stats()["reports"]["w"]["reconstruction"] for e in world.exchanges]
        if number > training:
            found, wanted = mean["w"].reshape(-1), exact_mean(list(totals))
            sent = found != 0
            assert sent.sum() == 400
            lost += ((found - wanted)[sent] ** 2).sum()
            power += (wanted[sent] ** 2).sum()
            for exchange, total in zip(world.exchanges, totals, strict=True):
                assert not residual(exchange)[sent].any()
                np.testing.assert_allclose(residual(exchange)[~sent], total[~sent], atol=1e-4)
    table = np.reshape(reports, (-1, ranks))
    assert (table == table[:, :1]).all()
    error = table[:, 0]
    assert error[0] == 1.0 and error[1] > 0.7
    assert np.mean(error[training - 10 : training]) < 0.1
    assert (error[training:] == error[training]).all()
    assert lost < 0.15 * power, "codes lose more than the report says"


@FORMS
def test_with_nothing_to_learn_it_is_sparsification(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the identity as autoencoder, LGC only sparsifies.

    At the leader's largest elements, the result is the mean of the ranks' values ("ring"), or the
    leader's values ("server", after the training step).
    """
    monkeypatch.setattr(Autoencoder, "encode", lambda self, weights, x: x)
    monkeypatch.setattr(Autoencoder, "decode", lambda self, weights, codes, news: codes)
    monkeypatch.setattr(f"{LGC.__module__}.code_size", lambda values: 16 * code_length(values) + 15)
    world, errors = Ranks(LGC(0.1, form, dense=0, training=1), 2), np.zeros((2, 300))
    for number, gradients in enumerate(normals((300,), 2, steps=6)):
        errors += gradients
        index = np.argsort(-np.abs(errors[number % 2]))[:30]
        said = errors[:, index]
        if form == "server" and number > 0:
            said = np.stack([said[number % 2]] * 2)
        elif number > 0:
            said = np.stack([said.mean(0)] * 2)
        mean = np.zeros(300)
        mean[index] = said.mean(0)
        errors[:, index] = 0
        np.testing.assert_allclose(world.step(gradients)[0], mean, atol=1e-5)


def test_with_all_for_innovation_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that gets all values as innovation, and decodes only these, has the exact mean."""
    monkeypatch.setattr(Autoencoder, "decode", lambda self, weights, codes, news: news)
    world = Ranks(LGC(0.1, "server", dense=0, training=1, innovation=1.0), 3)
    for number, gradients in enumerate(normals((300,), 3, steps=5)):
        carried = [np.zeros(300)] * 3 if number == 0 else world.residuals()
        totals = np.float64(gradients) + np.stack(carried)
        index = np.argsort(-np.abs(totals[number % 3]))[:30]
        mean = np.zeros(300)
        mean[index] = totals[:, index].mean(0)
        np.testing.assert_allclose(world.step(gradients)[0], mean, atol=1e-5)


def test_the_innovation_is_the_largest_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innovation of a rank is its few largest values at the leader's positions."""
    monkeypatch.setattr(Autoencoder, "decode", lambda self, weights, codes, news: news)
    world = Ranks(LGC(0.1, "server", dense=0, training=1, innovation=0.02), 3)
    for number, gradients in enumerate(normals((300,), 3, steps=5)):
        carried = [np.zeros(300)] * 3 if number == 0 else world.residuals()
        totals = np.float64(gradients) + np.stack(carried)
        index, _ = leader_s(totals, number % 3, 30)
        values = totals[:, index]
        mean = np.zeros(300)
        mean[index] = np.mean(
            values if number == 0 else [innovation_of(v, 6) for v in values], axis=0
        )
        np.testing.assert_allclose(world.step(gradients)[0], mean, atol=1e-5)


@FORMS
def test_smaller_gradients_are_coded_as_well(form: str) -> None:
    """Gradients that shrink by a power of two have the same codes: their means shrink exactly."""
    large, small = (Ranks(LGC(0.05, form, dense=0, training=3), 2) for _ in "ab")
    for gradients in alike(2, 8, 2000):
        shrunk = small.step([g * np.float32(2**-12) for g in gradients])[0]
        assert same_bits(shrunk * np.float32(2**12), large.step(gradients)[0])


@FORMS
def test_between_machines(form: str) -> None:
    """Within TwoLevel, ranks agree to the bit, reach the last phase, and report reconstruction."""
    world = simulate(TwoLevel(LGC(0.1, form, dense=1, training=2)), 4, local_size=2)
    for gradients in several(4, 6):
        means = step(world, NUMPY, gradients)
        assert means[0] is not None
        for mean in means[1:]:
            assert mean is not None and all(same_bits(mean[k], means[0][k]) for k in mean)
    assert phases(world) == {3}
    assert set(world.exchanges[0].stats()["reports"]) == {"w+1"}


# ------------------------------------------------------------------------------------- checkpoints
def resumed(folder: Path, world: World, compression: Any, ranks: int, like: Any) -> World:
    """Return a new world with the state of `world`, saved and loaded without collectives."""
    folder.mkdir(exist_ok=True)
    rows = [checkpoint._write(folder, [exchange]) for exchange in world.exchanges]
    checkpoint._complete(folder, world.exchanges[:1], rows, 0, "a job")
    fresh = simulate(compression, ranks)
    fresh._build(like)
    manifest = read_manifest(folder)
    for exchange in fresh.exchanges:
        owner = SimpleNamespace(exchange=exchange, expect=lambda names: None)
        checkpoint._prepare(manifest, [owner], [])
        for restore in checkpoint._restoring(folder, manifest, [owner]):
            restore()
    return fresh


@FORMS
@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_resuming_goes_on_where_it_was(form: str, at: int, tmp_path: Path) -> None:
    """A resumed job continues to the bit in any phase, after skipped steps and other levels."""
    lgc, steps = LGC(0.05, form, dense=2, training=3), several(2, 11)
    steps[0][1]["w"][0, 0] = np.inf
    rows = [(0, lgc), (2, Dense()), (3, lgc)]
    named = [{"step": at, "name": "w+1", "compressor": repr(level)} for at, level in rows]
    copies = [[{k: g.copy() for k, g in mine.items()} for mine in now] for now in steps]
    world = simulate(Replay(named), 2)
    for gradients in steps[:at]:
        step(world, NUMPY, gradients)
    again = resumed(tmp_path, world, Replay(named), 2, steps[0][0])
    for ours, theirs in zip(steps[at:], copies[at:], strict=True):
        means, wanted = step(again, NUMPY, theirs)[0], step(world, NUMPY, ours)[0]
        assert again.exchanges[0].layout.phases == world.exchanges[0].layout.phases
        assert means is not None and wanted is not None
        assert all(same_bits(means[name], wanted[name]) for name in wanted)


def test_resuming_on_another_number_of_ranks(tmp_path: Path) -> None:
    """A "ring" checkpoint is resumed by another number of ranks; a "server" checkpoint is refused.

    A ring has one decoder for any number of ranks, and a server has one decoder for each rank.
    """
    for form in ("ring", "server"):
        folder = tmp_path / form
        lgc = LGC(0.05, form, dense=0, training=2)
        world = simulate(lgc, 2)
        for gradients in several(2, 4):
            step(world, NUMPY, gradients)
        (gradients,) = several(3, 1, seed=4)
        if form == "server":
            with pytest.raises(ValueError, match="number of ranks is 3, but must be"):
                resumed(folder, world, lgc, 3, gradients[0])
            continue
        other = resumed(folder, world, lgc, 3, gradients[0])
        assert phases(other) == {3}
        carried = np.mean([e.bucket_states[0].state["error"] for e in world.exchanges], 0)
        means = step(other, NUMPY, gradients)
        assert means[0] is not None
        given = np.concatenate([exact_mean([g[k] for g in gradients]).reshape(-1) for k in "wv"])
        found = np.concatenate([means[0][k].reshape(-1) for k in "wv"])
        left = exact_mean([e.bucket_states[0].state["error"] for e in other.exchanges])
        unsent = found == 0
        assert unsent.sum() == 2400 - 120 and not left[~unsent].any()
        np.testing.assert_allclose(left[unsent], (given + carried)[unsent], atol=1e-4)


# ------------------------------------------------------------------------------------- in a graph
@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@pytest.mark.seldom(where=lambda form: form == "server")
@FORMS
def test_graphs_are_traced_anew_for_each_phase(form: str) -> None:
    """A graph has one trace per phase, and skipped steps do not advance the phase."""
    import tensorflow as tf

    from accordion_hvd.tensorflow.exchange import TensorFlowExchange

    lgc, tensors = LGC(0.1, form, dense=2, training=2), [TensorInfo("w", (40, 50), "float32")]
    link = SimulatedCommunicator(Hub(1), 0, TENSORFLOW.xp)
    exchange = TensorFlowExchange(link, as_policy(lgc), tensors)
    oracle, versions, run = simulate(lgc, 1), [], None
    stream = [g[0] for g in normals((40, 50), 1, steps=9)]
    stream[1] = stream[1] * np.nan
    for gradient in stream:
        exchange.prepare_trace()
        if not versions or versions[-1] != exchange.version:
            run = tf.function(exchange.traced, autograph=False)
        versions.append(exchange.version)
        assert run is not None
        mean = run([tf.constant(gradient)], tf.constant(0.1))[0].numpy()
        wanted = step(oracle, NUMPY, [{"w": gradient.copy()}])[0]
        if wanted is None:
            assert np.isnan(mean).all()
            continue
        scale = np.abs(wanted["w"]).max()
        np.testing.assert_allclose(mean, wanted["w"], atol=1e-3 * scale)
    assert (exchange.steps, exchange.skipped) == (9, 1)
    assert len(set(versions)) == 4
    assert [versions.count(v) for v in sorted(set(versions))] == [3, 1, 1, 4]


# ------------------------------------------------------------------------------------- in training
def trained(compression: Any, ranks: int = 2, steps: int = 400) -> tuple[float, float]:
    """Train a network with a dense last layer; return its test accuracy and compression ratio."""
    import torch

    from examples.data import load

    digits = load("digits")
    train, test = (
        (torch.tensor(split.images.reshape(-1, 64) / 16, dtype=torch.float32), split.labels)
        for split in (digits.train, digits.test)
    )
    torch.manual_seed(0)
    hidden = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)]
    net = torch.nn.Sequential(*hidden, torch.nn.ReLU(), torch.nn.Linear(256, 10))
    named, rng = dict(net.named_parameters()), np.random.default_rng(1)
    world = simulate(compression, ranks, skip=["4.*"])
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * 7 // 10], 0.1)
    for _ in range(steps):
        gradients = []
        for rank in range(ranks):
            chosen = rng.choice(np.arange(rank, len(train[1]), ranks), 32)
            wanted = torch.tensor(train[1][chosen])
            loss = torch.nn.functional.cross_entropy(net(train[0][chosen]), wanted)
            found = torch.autograd.grad(loss, list(named.values()))
            gradients.append(dict(zip(named, found, strict=True)))
        means = world.step(gradients)[0]
        assert means is not None
        for name, parameter in named.items():
            parameter.grad = means[name].clone()
        optimizer.step()
        schedule.step()
    right = net(test[0]).argmax(1).numpy() == test[1]
    return float(right.mean()), world.exchanges[0].stats()["ratio"]


@pytest.mark.nightly
@needs_torch
@FORMS
def test_training_on_digits(form: str) -> None:
    """LGC is at most three of 360 images less accurate than the plain average."""
    pytest.importorskip("sklearn")
    plain, _ = trained(Dense())
    coded, ratio = trained(LGC(0.01, form, dense=40, training=80, innovation=1e-4))
    assert coded >= plain - 3.5 / 360
    assert ratio > 6  # in 400 steps, the plain ones among them
