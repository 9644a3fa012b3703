"""Tests of all frameworks' operations: equal names, equal signatures, and NumPy's results."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from frameworks import (
    NUMPY,
    POISONED,
    TENSORFLOW,
    TORCH,
    Framework,
    installed,
    parameters,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from accordion_hvd.check import PayloadError
from accordion_hvd.ops import count_sketch, indices, journal, namespace, random
from accordion_hvd.ops import quantization as q
from accordion_hvd.ops.selection import (
    _SAMPLE,
    _places,
    accumulate_outgrown,
    largest_index,
    largest_of_bins,
)
from accordion_hvd.ops.spec import BROKEN, FOLDS


def public(xp: ModuleType) -> dict[str, Callable[..., Any]]:
    functions = inspect.getmembers(xp, inspect.isfunction)
    return {n: f for n, f in functions if n[0] != "_" and n != "consume"}


OTHERS = parameters((TORCH, TENSORFLOW))
ALL = parameters()


@pytest.mark.parametrize("framework", OTHERS)
def test_same_names_and_signatures(framework: Framework) -> None:
    ours, oracle = public(framework.xp), public(NUMPY.xp)
    assert set(ours) == set(oracle)
    for name, function in ours.items():
        mine, theirs = inspect.signature(function), inspect.signature(oracle[name])
        assert list(mine.parameters) == list(theirs.parameters), name
        for parameter in mine.parameters:
            a, b = mine.parameters[parameter], theirs.parameters[parameter]
            assert (a.kind, a.default) == (b.kind, b.default), name
        assert oracle[name].__doc__, name


def test_every_operation_is_compared() -> None:
    compared = {name for name, _, _ in RESULTS} | COVERED
    assert compared >= set(public(NUMPY.xp))


RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 7)).astype(np.float32)
Y = RNG.standard_normal((5, 7)).astype(np.float32)
V = RNG.standard_normal(40).astype(np.float32)
INDEX = np.array([3, 9, 10, 39], np.int32)
PLACES = np.int32([[[0, 1, 2], [3, 4, 9]], [[5, 0, 0], [9, 1, 11]]])  # of two rows' three chunks
NAN = np.array([1, np.nan, 3], np.float32)
INF = np.array([np.inf, -np.inf], np.float32)
EDGES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 1e-30, 3e38, -3e38, np.inf, -np.inf, np.nan]
HUGE = np.full(1200, 1e36, np.float32)  # finite, but its sum is not
CUBE = RNG.standard_normal((3, 4, 7)).astype(np.float32)
CUBE_OF_7 = RNG.standard_normal((3, 7, 7)).astype(np.float32)
LONG = RNG.standard_normal(70_000).astype(np.float32)
WIDE = RNG.standard_normal((300, 2048)).astype(np.float32)
TALL, LARGE = WIDE[:, :400].copy(), RNG.standard_normal((400, 2048)).astype(np.float32)
SIGNS = np.sign(RNG.standard_normal((1, 1099 + 2 * FOLDS))).astype(np.float32)
SIGNED = np.sign(RNG.standard_normal((7, 157 + 2 * FOLDS))).astype(np.float32)
CODES = RNG.integers(0, 256, LONG.size).astype(np.uint8)
BITS = q.pack_signs(LONG, None)
STEPS = q.bucket_norms(LONG, 7, "max") / np.float32(3)
HASHES = count_sketch.hashes(NUMPY.xp, 70_000, 5, 9_000, random.key("sketch", 1))
TABLE = count_sketch.insert(LONG, HASHES, 9_000)
P, Q = RNG.standard_normal((2, 5)).astype(np.float32), Y[:2]
BAD, GOOD = np.ones(1, np.float32), np.zeros(1, np.float32)

WIRES = ("float16", "bfloat16")

RATES = [(2.0, 3.0), [np.float32([2]), np.float32([3])], [X[:, :1], X[:, 1:2] ** 2]]

RESULTS: list[tuple[str, tuple[Any, ...], float]] = [  # operation, arguments, tolerance (0: bits)
    ("zeros", ((2, 3), "float32"), 0),
    ("full", ((2, 3), 1.5, "float32"), 0),
    ("arange", (5,), 0),
    ("cast", (X, "float16"), 0),
    ("cast", (X, "float64"), 0),
    ("cast", (X, "float32"), 0),
    ("copy", (X,), 0),
    ("reshape", (X, (7, 5)), 0),
    ("reshape", (X, (-1,)), 0),
    ("transpose", (X,), 0),
    ("minimum", (X, Y), 0),
    ("maximum", (X, Y), 0),
    ("concat", ([V, V[:3]],), 0),
    ("split", (V, (10, 25, 5)), 0),
    ("stack", ([X, Y],), 0),
    ("unstack", (X,), 0),
    ("transpose", (CUBE,), 0),
    ("to_bytes", (X,), 0),
    ("to_bytes", (INDEX,), 0),
    ("accumulate", (X, Y), 0),
    ("accumulate", (X, Y.astype(np.float16)), 0),
    ("subtract", (X, Y), 0),
    ("accumulate_scaled", (X, 0.9, Y), 0),
    ("accumulate_scaled", (X, 0.5, Y.astype(np.float16)), 0),
    *[("momentum", (X, beta, Y), 1e-6) for beta in (0.0, 0.9)],
    ("momentum", (X, 0.9, Y.astype(np.float16)), 1e-3),
    ("lerp", (X, 0.9, Y), 1e-6),
    ("lerp", (X.astype(np.float16), 0.9, Y), 1e-3),
    ("lerp", (X.astype(np.float64), 0.9, Y.astype(np.float64)), 1e-15),
    ("second_moment", (X, 0.99, Y), 1e-6),
    ("second_moment", (X, 0.99, Y.astype(np.float16)), 1e-3),
    *[("momentum", (X, beta, np.abs(Y)), 1e-6) for beta in (0.0, 0.9)],
    ("momentum", (X, 0.9, np.abs(Y).astype(np.float16)), 1e-3),
    ("momentum", (X.astype(np.float64), 0.9, np.abs(Y.astype(np.float64))), 1e-15),
    *[("bounded_ratio", (X, np.abs(X) * size, eps), 1e-6) for size in (0.5, 3) for eps in (0, 0.1)],
    ("bounded_ratio", (np.float32([0, 1, -1, 1e-37]), np.zeros(4, np.float32)), 1e-6),
    *[("preconditioned", (X, Y * Y, rates, 1e-3, X.copy()), 1e-5) for rates in RATES],
    ("preconditioned", (X, Y * Y, (1.0, 2.0), 1e-3, X.astype(np.float16)), 1e-5),
    ("mask_where_zero", (X, Y), 0),
    ("pad_last", (V, 48), 0),
    ("pad_last", (X, 7), 0),
    ("pad_last", (X, 8), 0),
    ("swap_leading", (X,), 0),
    ("swap_leading", (CUBE,), 0),
    ("clear", (V, INDEX), 0),
    ("add_at", (V, INDEX, V[:4]), 0),
    ("sum_sparse", ([INDEX, INDEX[:1], INDEX[:0]], [V[:4], V[:1], V[:0]], V.reshape(5, 8)), 0),
    ("sum_sparse", ([INDEX], [V[:4]], V.astype(np.float16)), 0),
    ("take", (V, INDEX), 0),
    ("concat", ([X, X[:, :2]], 1), 0),
    ("sum_at", (np.int32([3, 0, 3, 6]), np.int32([1, -1, 1, 5]), 8), 0),
    ("sum_at", (INDEX[:0], INDEX[:0], 3), 0),
    *[("finite", (x,), 0) for x in (X, NAN, INF, V.astype(np.float16), np.float64([1e300]))],
    ("largest_index", (V, 7), 0),
    ("largest_index", (V, 40), 0),
    ("largest_index", (V, 1), 0),
    ("largest_index", (X, 3), 0),
    ("largest_index", (X, 7), 0),
    ("accumulate_largest", (V, V[::-1].copy(), 7), 0),
    ("accumulate_largest", (LONG, LONG[::-1].copy(), 700), 0),
    ("accumulate_largest", (X, Y, 2), 0),
    ("accumulate_largest", (X, Y.astype(np.float16), 2), 0),
    *[("accumulate_reaching", (V, V[::-1].copy(), limit), 0) for limit in (0.0, 1.0, 99.0)],
    ("accumulate_reaching", (X, Y.astype(np.float16), 1.0), 0),
    ("accumulate_reaching", (np.zeros(3, np.float32), np.zeros(3, np.float32), 0.0), 0),
    *[("accumulate_outgrown", (V, V[::-1].copy(), width), 0) for width in (1, 7, 40, 50)],
    ("accumulate_outgrown", (X, Y.astype(np.float16), 3), 0),
    ("accumulate_outgrown", (LONG, LONG[::-1].copy(), 500), 0),
    ("accumulate_outgrown", (np.zeros((2, 5), np.float32), np.zeros((2, 5), np.float32), 2), 0),
    *[("largest_of_bins", (V, width), 0) for width in (1, 7, 40, 50)],
    ("largest_of_bins", (X, 3), 0),
    ("largest_of_bins", (np.zeros((2, 5), np.float32), 2), 0),
    *[("largest_of_chunks", (V, chunks, 3), 0) for chunks in (1, 7, 8)],
    ("largest_of_chunks", (X, 3, 1), 0),
    ("largest_of_chunks", (np.zeros((2, 5), np.float32), 2, 2), 0),
    ("index_of_chunks", (PLACES, 40), 0),
    ("index_of_chunks", (np.full((1, 1, 9_000_000), 255, np.int32), 18_000_000), 0),
    ("index_of_chunks", (np.stack([PLACES, PLACES[:, ::-1], PLACES + 1]), 34), 0),
    *[("pack_bins", (INDEX, V[:4], (2, 20), width), 0) for width in (7, 63, 64)],
    ("pack_bins", (INDEX[:0], V[:0], (40,), 7), 0),
    *[
        ("unpack_bins", (indices.pack_bins(INDEX, V[:4] < 0, (40,), w), (40,), w), 0)
        for w in (7, 64)
    ],
    ("unpack_bins", (np.zeros(0, np.uint8), (40,), 7), 0),
    *[("invalid_index", (INDEX, size), 0) for size in (40, 39)],
    ("invalid_index", (INDEX[::-1].copy(), 40), 0),
    ("invalid_index", (np.int32([-1, 3]), 40), 0),
    ("invalid_index", (np.int32([3, 3]), 40), 0),
    ("invalid_index", (INDEX[:0], 40), 0),
    ("invalid_index", (np.stack([INDEX, INDEX[::-1], INDEX + 1]), 40), 0),
    ("pack_index", (INDEX[:0], 40), 0),
    ("unpack_index", (np.zeros(0, np.uint8), 0, 40), 0),
    ("raise_on_invalid", ([X, [V]], np.zeros(3, np.float32), [0, 1, 2]), 0),
    ("sketch", (LONG, HASHES, 9_000), 0),
    ("sketch", (LONG.astype(np.float16), HASHES, 9_000), 0),
    ("unsketch", (TABLE, HASHES, LONG.copy()), 0),
    ("unsketch", (TABLE, HASHES, LONG.astype(np.float16)), 0),
    ("zeros_reusing", (X,), 0),
    ("zeros_reusing", (X.astype(np.float16),), 0),
    *[("pack_index", (INDEX, size), 0) for size in (40, 1000, 70_000, 2**31 - 1)],
    ("unpack_index", (np.stack([indices.pack(INDEX + i, 40) for i in (0, -1)]), 4, 40), 0),
    *[("unpack_index", (indices.pack(INDEX, size), 4, size), 0) for size in (40, 70_000, 2**30)],
    *[("project", (X, Y, X.T[:rank, :5].copy(), X[:rank], Y[:rank]), 1e-5) for rank in (1, 3)],
    ("project", (X, Y, X[:2, :5], X[:2], Y[:2, 2:], True), 1e-5),
    ("project", (X, Y.astype(np.float16), X[:1, :5], X[:1], X[:1]), 1e-5),
    ("project", (CUBE, CUBE + 1, CUBE[:, :2, :4], CUBE[:, :2], CUBE[:, 1:3]), 1e-5),
    ("project", (CUBE, CUBE + 1, CUBE[:, :1, :4], CUBE[:, :1], CUBE[:, 1:2, 3:], True), 1e-5),
    *[
        ("project", (LARGE, LARGE[::-1].copy(), TALL[:r], WIDE[:r], WIDE[9 : 9 + r]), 1e-3)
        for r in (1, 3, 8)
    ],
    *[
        ("project", (LARGE, LARGE[::-1].copy(), TALL[:r], WIDE[:r], TALL[9 : 9 + r], True), 1e-3)
        for r in (1, 3, 8)
    ],
    *[("expand", (P[:rank], Q[:rank], Y), 1e-5) for rank in (1, 2)],
    ("expand", (CUBE[:, :1], CUBE[:, :1], CUBE_OF_7), 1e-5),
    *[("expand", (TALL[:r], WIDE[:r], LARGE + 1), 1e-3) for r in (1, 3, 8)],
    ("deflate", (X, X[:2, :5], X[:2]), 1e-5),
    ("deflate", (CUBE_OF_7, CUBE[:, :1], CUBE[:, :1]), 1e-5),
    *[("deflate", (LARGE, TALL[:r], WIDE[:r]), 1e-3) for r in (1, 8)],
    *[("pack_bits", (CODES & 2**bits - 1, bits), 0) for bits in range(1, 9)],
    *[("unpack_bits", (q.pack_bits(CODES & 2**b - 1, b), b, CODES.size), 0) for b in range(1, 9)],
    *[
        ("bucket_norms", (x, 16, kind), 0)
        for x in (X, LONG)
        for kind in ("max", "l1", "l2", "mean")
    ],
    ("bucket_norms", (HUGE, 1200, "mean"), 1e-6),
    *[("bucket_norms", (x, 10**6, "max"), 0) for x in (V, V.astype(np.float16), NAN, INF)],
    *[("quantize", (LONG, STEPS, 7, bits, 5), 0) for bits in (3, 4, 8)],
    ("quantize", (X, np.ones(1, np.float32), 35, 8), 0),
    ("quantize", (X.astype(np.float16), np.ones(1, np.float32), 35, 8), 0),
    ("sum_quantized", ([CODES, CODES[::-1].copy()], [STEPS, STEPS * 3], 7, 8, 127, LONG), 0),
    ("sum_quantized", ([BITS], [STEPS[:1]], 70_000, 1, 0.5, WIDE[:70, :1000].copy()), 0),
    ("subtract_quantized", (LONG, BITS, STEPS, 7, 1, 0.5), 0),
    *[("pack_signs", (x, *turn), 0) for x in (X, LONG * (LONG > 0)) for turn in ((), (0,), (1,))],
    *[("pack_random_signs", (np.tanh(x), 5), 0) for x in (X, LONG)],
    ("pack_random_signs", (np.tanh(V.astype(np.float64)), 5), 0),
    *[("pack_powers", (x, 5), 0) for x in (X, LONG, NAN, INF, V.astype(np.float16))],
    ("sum_powers", ([q.pack_powers(LONG, 5), q.pack_powers(LONG, 6)], 0.5, LONG), 0),
    *[
        ("narrow", (x, ["w", "v"], seed), 0)
        for x in (LONG, np.float32([EDGES] * 2))
        for seed in (5, 6)
    ],
    ("narrow", (CUBE, ["u", "v", "w"], 5), 0),
    ("widen", (np.arange(-(2**15), 2**15).astype(np.int16).reshape(4, -1),), 0),
    *[
        ("column_means", (x, q.pack_signs(x.reshape(-1), None)), 0)
        for x in (X, CUBE, WIDE, np.swapaxes(WIDE, -1, -2))
    ],
    ("sum_columns", ([BITS[:5], BITS[5:10]], [X[:2], X[2:4]], X), 0),
    ("sum_columns", ([BITS[:11]], [CUBE[:, :2].copy()], CUBE), 0),
    ("subtract_columns", (CUBE, BITS[:11], CUBE[:, :2].copy()), 0),
    ("clip", (X, np.float32([0.7])), 0),
    ("argsort", (V,), 0),
    ("argsort", (np.round(V),), 0),
    *[("frames", (X, width, step), 0) for width, step in [(7, 1), (3, 2), (6, 1), (2, 3)]],
    *[("overlap_add", (CUBE, step), 1e-6) for step in (1, 2, 3, 4, 7)],
    ("orthogonalize", (CUBE,), 1e-5),
    ("orthogonalize", (X,), 1e-5),
    ("orthogonalize", (X[:1],), 1e-5),
    ("orthogonalize", (np.zeros((3, 6), np.float32),), 1e-5),
    ("norm", (X,), 1e-6),
    ("row_norms", (X,), 1e-6),
    ("row_norms", (np.stack([X, Y, 0 * X]),), 1e-6),
    ("row_norms", (np.full_like(X[:1], np.inf),), 0),
    ("power_below", (np.array([[1.0, 0.999, 3e-18, 2.0**15, 7e33]], np.float32),), 0),
    ("inner_products", (X, Y), 1e-6),
    ("inner_products", (X[:, ::2], Y[:, ::2]), 1e-6),
    ("inner_products", (X[:1], np.full_like(X[:1], np.nan)), 0),
    ("norm", (np.full(10, 1e30, np.float32),), 1e-6),
    *[("norm", (np.float32(scale) * LONG,), 2e-7) for scale in (1, 0, 1e-30, 1e-22, 1e25)],
    ("norm", (np.append(LONG, np.float32(np.inf)),), 0),
    ("norm", (np.append(LONG, np.float32(np.nan)),), 0),
    ("nonfinite", (X,), 0),
    ("nonfinite", (NAN,), 0),
    ("nonfinite", (INF,), 0),
    ("nonfinite", (X.astype(np.float16),), 0),
    ("nonfinite", (HUGE,), 0),
    ("nonfinite", (np.append(HUGE, np.float32(np.inf)),), 0),
    ("nonfinite", (HUGE.astype(np.float64) * 1e200,), 0),
    ("too_large", (X,), 0),
    ("too_large", (NAN,), 0),
    ("too_large", (HUGE,), 0),
    ("too_large", (X.astype(np.float16),), 0),
    *[("fold", (x, SIGNS), 1e-5) for x in (LONG[None], LONG[None, :1100], V[None])],
    *[("fold", (LONG.reshape(7, -1).astype(kind), SIGNED), 1e-5) for kind in ("f2", "f4", "f8")],
    ("zero_if_bad", (X, GOOD), 0),
    ("zero_if_bad", (X, BAD), 0),
    *[("filled", (X, value), 0) for value in (0.0, np.nan)],
    *[("filled_if", (bad, np.nan, X), 0) for bad in (True, False)],
    *[("to_wire", ([X, V], wire, count), 0) for wire in WIRES for count in (75, 80)],
    *[("mean_of_wire", (NUMPY.xp.to_wire([X, V], w, 76), w, 4), 0) for w in WIRES],
    ("from_wire", (NUMPY.xp.to_wire([X, V], "float16", 80), "float16", [X + 1, V + 1]), 0),
    ("checksum", (X,), 0),
    ("checksum", (V.astype(np.float16),), 0),
    ("checksum", (V.astype(np.float64),), 0),
    ("maximum_of", ([V, V[:3] + 9],), 0),
    ("exceeds", (GOOD, 0.0), 0),
    ("exceeds", (BAD, 0.0), 0),
    ("exceeds", (BAD, 2.0), 0),
    ("where", (True, X, Y), 0),
    ("where", (False, X, Y), 0),
]
ON_GPUS = {"project", "expand", "deflate", "clear", "add_at", "sum_sparse"}
COVERED = {"spec", "shape", "dtype", "device", "asarray", "to_numpy", "symbolic"}
COVERED |= {"from_bytes", "secret_normal", "secret_uniform"}  # the last two: test_topagg.py
RESULTS = [row for row in RESULTS if hasattr(NUMPY.xp, row[0])]


def into(framework: Framework, x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return framework.tensor(x)
    return [into(framework, part) for part in x] if isinstance(x, list) else x


def back(framework: Framework, x: Any) -> list[np.ndarray]:
    if isinstance(x, (list, tuple)):
        return [part for piece in x for part in back(framework, piece)]
    return [np.array(x) if isinstance(x, (bool, np.generic)) else framework.array(x)]


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize(("name", "arguments", "tolerance"), RESULTS)
def test_results(framework: Framework, name: str, arguments: Any, tolerance: float) -> None:
    wanted = back(NUMPY, getattr(NUMPY.xp, name)(*[into(NUMPY, x) for x in arguments]))
    with framework.running():
        given = [into(framework, x) for x in arguments]
        found = back(framework, getattr(framework.xp, name)(*given))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if tolerance:
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("row", [row for row in RESULTS if row[0] in ON_GPUS])
def test_tensorflow_operations_for_gpus(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    monkeypatch.setattr(TENSORFLOW.xp, "_has_gpu", lambda: True)
    test_results(TENSORFLOW, *row)


def test_tensorflow_kernels_need_no_thread() -> None:
    """Kernels run in Python code that occupies the only thread of TensorFlow's graphs."""
    pytest.importorskip("tensorflow")
    code = """
import tensorflow as tf
from accordion_hvd.ops import tensorflow as xp

def run(x):
    total, _ = xp.project(x, x, x[:2], x[:2], x[:2])
    return xp.add_at(xp.reshape(total, (-1,)), tf.constant([3]), tf.constant([1.0]))

print(tf.function(lambda x: tf.py_function(run, [x], tf.float32))(tf.eye(9)).shape)
"""
    names = ("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS")
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | dict.fromkeys(names, "1"), timeout=100,
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.strip() == "(81,)", found.stderr


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("like", [X, LARGE, LARGE.astype(np.float16), CUBE_OF_7])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("framework", ALL)
def test_project_tells_bad_gradients_and_can_be_undone(
    framework: Framework, left: bool, like: np.ndarray, bad: float
) -> None:
    xp, grad, undo = framework.xp, like.copy(), []
    grad.reshape(-1)[-3] = bad
    shape = (*like.shape[:-2], 1)
    p, q = (np.ones((*shape, extent), np.float32) for extent in like.shape[-2:])
    error = framework.tensor(like.astype(np.float32))
    with framework.running(), journal.recording(undo):
        given = (grad, p, q, p if left else q)
        found = xp.project(error, *[framework.tensor(x) for x in given], left)[1]
    assert not np.isfinite(framework.array(found)).all()
    journal.rewind(undo)
    np.testing.assert_allclose(framework.array(error), like, atol=1e-6)


