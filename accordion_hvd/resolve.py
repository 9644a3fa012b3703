"""The interpretation of `compression=`, shared by all frameworks.

A wrapper takes three steps: `resolve` returns what the argument means, in one frozen value,
`accordion_hvd.validate.validate` checks that it suits the optimizer and the job, and the wrapper
builds the averager.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from accordion_hvd import averaging, check, compressors
from accordion_hvd import policies as policy
from accordion_hvd.averaging.base import Averaging
from accordion_hvd.compressors.wrappers import HorovodCompression
from accordion_hvd.core import spec_strings
from accordion_hvd.core.base import Compressor, NotForStockHorovod
from accordion_hvd.optimizers.base import UpdateRule
from accordion_hvd.policies import Accordion, Fixed, Policy
from accordion_hvd.policies.accordion import Alternation, BatchGrowth, ByteBudget
from accordion_hvd.privacy import PrivacyBudget, TopAgg

Served: TypeAlias = Policy | Averaging


@dataclass(frozen=True)
class Resolved:
    """The resolved argument `compression=`, which wrappers and checks read.

    Attributes:
        serving: the policy that averages gradients, or the method that always averages models.
        guard: default mode of the guard: "warn" with Horovod's own compression, else "error".
            Horovod does not compare replicas, and scripts written for it may never broadcast their
            weights. The compressors and policies of this package need equal replicas, so training
            must stop if replicas differ.
    """

    serving: Served
    guard: str = "error"

    @property
    def method(self) -> Averaging | None:
        """Return the method that averages models, always or at times; None if there is none."""
        if isinstance(self.serving, Averaging):
            return self.serving
        alternation = self.serving.observers.find(Alternation)
        return None if alternation is None else alternation.method

    @property
    def growth(self) -> BatchGrowth | None:
        """Return the observer that makes batches grow; None if there is none."""
        serving = self.serving
        return None if isinstance(serving, Averaging) else serving.observers.find(BatchGrowth)


class WireCompression(Protocol):
    """One of Horovod's compression objects, such as `hvd.Compression.fp16`."""

    def compress(self, tensor: Any, /) -> tuple[Any, Any]:
        """Return the tensor to send, and what `decompress` needs to know."""

    def decompress(self, tensor: Any, context: Any, /) -> Any:
        """Return a received tensor in its original type."""


Compression: TypeAlias = (
    Compressor | Policy | Averaging | type[Compressor] | type[Policy] | str | WireCompression
)
"""The types of `DistributedOptimizer(compression=)`; see `resolve`."""

VARIABLE = "ACCORDION_HVD_COMPRESSION"
"""Environment variable with the spec string for scripts that pass no `compression=`."""


@functools.cache
def names() -> dict[str, Any]:
    """Return the classes and functions that spec strings may call, by lower-case name."""
    public = spec_strings.table(compressors, averaging, policy)
    return public | {"none": compressors.Dense, "privacybudget": PrivacyBudget, "topagg": TopAgg}


def parse(text: str) -> Any:
    """Return the compressor, policy or averaging method that a spec string describes.

    A spec string is `name`, `name:argument,key=value,...`, or a call in Python's syntax whose
    arguments are literals, lists, dicts and further calls. `name:name:...` is a call within a
    call. Allowed are the names of compressors, policies and averaging methods that
    `accordion_hvd` exports, in upper or lower case, and `none` for no compression. Nothing else
    is evaluated.

    Args:
        text: the spec string, such as "topk:0.01" or "EF21(TopK(0.01))".

    Raises:
        ValueError: if the text has another form, a name is unknown, or arguments do not fit.
    """
    return spec_strings.parse(text, names())


def resolve(compression: Any) -> Resolved:
    """Return what `DistributedOptimizer(compression=)` means.

    Args:
        compression: a compressor, a policy, an averaging method, the class of one, a spec string,
            or an object with Horovod's `compress` and `decompress`. `hvd.Compression.none`,
            Horovod's default, means the spec string in the environment variable
            ACCORDION_HVD_COMPRESSION, if that is set.

    Raises:
        TypeError: if `compression` is none of these.
        ValueError: if the spec string is not understood, or a policy lacks a level.
    """
    if _is_none(compression):
        return _from_environment()
    if not is_ours(compression) and callable(getattr(compression, "compress", None)):
        return Resolved(Fixed(HorovodCompression(compression)), "warn")
    instance = _instance(compression)
    return Resolved(instance if isinstance(instance, Averaging) else as_policy(instance))


