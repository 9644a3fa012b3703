"""Tests of DataLens: the teachers' data and votes, the privacy budget, and resumption."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import TORCH, installed
from test_scripts import ROOT, run

pytestmark = pytest.mark.skipif(not installed(TORCH), reason="torch not installed")


def settings(**more: Any) -> Any:
    pytest.importorskip("horovod")
    from examples.datalens.training import Settings

    return Settings(**more)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"epsilons": [0.0]}, "epsilons is [0.0]"),
        ({"epsilons": [math.inf]}, "epsilons is [inf]"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"teachers": 0}, "teachers is 0"),
        ({"k": 0}, "k is 0"),
        ({"threshold": 1.0}, "threshold is 1.0"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"lr": 0}, "lr is 0"),
        ({"sigma": 0.0}, "sigma is 0.0"),
        ({"network": "residual"}, "network is 'residual'"),
        ({"shade": -1}, "shade is -1"),
        ({"name": "../x"}, "name is '../x'"),
    ],
)
def test_settings_are_checked(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        settings(**more)
    assert told in str(refusal.value)


def test_the_config_is_understood() -> None:
    """The config is read, and each of its privacy budgets allows all votes of the training."""
    pytest.importorskip("jsonargparse")
    pytest.importorskip("horovod")
    from examples import config
    from examples.datalens.training import Settings

    path = ROOT / "configs" / "datalens_mnist.yaml"
    found = config.parse_settings("Train.", ["--config", str(path)], Settings)
    assert (found.name, found.data, found.delta) == (path.stem, "mnist", 1e-5)
    for epsilon in found.epsilons:
        method = found.method(epsilon)
        assert method.budget.left(method.mechanism) >= found.steps * found.batch


def test_the_noise_fits_the_budget() -> None:
    chosen = settings(steps=7, batch=11, k=24)
    method = chosen.method(10.0)
    assert method.budget.left(method.mechanism) >= 77
    assert method.budget.left(method.mechanism) < 85
    free = chosen.method(math.inf)
    assert free.sigma == 0 and free.budget is None


def test_no_record_has_two_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record belongs to at most one teacher, on one rank and on three.

    All records have the same label.
    """
    import torch

    chosen = settings(teachers=13)
    from examples.datalens import training as datalens

    images = torch.arange(100.0)[:, None].expand(100, 4)
    labels = torch.zeros(100, dtype=torch.int64)
    for ranks in (1, 3):
        seen = []
        for rank in range(ranks):
            monkeypatch.setattr(datalens.hvd, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(datalens.hvd, "size", lambda ranks=ranks: ranks)
            seen += datalens.my_teachers(chosen, (images, labels), 10).images[:, :, 0].tolist()
        assert len(seen) == 13 and {len(part) for part in seen} == {7}
        assert len({record for part in seen for record in part}) == 91
        # records are dealt to teachers in turn, whatever they contain
        assert {min(part) for part in seen} == set(range(13))


def test_teachers_do_not_know_of_each_other() -> None:
    """Replacing a record changes the wishes of its teacher only."""
    import torch

    from examples.datalens.gan import Teachers

    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.standard_normal((4, 5, 16)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, (4, 5)))
    fake, named = torch.from_numpy(rng.standard_normal((6, 16)).astype(np.float32)), labels[0, :1]
    named = torch.arange(6) % 3
    found = []
    for changed in (False, True):
        torch.manual_seed(0)
        mine = images.clone()
        mine[2, 1] += 3.0 * changed
        teachers = Teachers(mine, labels, 3, 8)
        for _ in range(5):
            teachers.learn(fake, named)
        found.append(teachers.wishes(fake, named).numpy())
    same = [np.array_equal(a, b) for a, b in zip(*found, strict=True)]
    assert same == [True, True, False, True]


def test_wishes_make_images_more_real() -> None:
    """Wishes move images so that teachers judge them more real; unseen classes have no wishes."""
    import torch

    from examples.datalens.gan import Teachers

    torch.manual_seed(0)
    images = torch.ones(2, 3, 16)
    teachers = Teachers(images, torch.zeros(2, 3, dtype=torch.int64), 2, 8)
    fake, named = -torch.ones(4, 16) + 0.1 * torch.randn(4, 16), torch.tensor([0, 0, 0, 1])
    for _ in range(50):
        teachers.learn(fake, named)
    wishes = teachers.wishes(fake, named)
    assert wishes[:, :3].sum() > 0 and not wishes[:, 3].any()
    before = teachers.judge(fake.expand(2, 4, 16), named)[:, :3]
    after = teachers.judge((fake + wishes), named)[:, :3]
    assert (after > before).all()


