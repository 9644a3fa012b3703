"""How rows of features travel: as they are, in 16 bits, or in 8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.compressors import BF16, FP16, Dense, Int8
from accordion_hvd.core.base import Info
from accordion_hvd.graph.structure import Array
from accordion_hvd.ops import numpy as xp


@dataclass(frozen=True)
class Wire:
    """A form in which rows travel.

    Attributes:
        name: as compressions are named in words.
        width: bytes of a row of so many features.
        encode: rows (count, features) fp32 to (count, width) uint8.
        decode: the inverse, given the features.
    """

    name: str
    width: Callable[[int], int]
    encode: Callable[[Array], Array]
    decode: Callable[[Array, int], Array]


def wire_of(compression: Any) -> Wire:
    """The form that a compression stands for.

    Args:
        compression: None, `Dense`, `FP16`, `BF16`, `Int8`, or a word for one. `Int8` has a scale
            for each row, whatever its `block`, and no error feedback: a row is sent anew each time.

    Raises:
        ValueError: it is another.
    """
    from accordion_hvd.resolve import parse

    wanted = parse(compression) if isinstance(compression, str) else compression
    for kind, wire in {Dense: PLAIN, FP16: HALF, BF16: BRAIN, Int8: EIGHT}.items():
        if isinstance(wanted, kind):
            return wire
    if wanted is not None:
        allowed = "None, 'dense', 'fp16', 'bf16' or 'int8'"
        check.refuse("FeatureStore", "compression", compression, allowed)
    return PLAIN


def _sixteen(dtype: str, name: str) -> Wire:
    def encode(rows: Array) -> Array:
        return xp.to_wire([rows], dtype, rows.size).reshape(len(rows), 2 * rows.shape[1])

    def decode(coded: Array, features: int) -> Array:
        like = np.empty((len(coded), features), np.float32)
        return xp.from_wire(xp.to_bytes(coded), dtype, [like])[0]

    return Wire(name, lambda features: 2 * features, encode, decode)


def _encode_eight(rows: Array) -> Array:
    """Codes of a row, then its step."""
    codes, steps = Int8(rows.shape[1]).encode(rows, Info())
    return np.hstack([codes.reshape(rows.shape), steps.reshape(-1, 1).view(np.uint8)])


def _decode_eight(coded: Array, features: int) -> Array:
    steps = np.ascontiguousarray(coded[:, features:]).view(np.float32).reshape(-1)
    codes = np.ascontiguousarray(coded[:, :features]).reshape(-1)
    like = np.empty((len(coded), features), np.float32)
    return Int8(features).decode((codes, steps), like, Info())


PLAIN = Wire(
    "dense",
    lambda features: 4 * features,
    lambda rows: rows.view(np.uint8).reshape(len(rows), -1) if rows.size else _none(rows),
    lambda coded, features: np.ascontiguousarray(coded).view(np.float32).reshape(-1, features),
)
HALF, BRAIN = _sixteen("float16", "fp16"), _sixteen("bfloat16", "bf16")
EIGHT = Wire("int8", lambda features: features + 4, _encode_eight, _decode_eight)


def _none(rows: Array) -> Array:
    return np.zeros((0, 4 * rows.shape[1]), np.uint8)
