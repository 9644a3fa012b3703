"""DataLens: a generator that learns from the noisy votes of teachers on all ranks.

"DataLens: Scalable Privacy Preserving Training via Gradient Compression and Aggregation" (Wang,
Wu, Long, Rimanic, Zhang & Li, CCS 2021). The defaults are ours, for two cores: no threshold, long
steps, few votes, many steps of the generator after each, and small perceptrons. The settings of the
paper are `configs/datalens_mnist_published.yaml` (epsilon = 1) and
`configs/datalens_mnist_published_10.yaml` (epsilon = 10).

Always ours: no votes of teachers on classes of which they have no image, and small networks.
Records are assigned to teachers by their number: an assignment by class would move other records
when the class of one record changes (and the released code uses records twice if a class runs out).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import accordion_hvd.torch as hvd
from accordion_hvd import PrivacyBudget, TopAgg, check
from accordion_hvd.comm.horovod.torch import HorovodCommunicator
from accordion_hvd.privacy import multiplier_for
from accordion_hvd.privacy.ballot import Ballot
from examples.command_line import stop
from examples.data import DataError, load
from examples.datalens import dpsgd, gan
from examples.pictures import figure
from examples.results import write_json
from examples.tables import as_text, format_table

Images = dpsgd.Images


@dataclass
class Settings:
    """Settings of a private generator and of its baselines.

    Args:
        name: name of the run; its results are in `<output>/<name>`.
        data: data set: digits (inside scikit-learn) or mnist.
        limit: largest number of images for training and testing; null: all.
        epsilons: privacy budgets; one generator is trained for each, and one without privacy.
        delta: delta of all budgets, well below 1 / (number of images).
        teachers: number of teachers on all ranks; each has its own part of the images.
        network: networks of generator and teachers; those of the paper are convolutional.
        teacher_width: hidden units of a teacher, or channels of its first convolution.
        teacher_steps: steps of the teachers before each vote.
        pretrain: steps of the teachers before the first vote.
        k: number of pixels of an image that a teacher votes on.
        sigma: standard deviation of the noise, in votes; null: the least for `steps` votes in each
            budget. With a number, training ends early if a budget is spent.
        clip: bound of a teacher's gradient for a pixel (the authors' max_grad, so small that votes
            are not random); null: the teacher's largest gradient.
        threshold: fraction of the teachers, in [0, 1), that a vote must exceed; null: the generator
            follows the mean vote.
        steps: votes of a private run (each on `batch` images).
        free_steps: votes of the run without privacy.
        batch: images of a vote; each image is a release.
        step_size: distance that a unanimous vote moves a pixel.
        student_steps: steps of the generator after each vote.
        width: hidden units of the generator, or channels before its last layer.
        noise: dimensions of the generator's noise.
        shade: mean pixel value of the initial images, in (-1, 1); a dark ground (-1) is not secret
            and saves votes.
        lr: learning rate of the generator and of convolutional teachers.
        baselines: also train a classifier and a generator (DP-GAN) by DP-SGD.
        dp_steps: steps of the baselines.
        seed: seed of weights and of the generator's noise; never of the private noise.
        output: folder for results.
        checkpoint: save a checkpoint after every tenth vote.
        resume: resume the run of this name from its last checkpoints.
        progress: show a progress bar.
    """

    name: str = "datalens"
    data: Literal["digits", "mnist"] = "digits"
    limit: int | None = None
    epsilons: list[float] = field(default_factory=lambda: [1.0, 10.0])
    delta: float = 1e-4
    teachers: int = 400
    network: Literal["perceptron", "convolutional"] = "perceptron"
    teacher_width: int = 16
    teacher_steps: int = 20
    pretrain: int = 60
    k: int = 48
    sigma: float | None = None
    clip: float | None = 1e-5
    threshold: float | None = None
    steps: int = 4
    free_steps: int = 30
    batch: int = 40
    step_size: float = 0.7
    student_steps: int = 30
    width: int = 128
    noise: int = 2
    shade: float = -0.9
    lr: float = 5e-3
    baselines: bool = True
    dp_steps: int = 200
    seed: int = 1
    output: str = "runs"
    checkpoint: bool = False
    resume: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        """Raises: ValueError if a value is out of range."""
        who = "settings"
        counts = ("teachers", "teacher_width", "pretrain", "steps", "free_steps", "batch")
        for key in (*counts, "student_steps", "width", "noise", "k", "dp_steps"):
            check.integer(who, key, getattr(self, key), least=1)
        for key in ("teacher_steps", "seed"):
            check.integer(who, key, getattr(self, key), least=0)
        if self.limit is not None:
            check.integer(who, "limit", self.limit, least=1)
        if not check.is_number(self.shade) or not abs(self.shade) < 1:
            check.refuse(who, "shade", self.shade, "a number between -1 and 1")
        for key in ("lr", "step_size"):
            if not check.is_number(getattr(self, key)) or not getattr(self, key) > 0:
                check.refuse(who, key, getattr(self, key), "a number above 0")
        for epsilon in self.epsilons:
            if not check.is_number(epsilon) or not epsilon > 0:
                check.refuse(who, "epsilons", self.epsilons, "numbers above 0")
            PrivacyBudget(epsilon, self.delta)
        check.one_of(who, "network", self.network, ("perceptron", "convolutional"))
        TopAgg(self.k, self.clip, 1.0 if self.sigma is None else self.sigma, self.threshold)
        if not re.fullmatch(r"[\w.+-]+", self.name) or set(self.name) == {"."}:
            check.refuse(who, "name", self.name, "made of letters, digits and . _ + -")

    def method(self, epsilon: float) -> TopAgg:
        """Return the aggregation of votes; for infinite `epsilon`, without noise."""
        options: dict[str, Any] = {"unit": "teacher", "contributors": self.teachers}
        if math.isinf(epsilon):
            return TopAgg(self.k, self.clip, 0.0, self.threshold, unprotected=True, **options)
        sigma = self.sigma
        if sigma is None:
            noise = multiplier_for(epsilon, self.delta, self.steps * self.batch)
            sigma = noise * 2 * self.k**0.5
        options["budget"] = PrivacyBudget(epsilon, self.delta)
        return TopAgg(self.k, self.clip, sigma, self.threshold, **options)


def run(settings: Settings) -> dict[str, Any]:
    """Train with these settings and return the content of `result.json`; collective."""
    try:
        data = load(settings.data, settings.limit, settings.seed)
    except DataError as error:
        stop(str(error))
    pixels = math.prod(data.shape)
    if settings.k > pixels:
        stop(f"settings: k is {settings.k}, but must be at most {pixels}, an image's pixels.")
    if len(data.train) < settings.teachers:
        stop(
            f"settings: teachers is {settings.teachers}, but must be at most {len(data.train)}, "
            "the number of images."
        )
    hvd.init()
    torch.set_num_threads(1)
    train, test = (_as_tensors(split.images, split.labels) for split in (data.train, data.test))
    rows, pictures = [], {}
    for epsilon in [*settings.epsilons, math.inf]:
        row, images = _generator(settings, epsilon, train, test, data.classes)
        if settings.baselines and not math.isinf(epsilon):
            row |= _baselines(settings, epsilon, train, test, data.classes)
        rows.append(row)
        pictures[_title(epsilon)] = images
    real = gan.accuracy_after(*train, test, data.classes, settings.seed)
    result = {"settings": asdict(settings), "ranks": hvd.size(), "real": real, "rows": rows}
    if hvd.rank() == 0:
        folder = Path(settings.output) / settings.name
        write_json(folder / "result.json", result)
        draw(pictures, data.shape[:2], folder / "sheet.png")
        print(as_text(table(result)))
        print(f"images: {folder / 'sheet.png'}")
    hvd.barrier()
    return result


def _as_tensors(images: np.ndarray, labels: np.ndarray) -> Images:
    flat = images.reshape(len(images), -1).astype(np.float32)
    most = 16.0 if flat.max() <= 16 else 255.0  # digits have 17 shades, others 256
    return torch.from_numpy(flat / most * 2 - 1), torch.from_numpy(labels)


def _title(epsilon: float | None) -> str:
    """Return the name of a budget; results in a file have None for infinity."""
    infinite = epsilon is None or math.isinf(epsilon)
    return "no privacy" if infinite else f"epsilon = {epsilon:g}"


# ------------------------------------------------------------------------------------ the generator
GROUP = 250  # convolutional teachers that compute together: 250 of them need about 1 GB


def my_teachers(settings: Settings, train: Images, classes: int) -> gan.Teachers | gan.Committee:
    """Return the teachers of this rank.

    Teacher t is on rank t modulo ranks, and record i belongs to teacher i modulo N. All teachers
    have the same number of records, and no record has two teachers; leftover records are unused.
    """
    number, share = settings.teachers, len(train[0]) // settings.teachers
    torch.manual_seed(settings.seed * 1000 + hvd.rank())
    index = torch.arange(number * share).reshape(share, number).t()[hvd.rank() :: hvd.size()]
    images, labels, width = train[0][index], train[1][index], settings.teacher_width
    if settings.network == "perceptron":
        return gan.Teachers(images, labels, classes, width)
    kind, lr = gan.ConvolutionalTeachers, settings.lr
    parts = zip(images.split(GROUP), labels.split(GROUP), strict=True)
    return gan.Committee([kind(*part, classes, width, lr) for part in parts])


def _generator(
    settings: Settings, epsilon: float, train: Images, test: Images, classes: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Train a generator at this epsilon; return its results and images of each class."""
    method, teachers = settings.method(epsilon), my_teachers(settings, train, classes)
    torch.manual_seed(settings.seed)
    student = Student(settings, _new_generator(settings, train, classes))
    name = f"datalens.{_title(epsilon)}".replace(" ", "")
    ballot = Ballot(method, HorovodCommunicator(), name)
    place = Path(settings.output) / settings.name / name / "checkpoint"
    if settings.resume and (place / "student.pt").exists():
        hvd.load_state(place, only=[ballot])
        student.load(place / "student.pt")
    steps = settings.free_steps if math.isinf(epsilon) else settings.steps
    show = settings.progress and hvd.rank() == 0
    with tqdm(total=steps, initial=student.step, desc=_title(epsilon), disable=not show) as bar:
        pretrained = False
        while student.step < steps and ballot.affords(settings.batch):
            for _ in range(settings.teacher_steps if pretrained else settings.pretrain):
                teachers.learn(*student.show())
            pretrained = True
            student.follow(teachers, ballot)
            if settings.checkpoint and (student.step % 10 == 0 or student.step == steps):
                hvd.save_state(place, only=[ballot])  # first, so that no spent privacy is lost
                student.save(place / "student.pt")
            bar.update()
    images, labels = student.draw(4000)
    accuracy = gan.accuracy_after(images, labels, test, classes, settings.seed)
    stats = ballot.exchange.stats()
    sheet = student.sheet(classes)
    row = {
        "epsilon": epsilon,
        "spent": stats["privacy"].get("epsilon"),
        "releases": student.step * settings.batch,
        "sigma": method.sigma,
        "sent": stats["sent"],
        "accuracy": accuracy,
    }
    return row, sheet


