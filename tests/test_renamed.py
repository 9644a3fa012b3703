"""Tests of old names of attributes: they still work, and the warning gives the new name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest

import accordion_hvd
from accordion_hvd import Compressor, Fixed, Info, _renamed
from accordion_hvd.averaging import base as averaging
from accordion_hvd.core import base
from accordion_hvd.optimizers import CDAdam
from accordion_hvd.optimizers import base as optimizers
from accordion_hvd.policies import base as policies

MEMBERS = [
    (owner, old, new)
    for owner, table in [
        (Compressor, base.RENAMED),
        (optimizers.UpdateRule, optimizers.RENAMED),
        (averaging.Averaging, averaging.RENAMED),
        (policies.Policy, policies.RENAMED),
    ]
    for old, new in table.items()
]


@pytest.mark.parametrize(("owner", "old", "new"), MEMBERS)
def test_subclasses_may_define_members_by_old_names(owner: type, old: str, new: str) -> None:
    assert hasattr(owner, new) and not hasattr(owner, old)
    value = object()
    message = f"Older defines {old}, which is called {new} now; rename it."
    with pytest.warns(DeprecationWarning, match=message):
        made: Any = type("Older", (owner,), {old: value})
    assert getattr(made, new) is value


def check_module(name: str, renamed: Mapping[str, str]) -> None:
    module = importlib.import_module(name)
    for old, new in renamed.items():
        assert not hasattr(type(module), old) and old not in vars(module)
        with pytest.warns(DeprecationWarning, match=f"{name}.{old} is called {new} now."):
            assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_the_kind'"):
        module.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_operations_have_their_old_names(framework: str) -> None:
    pytest.importorskip(framework)
    check_module(f"accordion_hvd.ops.{framework}", _renamed.OPERATIONS)


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("accordion_hvd", {"Conversation": "ExchangeGenerator"}),
        ("accordion_hvd.core.base", {"Conversation": "ExchangeGenerator", "Machines": "Hosts"}),
        ("accordion_hvd.optimizers", {"Rule": "UpdateRule"}),
        ("accordion_hvd.optimizers.base", {"Rule": "UpdateRule"}),
    ],
)
def test_modules_have_their_old_names(name: str, renamed: Mapping[str, str]) -> None:
    check_module(name, renamed)


def test_info_has_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="Info.machines is called hosts now."):
        assert Info(hosts=((0, 1),)).machines == ((0, 1),)
    assert "Conversation" not in dir(accordion_hvd)


def test_checkpoints_with_old_names_of_arguments_are_recognized() -> None:
    old = "Fixed(CDAdam(betas=(0.9, 0.99), whitened=True, bits=2, pace=0.1))"
    new = "Fixed(CDAdam(betas=(0.9, 0.99), preconditioned=True, bits=2, replica_lr=0.1))"
    assert _renamed.current(old) == new == _renamed.current(new)
    rule = CDAdam(preconditioned=True, bits=2, replica_lr=0.1)
    assert repr(Fixed(rule)) == new
