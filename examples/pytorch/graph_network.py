"""Train a graph network whose nodes are distributed over the ranks.

The graph connects scikit-learn's digits with their eight nearest neighbours. Each rank stores the
features of its own nodes. The sampler prefers these, and weights them so that it has no bias.

    horovodrun --gloo -np 2 python examples/pytorch/graph_network.py

Rank 0 prints how METIS partitions the graph, the test accuracy, and the bytes of features that it
has received, with those that a sampler without this preference needs.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn

import accordion_hvd.torch as hvd
from accordion_hvd.graph import Block, FeatureStore, Graph, Sampler, SkewedSampler, partition


class GCN(nn.Module):
    """Two graph convolutions (Kipf & Welling, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 10)])

    def forward(self, blocks: tuple[Block, ...], features: np.ndarray) -> torch.Tensor:
        """Return the scores of the targets, given the features of the first block's sources."""
        x = torch.from_numpy(features)
        for number, (block, layer) in enumerate(zip(blocks, self.layers, strict=True)):
            rows, columns, values = map(torch.from_numpy, (block.rows, block.columns, block.values))
            messages = layer(x.relu() if number else x)[columns] * values[:, None]
            x = torch.zeros(block.targets, messages.shape[1]).index_add(0, rows, messages)
        return x


def main() -> None:
    """Train and test."""
    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    graph = Graph.from_edges(kneighbors_graph(images, 8).nonzero(), len(images))
    part = partition(graph, hvd.size())
    mine = part.owner == hvd.rank()
    store = FeatureStore(images[mine] / 16, part, "torch", graph=graph)
    sampler = SkewedSampler(graph, part, hvd.rank(), fanout=(4, 4), budget=2)
    plain = Sampler(graph, fanout=(4, 4), rank=hvd.rank())  # to compare the bytes only
    draw = np.random.default_rng(0)
    train, test = (half[mine[half]] for half in np.split(draw.permutation(len(images)), [400]))
    model, needed = GCN(), 0
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(100):  # all ranks take equally many steps, because they fetch together
        targets = draw.choice(train, 32, replace=False)
        blocks = sampler.sample(targets, step=step)
        optimizer.zero_grad()
        scores = model(blocks, store.fetch(blocks[0].sources))
        nn.functional.cross_entropy(scores, torch.from_numpy(labels[targets])).backward()
        optimizer.step()
        needed += int(np.count_nonzero(~mine[plain.sample(targets, step=step)[0].sources]))
    got, dense = (rows * store.width / 1e6 for rows in (store.stats()["remote"], needed))
    blocks = Sampler(graph, (None, None)).sample(test)  # all neighbours
    with torch.no_grad():
        found = model(blocks, store.fetch(blocks[0].sources)).argmax(1).numpy()
    counts = torch.tensor([float(np.sum(found == labels[test])), len(test)])
    right, tested = hvd.allreduce(counts, op=hvd.Sum)  # each rank has tested its own nodes
    if hvd.rank() == 0:
        print(part)
        print(
            f"test accuracy {right / tested:.1%}, {got:.2f} MB received instead of {dense:.2f} MB"
        )


if __name__ == "__main__":
    main()