def _new_generator(settings: Settings, train: Images, classes: int) -> gan.Generator:
    convolutional = settings.network == "convolutional"
    kind = gan.ConvolutionalGenerator if convolutional else gan.Generator
    return kind(train[0].shape[1], classes, settings.noise, settings.width, settings.shade)


class Student:
    """The generator, which depends only on releases and is therefore equal on all ranks.

    Args:
        settings: settings of the run.
        generator: the initial generator.
    """

    def __init__(self, settings: Settings, generator: gan.Generator) -> None:
        self.settings, self.generator, self.step = settings, generator, 0
        self.random = torch.Generator().manual_seed(settings.seed)  # of public noise
        self.optimizer = torch.optim.Adam(generator.parameters(), settings.lr, betas=(0.5, 0.999))

    def draw(self, count: int) -> Images:
        """Return generated images and their labels."""
        z, labels = self.generator.draw(count, self.random)
        with torch.no_grad():
            return self.generator(z, labels), labels

    def show(self) -> Images:
        """Return a batch of generated images on which teachers train."""
        return self.draw(self.settings.batch)

    def follow(self, teachers: gan.Teachers | gan.Committee, ballot: Ballot) -> None:
        """Let the teachers vote on a batch of images, and train on the resulting images."""
        z, labels = self.generator.draw(self.settings.batch, self.random)
        images = self.generator(z, labels).detach()
        target = images + self.settings.step_size * ballot.vote(teachers.wishes(images, labels))
        for _ in range(self.settings.student_steps):
            loss = (self.generator(z, labels) - target).square().sum(1).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.step += 1

    def sheet(self, classes: int, columns: int = 10) -> torch.Tensor:
        """Return generated images of each class, (classes, columns, pixels)."""
        z = 2 * torch.rand(classes * columns, self.generator.noise, generator=self.random) - 1
        with torch.no_grad():
            images = self.generator(z, torch.arange(classes).repeat_interleave(columns))
        return images.reshape(classes, columns, -1)

    def save(self, path: Path) -> None:
        """Write the generator and its optimizer on rank 0; they depend only on releases."""
        if hvd.rank() == 0:
            state = {"step": self.step, "random": self.random.get_state()}
            state |= {
                "generator": self.generator.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            part = path.with_name(path.name + ".part")
            torch.save(state, part)
            part.replace(path)
        hvd.barrier()

    def load(self, path: Path) -> None:
        """Load what `save` has written, on every rank."""
        state = torch.load(path, weights_only=True)
        self.generator.load_state_dict(state["generator"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])
        self.step = state["step"]


# --------------------------------------------------------------------------------------- baselines
def _baselines(
    settings: Settings, epsilon: float, train: Images, test: Images, classes: int
) -> dict[str, float]:
    """Return the test accuracies of the baselines with the same budget."""
    accuracies = {}
    for method in ("dpsgd", "topagg"):
        budget = PrivacyBudget(epsilon, settings.delta)
        options = {"steps": settings.dp_steps, "seed": settings.seed}
        accuracy = dpsgd.train_classifier(method, train, test, classes, budget, **options)
        accuracies[f"{method}_classifier"] = accuracy
    torch.manual_seed(settings.seed)
    generator = _new_generator(settings, train, classes)
    random = torch.Generator().manual_seed(settings.seed)
    budget = PrivacyBudget(epsilon, settings.delta)
    dpsgd.train_gan(generator, train, budget, random, steps=settings.dp_steps)
    z, labels = generator.draw(4000, random)
    with torch.no_grad():
        images = generator(z, labels)
    accuracies["dpgan"] = gan.accuracy_after(images, labels, test, classes, settings.seed)
    return accuracies


# ------------------------------------------------------------------------------------------ results
COLUMNS = {
    "budget": "{budget}",
    "spent": "{spent:.3f}",
    "releases": "{releases}",
    "sigma": "{sigma:.0f}",
    "DataLens": "{accuracy:.1%}",
    "DP-GAN": "{dpgan:.1%}",
    "DP-SGD, classifier": "{dpsgd_classifier:.1%}",
    "TopAgg in its place": "{topagg_classifier:.1%}",
}


def table(result: dict[str, Any]) -> pd.DataFrame:
    """Return a table of budgets, spent privacy and test accuracies."""
    missing = dict.fromkeys(("dpgan", "dpsgd_classifier", "topagg_classifier"))
    rows = [missing | row | {"budget": _title(row["epsilon"])} for row in result["rows"]]
    return format_table(COLUMNS, rows)


def draw(pictures: dict[str, torch.Tensor], shape: tuple[int, ...], path: Path) -> None:
    """Draw one sheet of images for each budget, with a row for each class."""
    size = (3.2 * len(pictures), 3.5)
    with figure(path, size, columns=len(pictures), dpi=100) as (_, axes):
        for axis, (title, images) in zip(axes[0], pictures.items(), strict=True):
            classes, columns, _ = images.shape
            tiles = images.numpy().reshape(classes, columns, *shape)
            tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=1.0)
            sheet = tiles.transpose(0, 2, 1, 3).reshape(classes * (shape[0] + 1), -1)
            axis.imshow(sheet, cmap="gray", vmin=-1, vmax=1)
            axis.set_title(title)
            axis.set_axis_off()
