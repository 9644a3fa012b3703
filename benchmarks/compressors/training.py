"""Accuracy with each compressor, for docs/compressor-accuracy.md (`make bench-compressors`).

Several ranks in one process train small networks (`simulate`). All methods share images, learning
rates and seeds, so that only the compression differs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Literal, get_args

import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from accordion_hvd import check, compressors, simulate
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import as_policy, parse
from benchmarks import report
from benchmarks.task import Task
from examples.command_line import read_options
from examples.data import DataError, Dataset, Shard, load
from examples.results import read_json, write_json
from examples.tables import as_markdown

MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class EpochTask(Task):
    """Training on images for a number of epochs.

    Attributes:
        data: name of the image set.
        images: number of training images; None means all.
        shift: largest random shift of an image in pixels, new in each epoch.
        epochs: passes over the images.
        lr: highest learning rate.
        seeds: seeds of weights and order; accuracies are means over them.
        methods: prefixes of the methods' spec strings; empty means all methods.
    """

    data: str
    images: int | None
    shift: int
    epochs: int
    lr: float
    seeds: tuple[int, ...]
    methods: tuple[str, ...] = ()

    def chosen(self) -> list[Method]:
        """Return the methods of this task."""
        return [method for method in METHODS if method.word.startswith(self.methods or ("",))]


LONG = ("Dense", "PowerSGD(1", "TopK", "RandomK", "StepSchedule", "AdaComp", "LGC", "Sketched",
        "TernGrad", "SignSGD()", "EFSignSGD", "OneBit", "TwoLevel", "AdaQS")  # fmt: skip
"""Prefixes of methods that lose more than a point in short trainings of CIFAR-10."""

LARGE = ("Dense", "TernGrad", "SignSGD()")
"""Prefixes of methods that lose more than two points in longer trainings, too."""

DIGITS = EpochTask(
    title="scikit-learn's digits", data="digits", images=None, shift=1, epochs=60, batch=16, lr=0.1,
    seeds=(1, 2, 3),
)  # fmt: skip
CIFAR10 = EpochTask(
    title="CIFAR-10", data="cifar10", images=20_000, shift=2, epochs=6, batch=16, lr=0.05,
    seeds=(1, 2, 3),
)  # fmt: skip
LONGER = dataclasses.replace(
    CIFAR10, title="CIFAR-10, for longer", epochs=20, seeds=(1,), methods=LONG
)
TaskName = Literal["digits", "cifar10", "cifar10-long", "cifar10-large"]
TASKS: dict[str, EpochTask] = {
    "digits": DIGITS,
    "cifar10": CIFAR10,
    "cifar10-long": LONGER,
    "cifar10-large": dataclasses.replace(
        LONGER, title="CIFAR-10, larger batches", batch=64, methods=LARGE
    ),
}
"""Tasks by name."""


@dataclass(frozen=True)
class Method:
    """Compression and learning rate of a training.

    Attributes:
        word: spec string, as `accordion_hvd.parse` accepts it. $epoch is the number of steps of an
            epoch; $third and $tenth are these fractions of all steps.
        rate: learning rate, as a multiple of the task's.
    """

    word: str
    rate: float = 1.0

    def policy(self, epoch: int, steps: int) -> Policy:
        """Return a new policy for a training of `steps` steps, with `epoch` steps per epoch."""
        names = {"epoch": str(epoch), "tenth": str(steps // 10), "third": str(steps // 3)}
        return as_policy(parse(Template(self.word).substitute(names)))


PLAIN = Method("Dense()")

SETTINGS = (
    PLAIN,
    Method("FP16()"),
    Method("BF16()"),
    Method("PowerSGD(4)"),
    Method("PowerSGD(4, alternate=True)"),
    Method("PowerSGD(4, wire='float16')"),
    Method("PowerSGD(4, wire='bfloat16')"),
    Method("PowerSGD(1)"),
    Method("TopK(0.01)"),
    Method("STC(0.05)"),
    Method("RandomK(0.1)", 0.5),
    Method("Threshold(0.03)"),
    Method("StepSchedule({0: Dense(), $tenth: ScaleCom(0.02)}, window=1)"),
    Method("AdaComp(50)"),
    Method("DGC(0.01, warmup=$tenth)"),
    Method("LGC(0.02, dense=$tenth, training=$third)"),
    Method("LGC(0.02, 'server', dense=$tenth, training=$third, innovation=0.002)"),
    Method("SketchedSGD(0.01, 3, 5)"),
    Method("QSGD(4)"),
    Method("TernGrad()"),
    Method("Natural()"),
    Method("Int8()"),
    Method("SignSGD()", 0.03),  # the learning rate alone sets the length of a step
    Method("SignSGD(0.9)", 0.02),
    Method("EFSignSGD()", 0.5),
    Method("OneBit()"),
    Method("EF21(TopK(0.05))"),
    Method("Diana(QSGD(4))"),
    Method("ErrorFeedback(Natural())"),
    Method("Gathered(TopK(0.1))"),
    Method("DoubleSqueeze(QSGD(4))"),
    Method("DoubleSqueeze(Int8())"),
    Method("DoubleSqueeze(EFSignSGD())", 0.5),
    Method("DoubleSqueeze(OneBit())"),
    Method("DoubleSqueeze(TopK(0.01))"),
    Method("Momentum(Natural())"),
    Method("TwoLevel(PowerSGD(1))"),
    Method("Accordion(PowerSGD(4), PowerSGD(1), window=$epoch, interval=2)"),
    Method("AdaQS([PowerSGD(1), PowerSGD(2), PowerSGD(4)], window=$epoch)"),
)
"""Compressors, some with settings for short trainings, and policies."""

METHODS = SETTINGS + tuple(
    Method(getattr(compressors, name).summary[0])
    for name in compressors.__all__
    if not any(f"{name}(" in method.word for method in SETTINGS)
)
"""All compressors, those without `SETTINGS` in the usual one, and policies."""


@dataclass(frozen=True)
class Outcome:
    """Result of a training.

    Attributes:
        accuracy: test accuracy, in [0, 1].
        ratio: bytes of uncompressed gradients / bytes sent, of a rank.
        last_ratio: the same ratio in the last epoch only.
        seconds: training time on this machine.
    """

    task: str
    word: str
    seed: int
    ranks: int
    epochs: int
    accuracy: float
    ratio: float
    last_ratio: float
    seconds: float


def train(name: str, data: Dataset, method: Method, seed: int, ranks: int) -> Outcome:
    """Train a task once on simulated ranks in this process."""
    task, began = TASKS[name], time.perf_counter()
    torch.manual_seed(seed)
    shards = [Shard(data, r, ranks, task.batch, seed, "NCHW", task.shift) for r in range(ranks)]
    epoch = len(shards[0])
    steps = epoch * task.epochs
    policy, model = method.policy(epoch, steps), network(data)
    momentum = 0.0 if policy.output == "update" else MOMENTUM
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=momentum)
    world = simulate(policy, ranks, local_size=2 if ranks % 2 == 0 else 1)
    parameters = dict(model.named_parameters())
    model.train()
    before = 0.0, 0.0
    for step in range(steps):
        if step % epoch == 0:
            for shard in shards:
                shard.shuffle(step // epoch)
            before = _sent(world) if step else before
        lr = method.rate * task.lr_at(task.lr, step, steps)
        (mean, *_) = world.step([_gradients(model, *s[step % epoch]) for s in shards], lr=lr)
        if mean is None:
            continue
        for key, parameter in parameters.items():
            parameter.grad = mean[key].to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    dense, sent = _sent(world)
    last_ratio = (dense - before[0]) / (sent - before[1])
    seconds = time.perf_counter() - began
    accuracy = _accuracy(model, data)
    plan = (name, method.word, seed, ranks, task.epochs)
    return Outcome(*plan, accuracy, dense / sent, last_ratio, seconds)


def network(data: Dataset) -> nn.Module:
    """Return a small network, with some large layers, for images of any size."""
    height, width, channels = data.shape
    if min(height, width) < 16:
        sizes = [height * width * channels, 128, 128, data.classes]
        pairs = zip(sizes, sizes[1:], strict=False)
        layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers[:-1])
    layers = []
    for wide in (16, 32, 64):
        convolution = nn.Conv2d(channels, wide, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(wide), nn.ReLU()]
        channels = wide
    top = [nn.Linear(channels * (height // 8) * (width // 8), 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *top, nn.Linear(256, data.classes))


def _gradients(model: nn.Module, images: Any, labels: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of one rank."""
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def _sent(world: Any) -> tuple[float, float]:
    """Return rank 0's bytes: as if uncompressed, and sent."""
    stats = world.exchanges[0].stats()
    return stats["dense_sent"], stats["sent"]