def as_policy(compression: Any) -> Policy:
    """Return the policy that a policy, a compressor, the class of one, or a spec string means.

    Raises:
        TypeError: if `compression` is none of these.
        ValueError: if the spec string is not understood, or the policy lacks a level.
    """
    compression = _instance(compression)
    if isinstance(compression, Compressor):
        own = compression.policy() if isinstance(compression, UpdateRule) else None
        return own or Fixed(compression)
    if isinstance(compression, Policy):
        compression.complete()
        return compression
    raise TypeError(
        f"compression is {compression!r}, but must be a Compressor such as TopK(0.01), a policy "
        "such as Accordion(low=PowerSGD(4), high=PowerSGD(1)), or a spec string such as "
        "'topk:0.01'."
    )


def staged(rule: UpdateRule, policy: Any = None) -> Policy:
    """Return the policy that chooses between the stages of a compressed optimizer.

    Args:
        rule: the optimizer's update rule.
        policy: an `Accordion` without levels, another policy whose levels are update rules, or
            None for the rule's own policy.

    Raises:
        ValueError: if the rule has only one stage, or the policy does not suit an optimizer.
    """
    if policy is None:
        return as_policy(rule)
    if isinstance(policy, Accordion) and policy.growth is not None:
        allowed = "None where it serves a compressed optimizer; use it in a DistributedOptimizer"
        check.refuse(policy, "batch_size", policy.growth.sizes, allowed)
    if isinstance(policy, Accordion) and policy.low is None:
        if rule.dense() == rule:
            check.refuse(rule, "policy", policy, "None, since it has only one stage")
        if policy.signal == "reduced":  # the results are directions, not gradients
            allowed = "'local' where it serves a compressed optimizer"
            check.refuse(policy, "signal", policy.signal, allowed)
        policy.between(rule.dense(), rule)
    policy = as_policy(policy)
    alternation = policy.observers.find(Alternation)
    if alternation is not None:
        allowed = "a stage of the compressed optimizer that it serves"
        check.refuse(policy, "high", alternation.method, allowed)
    if policy.observers.find(ByteBudget) is not None:
        check.refuse(policy, "budget", policy, "None where it serves a compressed optimizer")
    if policy.output != "update":
        check.refuse(rule, "policy", policy, "one whose levels are accordion_hvd.optimizers")
    return policy


def is_ours(compression: Any) -> bool:
    """Return whether `compression` is an object or a class of this package, or a spec string."""
    if isinstance(compression, str):
        return True
    if isinstance(compression, type):
        return issubclass(compression, NotForStockHorovod)
    return isinstance(compression, NotForStockHorovod)


def _from_environment() -> Resolved:
    text = os.environ.get(VARIABLE)
    if not text:
        return Resolved(Fixed(compressors.Dense()), "warn")
    try:
        return resolve(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE} is {text!r}: {error}") from None


def _instance(compression: Any) -> Any:
    """Return the object that a spec string or a class means; return other objects unchanged."""
    if isinstance(compression, str):
        compression = parse(compression)
    if isinstance(compression, type) and issubclass(compression, (Compressor, Policy, Averaging)):
        kind = compression.__name__
        try:
            compression = compression()
        except TypeError as error:
            raise TypeError(
                f"compression is the class {kind}, but must be an instance: write {kind}(...) with "
                f"its arguments ({error})."
            ) from None
    return compression


def _is_none(compression: Any) -> bool:
    """Return whether `compression` is `hvd.Compression.none` of an engine's module."""
    module = str(getattr(compression, "__module__", ""))
    of_engine = module.startswith(("horovod.", "accordion_hvd.comm."))
    return of_engine and getattr(compression, "__name__", "") == "NoneCompressor"
