"""A GCN in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import accordion_hvd.torch as hvd
from accordion_hvd.graph import Block
from examples.graph.config import GraphSettings

Array = np.ndarray
FRAMEWORK = "torch"


def prepare() -> None:
    """Set the number of threads to this host's cores per rank."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))


class GCN(nn.Module):
    """Layers sigma(A X W + b) on sampled blocks (Kipf & Welling, 2017).

    Args:
        sizes: number of features of the input, between layers, and of the output.
        dropout: dropout rate of the input of each layer.
    """

    def __init__(self, sizes: Sequence[int], dropout: float) -> None:
        super().__init__()
        pairs = zip(sizes, sizes[1:], strict=False)
        self.layers = nn.ModuleList([nn.Linear(before, after) for before, after in pairs])
        self.dropout = dropout
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, blocks: Sequence[Block], x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the last block's targets, given the first block's features."""
        for number, block in enumerate(blocks):
            x = self.layer(number, block, F.dropout(x, self.dropout, self.training))
        return x

    def layer(self, number: int, block: Block, x: torch.Tensor) -> torch.Tensor:
        """Compute A (X W), which is cheaper than (A X) W because W makes rows shorter."""
        linear: Any = self.layers[number]
        rows, columns, values = (
            torch.from_numpy(part) for part in (block.rows, block.columns, block.values)
        )
        messages = F.linear(x, linear.weight)[columns] * values[:, None]
        total = messages.new_zeros((block.targets, messages.shape[1]))
        x = total.index_add(0, rows, messages) + linear.bias
        return x if number + 1 == len(self.layers) else F.relu(x)


class Network:
    """A GCN and its optimizer in PyTorch; see `training.Network`."""

    def __init__(self, settings: GraphSettings, sizes: Sequence[int], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = GCN(sizes, settings.dropout)
        first, *others = self.model.layers
        other_weights = [weight for layer in others for weight in layer.parameters()]
        groups = [{"params": [*first.parameters()], "weight_decay": settings.weight_decay}]
        groups += [{"params": other_weights}] if other_weights else []
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(groups, lr=settings.lr),
            named_parameters=self.model.named_parameters(),
            compression=settings.policy() or hvd.Compression.none,
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer.end_window()  # keeps a policy without `window` from raising an error
        self.exchange = self.optimizer.exchange if hvd.size() > 1 else None
        torch.manual_seed(1000 * seed + hvd.rank())  # dropout differs between ranks

    def step(self, blocks: tuple[Block, ...], x: Array, labels: Array, share: float) -> float:
        """Take one optimizer step and return the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        scores = self.model(blocks, torch.from_numpy(x))
        loss = F.cross_entropy(scores, torch.from_numpy(labels), reduction="sum") * share
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def layer(self, number: int, block: Block, x: Array) -> Array:
        """Return the output of one layer without dropout."""
        with torch.no_grad():
            return self.model.layer(number, block, torch.from_numpy(x)).numpy()


build = Network