@torch.no_grad()
def _accuracy(model: nn.Module, data: Dataset) -> float:
    model.eval()
    correct = 0
    for images, labels in Shard(data, 0, 1, 1, 0, "NCHW").test_batches():
        predicted = model(torch.from_numpy(images)).argmax(1)
        correct += int((predicted == torch.from_numpy(labels)).sum())
    return correct / len(data.test)


# --------------------------------------------------------------------------------------- the page
def page(outcomes: Sequence[Outcome]) -> str:
    """Return the text of docs/compressor-accuracy.md."""
    by_task = {name: [o for o in outcomes if o.task == name] for name in TASKS}
    parts = [_section(TASKS[name], results) for name, results in by_task.items() if results]
    return report.render("compressor_accuracy/page", tasks=report.join(parts))


def _section(task: EpochTask, outcomes: Sequence[Outcome]) -> str:
    """Return the section of a task."""
    plain = [100 * o.accuracy for o in outcomes if o.word == PLAIN.word]
    spread = f"{max(plain) - min(plain):.1f} points" if len(plain) > 1 else ""
    methods = {method.word for method in task.chosen()}
    missing = len(methods - {o.word for o in outcomes})
    return report.render(
        "compressor_accuracy/task",
        title=task.title,
        images="All" if task.images is None else f"{task.images:,}",
        epochs=task.epochs,
        ranks=outcomes[0].ranks,
        batch=task.batch,
        lr=f"{task.lr:g}",
        seeds=sorted({o.seed for o in outcomes}),
        apart=spread
        and f" Uncompressed trainings with these seeds end within {spread} of each other.",
        missing=f" {missing} of {len(methods)} methods have not been trained yet and have no row."
        if missing
        else "",
        table=as_markdown(_table(outcomes)),
    )


