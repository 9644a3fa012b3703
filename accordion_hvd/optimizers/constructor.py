"""How the classes of compressed optimizers get their update rules."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any

from accordion_hvd.optimizers.base import UpdateRule


def give(kind: Any, rule: type[UpdateRule], common: Callable[..., Any]) -> None:
    """Make a class of a framework the optimizer of an update rule.

    The constructor in the class is only a signature, for type checkers and readers: it is removed,
    and the class inherits one that takes all arguments.

    Args:
        kind: the class. Its constructor has an argument for each of the rule, and `**options`.
        rule: the update rule, whose documentation the class gets.
        common: function with the keyword arguments that `**options` stands for, with defaults.
    """
    own = [*signature(kind.__init__).parameters.values()][1:-1]  # without self and **options
    shared = [p for p in signature(common).parameters.values() if p.kind is p.KEYWORD_ONLY]
    kind.__signature__ = Signature([*own, *shared])
    note = "See `CompressedOptimizer` for arguments that all of them take."
    kind.__doc__ = f"{rule.__doc__}\n\n{note}"
    kind._rule = rule
    del kind.__init__
