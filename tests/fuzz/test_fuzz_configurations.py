"""Fuzz tests of the scripts' YAML configurations: valid settings, or an error of one line."""

from __future__ import annotations

import random
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz, seeds

from examples.config import Settings, parse_settings

pytest.importorskip("jsonargparse")

KEYS = [item.name for item in fields(Settings)]
VALUES = ["1", "0", "-1", "2.5", "1e999", ".nan", ".inf", "null", "true", "[]", "[1, 2]", "{}"]
VALUES += ["topk:0.1", "'Accordion(low=PowerSGD(4), high=PowerSGD(1))'", "cosine", "drops", "mlp"]
VALUES += ["{low: topk:0.1, high: topk:0.01}", "{low: 3}", "{x: 1}", "{low: {a: [1]}}", "text"]
VALUES += ["!!python/object/apply:os.system [echo]", "!!python/name:os.system", "!!binary aGk="]
VALUES += ["&a [*a]", "&a {low: *a}", "*b", "0x10", "1_0", "2020-01-01", "'..'", "../x", "9" * 40]
STRANGE = ["", "\t", "a: b: c", "[", "{" * 50, "- 1", "3", "null", "---\n---\n", "%YAML 9\n---"]
STRANGE += ["? [a]\n: 1", "[1]: 2", "1: 2", "null: 3", "<<: {lr: 1}", "config: x.yaml", "\x00"]
STRANGE += ["lr: 1\nlr: 2", "!!set {a}", "a: &x [" + "1," * 300 + "]", "lr: " + "[" * 400]


def text_of(seed: int) -> str:
    r = random.Random(seed)
    if r.random() < 0.2:
        return r.choice(STRANGE)
    rows = [f"{r.choice([*KEYS, 'x'])}: {r.choice(VALUES)}" for _ in range(r.randrange(1, 4))]
    text = "\n".join(rows)
    if r.random() < 0.2:
        at = r.randrange(len(text))
        text = text[:at] + r.choice(list("\0\t{}[]&*!|>%@:#- \n\x07é")) + text[at + 1 :]
    return text


def settings_of(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(text)
        return parse_settings(None, ["--config", str(path)])


@fuzz("YAML configurations", 0.01, seed=seeds)
def test_configurations(seed: int) -> None:
    try:
        settings = settings_of(text_of(seed))
    except ValueError as error:
        assert type(error) is ValueError and str(error).startswith("settings: "), repr(error)
        assert "\n" not in str(error)
        return
    settings.policy()
    assert all(settings.lr_at(epoch) >= 0 for epoch in range(3))
    Settings(**settings.as_dict())  # the values have the types that they should have
