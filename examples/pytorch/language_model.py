"""Train a small Transformer on the bytes of a text, with gradients compressed by Accordion.

    horovodrun --gloo -np 2 python examples/pytorch/language_model.py

The path of a text file may follow. Without one, the text is Tiny Shakespeare: the copy in the
folder ACCORDION_DATA, or a download. Rank 0 prints the loss on the last tenth of the text, in nats
per byte (an untrained model has 5.5), and the bytes that it has sent and would have sent.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pooch
import torch
from torch import nn

import accordion_hvd.torch as hvd
from accordion_hvd import Accordion, PowerSGD

STEPS, BATCH, CONTEXT, WIDTH = 300, 32, 32, 64
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HASH = "md5:6fb458f1232090904fb40fe944165e91"


def text() -> torch.Tensor:
    """Return the bytes of the text."""
    folder = Path(os.environ.get("ACCORDION_DATA", pooch.os_cache("accordion-hvd")))
    given = sys.argv[1] if len(sys.argv) > 1 else None
    path = given or pooch.retrieve(URL, HASH, "input.txt", folder / "tinyshakespeare")
    return torch.tensor(list(Path(path).read_bytes()))


class Transformer(nn.Module):
    """A decoder of two layers, which predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next byte, (batch, position, byte)."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        h = self.embedding(x) + self.positions(torch.arange(CONTEXT))
        return self.head(self.layers(h, mask, is_causal=True))


def loss_of(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the loss on the parts of the text that begin at `starts`."""
    parts = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(parts[:, :-1]).flatten(0, 1), parts[:, 1:].flatten())


def main() -> None:
    """Train and test."""
    hvd.init()
    torch.manual_seed(0)
    model, data = Transformer(), text()
    train, test = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        named_parameters=model.named_parameters(),
        compression=Accordion(low=PowerSGD(8), high=PowerSGD(2), window=30, interval=1),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    draw = torch.Generator().manual_seed(hvd.rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        starts = torch.randint(len(train) - CONTEXT, (BATCH,), generator=draw)
        loss = loss_of(model, train, starts)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        loss = loss_of(model, test, torch.arange(0, len(test) - CONTEXT, 4 * CONTEXT))
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test loss {loss.item():.3f}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
