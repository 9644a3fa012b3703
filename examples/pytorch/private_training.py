"""Train with differential privacy: TopAgg, Poisson samples and a privacy budget.

Each example of a random lot votes with signs on the K largest elements of its gradient. Ranks sum
the votes, and rank 0 adds secret noise. Training ends before the budget is exceeded.

    torchrun --nproc-per-node 2 examples/pytorch/private_training.py

`horovodrun -np 2 python` starts the same script. It needs the extra `privacy`. Rank 0 prints the
spent privacy, the test accuracy on scikit-learn's digits, and its bytes, with those of averaged
gradients. Lots and noise come from the operating system's random source, so that results differ
from run to run.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import accordion_hvd.torch as hvd
from accordion_hvd import PrivacyBudget, TopAgg
from accordion_hvd.privacy import PoissonSampler, multiplier_for
from accordion_hvd.privacy.torch import backward

EPSILON, DELTA, STEPS, RATE, K = 4.0, 1e-4, 100, 0.2, 30


def digits() -> list[torch.Tensor]:
    """Return images for training and testing, (images, 64), and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def main() -> None:
    """Train and test."""
    hvd.init()
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits()
    model = nn.Linear(64, 10)  # the noise grows with the number of parameters
    sampler = PoissonSampler(len(images), RATE, hvd.rank(), hvd.size())
    noise = multiplier_for(EPSILON, DELTA, STEPS, RATE, "add or remove")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=TopAgg(
            k=K,
            clip=None,
            sigma=noise * K**0.5,
            unit="example",
            contributors=sampler.expected,
            rate=RATE,
            budget=PrivacyBudget(EPSILON, DELTA),
        ),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    while optimizer.exchange.policy.affords():
        lot = sampler.draw()
        backward(model, nn.functional.cross_entropy, images[lot], labels[lot])
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        spent, sent, dense = stats["privacy"], stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"epsilon {spent['epsilon']:.3f} of {EPSILON} after {spent['releases']} steps")
        print(f"test accuracy {accuracy:.1%}, {sent:.3f} MB sent instead of {dense:.3f} MB")


if __name__ == "__main__":
    main()
