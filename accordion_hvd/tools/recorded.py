"""Policies as ledgers and checkpoints name them."""

from __future__ import annotations

from typing import Any

from accordion_hvd import optimizers, resolve
from accordion_hvd.core import spec_strings
from accordion_hvd.policies import Policy


def policy_of(text: str) -> Policy | None:
    """Return a new policy like the one whose repr is `text`; None if it cannot be made of it."""
    names = {name.lower(): getattr(optimizers, name) for name in optimizers.NATIVE}
    names |= resolve.names()
    del names["replay"]  # may read files
    try:
        found: Any = spec_strings.parse(text, names)
    except ValueError:
        return None
    return found if isinstance(found, Policy) else None


def compressor_at(policy: Policy | None, name: str, level: int) -> str:
    """Return the compressor of a layer at a level as text; empty if it is unknown."""
    if policy is None:
        return ""
    try:
        levels: tuple[Any, ...] = policy.levels(name)
    except ValueError:  # of a policy that knows its layers by name
        return ""
    if policy.gate is not None:
        levels += policy.gate.fallbacks
    return repr(levels[level]) if level < len(levels) else ""


def start_of(policy: Policy | None, name: str) -> str:
    """Return the compressor of a layer before the first decision; empty if it is unknown."""
    return "" if policy is None else compressor_at(policy, name, policy.start(name))
