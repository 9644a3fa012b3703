"""Tests of the signatures of compressed optimizers, which type checkers read in the code."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from accordion_hvd import optimizers

OWN = {"torch": {"params", "lr", "weight_decay"}, "tensorflow.keras": {"learning_rate"}}
"""Arguments of each framework that are neither the rule's nor in `Options`."""


def classes(framework: str) -> dict[str, Any]:
    pytest.importorskip(framework.partition(".")[0])
    pytest.importorskip("horovod")
    module = importlib.import_module(f"accordion_hvd.{framework}.compressed")
    return {name: getattr(module, name) for name in module.__all__}


def arguments_of(rule: Any, framework: str) -> dict[str, tuple[str, Any]]:
    """Return the types and defaults of a rule's arguments, by the framework's names."""
    signature = inspect.signature(rule).parameters
    found = {name: (p.annotation, p.default) for name, p in signature.items()}
    if framework != "torch":
        betas, eps = found.pop("betas", None), found.pop("eps", None)
        found |= {f"beta_{i}": ("float", x) for i, x in enumerate(betas[1], 1)} if betas else {}
        found |= {"epsilon": eps} if eps else {}
    return found


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "tensorflow.keras"])
def test_what_stands_in_for_horovod_has_its_arguments_and_defaults(framework: str) -> None:
    pytest.importorskip(framework.partition(".")[0])
    theirs = pytest.importorskip(f"horovod.{framework}")
    ours, compared = importlib.import_module(f"accordion_hvd.{framework}"), 0
    for name, function in inspect.getmembers(ours, callable):
        wrapped = getattr(theirs, name, function)
        if wrapped is not function and not inspect.isclass(function):
            mine, wanted = (inspect.signature(x).parameters for x in (function, wrapped))
            wanted = {
                x: p for x, p in wanted.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            }
            assert {*mine} >= {*wanted}, name
            # None stands for values of Horovod's own, such as its compression or all ranks.
            other = {x for x in wanted if mine[x].default not in (wanted[x].default, None)}
            assert not other, name
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("framework", OWN)
def test_signatures_have_the_arguments_of_the_rules(framework: str) -> None:
    """Names, types and defaults are the rule's; `Options` has the other keywords.

    Positional arguments have the places that the inherited constructor expects.
    """
    found = classes(framework)
    assert {*found} == {*optimizers.NATIVE, *optimizers.ALIASES}
    module = importlib.import_module(f"accordion_hvd.{framework}.optimizers")
    options = {name: x.__forward_arg__ for name, x in module.Options.__annotations__.items()}
    places = [*inspect.signature(module.CompressedOptimizer.__init__).parameters][1:]
    for name, kind in found.items():
        signature = inspect.signature(kind).parameters
        wanted = arguments_of(getattr(optimizers, name), framework)
        assert {*signature} == OWN[framework] | {*wanted, *options}, name
        assert {x: (signature[x].annotation, signature[x].default) for x in wanted} == wanted, name
        assert {x: signature[x].annotation for x in options} == options, name
        positional = [x for x, p in signature.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == places[: len(positional)], name
        summary, _, _ = kind.__doc__.partition("\n")
        assert kind._rule.__doc__.startswith(summary) and summary in inspect.getsource(kind), name


@pytest.mark.parametrize("framework", OWN)
def test_every_argument_of_a_signature_is_accepted(framework: str) -> None:
    """A constructor accepts each argument of its signature, with the default value.

    The signature of a user's subclass is that of the subclass's own constructor.
    """
    found = classes(framework)
    module = importlib.import_module(f"accordion_hvd.{framework}")
    module.init()
    for kind in found.values():
        signature = inspect.signature(kind)
        given = {p.name: p.default for p in signature.parameters.values() if p.name != "params"}
        optimizer = kind(**given, **parameters(framework))
        assert optimizer.rule == kind(**parameters(framework)).rule

    class Own(module.OnebitAdam):
        def __init__(self, rate: float, **options: object) -> None:
            super().__init__(**options)

    shown = inspect.signature(Own).parameters
    assert "warmup_steps" not in shown and (framework != "torch" or "rate" in shown)


def parameters(framework: str) -> dict[str, object]:
    if framework != "torch":
        return {}
    torch = importlib.import_module("torch")
    return {"params": [torch.nn.Parameter(torch.zeros(3, 4))]}
