"""LGC: its autoencoder against PyTorch's own, its phases, and what they are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import TORCH, Framework, installed, parameters

from accordion_hvd.compressors.autoencoder import (
    DECODER,
    ENCODER,
    Autoencoder,
    Layer,
    code_length,
    signals_of,
)

RNG = np.random.default_rng(0)
needs_torch = pytest.mark.skipif(not installed(TORCH), reason="torch not installed")


# --------------------------------------------------------------------------------- the autoencoder
def of_torch(layers: Any, parameters: Any, x: Any) -> Any:
    """PyTorch's convolutions with our parameters; signals (signals, channels, length)."""
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
    """The two losses, as the paper has them, with weights 1 and 1."""
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


@pytest.mark.parametrize("transposed", [False, True])
def test_signals_keep_their_size(transposed: bool) -> None:
    """Initial weights neither blow a signal up nor let it vanish."""
    layers = [Layer(16, 16, transposed=transposed) for _ in range(3)]
    x = RNG.standard_normal((2, 16 * 63)).astype(np.float32)
    for i, layer in enumerate(layers):
        x = layer.forward(layer.draw(f"layer {i}")[None], x)
    assert 0.3 < np.sqrt(np.mean(x**2)) < 2.0
