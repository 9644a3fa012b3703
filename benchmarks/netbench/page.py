"""docs/performance.md: how it was measured, what came out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.netbench import tables
from benchmarks.netbench.contestants import (
    ACCORDION,
    CAUTIOUS,
    COMPUTE,
    DDP,
    GATED,
    GROUPED,
    OURS,
    SILENT,
    STEADY,
    STOCK,
)
from benchmarks.netbench.picture import words
from examples.report import FRAMEWORKS, as_markdown
from examples.results import Row

NOISY = 0.3
"""Cores that other processes use, from which on a reader should know of it."""


def parts(found: Sequence[Row], picture: str) -> list[str]:
    """Of the page; they say nothing but what the results hold."""
    head = [INTRODUCTION, machine(found[0]), f"![ms a step by way and rate]({picture})"]
    return [*head, *map(section, found), METHOD]


INTRODUCTION = """
# Performance on limited links

Written by `make bench-network` from what it measured, but for the notes at the end. Several hosts
(network namespaces) on one machine train the same network over links whose rate is limited, in many
ways that take turns; what the words mean stands at the end. Times belong to this machine; ratios
carry further, but measure your own:

```sh
make bench-network
.venv/bin/python scripts/netbench.py run --hosts 4 --rate 200mbit -- python my_training.py
```
"""

METHOD = f"""
## How it was measured

- **Links.** Each host has a full-duplex link, limited both ways by a token bucket (`tc tbf`). There
  is bandwidth here, but neither the latency of long lines (some 20 us instead) nor random losses.
- **A step** is forward, backward, exchange, and SGD with momentum 0.9; its time is that of the
  slowest rank, each with one thread. Ways take turns of some steps each; the tables have the
  median of the turns and their range. Ratios are formed within a repetition, then so is the median.
- **CPU ms** is the processor time of all threads of a rank in a step. Where ranks share cores, it
  counts more than once: four ranks that need 50 ms each keep two cores busy for 100 ms.
- **MB** are counted at the interface of the busiest host. They hold few of the TCP headers, since
  the kernel counts large packets before they are cut up (segmentation offload). The links are taken
  at the goodput of one TCP connection, measured on them at the start, so this cancels.
- **limit** is the larger of computation alone and of these bytes over that goodput: what a step
  takes if both overlap perfectly and compression costs nothing. **one after the other** is their
  sum, **x limit** the measured time over the limit.
- **weights equal**: whether all ranks had the same weights, bit by bit, at the end.
- `{COMPUTE}` exchanges nothing. `{STOCK}` is Horovod's own optimizer. `{DDP}` is PyTorch's
  DistributedDataParallel over Gloo, with its own hooks where a compression is named; PowerSGD's has
  all gradients in one bucket, because over Gloo it aborts with several. `ours` is this package.
- `{OURS}{ACCORDION}` is `{STEADY}`
  outside critical regimes, where every layer is at its high level: to be compared with
  `{OURS}powersgd:1`.
- `{OURS}{GATED}` is `{CAUTIOUS}`. Before each of its turns the gate
  judges the link anew; what it says is under the table, and the trials are not part of the times.
- Speed says nothing about accuracy: what a compression does to that is another question.
"""


def notes(found: Row) -> str:
    """What a reader must know of the framework's own ways."""
    if SILENT not in found["equal"] or found["equal"][SILENT]:
        return ""
    return f"""
Horovod's own Keras wrapper runs under Keras 3, but averages nothing: its replicas differ. What a
compression must beat is therefore `{GROUPED}`: an optimizer that calls
`hvd.grouped_allreduce` in `apply`, written for this comparison.
"""


def machine(found: Row) -> str:
    """What it ran on."""
    here, settings = found["machine"], found["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    ranks = settings["hosts"] * settings["per_host"]
    return (
        f"Measured on {here['date']}: {here['cores']} cores of {here['cpu']}, Linux "
        f"{here['kernel']}, Python {here['python']}, {versions}. {settings['hosts']} hosts, "
        f"{ranks} ranks, Horovod over {settings['backend'].upper().replace('GLOO', 'Gloo')}."
    )


def section(found: Row) -> str:
    """Tables of one framework."""
    settings, model = found["settings"], found["model"]
    framework = settings["framework"]
    parts = [
        f"## {FRAMEWORKS[framework]}",
        f"Model `{settings['model']}`: {model['parameters']:,} parameters in {model['tensors']} "
        f"tensors, batches of {settings['batch']} on each rank; {settings['repetitions']} turn(s) "
        f"of each way at each rate. {noise(found)}",
        notes(found),
        "### How many times as fast (medians, and their range)",
        as_markdown(tables.comparison(found, pairs(framework, list(found["equal"])))),
        "### Times the limit",
        as_markdown(tables.limits(found)),
    ]
    for rate in settings["rates"]:
        goodput = found["bandwidth"][rate] * 8 / 1e6
        parts.append(f"### {words(rate)}\n\nTCP goodput {goodput:.0f} Mbit/s.")
        parts.append(as_markdown(tables.table(found, rate)))
        parts += verdicts(found, rate)
    return "\n\n".join(part.strip() for part in parts if part.strip())


def verdicts(found: Row, rate: str) -> list[str]:
    """What gates said of a rate, each line once."""
    turns = [turn for turn in found["turns"] if turn["rate"] == rate]
    said = dict.fromkeys(turn["verdict"] for turn in turns if "verdict" in turn)
    return ["\n".join(f"- {line}" for line in said)] if said else []


def pairs(framework: str, ways: Sequence[str]) -> list[tuple[str, str]]:
    """What is worth comparing: ours with what a user has now, and with the same compression."""
    ours = [way for way in ways if way.startswith(OURS)]
    if framework == "keras":
        return [(way, GROUPED) for way in ours]
    found = [(way, STOCK) for way in ours]
    peers = {f"{OURS}fp16": [f"{STOCK} fp16", f"{DDP} fp16"], f"{OURS}dense": [DDP]}
    peers |= {
        f"{OURS}{word}": [f"{DDP} {word}"] for word in ("powersgd:1", "powersgd:2", "powersgd:4")
    }
    peers[OURS + ACCORDION] = [f"{OURS}powersgd:1", f"{DDP} powersgd:1"]
    peers[OURS + GATED] = [f"{OURS}{word}" for word in ("dense", "fp16", "powersgd:1")]
    return found + [(way, peer) for way in ours for peer in peers.get(way, [])]


def noise(found: Row) -> str:
    """What else the machine did."""
    cores = [turn["foreign"] for turn in found["turns"]]
    loud = sum(one > NOISY for one in cores)
    return (
        f"Beside the ranks {max(0.0, statistics.median(cores)):.1f} cores were busy in the median "
        f"turn, more than {NOISY} in {loud} of {len(cores)} (the links' own work included)."
    )
