"""Tests of the signatures of compressed optimizers: at run time, and in stubs."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from scripts import write_stubs

FRAMEWORKS = [*write_stubs.HEADS]


def needed(framework: str) -> None:
    pytest.importorskip(framework.partition(".")[0])
    pytest.importorskip("horovod")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_stubs_are_up_to_date(framework: str) -> None:
    needed(framework)
    written = ast.parse(write_stubs.path_of(framework).read_text())
    wanted = ast.parse(write_stubs.stub(framework))
    assert ast.dump(written) == ast.dump(wanted), "run python scripts/write_stubs.py"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_signatures_of_stubs_are_those_at_run_time(framework: str) -> None:
    """Arguments have the same names, order, kinds and defaults in the stubs and at run time."""
    needed(framework)
    tree = ast.parse(write_stubs.path_of(framework).read_text())
    module = importlib.import_module(f"accordion_hvd.{framework}")
    found = set()
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        (init,) = (x for x in node.body if isinstance(x, ast.FunctionDef))
        arguments, signature = init.args, inspect.signature(getattr(module, node.name))
        named = signature.parameters.values()
        positional = [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p.name for p in named if p.kind is p.KEYWORD_ONLY]
        assert [a.arg for a in arguments.args] == ["self", *positional], node.name
        assert [a.arg for a in arguments.kwonlyargs] == keywords, node.name
        defaults = [ast.literal_eval(x) for x in (*arguments.defaults, *arguments.kw_defaults) if x]
        assert defaults == [p.default for p in named if p.default is not p.empty], node.name
        found.add(node.name)
    native = importlib.import_module(f"accordion_hvd.{framework}.compressed").NATIVE
    assert found == {kind.__name__ for kind in native.values()} and len(found) >= 9


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_argument_of_a_signature_is_accepted(framework: str) -> None:
    """A constructor accepts each argument of its signature, with the default value.

    The signature of a user's subclass is that of the subclass's own constructor.
    """
    needed(framework)
    module = importlib.import_module(f"accordion_hvd.{framework}")
    module.init()
    for kind in importlib.import_module(f"accordion_hvd.{framework}.compressed").NATIVE.values():
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
