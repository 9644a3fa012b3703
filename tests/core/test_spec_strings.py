"""Tests of spec strings: words and calls are understood, and every `repr` can be parsed again."""

from __future__ import annotations

import math
from typing import Any

import pytest
from cases import CASES
from hypothesis import given
from hypothesis import strategies as st

from accordion_hvd import Accordion, Dense, Fixed, Policy, PowerSGD, RandomK, TopK, TwoLevel, parse
from accordion_hvd.resolve import as_policy


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compressors_read_back(case: Any) -> None:
    assert parse(repr(case.compressor)) == case.compressor
    name, bracket, rest = repr(case.compressor).partition("(")
    assert parse(name.upper() + bracket + rest) == case.compressor


@pytest.mark.parametrize(
    "policy",
    [
        Accordion(low=PowerSGD(4), high=PowerSGD(1)),
        Accordion(low=Dense(), high=TopK(0.01), threshold=math.inf, window=7, lr_drop=None),
        Accordion(low=Dense(), high=TopK(0.5), signal="reduced", overrides={"head*": Dense()}),
        Fixed(TopK(0.1)),
        Fixed(TopK(0.1), overrides={"a.*": PowerSGD(3), "b": Dense()}),
    ],
    ids=repr,
)
def test_policies_read_back(policy: Policy) -> None:
    again = parse(repr(policy))
    assert type(again) is type(policy)
    assert repr(again) == repr(policy)


@given(ratio=st.floats(0, 1, exclude_min=True), rank=st.integers(1, 10**6))
def test_arguments_read_back(ratio: float, rank: int) -> None:
    assert parse(repr(TopK(ratio))) == TopK(ratio)
    assert parse(f"randomk:{ratio!r}") == RandomK(ratio)
    assert parse(f"powersgd:rank={rank}") == PowerSGD(rank)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dense", Dense()),
        (" TopK ", TopK()),
        ("topk:0.05", TopK(0.05)),
        ("topk:ratio=0.05", TopK(0.05)),
        ("PowerSGD:4", PowerSGD(4)),
        ("powersgd(rank=4)", PowerSGD(4)),
        ("powersgd:", PowerSGD()),
        ("powersgd:4,alternate", PowerSGD(4, alternate=True)),
        ("powersgd(alternate)", PowerSGD(alternate=True)),
        ("powersgd:4,wire='float16'", PowerSGD(4, wire="float16")),
        ("powersgd:4,alternate=False", PowerSGD(4)),
        ("twolevel:powersgd:1,alternate", TwoLevel(PowerSGD(1, alternate=True))),
    ],
)
def test_words(word: str, meant: Any) -> None:
    assert parse(word) == meant


def test_a_policy_in_a_word() -> None:
    policy = parse("accordion:low=powersgd(4),high=powersgd,threshold=0.3,window=10")
    assert isinstance(policy, Accordion)
    assert (policy.low, policy.high) == (PowerSGD(4), PowerSGD())
    assert (policy.threshold, policy.window) == (0.3, 10)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("zip", "'zip' is not known; allowed are accordion, "),
        ("powersdg:4", "did you mean 'powersgd'? allowed are accordion, "),
        ("topk:2", "TopK: ratio is 2"),
        ("topk:0.1,0.2", "TopK: wire is 0.2"),
        ("topk:0.1,'float16',3,4", "topk:0.1,'float16',3"),
        ("topk:rank=3", "rank"),
        ("topk:alternate", "'alternate' is not known"),
        ("powersgd:4,rank", "'rank' is not known"),
        ("powersgd:4,True,alternate", "alternate"),
        ("topk:(", "is not understood"),
        ("", "is not understood"),
        ("topk:__import__('os').getcwd()", "not"),
        ("__import__('os')", "'__import__' is not known"),
        ("topk:1+1", "is not"),
        ("topk:[x for x in (1,)]", "is not understood"),
        ("accordion(low=topk)", "high is missing"),
        ("accordion(low=topk, high=3)", "."),
    ],
)
def test_nonsense_is_refused(word: str, says: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refusal:
        parse(word)
    assert says in str(refusal.value)


def test_as_policy() -> None:
    assert repr(as_policy("topk:0.1")) == "Fixed(TopK(ratio=0.1))"
    assert repr(as_policy(TopK)) == repr(as_policy(TopK()))
    policy = Accordion(low=Dense(), high=TopK())
    assert as_policy(policy) is policy
    for wrong in (3, None, object(), int):
        with pytest.raises(TypeError, match="must be a Compressor such as"):
            as_policy(wrong)
