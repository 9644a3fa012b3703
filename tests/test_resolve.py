"""Tests of the argument `compression`, without a framework: its meanings, and unsuitable uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accordion_hvd import (
    COLD,
    DGC,
    EF21,
    WAGMA,
    Accordion,
    Dense,
    Diana,
    DiLoCo,
    Displacement,
    Fixed,
    Goodput,
    LocalSGD,
    PowerSGD,
    TopAgg,
    TopK,
)
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.optimizers import OnebitAdam
from accordion_hvd.resolve import VARIABLE, Resolved, as_policy, resolve
from accordion_hvd.validate import Use, check_adasum, check_arguments, check_passes, validate


class NoneCompressor:
    """Stand-in for `hvd.Compression.none`."""

    __module__ = "horovod.torch.compression"

    compress = decompress = staticmethod(lambda tensor, *context: tensor)


class Half(NoneCompressor):
    """Stand-in for another compression of Horovod."""


METHODS: list[tuple[Any, Averaging]] = [
    ("wagma:4,period=7", WAGMA(4, 7)),
    ("LocalSGD(3)", LocalSGD(3)),
    (DiLoCo, DiLoCo()),
    (WAGMA(8), WAGMA(8)),
]
POLICIES: list[tuple[Any, str]] = [
    ("topk:0.1", "Fixed(TopK(ratio=0.1))"),
    (TopK, f"Fixed({TopK()!r})"),
    (TopK(0.1), "Fixed(TopK(ratio=0.1))"),
    (Fixed(Dense()), "Fixed(Dense())"),
    ("none", "Fixed(Dense())"),
    (" None ", "Fixed(Dense())"),
    (NoneCompressor, "Fixed(Dense())"),
    (Half, "Fixed(HorovodCompression(Half))"),
]


@pytest.mark.parametrize(("compression", "means"), METHODS)
def test_averaging_methods(compression: Any, means: Averaging) -> None:
    assert resolve(compression).serving == means


@pytest.mark.parametrize(("compression", "means"), POLICIES)
def test_policies(compression: Any, means: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert repr(resolve(compression).serving) == means


@pytest.mark.parametrize(("word", "means"), [x for x in METHODS + POLICIES if type(x[0]) is str])
def test_environment(word: str, means: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is parsed like the argument, but only used if a script names no compression."""
    monkeypatch.setenv(VARIABLE, word)
    assert repr(resolve(NoneCompressor).serving) == (
        means if isinstance(means, str) else repr(means)
    )
    assert repr(resolve(Half).serving) == "Fixed(HorovodCompression(Half))"
    assert repr(resolve(Dense()).serving) == "Fixed(Dense())"


@pytest.mark.parametrize(
    ("word", "says"),
    [("topk:7", "TopK: ratio is 7"), ("zip", "'zip' is not known"), ("topk:(", "not understood")],
)
def test_a_wrong_variable_is_named(word: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, word)
    with pytest.raises(ValueError, match=says) as refusal:
        resolve(NoneCompressor)
    assert str(refusal.value).startswith(f"{VARIABLE} is {word!r}: ")


@pytest.mark.parametrize("wrong", [3, object(), int, None])
def test_unknown_objects_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be a Compressor such as"):
        resolve(wrong)


# ------------------------------------------------------------------------------ the validator
USE = Use("accordion_hvd.torch", ranks=4, members=4, optimizer="SGD")


@pytest.mark.parametrize("kind", [EF21, Diana])
def test_a_class_in_place_of_an_instance_is_named(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"compression is the class {kind.__name__}, but must be"):
        resolve(kind)


def test_a_gate_names_optimizers_that_were_not_measured(recwarn: Any) -> None:
    gated = resolve(Fixed(TopK(0.1), gate="auto"))
    for optimizer in ("SGD", "Adam", "AdamW"):
        validate(gated, replace(USE, optimizer=optimizer))
    validate(resolve(TopK(0.1)), replace(USE, optimizer="Rprop"))
    validate(gated, replace(USE, optimizer="NoneType", knows_optimizer=False))
    assert not recwarn.list
    with pytest.warns(match=r"was measured with SGD, Adam, AdamW, not with Rprop"):
        validate(gated, replace(USE, optimizer="Rprop"))


