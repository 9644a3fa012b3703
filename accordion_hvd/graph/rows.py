"""Formats of feature rows in messages: fp32, 16 bits or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import check, compressors
from accordion_hvd.compressors import BF16, FP16, Dense, Int8
from accordion_hvd.core import spec_strings
from accordion_hvd.core.base import Info
from accordion_hvd.core.codec import Codec
from accordion_hvd.graph.structure import Array
from accordion_hvd.ops import numpy as xp


@dataclass(frozen=True)
class Wire:
    """A format of feature rows, in which each row is encoded as a message of its own.

    Args:
        kind: `Dense`, `FP16`, `BF16` or `Int8`. The message of these codecs for several rows
            consists of the messages of the rows.
    """

    kind: type[Codec]

    @property
    def name(self) -> str:
        """Return the name of the format, as in spec strings."""
        return self.kind.__name__.lower()

    def width(self, features: int) -> int:
        """Return the bytes of an encoded row with this number of features."""
        return sum(part.nbytes for part in self._of_one(features))

    def encode(self, rows: Array) -> Array:
        """Encode rows, (count, features) fp32, as (count, width) uint8."""
        count, features = rows.shape
        message = self._codec(features).encode(rows, Info())
        parts = zip(message, self._of_one(features), strict=True)
        return np.hstack([xp.to_bytes(part).reshape(count, row.nbytes) for part, row in parts])

    def decode(self, coded: Array, features: int) -> Array:
        """Decode rows, (count, width) uint8, into (count, features) fp32."""
        message, start = [], 0
        for row in self._of_one(features):
            part = np.ascontiguousarray(coded[:, start : start + row.nbytes])
            message.append(part.reshape(-1).view(row.dtype))
            start += row.nbytes
        like = np.empty((len(coded), features), np.float32)
        return self._codec(features).decode(tuple(message), like, Info())

    def _codec(self, features: int) -> Codec:
        return Int8(features) if self.kind is Int8 else self.kind()

    def _of_one(self, features: int) -> tuple[Array, ...]:
        return self._codec(features).encode(np.zeros((1, features), np.float32), Info())


def wire_of(compression: Any) -> Wire:
    """Return the format that a compression stands for.

    Args:
        compression: None, `Dense`, `FP16`, `BF16`, `Int8`, or a spec string of one of these. `Int8`
            has one scale per row, whatever its `block`, and no error feedback, since each fetch
            sends the row itself.

    Raises:
        ValueError: if it is another compression.
    """
    names = spec_strings.table(compressors) | {"none": Dense}
    wanted = spec_strings.parse(compression, names) if isinstance(compression, str) else compression
    wanted = Dense() if wanted is None else wanted
    if not isinstance(wanted, (Dense, FP16, BF16, Int8)):
        allowed = "None, 'dense', 'fp16', 'bf16' or 'int8'"
        check.refuse("FeatureStore", "compression", compression, allowed)
    return Wire(type(wanted))
