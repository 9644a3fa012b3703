"""Train a small Transformer on the bytes of a text, with gradients compressed by Accordion.

    horovodrun --gloo -np 2 python examples/pytorch/language_model.py

The path of a text file may follow. Without one, the text is Tiny Shakespeare: the copy in the
folder ACCORDION_DATA, or a download. Rank 0 prints the loss on the last tenth of the text, in nats
per byte (an untrained model has 5.5), and its bytes, with those of averaged gradients.
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


def text(path: str = "") -> torch.Tensor:
    """Return the bytes of a file, by default Tiny Shakespeare."""
    folder = Path(os.environ.get("ACCORDION_DATA", pooch.os_cache("accordion-hvd")))
    path = path or pooch.retrieve(URL, HASH, "input.txt", folder / "tinyshakespeare")
    return torch.tensor(list(Path(path).read_bytes()))


class Transformer(nn.Module):
    """A decoder of two layers, which predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, 256)

    def loss(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next byte in the parts of the text that begin at `starts`."""
        parts = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        x = self.embedding(parts[:, :-1]) + self.positions.weight
        h = self.layers(x, nn.Transformer.generate_square_subsequent_mask(CONTEXT), is_causal=True)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), parts[:, 1:].flatten())


def main() -> None:
    """Train and test."""
    hvd.init()
    torch.manual_seed(0)
    model, data = Transformer(), text(*sys.argv[1:2])
    train, test = data.tensor_split([len(data) * 9 // 10])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        named_parameters=model.named_parameters(),
        compression=Accordion(low=PowerSGD(8), high=PowerSGD(2), window=30, interval=1),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    draw = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.loss(train, torch.randint(len(train) - CONTEXT, (BATCH,), generator=draw)).backward()
        optimizer.step()
    with torch.no_grad():
        loss = model.loss(test, torch.arange(0, len(test) - CONTEXT, 4 * CONTEXT)).item()
    if hvd.rank() == 0:
        stats = optimizer.exchange.stats()
        sent, dense = stats["sent"] / 1e6, stats["dense_sent"] / 1e6
        print(f"test loss {loss:.3f}, {sent:.2f} MB sent instead of {dense:.2f} MB")


if __name__ == "__main__":
    main()
