"""Baselines of DataLens: DP-SGD for a classifier and for the discriminator of a GAN (DP-GAN)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import accordion_hvd.torch as hvd
from accordion_hvd import Allreduce, Compressor, Info, PrivacyBudget, TopAgg, namespace
from accordion_hvd.core.base import ExchangeGenerator, Private, State, Tensor
from accordion_hvd.ops import secret
from accordion_hvd.privacy import PoissonSampler, Release, multiplier_for
from accordion_hvd.privacy.budget import PrivacyAccountant
from accordion_hvd.privacy.torch import backward
from examples.datalens import gan

Images = tuple[torch.Tensor, torch.Tensor]
"""(count, pixels) in [-1, 1], and labels (count,)."""


@dataclass(frozen=True)
class DPSGD(Private):
    """DP-SGD: the sum of clipped gradients of examples plus Gaussian noise.

    "Deep Learning with Differential Privacy" (Abadi et al., CCS 2016). This is a baseline: the
    noise is secret, as in `TopAgg`, but sums are fp32, and the proof does not cover their low bits.

    Args:
        clip: largest 2-norm of an example's gradient.
        noise: standard deviation of the noise, divided by `clip`.
        contributors: expected number of examples in a lot of all ranks.
        rate: probability that an example is in a lot of a `PoissonSampler`. For batches of a
            shuffling loader, a rate below 1 understates epsilon.
        budget: budget that records the steps.
    """

    scope = "samples"

    clip: float
    noise: float
    contributors: int
    rate: float
    budget: PrivacyBudget

    def accountant(self, policy: Any) -> PrivacyAccountant:
        """Return what records the steps of `policy` in the budget."""
        release = Release(self.noise, self.rate, "add or remove")
        return PrivacyAccountant(policy, self.budget, release)

    def exchange(self, grad: Tensor, state: State, info: Info) -> ExchangeGenerator:
        """Average in one allreduce; `grad` is (examples of this rank, elements)."""
        xp = namespace(grad)
        rows, size = xp.shape(grad)
        total = np.zeros(size)
        if rows:
            x = xp.finite(grad)
            norms = np.maximum(xp.to_numpy(xp.bucket_norms(x, size, "l2")), 1e-30)
            total = np.minimum(1.0, self.clip / norms) @ xp.to_numpy(x)
        if info.rank == 0:
            total = total + self.noise * self.clip * secret.normal(size)
        local = xp.asarray(total.astype(np.float32), xp.device(grad))
        summed = yield Allreduce(local, op="sum")
        return summed * (1 / self.contributors), state


def private_optimizer(
    method: str, model: nn.Module, lr: float, sampler: PoissonSampler, budget: PrivacyBudget,
    steps: int, k: int
) -> Any:  # fmt: skip
    """Return Adam with DP-SGD ("dpsgd") or TopAgg ("topagg"), with the noise for `steps` steps."""
    noise = multiplier_for(budget.epsilon, budget.delta, steps, sampler.rate, "add or remove")
    lot, rate = sampler.expected, sampler.rate
    compression: Compressor = DPSGD(1.0, noise, lot, rate, budget)
    if method == "topagg":
        k = min(k, sum(p.numel() for p in model.parameters()))
        options = {"contributors": lot, "rate": rate, "budget": budget}
        compression = TopAgg(k, None, noise * k**0.5, unit="example", **options)  # type: ignore[arg-type]
    return hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr),
        named_parameters=model.named_parameters(),
        compression=compression,
    )


def train_classifier(
    method: str, train: Images, test: Images, classes: int, budget: PrivacyBudget, *,
    steps: int, rate: float = 0.1, k: int = 500, lr: float = 5e-3, seed: int = 0
) -> float:  # fmt: skip
    """Return the test accuracy of a classifier trained privately on real images; collective."""
    torch.manual_seed(seed)
    model = gan.classifier(train[0].shape[1], classes, 32)
    sampler = PoissonSampler(len(train[0]), rate, hvd.rank(), hvd.size())
    optimizer = private_optimizer(method, model, lr, sampler, budget, steps, k)
    while optimizer.exchange.policy.affords() and optimizer.exchange.steps < steps:
        lot = sampler.draw()
        backward(model, F.cross_entropy, train[0][lot], train[1][lot])
        optimizer.step()
    return gan.accuracy(model, test)


class Pairs(nn.Module):
    """A discriminator of pairs: a real image, a generated one, and their class."""

    def __init__(self, pixels: int, classes: int, width: int) -> None:
        super().__init__()
        self.pixels = pixels
        self.hidden, self.chosen = nn.Linear(pixels, width), nn.Linear(classes, width)

    def judge(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Return logits of being real, (count,)."""
        return (F.leaky_relu(self.hidden(images), 0.2) * self.chosen(classes)).sum(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the real and the generated image, (count, 2)."""
        real, fake, classes = x.split([self.pixels, self.pixels, x.shape[1] - 2 * self.pixels], 1)
        return torch.stack([self.judge(real, classes), self.judge(fake, classes)], 1)


def _pair_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1])).mean()


def train_gan(
    generator: gan.Generator, train: Images, budget: PrivacyBudget, random: torch.Generator, *,
    steps: int, rate: float = 0.05, batch: int = 100, lr: float = 5e-3, width: int = 32
) -> None:  # fmt: skip
    """Train `generator` against a discriminator that DP-SGD trains; collective.

    The generator depends on the data only through this discriminator.
    """
    pixels, classes = train[0].shape[1], generator.classes
    critic = Pairs(pixels, classes, width)
    hvd.broadcast_parameters(critic.state_dict(), root_rank=0)
    sampler = PoissonSampler(len(train[0]), rate, hvd.rank(), hvd.size())
    optimizer = private_optimizer("dpsgd", critic, lr, sampler, budget, steps, 0)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr, betas=(0.5, 0.999))
    while optimizer.exchange.policy.affords() and optimizer.exchange.steps < steps:
        lot = sampler.draw()
        labels = train[1][lot]
        with torch.no_grad():
            fake = generator(2 * torch.rand(len(lot), generator.noise) - 1, labels)
        one_hot = F.one_hot(labels, classes).float()
        backward(critic, _pair_loss, torch.cat([train[0][lot], fake, one_hot], 1), labels)
        optimizer.step()
        z, wanted = generator.draw(batch, random)
        logits = critic.judge(generator(z, wanted), F.one_hot(wanted, classes).float())
        generator_optimizer.zero_grad()
        F.softplus(-logits).mean().backward()
        generator_optimizer.step()