MIXED = Accordion(low=Dense(), high=WAGMA(4), window=5)
GROWING = Accordion(batch_size=(6, 12), window=5)
VOTES: dict[str, Any] = {"k": 5, "clip": None, "sigma": 20.0}
DISPLACED = Displacement(Dense(), TopK(0.1), window=5)
BLIND = replace(USE, owner="ddp.register", knows_optimizer=False)
SUITS: list[tuple[Any, Use]] = [
    (TopK(0.1), replace(USE, plain=False, total=True, skip=("w",), passes=3)),
    (DGC(), USE),
    (WAGMA(4), replace(USE, plain=False)),
    (COLD("ring", 0.5, TopK(0.3)), USE),
    (MIXED, replace(USE, plain=False)),
    (GROWING, replace(USE, ranks=3, members=3)),
    (TopAgg(**VOTES), USE),
    (DISPLACED, USE),
    (Accordion(low=Dense(), high=TopK(0.1), window=5), BLIND),
]
TAPE = replace(USE, owner="DistributedGradientTape", takes_steps=False)
REFUSED: list[tuple[Any, Use, str]] = [
    (DGC(), replace(USE, plain=False), "DGC.* returns finished updates.* SGD has momentum"),
    (OnebitAdam(), USE, "OnebitAdam is an optimizer: use accordion_hvd.torch.OnebitAdam"),
    (Fixed(WAGMA()), USE, "compression is Fixed.*must be one that averages gradients"),
    (WAGMA(), replace(USE, total=True), "op is 'hvd.Sum'.*hvd.Average with WAGMA"),
    (WAGMA(), replace(USE, skip=("w",)), r"skip is \('w',\).*left out with WAGMA"),
    (MIXED, replace(USE, total=True), "op is 'hvd.Sum'.*hvd.Average with WAGMA"),
    (COLD("ring", 0.5, TopK(0.3)), replace(USE, plain=False), "plain SGD.*SGD takes other steps"),
    (COLD("ring", 0.5, TopK(0.3)), replace(USE, one_rate=False), "one learning rate"),
    (GROWING, USE, r"batch_size is \(6, 12\).*multiples of 4, the number of ranks"),
    (TopAgg(**VOTES), replace(USE, members=2), "must serve all 4 ranks.* process set has 2"),
    (WAGMA(), TAPE, "DistributedGradientTape: compression is WAGMA.*works with accordion_hvd"),
    (MIXED, TAPE, "DistributedGradientTape: compression is Accordion.*one without WAGMA"),
    (GROWING, TAPE, "one without batch_size: a tape takes no steps"),
    (DISPLACED, BLIND, "compression is Displacement.*ddp.register does not know the optimizer"),
    (Goodput([Dense(), TopK(0.1)], window=5), BLIND, "compression is Goodput.*no step sizes"),
]


def resolved(compression: Any) -> Resolved:
    return Resolved(compression) if isinstance(compression, Fixed) else resolve(compression)


@pytest.mark.parametrize(("compression", "use"), SUITS)
def test_good_uses_pass(compression: Any, use: Use) -> None:
    validate(resolved(compression), use)


@pytest.mark.parametrize(("compression", "use", "says"), REFUSED)
def test_bad_uses_are_refused_in_one_sentence(compression: Any, use: Use, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        validate(resolved(compression), use)
    assert "\n" not in str(refusal.value)


def test_horovods_arguments() -> None:
    known = ("average", "sum", "adasum")
    check_arguments("sum", known, 1.0, 3)
    check_arguments("average", known, 2.0, [["w"]])
    for arguments, says in (
        (("max", known, 1.0, None), "op is 'max'"),
        (("sum", known, 2.0, None), "gradient_predivide_factor not supported"),
        (("sum", known, 1.0, -1), "groups is -1"),
    ):
        with pytest.raises(ValueError, match=says):
            check_arguments(*arguments)
    check_adasum(NoneCompressor)
    for ours in (TopK(0.1), PowerSGD, "topk", MIXED, WAGMA()):
        with pytest.raises(ValueError, match="op=hvd.Adasum cannot be combined"):
            check_adasum(ours)


def test_passes() -> None:
    check_passes(2)
    check_passes(2, as_policy(TopAgg(**VOTES)))
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="backward_passes_per_step is"):
            check_passes(wrong)
    several = as_policy(TopAgg(**VOTES | {"unit": "teacher", "contributors": 2}))
    with pytest.raises(ValueError, match="backward_passes_per_step is 2, but must be 1 with"):
        check_passes(2, several)
