"""Fuzz tests of spec strings: each is understood, or refused with a clear error."""

from __future__ import annotations

import inspect
import random
from typing import Any

from fuzzing import fuzz, seeds
from hypothesis import strategies as st

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.policies import Policy
from accordion_hvd.resolve import names, resolve

PARAMETERS = {name: list(inspect.signature(kind).parameters) for name, kind in names().items()
              if name != "privacybudget"}  # fmt: skip
# PrivacyBudget searches for its noise, which takes a second.
VALUES = ["1", "0", "-1", "0.5", "1e400", "nan", "inf", "-inf", "None", "True", "'a'", "b'a'"]
VALUES += ["1j", "[]", "[1]", "{}", "{1:2}", "{[]:1}", "{**{}}", "()", "...", "10**9", "9" * 30]
VALUES += ["'float16'", "'local'", "x", "*[1]", "**{'ratio':0.5}", "lambda: 0", "f'{1}'", "-'a'"]
VALUES += ["__import__('os')", "[i for i in range(9)]", "2147483648", "'ring'", "print", "1_0"]
STRANGE = ["\0", "topk\0", "\ud800", "topk:'\udcff'", "é:1", "(" * 999, "[" * 300 + "]" * 300]
STRANGE += ["-" * 1900 + "1", "topk:" + "1+" * 900 + "1", "topk:" * 300, "ef21(" * 350]
STRANGE += ["1" * 1999, "a" * 10**6, "topk:" + "-" * 10**5, "", " ", ":", "topk:", "topk::"]
CHARACTERS = list("(),:={}[]'\"\0\\ \n*-.1aé\ud800")


def call(r: random.Random, depth: int) -> str:
    """Return a call in Python's syntax, which is wrong in most cases."""
    name = r.choice(list(PARAMETERS))
    arguments = []
    for _ in range(r.randrange(4)):
        nested = depth and r.random() < 0.35
        value = call(r, depth - 1) if nested else r.choice(VALUES)
        key = r.choice([*PARAMETERS[name], "x"])
        arguments.append(f"{key}={value}" if r.random() < 0.5 else value)
    return f"{name}({', '.join(arguments)})"


def short(r: random.Random) -> str:
    """Return a spec string in the short form with a colon."""
    name = r.choice(list(PARAMETERS))
    words = [r.choice([*PARAMETERS[name], *VALUES]) for _ in range(r.randrange(1, 4))]
    return f"{name}:{','.join(words)}"


def text_of(seed: int) -> str:
    r = random.Random(seed)
    text = r.choice([lambda: call(r, 2), lambda: short(r), lambda: r.choice(STRANGE)])()
    if r.random() < 0.2:
        at = r.randrange(len(text) + 1)
        text = text[:at] + r.choice(CHARACTERS) + text[at + r.randrange(3) :]
    return text


def check(text: str) -> None:
    found: Any = None
    try:
        found = resolve(text).serving
    except ValueError as error:
        assert type(error) is ValueError and str(error).endswith("."), repr(error)
    except TypeError as error:  # as documented, for values of another type
        assert "must be a Compressor" in str(error)
    if found is not None:
        assert isinstance(found, (Policy, Averaging)) and repr(found)


@fuzz("spec strings of wrong calls", 0.3, seed=seeds)
def test_calls(seed: int) -> None:
    check(text_of(seed))


@fuzz("spec strings of any characters", 0.055, text=st.text(max_size=40))
def test_texts(text: str) -> None:
    check(text)
