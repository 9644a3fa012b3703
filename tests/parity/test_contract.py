"""What a script may do, in each form in which users meet the library: `contract.csv`.

A row has a subject, the forms that it is about, and a verdict: what the script does is honoured, or
refused in a sentence, by the check or test that is named; or it cannot be written, as the snippet
of that name shows.
"""

from __future__ import annotations

import ast
import csv
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FORMS = (
    "horovod", "torch.distributed", "ddp", "fsdp", "torchft", "averaging", "compressed",
    "fit", "loop", "tape",
)  # fmt: skip
"""`DistributedOptimizer` over two engines, hooks, `DistributedOptimizer` with an averaging method,
compressed optimizers; in Keras, `fit` and loops with a `DistributedOptimizer`, and tapes."""

VERDICTS = ("honoured", "refused", "cannot")

with open(Path(__file__).with_name("contract.csv"), newline="") as _file:
    ROWS = list(csv.DictReader(_file))
CELLS = [(row["subject"], form, row["verdict"]) for row in ROWS for form in row["forms"].split()]

SNIPPETS: dict[str, tuple[str, type[Exception], str]] = {
    "a variable that Keras' optimizer was not built with": (
        "import keras\n"
        "optimizer = keras.optimizers.SGD()\n"
        "one, two = keras.Variable([0.0]), keras.Variable([0.0])\n"
        "optimizer.build([one])\n"
        "optimizer.apply([one], [two])",
        ValueError,
        "unknown variable",
    ),
    "a gradient of Keras with memory of its own": (
        "import tensorflow as tf\nbuffer = tf.zeros(4)\nbuffer[:2] = 1",
        TypeError,
        "does not support item assignment",
    ),
    "a DistributedDataParallel without a process group": (
        "import torch\ntorch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
        ValueError,
        "process group",
    ),
    "an argument op": (
        "import torch\nfrom accordion_hvd import Dense, ddp\n"
        "ddp.register(torch.nn.Linear(2, 2), Dense(), op=1)",
        TypeError,
        "unexpected keyword argument 'op'",
    ),
    "an argument residual_dtype": (
        "import torch\nimport accordion_hvd.torch as hvd\nhvd.init()\n"
        "hvd.OnebitAdam([torch.nn.Parameter(torch.zeros(2))], residual_dtype='bfloat16')",
        TypeError,
        "unexpected keyword argument 'residual_dtype'",
    ),
}
"""Name -> what cannot be written, and the error with which it fails."""


def test_each_subject_has_a_verdict_for_each_form() -> None:
    assert {verdict for _, _, verdict in CELLS} <= set(VERDICTS)
    counts = Counter((subject, form) for subject, form, _ in CELLS)
    wanted = {(row["subject"], form) for row in ROWS for form in FORMS}
    assert set(counts) == wanted, wanted ^ set(counts)
    assert max(counts.values()) == 1, counts.most_common(3)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['subject']}-{row['forms']}")
def test_what_a_row_names_is_there(row: dict[str, str]) -> None:
    if row["verdict"] == "cannot":
        assert row["test"] in SNIPPETS
        return
    file, _, name = row["test"].partition("::")
    (path,) = TESTS.rglob(f"{file}.py")
    tree = ast.parse(path.read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", SNIPPETS)
def test_what_cannot_be_written_fails(name: str) -> None:
    code, kind, says = SNIPPETS[name]
    with pytest.raises(kind, match=f"(?i){says}"):
        exec(code, {})
