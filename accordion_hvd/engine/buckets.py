"""Buckets of tensors that are compressed and sent together.

A tensor with two or more dimensions that is large enough forms a bucket by itself and keeps its
shape: matrix methods need the shape, and Accordion decides per layer. All other tensors (biases,
norms, small or exempt tensors) are packed into flat buckets and sent uncompressed. Compressors do
not depend on this rule.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accordion_hvd.check import first_match, matches
from accordion_hvd.ops.spec import ITEMSIZE

MIN_ELEMENTS = 1024
"""Minimum number of elements of compressed tensors: below, compression costs more than it saves."""

FLAT_BYTES = 8 << 20
"""Uncompressed bytes at which a flat bucket is closed, so that it can be sent during backward."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor to be exchanged.

    Attributes:
        name: unique name, equal on all ranks.
        kind: kind of the tensor, such as its device. Tensors of different kinds are never packed
            together.
        group: parameter group, if compressors depend on its settings. Tensors of different groups
            are never packed together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    group: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that a compressor treats as one.

    Attributes:
        name: name of the tensor; for several tensors, the first name and the number of the others.
        members: positions of the tensors in the list of all tensors.
        shape: shape that the compressor receives: that of the tensor, or (elements,) if packed.
        sizes: number of elements of each member.
        compress: whether the policy chooses the compressor; otherwise the bucket is sent
            uncompressed.
        packed: whether the members are flattened and concatenated.
    """

    name: str
    members: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    compress: bool
    packed: bool
    group: str = ""

    @functools.cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def dense_bytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]


def make_buckets(
    tensors: Sequence[TensorInfo],
    *,
    scope: str = "tensor",
    skip: Sequence[str] = (),
    min_elements: int = MIN_ELEMENTS,
    scopes: Mapping[str, str] | None = None,
) -> list[Bucket]:
    """Divide `tensors` into buckets; a pure function, so that all ranks get the same buckets.

    Args:
        tensors: tensors in the order in which their gradients are expected.
        scope: scope that the compressors need (`Compressor.scope`). "each" makes a bucket of every
            tensor, small ones included, as Horovod's compression objects expect.
        skip: patterns (as for file names) of the names of tensors to send uncompressed.
        min_elements: tensors with fewer elements are sent uncompressed.
        scopes: name pattern -> scope of the matching tensors, which share no bucket with other
            tensors. The first pattern that matches counts. Ignored for scopes "each" and "model".
    """
    if scope == "each":
        return [_bucket(tensors, [i], compress=True, packed=False) for i in range(len(tensors))]
    if scope == "model":
        return _packed(tensors, range(len(tensors)), compress=True, limit=math.inf)
    chosen = [i for i, t in enumerate(tensors) if _compressible(t, skip, min_elements)]
    others = [i for i in range(len(tensors)) if i not in set(chosen)]
    parts: dict[str, list[int]] = {}  # pattern ("" for none) -> tensors
    for i in chosen:
        parts.setdefault(first_match(tensors[i].name, scopes or {}) or "", []).append(i)
    own = [
        bucket
        for pattern, which in parts.items()
        for bucket in _compressed(tensors, which, (scopes or {}).get(pattern, scope))
    ]
    packed = _packed(tensors, others, compress=False, limit=FLAT_BYTES)
    return sorted(own + packed, key=lambda bucket: bucket.members[-1])


def _compressed(tensors: Sequence[TensorInfo], which: Sequence[int], scope: str) -> list[Bucket]:
    if scope in ("flat", "joint"):
        limit = FLAT_BYTES if scope == "flat" else math.inf
        return _packed(tensors, which, compress=True, limit=limit)
    return [_bucket(tensors, [i], compress=True, packed=False) for i in which]


def fingerprint(*parts: object) -> int:
    """Return a hash of `parts` from 0 to 4092; it most likely differs if `parts` differ."""
    text = repr(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % 4093


def _compressible(tensor: TensorInfo, skip: Sequence[str], min_elements: int) -> bool:
    large = len(tensor.shape) >= 2 and tensor.size >= min_elements
    return large and tensor.dtype.startswith(("float", "bfloat")) and not matches(tensor.name, skip)


def _packed(
    tensors: Sequence[TensorInfo], which: Sequence[int], *, compress: bool, limit: float
) -> list[Bucket]:
    """Pack tensors of equal dtype, kind and group into flat buckets of up to `limit` bytes."""
    open_: dict[tuple[str, str, str], list[int]] = {}
    closed: list[list[int]] = []
    for i in which:
        key = (tensors[i].dtype, tensors[i].kind, tensors[i].group)
        if key in open_ and 4 * sum(tensors[j].size for j in (*open_[key], i)) > limit:
            closed.append(open_.pop(key))
        open_.setdefault(key, []).append(i)
    flat = (*closed, *open_.values())
    return [_bucket(tensors, members, compress=compress, packed=True) for members in flat]


def _bucket(
    tensors: Sequence[TensorInfo], members: Sequence[int], *, compress: bool, packed: bool
) -> Bucket:
    first, sizes = tensors[members[0]], tuple(tensors[i].size for i in members)
    shape = (sum(sizes),) if packed else first.shape
    name = first.name + (f"+{len(members) - 1}" if len(members) > 1 else "")
    members = tuple(members)
    return Bucket(name, members, shape, sizes, first.dtype, compress, packed, first.group)
