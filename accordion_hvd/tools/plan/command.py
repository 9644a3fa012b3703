"""The command line of `accordion-hvd plan`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accordion_hvd.tools.text import Misuse, number_of, parse_rate, parse_time, short

if TYPE_CHECKING:
    from accordion_hvd.simulation.prediction import Cluster
    from accordion_hvd.tools.plan.model import Model


class Quantity(click.ParamType):
    """A rate or a time; `parse` returns the number, or raises ValueError."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, parameter: Any, context: Any) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


def _rate(word: str) -> float:
    bits = parse_rate(word)
    return math.inf if bits is None else bits


ENGINE_NAMES = ("horovod", "torch")
"""Names of `accordion_hvd.simulation.prediction.COSTS`, whose import takes time."""

EXAMPLE = "accordion_hvd.tools.plan.command:example"

RATE, TIME = Quantity("rate", _rate), Quantity("time", parse_time)


@click.command(short_help="Predict what compression would cost on a cluster.")
@click.argument("configurations", nargs=-1)
@click.option(
    "--model", default=EXAMPLE, metavar="FILE.py:FUNCTION",
    help="Model, or (model, step); an example by default.",
)  # fmt: skip
@click.option("--hosts", type=click.IntRange(1), metavar="N", help="Number of hosts.")
@click.option("--per-host", type=click.IntRange(1), default=1, metavar="N", help="Ranks per host.")
@click.option("--link", "rate", type=RATE, help="Rate of each host's link, such as 1gbit.")
@click.option("--rtt", type=TIME, default="none", help="Round-trip time of two hosts, as 20ms.")
@click.option("--cores", type=float, help="Cores of each host; by default, as here.")
@click.option("--compute", type=TIME, help="Time of a step without an exchange, as 120ms.")
@click.option("--engine", type=click.Choice(ENGINE_NAMES), help="By default as installed.")
@click.option("--price", type=float, help="Price of an hour of the job.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="File for the results.")
def plan(
    configurations: tuple[str, ...],
    model: str,
    hosts: int | None,
    per_host: int,
    rate: float | None,
    rtt: float,
    cores: float | None,
    compute: float | None,
    engine: str | None,
    price: float | None,
    path: Path | None,
) -> None:
    """Predict what CONFIGURATIONS, such as powersgd:4, would cost on a cluster.

    The model's step and the compressors are measured on this machine (20 seconds); hosts are
    assumed to be like it. Started with horovodrun or torchrun, the command measures the link, too.
    Otherwise pass --hosts and --link.

    FUNCTION returns (model, step). In PyTorch, step() runs the forward and backward pass of one
    batch; in Keras, it may call model.train_on_batch.
    """
    from accordion_hvd.simulation.prediction import GOODPUT, Cluster
    from accordion_hvd.tools.plan import table

    try:
        if rate is None or hosts is None:
            cluster, name = table.measured(engine)
        else:
            bandwidth = rate / 8 * GOODPUT
            cores = float(os.cpu_count() or 1) if cores is None else cores
            cluster = Cluster(hosts, per_host, bandwidth, rtt, cores)
            name = engine or ""
        chosen = list(configurations) or table.configurations(cluster.ranks)
        _plan(chosen, model, cluster, compute, name, price, path)
    except ValueError as error:
        raise Misuse(str(error)) from None


def _plan(
    configurations: list[str],
    word: str,
    cluster: Cluster,
    compute: float | None,
    engine: str,
    price: float | None,
    path: Path | None,
) -> None:
    from accordion_hvd.tools.plan import table
    from accordion_hvd.tools.plan.model import companions, measure

    with companions(word, busy(cluster) - 1, threads(cluster)):
        model = measure(word, compute, threads(cluster))
        engine = engine or _installed(model)
        rows = []
        for configuration in configurations:
            steps = table.rehearse(model, configuration, cluster, engine)
            rows.append(table.row(model, configuration, steps, cluster, engine))
    if not table.prints():
        return
    if word == EXAMPLE:
        click.echo("An example; pass --model to plan with your own model.")
    click.echo(_describe(model, cluster, engine))
    click.echo()
    click.echo(table.text(rows, price))
    click.echo()
    click.echo(table.verdict(rows))
    if path is not None:
        found = {"model": word, "engine": engine, "compute": model.compute, **vars(cluster)}
        path.write_text(json.dumps({**found, "rows": table.as_json(rows)}, indent=1) + "\n")


def _installed(model: Model) -> str:
    """Return the engine of a job here: PyTorch needs no Horovod, Keras does."""
    alone = model.xp.__name__.endswith("torch") and importlib.util.find_spec("horovod") is None
    return "torch" if alone else "horovod"


def busy(cluster: Cluster) -> int:
    """Return the number of processes that compute on this machine while a step is measured."""
    from accordion_hvd.tools.plan import table

    if table.launched():
        return 1  # the other ranks measure at the same time
    cores = os.cpu_count() or 1
    return min(cores, math.ceil(cluster.per_host * cores / cluster.cores))


def threads(cluster: Cluster) -> int:
    known = os.environ.get("OMP_NUM_THREADS", "")
    return int(known) if known.isdigit() else max(1, int(cluster.cores / cluster.per_host))


def _describe(model: Model, cluster: Cluster, engine: str) -> str:
    from accordion_hvd.simulation.prediction import GOODPUT

    tensors = number_of(len(model.gradients.tensors), "tensor")
    compute = short(1000 * model.compute)
    places = [f"{number_of(cluster.hosts, 'host')} of {number_of(cluster.per_host, 'rank')}"]
    if cluster.hosts > 1:
        rate = cluster.bandwidth * 8e-6 / GOODPUT
        places.append("unlimited links" if math.isinf(rate) else f"{short(rate)} Mbit/s")
        places.append(f"round-trip time {short(1000 * cluster.rtt)} ms")
    return (
        f"{model.parameters / 1e6:.1f} million parameters in {tensors}, "
        f"{compute} ms of computation a step\n{', '.join([*places, engine])}"
    )


# ------------------------------------------------------------------------ the model without --model
BATCH, LENGTH, WIDTH, DEPTH = 8, 64, 384, 6


def example() -> tuple[Any, Callable[[], Any]]:
    """Return a network of about ten million parameters and its step: a Transformer in PyTorch.

    Without PyTorch, the network is a perceptron in Keras.
    """
    return _keras() if importlib.util.find_spec("torch") is None else _torch()


def _torch() -> tuple[Any, Callable[[], Any]]:
    import torch

    layer = torch.nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
    inputs = torch.randn(BATCH, LENGTH, WIDTH)
    return model, lambda: model(inputs).square().mean().backward()


def _keras() -> tuple[Any, Callable[[], Any]]:
    import keras
    import numpy as np

    layers: list[Any] = [keras.Input((LENGTH, WIDTH))]
    for _ in range(DEPTH + 2):
        layers += [keras.layers.Dense(4 * WIDTH, "relu"), keras.layers.Dense(WIDTH)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    inputs = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH), np.float32)
    return model, lambda: model.train_on_batch(inputs, inputs)