def ballot_without_noise(teachers: int, **more: Any) -> Any:
    from accordion_hvd import TopAgg
    from accordion_hvd.privacy.ballot import Ballot
    from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator

    method = TopAgg(sigma=0.0, unprotected=True, unit="teacher", contributors=teachers, **more)
    return Ballot(method, SimulatedCommunicator(Hub(1), 0, TORCH.xp))


PUBLISHED = {"threshold": 0.7, "step_size": 1e-3, "lr": 1e-3, "student_steps": 1, "shade": 0.0}
OURS: dict[str, Any] = {"threshold": None}


class Painters:
    """Ten teachers who want the same image: a wish is that image minus the present one."""

    def __init__(self, wanted: Any) -> None:
        self.wanted = wanted

    def wishes(self, images: Any, labels: Any) -> Any:
        return (self.wanted - images).expand(10, *images.shape)


@pytest.mark.parametrize("network", ["perceptron", "convolutional"])
@pytest.mark.parametrize("chosen", [PUBLISHED, OURS])
def test_votes_move_images_as_teachers_ask(network: str, chosen: dict[str, Any]) -> None:
    """Without noise, the pixels that were voted on move in the vote's direction on average."""
    import torch

    told = settings(network=network, batch=15, k=20, width=16, noise=4, **chosen)
    from examples.datalens.training import Student, _new_generator

    torch.manual_seed(0)
    wanted = 0.9 * torch.sign(torch.randn(64))
    student = Student(told, _new_generator(told, (torch.zeros(1, 64), torch.zeros(1)), 10))
    ballot = ballot_without_noise(10, k=told.k, clip=told.clip, threshold=told.threshold)
    for _ in range(3):
        random = torch.Generator()
        random.set_state(student.random.get_state())
        z, labels = student.generator.draw(told.batch, random)  # those of the coming vote
        with torch.no_grad():
            before = student.generator(z, labels)
            student_wish = wanted - before
        student.follow(Painters(wanted), ballot)
        with torch.no_grad():
            moved = student.generator(z, labels) - before
        voted = torch.zeros(before.shape, dtype=torch.bool)
        voted.scatter_(1, student_wish.abs().topk(told.k, 1).indices, True)
        along = (moved * torch.sign(student_wish))[voted]
        assert along.mean() > 0.3 * moved[voted].abs().mean() > 0
        assert along.mean() > 1e-4


def test_a_vote_is_a_step_of_the_published_length() -> None:
    """A vote is 1 or -1, as the wishes' sign, on k pixels of each image, and 0 elsewhere."""
    import torch

    wishes = torch.randn(1, 15, 64, generator=torch.Generator().manual_seed(0)).expand(10, 15, 64)
    vote = ballot_without_noise(10, k=20, clip=1e-5, threshold=0.7).vote(wishes)
    assert ((vote != 0).sum(1) == 20).all() and (vote * wishes[0] >= 0).all()
    assert set(vote.unique().tolist()) == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("network", ["perceptron", "convolutional"])
