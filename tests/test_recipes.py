"""Tests that what docs/recipes.md and docs/getting-started/slurm.md show runs as it stands."""

from __future__ import annotations

import os
import re
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


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.parametrize(("number", "tasks", "cores"), [(0, 1, 2), (2, 2, 1)])
def test_scripts_for_slurm_run(number: int, tasks: int, cores: int, tmp_path: Path) -> None:
    """The files with torchrun and with srun alone train with two ranks, on one node."""
    need("torchrun")
    (tmp_path / "train.py").write_text(blocks("getting-started/torchrun.md", "python")[0])
    (tmp_path / "bin").mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    texts = {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n", "python": python}
    for name, text in texts.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "SLURM_NNODES": "1", "SLURM_NTASKS": str(tasks),
        "SLURM_CPUS_PER_TASK": str(cores), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost",
        "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", blocks("getting-started/slurm.md", "sh")[number]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("epoch 8:") == 1 and "PowerSGD(rank=1)" in done.stdout, done.stdout
