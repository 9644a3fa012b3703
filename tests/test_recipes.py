"""Tests that what docs/recipes.md and docs/getting-started/slurm.md show runs as it stands."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import need, ranks

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.nightly
@ranks(2, launcher="torchrun", limit=200)
def test_recipes_run_and_keep_ranks_equal() -> None:
    """On CPUs; the compiled model is not made faster, which would need a compiler."""
    import functools
    import tempfile

    import torch
    import torch.distributed as dist
    import transformers

    import accordion_hvd.torch as hvd
    from accordion_hvd import PowerSGD

    hvd.init()
    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Linear(40, 30)
            self.lora_a, self.lora_b = torch.nn.Linear(40, 8), torch.nn.Linear(8, 30)

        def forward(self, x: Any, labels: Any = None) -> Any:
            y = self.weight(x) + self.lora_b(self.lora_a(x))
            return y if labels is None else {"loss": (y - labels).square().mean()}

    def prepared() -> dict[str, Any]:
        torch.manual_seed(0)
        network = Layer()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.1), network.named_parameters(), PowerSGD(4)
        )
        torch.manual_seed(hvd.rank())
        batches = torch.randn(4, 8, 40)
        return {
            "hvd": hvd, "torch": torch, "PowerSGD": PowerSGD, "network": network,
            "optimizer": optimizer, "batches": batches, "model": Layer(),
            "rows": [{"x": x, "labels": torch.ones(30)} for x in torch.randn(32, 40)],
            "arguments": transformers.TrainingArguments(
                tempfile.mkdtemp(), use_cpu=True, ddp_backend="gloo", max_steps=3, report_to=[],
                per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True,
            ),
            "loss_of": lambda model, batch: model(batch).square().mean(),
        }  # fmt: skip

    for block in blocks("recipes.md", "python"):
        scope = prepared()
        model = scope["model" if "Trainer" in block else "network"]
        before = [p.detach().flatten().clone() for p in model.parameters()]
        exec(block.replace('"cuda"', '"cpu"'), scope)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        every = [torch.empty_like(after) for _ in range(2)]
        dist.all_gather(every, after)
        assert torch.equal(*every), block
        if "lora_" not in block:  # which steps in no loop
            assert not torch.equal(after, torch.cat(before)), block


SRUN = """#!/bin/bash
# Stands for srun: starts the tasks of one node, with the variables that Slurm gives them.
while [[ "$1" == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


MODULE = """
# Stands for environment modules: does what the two commands in the modulefile say.
module() {
    while read -r command name value; do case "$command" in
        prepend-path) export "$name=$value:${!name}" ;;
        setenv) export "$name=$value" ;;
    esac; done < "modules/$2"
}
"""

DOCKER = """#!/bin/bash
# Stands for docker: runs the command of a container here, in the folder that is mounted.
[[ "$1" == run ]] && shift
while [[ "$1" == -* ]]; do [[ "$1" == --rm ]] || shift; shift; done
exec "${@:2}"
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Make a folder with train.py and stand-ins; return the environment of commands there."""
    need("torchrun")
    (tmp_path / "train.py").write_text(blocks("getting-started/torchrun.md", "python")[0])
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    texts = {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n", "docker": DOCKER}
    for folder, programs in {".venv": {"python": python}, "stand_ins": texts}.items():
        (tmp_path / folder / "bin").mkdir(parents=True)
        for name, text in programs.items():
            (tmp_path / folder / "bin" / name).write_text(text)
            (tmp_path / folder / "bin" / name).chmod(0o755)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={tmp_path}/.venv/bin:$PATH")
    (tmp_path / "modules").mkdir()
    module = blocks("getting-started/slurm.md", "tcl")[0].replace("/shared/accordion_hvd", ".")
    (tmp_path / "modules/accordion_hvd").write_text(module)
    (tmp_path / "module.sh").write_text(MODULE)
    path = f"{tmp_path}/stand_ins/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1",
        "BASH_ENV": str(tmp_path / "module.sh"),
    }  # fmt: skip


def trained(output: str) -> bool:
    return output.count("epoch 8:") == 1 and "PowerSGD(rank=1)" in output


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize(
    ("number", "tasks", "cores", "load"),
    [(0, 1, 2, ". .venv/bin/activate"), (2, 2, 1, "module load accordion_hvd")],
    ids=["torchrun", "srun and a module"],
)
def test_scripts_for_slurm_run(
    number: int, tasks: int, cores: int, load: str, tmp_path: Path, site: dict[str, str]
) -> None:
    """The files with torchrun and with srun alone train with two ranks, on one node."""
    site |= {
        "SLURM_NNODES": "1", "SLURM_NTASKS": str(tasks), "SLURM_CPUS_PER_TASK": str(cores),
        "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost",
    }  # fmt: skip
    script = blocks("getting-started/slurm.md", "sh")[number]
    assert ". .venv/bin/activate" in script
    done = subprocess.run(
        ["bash", "-c", script.replace(". .venv/bin/activate", load)],
        cwd=tmp_path, env=site, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0 and trained(done.stdout), done.stdout + done.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.launch
def test_containers_on_two_machines_meet(tmp_path: Path, site: dict[str, str]) -> None:
    """Both machines are this one."""
    command = blocks("recipes.md", "sh")[-1]
    assert "--network host" in command and command.count("docker") == 1
    site["HEAD"] = "localhost"
    with (tmp_path / "output").open("w") as output:
        machines = [
            subprocess.Popen(
                ["bash", "-c", command], cwd=tmp_path, env=site, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )
            for _ in range(2)
        ]  # fmt: skip
    try:
        found = [machine.wait(timeout=280) for machine in machines]
    finally:
        for machine in machines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
    text = (tmp_path / "output").read_text()
    assert found == [0, 0] and trained(text), text
