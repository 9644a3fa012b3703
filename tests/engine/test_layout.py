"""Tests of buckets: a tensor is in exactly one bucket, a bucket in exactly one fusion group."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accordion_hvd.check import matches
from accordion_hvd.engine.layout import (
    MIN_ELEMENTS,
    TensorInfo,
    divide,
    fingerprint,
    limits_of,
    make_buckets,
    make_groups,
)

shapes = st.lists(st.integers(1, 60), min_size=0, max_size=4).map(tuple)
dtypes = st.sampled_from(["float32", "float16", "bfloat16", "float64", "int32"])
models = st.lists(st.tuples(shapes, dtypes, st.sampled_from(["", "cuda"])), max_size=12).map(
    lambda rows: [TensorInfo(f"layer{i}.weight", *row) for i, row in enumerate(rows)]
)
SKIPS = [(), ("layer1*",), ("*",)]


@settings(max_examples=200, deadline=None)
@given(
    tensors=models,
    scope=st.sampled_from(["tensor", "flat", "joint", "model"]),
    skip=st.sampled_from(SKIPS),
)
def test_a_bijection(tensors: list[TensorInfo], scope: str, skip: tuple[str, ...]) -> None:
    buckets = make_buckets(tensors, scope=scope, skip=skip)
    members = [i for bucket in buckets for i in bucket.members]
    assert sorted(members) == list(range(len(tensors)))
    assert len({bucket.name for bucket in buckets}) == len(buckets)
    assert make_buckets(tensors, scope=scope, skip=skip) == buckets
    for bucket in buckets:
        mine = [tensors[i] for i in bucket.members]
        assert bucket.sizes == tuple(t.size for t in mine)
        assert {(t.dtype, t.kind) for t in mine} == {(bucket.dtype, mine[0].kind)}
        assert bucket.shape == ((bucket.size,) if bucket.packed else mine[0].shape)
        assert bucket.packed or len(mine) == 1
        if scope != "model":
            for tensor in mine:
                large = len(tensor.shape) >= 2 and tensor.size >= MIN_ELEMENTS
                real = tensor.dtype != "int32"
                assert bucket.compress == (large and real and not matches(tensor.name, skip))
        if scope == "tensor":
            assert bucket.compress != bucket.packed
    payloads = [4 * bucket.size for bucket in buckets]
    groups = make_groups(payloads, limit=10_000)
    assert [i for group in groups for i in group] == list(range(len(buckets)))
    for group in groups:
        assert len(group) == 1 or sum(payloads[i] for i in group) <= 10_000


KINDS = st.sampled_from(["", "alike", "any"])


@settings(max_examples=200, deadline=None)
@given(
    tensors=models, data=st.data(), limit=st.sampled_from([None, 100.0, 1e9]),
    device=st.sampled_from([None, "cpu", "cuda:0"]),
)  # fmt: skip
def test_a_layout_has_everything_once(
    tensors: list[TensorInfo], data: st.DataObject, limit: float | None, device: str | None
) -> None:
    buckets = make_buckets(tensors)
    kinds = [(data.draw(KINDS), bucket.dtype) for bucket in buckets]
    groups = divide(buckets, kinds, [4.0 * bucket.size for bucket in buckets], limit, device)
    batches = [batch for group in groups for batch in group]
    assert sorted(i for _, positions in batches for i in positions) == list(range(len(buckets)))
    for stacked, positions in batches:
        mine = [buckets[i] for i in positions]
        assert bool(stacked) == (len(mine) > 1)
        if stacked:
            assert all(kinds[i] == (stacked, mine[0].dtype) for i in positions)
            assert all(bucket.size <= limits_of(device).stacked for bucket in mine)
        if stacked == "alike":
            assert len({bucket.shape for bucket in mine}) == 1


def test_rule_by_example() -> None:
    tensors = [
        TensorInfo("conv.weight", (32, 32, 3, 3), "float32"),
        TensorInfo("conv.bias", (32,), "float32"),
        TensorInfo("small.weight", (10, 10), "float32"),
        TensorInfo("embedding", (5000, 8), "float32"),
        TensorInfo("norm.weight", (5000,), "float32"),
    ]
    buckets = {bucket.name: bucket for bucket in make_buckets(tensors, skip=["embed*"])}
    assert set(buckets) == {"conv.weight", "conv.bias+3"}
    assert buckets["conv.weight"].compress and buckets["conv.weight"].shape == (32, 32, 3, 3)
    assert buckets["conv.bias+3"].members == (1, 2, 3, 4)
    assert buckets["conv.bias+3"].shape == (32 + 100 + 40000 + 5000,)


def test_order_is_that_of_the_last_gradient() -> None:
    """Buckets are ordered by their last gradients, since a bucket is ready when all are there."""
    tensors = [TensorInfo(f"b{i}", (8,), "float32") for i in range(3)]
    tensors[1:1] = [TensorInfo("w", (64, 64), "float32")]
    assert [bucket.name for bucket in make_buckets(tensors)] == ["w", "b0+2"]


@pytest.mark.parametrize(
    ("name", "patterns", "result"),
    [
        ("layer.weight", ["layer.*"], True),
        ("layer.weight", ["Layer.*"], False),
        ("layer.weight", ["weight"], False),
        ("layer.weight", ["x", "*.weight"], True),
        ("layer.weight", [], False),
        ("layer.0.weight", ["layer.[01].*"], True),
    ],
)
def test_patterns(name: str, patterns: list[str], result: bool) -> None:
    assert matches(name, patterns) is result


def test_fingerprint_is_small_and_stable() -> None:
    assert fingerprint("a", (1, 2)) == fingerprint("a", (1, 2))
    assert len({fingerprint(i) for i in range(200)}) > 150
    assert all(0 <= fingerprint(i) < 2**24 for i in range(200))
