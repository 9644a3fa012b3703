"""Names of the methods to exchange gradients that the benchmark compares.

`ours SPEC` is this package over Horovod with a spec string of `accordion_hvd.parse` (`ours SPEC
without ledger` records no steps), `ours over torch.distributed SPEC` is the same without Horovod,
`DDP + our hook SPEC` is its communication hook, `HSDP + ours SPEC` compresses between the replicas
of a sharded model, and `optimizer NAME` is one of its optimizers; the other names are listed below.
Two launches hold the methods, one with Horovod and one without, because Horovod's threads
communicate even when idle and would slow down the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd.policies import Accordion
from accordion_hvd.resolve import parse

COMPUTE, COMPILED = "compute only", "compute only, XLA"
ALONE = (COMPUTE, COMPILED)
"""Computation without an exchange."""

STOCK, DDP, OURS, OPTIMIZER = "Horovod", "DDP", "ours ", "optimizer "
OVER, HOOK = "ours over torch.distributed ", "DDP + our hook "
SHARDED, WITHIN, BETWEEN = "HSDP", "HSDP within hosts", "HSDP + ours "
FP16 = " fp16"
UNRECORDED = " without ledger"
"""End of the name of a method whose optimizer records nothing; measured on request."""

ACCORDION = "accordion"
STEADY = "Accordion(low=PowerSGD(4), high=PowerSGD(1), threshold=1e9)"
"""Policy of `ours accordion`. Its threshold is never reached, so it stays at the high level once it
has left the initial critical regime."""

GATED = "gate"
CAUTIOUS = "Fixed(PowerSGD(1), gate='auto')"
"""Policy of `ours gate`."""

GROUPED, SILENT = "grouped allreduce in the graph", "Horovod (averages nothing)"
HALVES = "powersgd:4,wire='float16'"
"""PowerSGD with fp16 factors; in DDP's own hook, `fp16_compress_wrapper` around it."""

_PLAIN = ("fp16", "powersgd:1", "powersgd:4", "powersgd:4,alternate", HALVES, "topk:0.01")
_OURS = ("dense", "fp16", "powersgd:1", "powersgd:2", "powersgd:4", "topk:0.01", "topk:0.001")
METHODS = {
    "torch": (
        COMPUTE, STOCK, STOCK + FP16, DDP, DDP + FP16,
        *(f"{DDP} powersgd:{rank}" for rank in (1, 2, 4)), f"{DDP} {HALVES}",
        *(OURS + word for word in (*_OURS, ACCORDION, GATED)),
        *(prefix + word for prefix in (OVER, HOOK) for word in _PLAIN),
    ),
    "keras": (
        *ALONE, SILENT, GROUPED,
        *(OURS + word for word in ("dense", "fp16", "powersgd:1", "powersgd:4", "topk:0.01")),
    ),
}  # fmt: skip
"""Methods by framework; all are measured by default."""

RULES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AMSGrad": {},
    "OnebitAdam": {"warmup_steps": 4, "floor": 0.1},  # else it diverges after so few warm-up steps
    "Birder": {},
    "SketchedAMSGrad": {"warmup_steps": 4},
    "CDAdam": {},
    "Birder, two bits": {"beta": 0.9, "beta_b": 0.99, "bits": 1.9, "feedback": True},
    "CDAdam, two bits": {"preconditioned": True, "bits": 1.9, "replica_lr": 0.1},
}
"""Optimizers that are measured only on request (as `optimizer OnebitAdam`), in PyTorch.

The part of a name after a comma distinguishes settings of one optimizer; two bits are for small
batches. The exact stage ends before measurements begin.
"""

REPLICAS = (SHARDED, WITHIN, *(BETWEEN + word for word in ("fp16", "powersgd:4", "topk:0.01")))
"""Models that are sharded within each host, with replicas on the others; measured on request, with
two or more processes per host. WITHIN does not average between the replicas."""

HOROVOD, PLAIN = "horovod", "plain"


def is_unrecorded(method: str) -> bool:
    """Return whether the method records no steps in its ledger."""
    return method.endswith(UNRECORDED)


def group(method: str) -> str:
    """Return the launch that holds a method: HOROVOD or PLAIN."""
    plain = method in ALONE or method.startswith((DDP, OVER, SHARDED))
    return PLAIN if plain else HOROVOD


def is_ours(method: str) -> bool:
    """Return whether this package exchanges the gradients, over any engine."""
    return method.startswith((OURS, HOOK, BETWEEN))


def compression(method: str) -> Any:
    """Return the compression of one of this package's methods.

    Raises:
        ValueError: if the spec string is invalid.
    """
    for prefix in (OVER, HOOK, BETWEEN, OURS):
        if method.startswith(prefix):
            break
    word = method.removeprefix(prefix).removesuffix(UNRECORDED)
    return parse({ACCORDION: STEADY, GATED: CAUTIOUS}.get(word, word))


def gated(method: str) -> bool:
    """Return whether a gate decides how the method exchanges gradients."""
    return is_ours(method) and getattr(compression(method), "gate", None) is not None


def reduces_fp16(method: str) -> bool:
    """Return whether the method's fp16 reduction depends on the link."""
    return is_ours(method) and compression(method).fp16_reduction


def adapts(method: str) -> bool:
    """Return whether the method's levels depend on the gradients."""
    return is_ours(method) and isinstance(compression(method), Accordion)


def check_level(method: str, levels: Mapping[str, int]) -> None:
    """Check that Accordion is at the level that is to be measured.

    Raises:
        RuntimeError: if a layer is not at the high level.
    """
    if not levels or not all(levels.values()):
        raise RuntimeError(f"{method!r} has not reached its high level: {dict(levels)}.")


def choose(framework: str, wanted: Sequence[str]) -> list[str]:
    """Return methods by pattern (regular expression for an entire name) or spec string.

    Computation without exchange is always included, because it is the reference of the others.

    Raises:
        ValueError: if a pattern matches no method, or a spec string is invalid.
    """
    known = METHODS[framework]
    chosen = [COMPUTE] if wanted else list(known)
    if framework == "torch":
        known = (*known, *(OPTIMIZER + name for name in RULES), *REPLICAS)
    for pattern in wanted:
        if pattern in known:
            found = [pattern]
        elif is_ours(pattern) and not _matching(pattern, known):
            compression(pattern)
            found = [pattern]
        else:
            found = _matching(pattern, known)
        if not found:
            raise ValueError(
                f"--methods {pattern!r} matches none of {', '.join(map(repr, known))}; "
                "'ours SPEC' accepts any compression."
            )
        chosen += [method for method in found if method not in chosen]
    return chosen


def _matching(pattern: str, known: Sequence[str]) -> list[str]:
    try:
        return [method for method in known if re.fullmatch(pattern, method)]
    except re.error as error:
        raise ValueError(f"--methods {pattern!r} is not a regular expression: {error}.") from None
