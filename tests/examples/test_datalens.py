"""DataLens: whose data a teacher sees, what a run leaves behind, and what it does when resumed."""

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
        ({"shade": -1}, "shade is -1"),
        ({"name": "../x"}, "name is '../x'"),
    ],
)
def test_settings_are_checked(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        settings(**more)
    assert told in str(refusal.value)


def test_the_config_is_understood() -> None:
    """With as many votes as its budgets allow."""
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
    """Whatever the number of ranks, and though classes run out."""
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
        # a teacher's part does not depend on what others' records are
        assert {min(part) for part in seen} == set(range(13))


def test_teachers_do_not_know_of_each_other() -> None:
    """A record that is replaced changes one teacher's wishes, and no other's."""
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
    """The negative gradient of the generator's loss; none for classes that a teacher never saw."""
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


def test_the_script_refuses_in_a_sentence() -> None:
    done = run("train_datalens.py", "--epsilons", "[-1]")
    assert done.returncode == 2
    assert "settings: epsilons is [-1.0], but must be numbers above 0." in done.stderr
    done = run("train_datalens.py", "--teachers", "5000")
    assert done.returncode == 2 and "teachers is 5000, but must be at most 1437" in done.stderr


@pytest.mark.launch
@pytest.mark.timeout(240)
def test_two_ranks_train_and_resume(tmp_path: Path) -> None:
    """The budget holds; a run that is resumed when all is spent spends no more."""
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
