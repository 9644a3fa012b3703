"""Helpers that run the decisions of a policy without an exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from accordion_hvd.policies import Policy, base


def decide(policy: Policy, norms: Mapping[str, float], rates: Mapping[str, float]) -> None:
    """Let a policy decide by these norms, and apply its decisions after a round trip via JSON."""
    seen = {evidence.key: norms for evidence in policy.evidence}
    rows = json.dumps(base.plain(policy.decide(seen, rates)))
    policy.apply(base.read(json.loads(rows)))


def rows_of(policy: Policy) -> list[dict[str, Any]]:
    """Return the policy's history as dicts."""
    return base.plain(policy.history)
