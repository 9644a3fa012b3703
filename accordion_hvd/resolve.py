"""The meaning of `compression=`, which only this module interprets, for every framework.

A wrapper makes three stops: `resolve` finds the object that is to serve, `validate` (in
`accordion_hvd.validate`) checks that it suits the optimizer and the job, and the wrapper builds.
"""

from __future__ import annotations

import functools
import os
from typing import Any, TypeAlias

from accordion_hvd import averaging, check, compressors
from accordion_hvd import policies as policy
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.compressors.horovod_compression import HorovodCompression
from accordion_hvd.core import spec_strings
from accordion_hvd.core.base import Compressor, NotForStockHorovod
from accordion_hvd.optimizers.base import UpdateRule
from accordion_hvd.policies import Accordion, Fixed, Policy
from accordion_hvd.policies.alternation import Alternation
from accordion_hvd.policies.byte_budget import ByteBudget
from accordion_hvd.privacy import PrivacyBudget, TopAgg

Serving: TypeAlias = Policy | Averaging

VARIABLE = "ACCORDION_HVD_COMPRESSION"
"""The environment variable that may name a compression where a script names none."""


@functools.cache
def names() -> dict[str, Any]:
    """Return the table of names in spec strings."""
    more = {kind.__name__.lower(): kind for kind in (PrivacyBudget, TopAgg)}
    known = spec_strings.table(compressors, averaging, policy)
    return known | more | {"none": compressors.Dense}


def parse(text: str) -> Any:
    """Return the compressor, policy or averaging method that a spec string describes.

    The text is `name`, `name:argument,key=value,...`, or a call as in Python, whose arguments are
    literals, lists, dicts and further calls. `name:name:...` is a call within a call. Names are
    those importable from `accordion_hvd`, in upper or lower case; `none` means no compression.
    Nothing else is evaluated.

    Raises:
        ValueError: the text has another form, a name is unknown, or arguments do not fit.
    """
    return spec_strings.parse(text, names())


def resolve(compression: Any) -> Serving:
    """Return the policy or the averaging method that `DistributedOptimizer(compression=)` means.

    Args:
        compression: a compressor, a policy, an averaging method, the class of one, a spec string,
            or an object with Horovod's `compress` and `decompress`. `hvd.Compression.none`,
            Horovod's default, means the spec string in the environment variable
            ACCORDION_HVD_COMPRESSION, if that is set.

    Raises:
        TypeError: `compression` is none of these.
        ValueError: the spec string is not understood, or a policy lacks a level.
    """
    if _is_none(compression):
        return _from_environment()
    if not is_ours(compression) and callable(getattr(compression, "compress", None)):
        return Fixed(HorovodCompression(compression))
    found = _made(compression)
    return found if isinstance(found, Averaging) else as_policy(found)


def as_policy(compression: Any) -> Policy:
    """Return a policy from a policy, a compressor, the class of one, or a spec string for one.

    Raises:
        TypeError: `compression` is none of these.
        ValueError: the spec string is not understood, or the policy lacks a level.
    """
    compression = _made(compression)
    if isinstance(compression, Compressor):
        return compression.policy() or Fixed(compression)
    if isinstance(compression, Policy):
        compression.complete()
        return compression
    raise TypeError(
        f"compression is {compression!r}, but must be a Compressor such as TopK(0.01), a policy "
        "such as Accordion(low=PowerSGD(4), high=PowerSGD(1)), or a word such as 'topk:0.01'."
    )


def staged(rule: UpdateRule, policy: Any = None) -> Policy:
    """Return the policy that moves a compressed optimizer between its stages.

    Args:
        rule: the optimizer's update rule.
        policy: an `Accordion` without levels, another policy whose levels are rules, or None for
            the rule's own policy.

    Raises:
        ValueError: the rule has one stage only, or the policy does not suit an optimizer.
    """
    if policy is None:
        return as_policy(rule)
    if isinstance(policy, Accordion) and policy.growth is not None:
        allowed = "None where it moves an optimizer; batches grow with a DistributedOptimizer"
        check.refuse(policy, "batch_size", policy.growth.sizes, allowed)
    if isinstance(policy, Accordion) and policy.low is None:
        if rule.dense() == rule:
            check.refuse(rule, "policy", policy, "None, since it has only one stage")
        if policy.signal == "reduced":  # the results are directions, not gradients
            check.refuse(policy, "signal", policy.signal, "'local' where it moves an optimizer")
        policy.between(rule.dense(), rule)
    policy = as_policy(policy)
    alternation = policy.observers.find(Alternation)
    if alternation is not None:
        check.refuse(
            policy, "high", alternation.method, "a compressed optimizer's stage where it moves one"
        )
    if policy.observers.find(ByteBudget) is not None:
        check.refuse(policy, "budget", policy, "None where it moves an optimizer")
    if policy.output != "update":
        check.refuse(rule, "policy", policy, "one whose levels are accordion_hvd.optimizers")
    return policy


def is_ours(compression: Any) -> bool:
    """Return whether `compression` is an object of this package, its class or a spec string."""
    if isinstance(compression, str):
        return True
    if isinstance(compression, type):
        return issubclass(compression, NotForStockHorovod)
    return isinstance(compression, NotForStockHorovod)


def default_guard(compression: Any) -> str:
    """Return what the guard does by default: "warn" with Horovod's own compression, else "error".

    Horovod compares no replicas, and scripts written for it may never broadcast their weights.
    Our compressors and policies need equal replicas, so training stops without them.
    """
    none = _is_none(compression)
    ours = os.environ.get(VARIABLE) if none else is_ours(compression)
    return "error" if ours else "warn"


def _from_environment() -> Serving:
    word = os.environ.get(VARIABLE)
    if not word:
        return Fixed(compressors.Dense())
    try:
        return resolve(word)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE} is {word!r}: {error}") from None


def _made(compression: Any) -> Any:
    """Return the object that a spec string or a class stands for; others as they are."""
    if isinstance(compression, str):
        compression = parse(compression)
    if isinstance(compression, type) and issubclass(compression, (Compressor, Policy)):
        compression = compression()
    return compression


def _is_none(compression: Any) -> bool:
    """Return whether `compression` is `hvd.Compression.none` of one of Horovod's modules."""
    module = str(getattr(compression, "__module__", ""))
    return (
        module.startswith("horovod.") and getattr(compression, "__name__", "") == "NoneCompressor"
    )
