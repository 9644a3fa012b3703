"""Buckets: the tensors that travel together.

A tensor with two or more dimensions that is large enough is a bucket of its own, in its own shape:
matrix methods need it and Accordion decides per layer. Everything else (biases, norms, small or
exempt tensors) is packed into flat buckets and travels dense. No compressor knows this rule.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from accordion_hvd.core.patterns import matches
from accordion_hvd.ops.spec import ITEMSIZE

MIN_ELEMENTS = 1024
"""Tensors with fewer elements travel dense: their bytes are not worth a compressor's work."""

FLAT_BYTES = 8 << 20
"""Dense bytes after which a flat bucket is closed, so that it can leave during backward."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor to be exchanged.

    Attributes:
        name: unique, equal on all ranks.
        shape: its shape.
        dtype: its dtype by name.
        kind: tensors of different kinds (devices, say) are never packed together.
        group: nor are tensors of different parameter groups, where these have settings that
            matter to a conversation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    group: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that make one conversation.

    Attributes:
        name: that of its tensor, or of its first one and how many follow.
        members: positions of its tensors in the list that was given.
        shape: what the conversation sees: the tensor's own, or (elements,) if packed.
        sizes: elements of each member.
        dtype: of all members.
        compress: whether the policy has a say; else it travels dense.
        packed: whether members are flattened and concatenated.
        group: that of all members.
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
        """Number of elements."""
        return sum(self.sizes)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the tensors as they are."""
        return self.size * ITEMSIZE[self.dtype]


def make_buckets(
    tensors: Sequence[TensorInfo],
    *,
    scope: str = "tensor",
    skip: Sequence[str] = (),
    min_elements: int = MIN_ELEMENTS,
) -> list[Bucket]:
    """Cut `tensors` into buckets: a pure function, equal on all ranks.

    Args:
        tensors: in the order in which their gradients are expected.
        scope: what the compressors want (`Compressor.scope`); "each" gives every tensor, small
            ones too, a bucket of its own (Horovod's compression objects expect that).
        skip: patterns (as of file names) of tensors that travel dense.
        min_elements: tensors with fewer elements travel dense.
    """
    if scope == "each":
        return [_bucket(tensors, [i], compress=True, packed=False) for i in range(len(tensors))]
    if scope == "model":
        return _packed(tensors, range(len(tensors)), compress=True, limit=math.inf)
    chosen = [i for i, t in enumerate(tensors) if _compressible(t, skip, min_elements)]
    rest = [i for i in range(len(tensors)) if i not in set(chosen)]
    if scope in ("flat", "joint"):
        limit = FLAT_BYTES if scope == "flat" else math.inf
        own = _packed(tensors, chosen, compress=True, limit=limit)
    else:
        own = [_bucket(tensors, [i], compress=True, packed=False) for i in chosen]
    packed = _packed(tensors, rest, compress=False, limit=FLAT_BYTES)
    return sorted(own + packed, key=lambda bucket: bucket.members[-1])


def fingerprint(*parts: object) -> int:
    """Return a number below 4093 that differs, most likely, where `parts` differ."""
    text = repr(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % 4093


def _compressible(tensor: TensorInfo, skip: Sequence[str], min_elements: int) -> bool:
    large = len(tensor.shape) >= 2 and tensor.size >= min_elements
    return large and tensor.dtype.startswith(("float", "bfloat")) and not matches(tensor.name, skip)


def _packed(
    tensors: Sequence[TensorInfo], which: Sequence[int], *, compress: bool, limit: float
) -> list[Bucket]:
    """Flat buckets of tensors of one dtype, kind and group, each up to `limit` bytes."""
    open_: dict[tuple[str, str, str], list[int]] = {}
    done: list[list[int]] = []
    for i in which:
        key = (tensors[i].dtype, tensors[i].kind, tensors[i].group)
        if key in open_ and 4 * sum(tensors[j].size for j in (*open_[key], i)) > limit:
            done.append(open_.pop(key))
        open_.setdefault(key, []).append(i)
    flat = (*done, *open_.values())
    return [_bucket(tensors, members, compress=compress, packed=True) for members in flat]


def _bucket(
    tensors: Sequence[TensorInfo], members: Sequence[int], *, compress: bool, packed: bool
) -> Bucket:
    first, sizes = tensors[members[0]], tuple(tensors[i].size for i in members)
    more = f"+{len(members) - 1}" if len(members) > 1 else ""
    shape = (sum(sizes),) if packed else first.shape
    name = first.name + more
    members = tuple(members)
    return Bucket(name, members, shape, sizes, first.dtype, compress, packed, first.group)
