"""The methods to exchange gradients that are measured, by name.

`ours <word>` is this package with a compression as of `accordion_hvd.parse`, and
`optimizer <name>` one of its optimizers; all other names are those below. Methods are held by two
launches: one over Horovod, and a plain one without, so that Horovod's threads, which talk even when
there is nothing to do, take nothing from the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_hvd.policies import Accordion
from accordion_hvd.resolve import parse

COMPUTE = "compute only"
STOCK, DDP, OURS, OPTIMIZER = "Horovod", "DDP", "ours ", "optimizer "
FP16 = " fp16"
ACCORDION = "accordion"
STEADY = "Accordion(low=PowerSGD(4), high=PowerSGD(1), threshold=1e9)"
"""What `ours accordion` means. Its threshold is never reached, so that it stays at the high level
once it has left its critical start."""

GATED = "gate"
CAUTIOUS = "Fixed(PowerSGD(1), gate='auto')"
"""What `ours gate` means."""

GROUPED, SILENT = "grouped allreduce in the graph", "Horovod (averages nothing)"
_OURS = ("dense", "fp16", "powersgd:1", "powersgd:2", "powersgd:4", "topk:0.01", "topk:0.001")
METHODS = {
    "torch": (
        COMPUTE, STOCK, STOCK + FP16, DDP, DDP + FP16,
        *(f"{DDP} powersgd:{rank}" for rank in (1, 2, 4)),
        *(OURS + word for word in (*_OURS, ACCORDION, GATED)),
    ),
    "keras": (
        COMPUTE, SILENT, GROUPED,
        *(OURS + word for word in ("dense", "fp16", "powersgd:1", "powersgd:4", "topk:0.01")),
    ),
}  # fmt: skip
"""By framework; all of them are measured unless some are chosen."""

RULES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AMSGrad": {},
    "OnebitAdam": {"warmup_steps": 4, "floor": 0.1},  # or it runs away after so few
    "Birder": {},
    "SketchedAMSGrad": {"warmup_steps": 4},
    "CDAdam": {},
    "Birder, two bits": {"beta": 0.9, "beta_b": 0.99, "bits": 1.9, "feedback": True},
    "CDAdam, two bits": {"whitened": True, "bits": 1.9, "pace": 0.1},
}
"""Optimizers that are measured when asked for (as `optimizer OnebitAdam`), in PyTorch.

What follows a comma tells settings of the same one apart; two bits are for small batches.
Their exact stage is over before anything is measured.
"""

HOROVOD, PLAIN = "horovod", "plain"


def group(method: str) -> str:
    """The launch that holds a method: HOROVOD or PLAIN."""
    return PLAIN if method == COMPUTE or method.startswith(DDP) else HOROVOD


def compression(method: str) -> Any:
    """What one of ours compresses with.

    Raises:
        ValueError: its word is not understood.
    """
    word = method.removeprefix(OURS)
    return parse({ACCORDION: STEADY, GATED: CAUTIOUS}.get(word, word))


def gated(method: str) -> bool:
    """Whether a gate decides what it exchanges."""
    return method.startswith(OURS) and getattr(compression(method), "gate", None) is not None


def halves(method: str) -> bool:
    """Whether who adds its 16-bit floats depends on the link."""
    return method.startswith(OURS) and compression(method).fp16_reduction


def adapts(method: str) -> bool:
    """Whether its levels depend on the gradients."""
    return method.startswith(OURS) and isinstance(compression(method), Accordion)


def check_level(method: str, levels: Mapping[str, int]) -> None:
    """Make sure that Accordion is where it is to be measured.

    Raises:
        RuntimeError: a layer is not at the high level.
    """
    if not levels or not all(levels.values()):
        raise RuntimeError(f"{method!r} has not reached its high level: {dict(levels)}.")


def choose(framework: str, wanted: Sequence[str]) -> list[str]:
    """Methods by patterns (regular expressions of whole names) or, if ours, by any word.

    Computation alone is always among them, since the others are compared with it.

    Raises:
        ValueError: a pattern matches nothing, or a word is not understood.
    """
    known = METHODS[framework]
    chosen = [COMPUTE] if wanted else list(known)
    if framework == "torch":
        known = (*known, *(OPTIMIZER + name for name in RULES))
    for pattern in wanted:
        if pattern in known:
            found = [pattern]
        elif pattern.startswith(OURS) and not _matching(pattern, known):
            compression(pattern)
            found = [pattern]
        else:
            found = _matching(pattern, known)
        if not found:
            raise ValueError(
                f"--methods {pattern!r} matches none of {', '.join(map(repr, known))}; "
                "'ours <word>' may have any compression."
            )
        chosen += [method for method in found if method not in chosen]
    return chosen


def _matching(pattern: str, known: Sequence[str]) -> list[str]:
    try:
        return [method for method in known if re.fullmatch(pattern, method)]
    except re.error as error:
        raise ValueError(f"--methods {pattern!r} is no regular expression: {error}.") from None
