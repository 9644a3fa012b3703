"""Who moves an optimizer between its stages."""

from __future__ import annotations

from typing import Any

from accordion_hvd import check
from accordion_hvd.optimizers.base import Rule
from accordion_hvd.policy import Accordion, Policy, as_policy


def staged(rule: Rule, policy: Any = None) -> Policy:
    """The policy that moves `rule`: its own, an `Accordion` between its stages, or another.

    Raises:
        ValueError: the rule has one stage only, or the policy's levels are no optimizers.
    """
    if policy is None:
        return rule.policy()
    if isinstance(policy, Accordion) and policy.batch_size is not None:
        allowed = "None where it moves an optimizer; batches grow with a DistributedOptimizer"
        check.refuse(policy, "batch_size", policy.batch_size, allowed)
    if isinstance(policy, Accordion) and policy.low is None:
        if rule.dense() == rule:
            check.refuse(rule, "policy", policy, "None, since it has only one stage")
        if policy.signal == "reduced":  # what comes back are directions, not gradients
            check.refuse(policy, "signal", policy.signal, "'local' where it moves an optimizer")
        policy.between(rule.dense(), rule)
    policy = as_policy(policy)
    if policy.method is not None:
        check.refuse(policy, "high", policy.method, "an optimizer of ours where it moves one")
    if policy.capped:
        check.refuse(policy, "budget", policy, "None where it moves an optimizer")
    if policy.output != "update":
        check.refuse(rule, "policy", policy, "one whose levels are accordion_hvd.optimizers")
    return policy


def refuse_rules(policy: Policy, module: str) -> None:
    """See that no level is an optimizer of ours, which is told more than a wrapper knows.

    Raises:
        ValueError: one is; the sentence says what to write.
    """
    rules = [level for level in policy.levels("") if isinstance(level, Rule)]
    if rules:
        name = type(rules[-1]).__name__
        raise ValueError(
            f"DistributedOptimizer: compression is {policy!r}, but {name} is an optimizer: use "
            f"{module}.{name} in the place of another one."
        )