def _table(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Return a table of means over seeds, with the range of the points lost."""
    found = pd.DataFrame(outcomes)
    means = found.groupby("word")[["accuracy", "ratio", "last_ratio"]].mean()
    accuracy = 100 * found.pivot(index="seed", columns="word", values="accuracy")
    lost = accuracy.rsub(accuracy.get(PLAIN.word, math.nan), axis=0)
    return pd.DataFrame(
        {
            "compression": f"`{method.word}`",
            "learning rate factor": f"{method.rate:g}",
            "test accuracy": f"{means['accuracy'][method.word]:.1%}",
            "points lost": report.spread(
                lost[method.word].dropna(), "{:+.1f}".format, statistics.fmean, " to "
            ),
            "ratio": f"{means['ratio'][method.word]:.1f}",
            "ratio in the last epoch": f"{means['last_ratio'][method.word]:.1f}",
        }
        for method in sorted_methods(outcomes)
    )


def sorted_methods(outcomes: Sequence[Outcome]) -> list[Method]:
    """Return the methods with outcomes: those of `METHODS` in order, then others."""
    words = {o.word for o in outcomes}
    known = [method for method in METHODS if method.word in words]
    return known + [Method(word) for word in sorted(words - {method.word for method in known})]


# ------------------------------------------------------------------------------- the command line
OWNER = "train_compressors.py"


@dataclass(frozen=True)
class Options:
    """Train small networks with each compressor, and write a page of their accuracies.

    Trainings that have results are not repeated.

    Args:
        tasks: tasks to train.
        methods: spec strings; by default all of the task.
        seeds: seeds of weights and order; by default those of the task.
        ranks: number of simulated ranks.
        anew: repeat trainings that have results.
        results: file of the results.
        output: page to write.
    """

    tasks: list[TaskName] = field(default_factory=lambda: list(get_args(TaskName)))
    methods: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    ranks: int = 4
    anew: bool = False
    results: Path = Path("runs/compressors.json")
    output: Path = Path("docs/compressor-accuracy.md")

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: if an option is not allowed.
        """
        check.integer(OWNER, "--ranks", self.ranks, least=2)
        for word in self.methods:
            try:
                _method(word)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"--methods has {word!r}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run trainings that have no result yet, save their results and write the page."""
    wanted: Options = read_options(Options, arguments, owner=OWNER)
    torch.set_num_threads(1)
    saved = _saved(wanted.results)
    for name in wanted.tasks:
        task = TASKS[name]
        try:
            data = load(task.data)
        except DataError as error:
            sys.exit(str(error))
        if task.images is not None:
            data = dataclasses.replace(data, train=data.train.chosen(task.images, 0))
        for method, seed in tqdm(_trainings(name, wanted, saved), desc=name, unit="training"):
            outcome = train(name, data, method, seed, wanted.ranks)
            saved[outcome.task, outcome.word, outcome.seed] = outcome
            write_json(wanted.results, {"outcomes": [asdict(o) for o in saved.values()]})
    report.write_page(wanted.output, page(list(saved.values())))
    print(f"page: {wanted.output}")


def _trainings(name: str, wanted: Options, saved: Saved) -> list[tuple[Method, int]]:
    """Return the requested (method, seed) pairs that have no result yet, seed by seed."""
    task = TASKS[name]
    methods = [_method(word) for word in wanted.methods] or task.chosen()
    pairs = [(method, seed) for seed in wanted.seeds or task.seeds for method in methods]
    if wanted.anew:
        return pairs
    plan = (wanted.ranks, task.epochs)
    outcomes = [o for o in saved.values() if (o.task, o.ranks, o.epochs) == (name, *plan)]
    done = {(o.word, o.seed) for o in outcomes}
    return [(method, seed) for method, seed in pairs if (method.word, seed) not in done]


def _method(word: str) -> Method:
    """Return the method of `METHODS` with the compression that `word` means, or a new one."""
    epoch, steps = 7, 9973  # numbers that no spec string has
    policy = repr(Method(word).policy(epoch, steps))
    same = (method for method in METHODS if repr(method.policy(epoch, steps)) == policy)
    return next(same, Method(word))


Saved = dict[tuple[str, str, int], Outcome]
"""Results by task, spec string and seed."""


def _saved(path: Path) -> Saved:
    """Return saved results."""
    rows = read_json(path)["outcomes"] if path.exists() else []
    return {(o.task, o.word, o.seed): o for o in (Outcome(**row) for row in rows)}


if __name__ == "__main__":
    main()