@pytest.mark.parametrize("framework", ALL)
def test_what_tensors_say_of_themselves(framework: Framework) -> None:
    xp, x = framework.xp, framework.tensor(X)
    assert xp.shape(x) == (5, 7) and xp.dtype(x) == "float32" and not xp.symbolic(x)
    assert namespace(x) is xp
    spec = xp.spec(framework.tensor(X, "float16"))
    assert (spec.shape, spec.dtype, spec.size, spec.xp) == ((5, 7), "float16", 35, xp)
    zeros = spec.zeros((2, 3))
    assert xp.dtype(zeros) == "float32" and xp.shape(zeros) == (2, 3)
    normal = framework.array(spec.normal((4, 5), seed="layer"))
    assert same_bits(normal, random.normal((4, 5), "layer"))
    assert not same_bits(normal, random.normal((4, 5), "other"))
    assert same_bits(framework.array(xp.asarray(X, xp.device(x))), X)


def test_no_tensor_has_no_namespace() -> None:
    for wrong in (1.0, [1.0], None, "x"):
        with pytest.raises(TypeError, match="not a tensor that accordion_hvd supports"):
            namespace(wrong)


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8", "float64"])
def test_bytes_round_trip(framework: Framework, dtype: str) -> None:
    xp, x = framework.xp, (X * 50).astype(dtype)
    data = xp.to_bytes(framework.tensor(x))
    assert framework.array(data).tobytes() == x.tobytes()
    assert same_bits(framework.array(xp.from_bytes(data, dtype, (5, 7))), x)
    assert same_bits(framework.array(xp.from_bytes(data, dtype, (-1, 7))), x)
    padded = xp.concat([framework.tensor(np.zeros(3, np.uint8)), data])
    piece = xp.split(padded, (3, x.nbytes))[1]  # its start is no multiple of the element size
    assert same_bits(framework.array(xp.from_bytes(piece, dtype, (5, 7))), x)


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_wires_round_trip(framework: Framework, wire: str) -> None:
    """Wires round to nearest, ties to even, and keep special values.

    A second rounding changes nothing.
    """
    special = np.float32([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, 1e-3])
    values = np.concatenate([X.reshape(-1), special])
    once = through_wire(framework, framework.tensor(values), wire)
    twice = through_wire(framework, framework.xp.copy(once), wire)
    np.testing.assert_array_equal(framework.array(twice), framework.array(once))
    finite = np.isfinite(values)
    step = 2.0**-11 if wire == "float16" else 2.0**-8
    found = framework.array(once)
    rounding = np.abs(found[finite] - values[finite])
    assert (rounding <= step * np.abs(values[finite])).all()
    np.testing.assert_array_equal(found[~finite], values[~finite])
    wanted = through_wire(NUMPY, values, wire)
    np.testing.assert_array_equal(found, wanted)


