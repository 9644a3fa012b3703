"""The time of encoding and decoding, which a rank's training thread spends on compression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from accordion_hvd import check
from accordion_hvd.core.base import Compressor


@dataclass(frozen=True)
class Throughput:
    """Encoding and decoding at constant rates.

    A compressor reads the gradient once before its first requests and once after each answer. It
    also reads each answer once: after an allgather, the tensors of all ranks.

    Args:
        rate: bytes per second that a compressor reads.
        rates: rates of single compressors, by class name. `Dense` takes no time by default.
    """

    rate: float = math.inf
    rates: Mapping[str, float] = field(default_factory=lambda: {"Dense": math.inf})

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), *self.rates.items()):
            check.at_least(self, name, value, least=0)
            if value == 0:
                check.refuse(self, name, value, "above 0")

    def seconds(self, compressor: Compressor, gradient: float, answers: float) -> float:
        """Return the seconds of one call, given the bytes of the gradient and of decoded answers.

        The first call encodes, and has no answers.
        """
        return (gradient + answers) / self.rates.get(type(compressor).__name__, self.rate)