def test_images_become_more_real_to_their_teachers(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, ten votes raise over 90 % of the teachers' judgements of generated images."""
    import torch

    told = settings(
        network=network, teachers=8, teacher_width=4, width=16, noise=4, k=20, threshold=0.5,
        step_size=0.1, student_steps=5, batch=20, lr=2e-3, shade=0.0,
    )  # fmt: skip
    from examples.datalens import training as datalens

    torch.manual_seed(0)
    labels = torch.arange(160) // 8 % 2  # each teacher has both classes
    images = (0.8 * torch.sign(torch.randn(2, 64)))[labels] + 0.1 * torch.randn(160, 64)
    monkeypatch.setattr(datalens.hvd, "rank", lambda: 0)
    monkeypatch.setattr(datalens.hvd, "size", lambda: 1)
    teachers = datalens.my_teachers(told, (images, labels), 2)
    student = datalens.Student(told, datalens._new_generator(told, (images, labels), 2))
    for _ in range(60):
        teachers.learn(*student.show())
    z, named = student.generator.draw(40, torch.Generator().manual_seed(1))
    groups = getattr(teachers, "groups", [teachers])

    def judged() -> torch.Tensor:
        with torch.no_grad():
            fake = student.generator(z, named)
            return torch.cat([g.judge(fake.expand(len(g), *fake.shape), named) for g in groups])

    before = judged()
    ballot = ballot_without_noise(8, k=told.k, clip=told.clip, threshold=told.threshold)
    for _ in range(10):
        student.follow(teachers, ballot)
    assert (judged() > before).float().mean() > 0.9


def test_groups_of_teachers_wish_as_each_would_alone() -> None:
    """Teachers with stacked convolutions judge images as the network of each alone would."""
    import torch

    from examples.datalens.gan import ConvolutionalTeachers

    torch.manual_seed(0)
    images, labels = torch.randn(3, 4, 64), torch.arange(12).reshape(3, 4) % 2
    teachers = ConvolutionalTeachers(images, labels, 2, 3)
    with torch.no_grad():
        for weight in teachers.weights:
            weight.copy_(torch.randn(weight.shape))
    fake, named = torch.randn(5, 64), torch.arange(5) % 2
    found = teachers.judge(fake.expand(3, 5, 64), named)
    for t in range(3):
        one, bias, two, offset, chosen, last = (weight[t].detach() for weight in teachers.weights)
        conv = torch.nn.functional.conv2d
        x = conv(fake.reshape(5, 1, 8, 8), one.reshape(3, 1, 5, 5), bias, stride=2, padding=2)
        x = torch.where(x > 0, x, 0.2 * x)
        x = conv(x, two.reshape(6, 3, 5, 5), offset, stride=2, padding=2)
        x = torch.where(x > 0, x, 0.2 * x).reshape(5, -1)
        wanted = (x * chosen[named]).sum(1) + last[named]
        torch.testing.assert_close(found[t].detach(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "epsilon", "images"),
    [("datalens_mnist_published", 1.0, 1300), ("datalens_mnist_published_10", 10.0, 1643)],
)
def test_the_published_settings(name: str, epsilon: float, images: int) -> None:
    """The configs have the published settings and as many votes as the authors' accounting allows.

    The orders and the conversion are those of the authors' code.
    """
    pytest.importorskip("jsonargparse")
    pytest.importorskip("horovod")
    from examples import config
    from examples.datalens.training import Settings

    path = ROOT / "configs" / f"{name}.yaml"
    found = config.parse_settings("Train.", ["--config", str(path)], Settings)
    assert (found.name, found.network, found.epsilons) == (name, "convolutional", [epsilon])
    assert (found.student_steps, found.teacher_steps, found.step_size) == (1, 2, 1e-3)
    assert images - found.batch < found.steps * found.batch <= images
    method = found.method(epsilon)
    published = {1.0: (200, 5000, 0.7), 10.0: (300, 800, 0.2)}[epsilon]
    assert (method.k, method.sigma, method.threshold) == published
    assert (method.contributors, method.clip, found.delta) == (4000, 1e-5, 1e-5)
    orders = np.array([1.1, *range(2, 200)])
    renyi = found.steps * found.batch * 2 * found.k * orders / found.sigma**2
    assert (renyi + math.log(1e5) / (orders - 1)).min() <= epsilon
    assert method.budget.left(method.mechanism) >= found.steps * found.batch


def test_the_script_refuses_in_a_sentence() -> None:
    done = run("train_datalens.py", "--epsilons", "[-1]")
    assert done.returncode == 2
    assert "settings: epsilons is [-1.0], but must be numbers above 0." in done.stderr
    done = run("train_datalens.py", "--teachers", "5000")
    assert done.returncode == 2 and "teachers is 5000, but must be at most 1437" in done.stderr


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.timeout(240)
def test_two_ranks_train_and_resume(tmp_path: Path) -> None:
    """The privacy budget holds, and a run that is resumed after it is spent releases nothing."""
    pytest.importorskip("horovod")
    pytest.importorskip("sklearn")
    launcher = Path(sys.executable).parent / "horovodrun"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [launcher, "--gloo", "-np", "2", sys.executable, program, str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "run" / "sheet.png").read_bytes()[:4] == b"\x89PNG"
    written = [json.loads((tmp_path / f"{part}.json").read_text()) for part in ("whole", "rest")]
    first, resumed = (result["rows"][0] for result in written)
    assert 9 < first["spent"] <= 10 and first["releases"] == 60
    assert {"dpgan", "dpsgd_classifier", "topagg_classifier"} <= set(first)
    assert (resumed["spent"], resumed["releases"]) == (first["spent"], 60)
    assert resumed["sent"] == 0, "nothing is left to be released"


PROGRAM = """
import sys
from pathlib import Path
from examples.datalens.training import Settings, hvd, run
from examples.results import write_json
few = dict(steps=3, batch=20, teacher_steps=1, free_steps=2, teachers=21, dp_steps=3, pretrain=3)
few |= dict(student_steps=2)
few |= dict(name="run", output=sys.argv[1], epsilons=[10.0], progress=False, checkpoint=True)
whole = run(Settings(**few))
rest = run(Settings(**few, resume=True, baselines=False))
if hvd.rank() == 0:
    for name, result in (("whole", whole), ("rest", rest)):
        write_json(Path(sys.argv[1], f"{name}.json"), result)
"""