def through_wire(framework: Framework, x: Any, wire: str) -> Any:
    xp = framework.xp
    sent = xp.to_wire([x], wire, x.shape[0] + 1)
    again = xp.to_wire([x], wire, x.shape[0] + 1, into=xp.copy(sent))  # into reused memory
    assert same_bits(framework.array(sent), framework.array(again))
    return xp.from_wire(sent, wire, [xp.copy(x)])[0]


@pytest.mark.parametrize("framework", ALL)
def test_orthogonal_rows(framework: Framework) -> None:
    """The rows are orthonormal and have the same span, even for linearly dependent rows."""
    full, dependent = X, np.concatenate([X[:2], X[:1] + X[1:2], X[3:4] * 0])
    for p in (full, dependent, X[:1], np.zeros((3, 8), np.float32), full * 1e-15, full * 1e15):
        p = p.astype(np.float32)
        q = framework.array(framework.xp.orthogonalize(framework.tensor(p)))
        assert_spans(q, p)


def assert_spans(q: np.ndarray, p: np.ndarray) -> None:
    np.testing.assert_allclose(q @ q.T, np.eye(len(p)), atol=1e-5)
    np.testing.assert_allclose(p @ q.T @ q, p, atol=1e-4 * max(np.abs(p).max(), 1e-30))


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_orthogonal_rows_on_accelerators(rows: int) -> None:
    """Stacks give what QR gives; dependent and vanishing rows are completed."""
    import torch

    from accordion_hvd.ops import torch as ops

    call = ops._normalize if rows == 1 else ops._orthogonalize_by_gram
    stack = RNG.standard_normal((5, rows, 300)).astype(np.float32)
    stack[1, -1] = 0
    stack[2] *= 1e-15
    stack[3] *= 1e15
    stack[4, rows // 2 :] = stack[4, : rows - rows // 2] * 2  # dependent
    found = call(torch.from_numpy(stack)).numpy()
    for basis, p in zip(found, stack, strict=True):
        assert_spans(basis, p)
    for i in {0, 2, 3}:  # independent rows have one result
        np.testing.assert_allclose(found[i], NUMPY.xp.orthogonalize(stack[i]), atol=1e-5)
    kinds = torch.zeros((5, rows, 300), device="meta")
    assert ops.orthogonalize(kinds).shape == kinds.shape  # no host read


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize(("width", "step"), [(1, 1), (3, 1), (3, 2), (6, 4), (12, 4)])
def test_frames_and_their_adjoint(framework: Framework, width: int, step: int) -> None:
    """Each frame is a piece of its row, and <frames(x), y> = <x, overlap_add(y)>."""
    x = RNG.standard_normal((2, 4 * step + width)).astype(np.float32)
    y = RNG.standard_normal((2, 5, width)).astype(np.float32)
    frames = framework.array(framework.xp.frames(framework.tensor(x), width, step))
    for i in range(5):
        assert (frames[:, i] == x[:, i * step : i * step + width]).all()
    back = framework.array(framework.xp.overlap_add(framework.tensor(y), step))
    np.testing.assert_allclose((frames * y).sum(), (x * back).sum(), rtol=1e-4)


@pytest.mark.parametrize("framework", ALL)
def test_undo(framework: Framework) -> None:
    """A rewound journal restores the tensor, to the bit where the framework's undo is exact."""
    xp = framework.xp
    with framework.running():
        x, entries = framework.tensor(V), []
        with journal.recording(entries):
            y = xp.accumulate(x, framework.tensor(V[::-1]))
            y = xp.clear(y, framework.tensor(INDEX))
            y = xp.add_at(y, framework.tensor(INDEX), framework.tensor(V[:4]))
            y = xp.subtract(y, framework.tensor(V * 2))
            y = xp.accumulate_scaled(y, 0.9, framework.tensor(V))
            y, _ = xp.accumulate_reaching(y, framework.tensor(V), 0.5)
            y, _, _ = xp.accumulate_outgrown(y, framework.tensor(V), 7)
        xp.accumulate(framework.tensor(V), framework.tensor(V))  # outside: not recorded
        assert len(entries) in (0, 7)
        journal.rewind(entries)
        assert not entries
        if framework.exact_undo:
            assert same_bits(framework.array(x), V)
        np.testing.assert_allclose(framework.array(x), V, atol=1e-6)


def test_poison_shows() -> None:
    with POISONED.running():
        for name, more in [("accumulate", (X,)), ("subtract", (X,))]:
            x = X.copy()
            result = getattr(NUMPY.xp, name)(x, *more)
            assert np.isnan(x).all() and np.isfinite(result).all()
        for name, more in [("clear", (INDEX,)), ("add_at", (INDEX, V[:4]))]:
            v = V.copy()
            result = getattr(NUMPY.xp, name)(v, *more)
            assert np.isnan(v).all() and np.isfinite(result).all()


# --------------------------------------------------------------------------------------- selection
@pytest.mark.parametrize("size", [1, 10, 1000, (1 << 16) + 1, 300_007])
@pytest.mark.parametrize("part", [0.001, 0.01, 0.3, 0.999, 1.0])
def test_largest_is_exact(size: int, part: float) -> None:
    count = max(1, int(part * size))
    for kind in ("normal", "heavy", "ties", "few", "few and nan", "columns", "nan", "sampled"):
        x = RNG.standard_normal(size).astype(np.float32)
        if kind == "heavy":
            x = x**9
        if kind == "ties":
            x = np.round(x)
        if kind == "columns":  # every sixteenth unit is dead
            x = np.where(np.arange(size) % 16 == 0, 0, x).astype(np.float32)
        if kind.startswith("few"):
            x = np.where(np.arange(size) % 97 == 0, x, 0).astype(np.float32)
        if kind == "sampled":  # the sample is unlike the rest
            x[_places(size, _SAMPLE)] *= 100
        if kind.endswith("nan"):
            x[: size // 3 : 5] = np.nan
        index = largest_index(x, count)
        assert index.dtype == np.int32 and index.shape == (count,)
        assert (np.diff(index) > 0).all(), "ascending, none twice"
        magnitude = np.where(np.isnan(x), -1, np.abs(x))
        wanted = np.sort(magnitude)[size - count :]
        np.testing.assert_array_equal(np.sort(magnitude[index]), wanted)


# -------------------------------------------------------------------------------- random numbers
@pytest.mark.parametrize("framework", ALL)
def test_uniform_is_the_same_everywhere(framework: Framework) -> None:
    xp = framework.xp
    for step in (0, 1, 2**31, 2**40):
        wanted = random.uniform(NUMPY.xp, 1000, random.key("a", step))
        assert ((0 <= wanted) & (wanted < 1)).all() and wanted.dtype == np.float32
        assert same_bits(framework.array(random.uniform(xp, 1000, random.key("a", step))), wanted)
        tensor = framework.tensor(np.array([step]))[0]
        if framework.backend == "numpy":
            continue  # there, a step is a Python integer
        mixed = framework.array(random.uniform(xp, 1000, random.key("a", tensor)))
        assert same_bits(mixed, wanted)


def test_words_are_mixed_by_murmurhash3() -> None:
    """The finalizer of MurmurHash3 maps 1 to 0x514E28B7 and all bits to 0x81F16F39."""
    for value, wanted in ((0, 0), (1, 0x514E28B7), (0xFFFFFFFF, 0x81F16F39)):
        assert random.hashed(0, value) == wanted


def test_uniform_is_uniform() -> None:
    draws = random.uniform(NUMPY.xp, 100_000, random.key("test", 1))
    counts = np.histogram(draws, 50, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-squared, 49 degrees: p < 1e-4
    other = random.uniform(NUMPY.xp, 100_000, random.key("test", 2))
    assert abs(np.corrcoef(draws, other)[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.02


def test_backends_are_all_there() -> None:
    for name in ("numpy", "torch", "tensorflow"):
        assert importlib.util.find_spec(f"accordion_hvd.ops.{name}") is not None


@pytest.mark.parametrize("size", [40, 1000, 70_000, 2**31 - 1])
def test_positions_are_packed_alike_on_gpus(size: int) -> None:
    import torch

    from accordion_hvd.ops import torch as xp

    packed = xp.pack_index.__wrapped__(torch.tensor(INDEX), size)
    assert packed.numpy().tobytes() == indices.pack(INDEX, size).tobytes()
    np.testing.assert_array_equal(
        xp.unpack_index.__wrapped__(packed, len(INDEX), size).numpy(), INDEX
    )
    rows = torch.stack([packed, xp.pack_index.__wrapped__(torch.tensor(INDEX - 1), size)])
    found = xp.unpack_index.__wrapped__(rows, len(INDEX), size).numpy()
    np.testing.assert_array_equal(found, [INDEX, INDEX - 1])


@settings(deadline=None)
@given(st.integers(1, 5000), st.data())
def test_positions_survive_packing(size: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=60))
    index = np.array(sorted(chosen), np.int32)
    packed = indices.pack(index, size)
    assert packed.size == indices.packed_length(index.size, size) <= 4 * index.size
    np.testing.assert_array_equal(indices.unpack(packed, index.size, size), index)


def test_bins_are_looked_at_alike_on_gpus() -> None:
    """PyTorch operations that GPUs use, run on the CPU, give NumPy's results."""
    torch = pytest.importorskip("torch")
    from accordion_hvd.ops import torch as xp

    for x, y in ((V, V[::-1].copy()), (X, Y), (WIDE, WIDE[::-1].copy()), (X * 0, Y * 0)):
        for width in (1, 3, 7, 50, 2000):
            wanted = NUMPY.xp.accumulate_outgrown(x.copy(), y, width)
            found = xp.accumulate_outgrown.__wrapped__(torch.tensor(x), torch.tensor(y), width)
            for ours, theirs in zip(found, wanted, strict=True):
                assert same_bits(ours.numpy(), theirs)
            index = xp.largest_of_bins.__wrapped__(torch.tensor(x), width).numpy()
            assert same_bits(index, NUMPY.xp.largest_of_bins(x, width))
    for places in (PLACES, PLACES[:, ::-1].copy(), np.stack([PLACES, PLACES + 1])):
        for ours, theirs in zip(
            xp.index_of_chunks.__wrapped__(torch.tensor(places), 35),
            NUMPY.xp.index_of_chunks(places, 35), strict=True,
        ):  # fmt: skip
            assert same_bits(ours.numpy(), theirs)
    for x in (V, X, WIDE):  # without equal magnitudes, of which PyTorch may take any
        place = xp.largest_of_chunks.__wrapped__(torch.tensor(x), 3, 1).numpy()
        assert same_bits(place, NUMPY.xp.largest_of_chunks(x, 3, 1))
    for wrong in (INDEX, INDEX[::-1].copy(), INDEX - 4, INDEX[:0], np.stack([INDEX, INDEX - 4])):
        for size in (39, 40):
            doubt = xp.invalid_index.__wrapped__(torch.tensor(wrong), size).numpy()
            assert same_bits(doubt, NUMPY.xp.invalid_index(wrong, size))
    packed = torch.tensor(indices.pack(INDEX, 1000))
    packed[len(INDEX) :] = 0  # the bitmap of the positions' high bytes is empty
    assert xp.invalid_index.__wrapped__(xp.unpack_index.__wrapped__(packed, len(INDEX), 1000), 1000)


@pytest.mark.parametrize("framework", ALL)
def test_doubts_name_their_senders(framework: Framework) -> None:
    doubts = framework.tensor(np.float32([0, 1, 0, 2, 1]))
    with pytest.raises(PayloadError, match="payloads of ranks 3, 7 do not decode: positions"):
        framework.xp.raise_on_invalid([], doubts, [0, 7, 1, 3, 7])


def test_graphs_keep_lists_as_they_were() -> None:
    """A list that changes after an operation was traced does not change the graph."""
    tf = pytest.importorskip("tensorflow")
    levels = V[:32]
    steps = NUMPY.xp.bucket_norms(levels, 8, "max")
    packed = NUMPY.xp.quantize(levels, steps, 8, 4)

    @tf.function
    def total(packed: Any, steps: Any) -> Any:
        parts, scales = [packed, packed], [steps, steps]
        result = TENSORFLOW.xp.sum_quantized(parts, scales, 8, 4, 8.0, tf.zeros(32))
        parts.clear()
        scales.append(steps)
        return result

    wanted = NUMPY.xp.sum_quantized([packed] * 2, [steps] * 2, 8, 4, 8.0, levels)
    np.testing.assert_array_equal(total(packed, steps).numpy(), wanted)


@pytest.mark.parametrize("size", [1, 63, 1000, 300_007])
def test_bins_in_blocks(size: int) -> None:
    """Long vectors are processed block by block, with the result of a plain loop."""
    rng = np.random.default_rng(size)
    error, grad = rng.standard_normal((2, size)).astype(np.float32)
    for width in (1, 50, 777, 16383):
        total, index, scale = accumulate_outgrown(error.copy(), grad, width)
        edges = np.arange(0, size, width)
        most = np.maximum.reduceat(np.abs(error + grad), edges)
        limits = np.repeat(most, np.diff([*edges, size]))
        wanted = np.flatnonzero((np.abs(total + grad) >= limits) & (total != 0))
        np.testing.assert_array_equal(index, wanted)
        np.testing.assert_allclose(scale, [most.mean(dtype=np.float64)], rtol=1e-6)
        best = [edge + np.abs(total[edge : edge + width]).argmax() for edge in edges]
        np.testing.assert_array_equal(largest_of_bins(total, width), best)


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_only_nonfinite_elements_are_nonfinite(framework: Framework, dtype: str) -> None:
    """Large finite elements do not count as non-finite, even if their sum overflows."""
    huge = np.full(5000, np.finfo(dtype).max / 100, dtype)
    with framework.running():
        for x in (huge, -huge):
            assert framework.array(framework.xp.nonfinite(framework.tensor(x)))[0] == 0
        for bad in (np.nan, np.inf, -np.inf):
            x = np.append(huge, np.asarray(bad, dtype))
            flag = framework.array(framework.xp.nonfinite(framework.tensor(x)))[0]
            assert flag == (BROKEN if np.isnan(bad) else 1)


@pytest.mark.parametrize("framework", ALL)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_large_norms_are_noticed(framework: Framework, dtype: str) -> None:
    cases = [([1.0] * 9, 0), ([np.nan, 1], BROKEN), ([1, -np.inf], BROKEN)]
    if dtype != "float16":
        cases += [([9e14, 0], 0), ([8e14] * 2, 1), ([1e30], 1), ([-1e38, 1e38], 1)]
    with framework.running():
        for x, large in cases:
            given = framework.tensor(np.asarray(x, dtype))
            assert framework.array(framework.xp.too_large(given))[0] == large, x
            if framework is TENSORFLOW:
                import tensorflow as tf

                assert tf.function(framework.xp.too_large)(given).numpy()[0] == large, x


PROJECTIONS = [
    (X, X.T[:1, :5].copy(), X[:1], Y[:1]),
    (LARGE, TALL[:2], WIDE[:2], WIDE[9:11]),  # in blocks
    (CUBE, CUBE[:, :2, :4], CUBE[:, :2], CUBE[:, 1:3]),
]
SPIKES = [(1e20, 1), (-1e38, 1), (np.nan, BROKEN), (-np.inf, BROKEN)]


@pytest.mark.parametrize("framework", ALL)
def test_projections_tell_large_from_broken_gradients(framework: Framework) -> None:
    with framework.running():
        for error, p, q, basis in PROJECTIONS:
            for value, flag in SPIKES:
                grad = np.ones_like(error)
                grad[..., -1, -1] = value
                given = [framework.tensor(x.copy()) for x in (error, grad, p, q, basis)]
                projected = framework.xp.project(*given)[1]
                assert framework.array(framework.xp.nonfinite(projected))[0] == flag


def test_folds_keep_norms_in_the_mean() -> None:
    """Their variance is that of independent signs, for vectors that all have one sign, too."""
    rng, size, columns = np.random.default_rng(3), 20_000, 313
    vectors = {
        "normal": rng.standard_normal(size),
        "equal": np.ones(size),
        "outer product": np.outer(rng.standard_normal(100), rng.standard_normal(200)).ravel(),
        "one column": np.where(np.arange(size) % 200 == 7, 1.0, 0.0),
        "one row": np.where(np.arange(size) // 200 == 7, 1.0, 0.0),
    }
    for name, x in vectors.items():
        x = (x / np.linalg.norm(x)).astype(np.float32)
        squares = []
        for _ in range(400):
            signs = rng.choice(np.float32([-1, 1]), columns + 2 * FOLDS)
            squares.append(
                float(np.square(NUMPY.xp.fold(x[None], signs[None]), dtype=np.float64).sum())
            )
        energy = np.square(np.pad(x, (0, FOLDS * columns - size)), dtype=np.float64)
        energy = energy.reshape(FOLDS, columns)
        deviation = (2 * (energy.sum(0) ** 2 - (energy**2).sum(0)).sum()) ** 0.5
        assert abs(np.mean(squares) - 1) < 4 * deviation / 20 + 1e-6, name
        assert np.std(squares) < 1.25 * deviation + 1e-6, name
        assert np.std(squares) >= 0.75 * deviation, name
        assert deviation < 1.05 * (2 / columns) ** 0.5, name


def test_flags_on_an_accelerator() -> None:
    torch = pytest.importorskip("torch")
    from card import Card, Watch

    from accordion_hvd.ops import torch as xp

    def card(x: np.ndarray) -> Any:
        return Card(torch.tensor(x))

    with Watch() as watch, watch.recording():
        for value, flag in [(0.0, 0), (1e12, 0), *SPIKES]:
            for error, p, q, basis in PROJECTIONS:
                grad = np.ones_like(error)
                grad[..., -1, -1] = value
                bad = xp.too_large(card(grad))
                assert bad.inner.item() == flag
                left = xp.zero_if_bad(card(grad), bad).inner
                assert bool(left.any()) == (flag == 0)
                total, projected = xp.project(*(card(x.copy()) for x in (error, grad, p, q, basis)))
                assert xp.nonfinite(projected).inner.item() == flag
                assert bool(torch.isfinite(total.inner).all())
        for size in (1099, 1100, 69_999, 70_000):
            for dtype in (np.float16, np.float32, np.float64):
                x = LONG[None, :size].astype(dtype)
                folded = xp.fold(card(x), card(SIGNS)).inner.numpy()
                np.testing.assert_allclose(folded, NUMPY.xp.fold(x, SIGNS), rtol=1e-5, atol=1e-4)
    assert not watch.waits
