"""Tests of unusual tensors: each compressor handles them, or refuses them with a clear error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, Ranks, installed, parameters, same_bits
from laws import check_conservation

from accordion_hvd import Info, TopK, simulate
from accordion_hvd.compressors.dense import AllElements
from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.exchange import Exchange
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.ops.spec import Spec
from accordion_hvd.resolve import as_policy
from accordion_hvd.simulation.one_process import Hub, SimulatedCommunicator

FEW = {type(case.compressor): case for case in CASES}
"""One row of each compressor."""

by_case = pytest.mark.parametrize("case", FEW.values(), ids=lambda case: case.name)
by_framework = pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
INFO = Info(size=2, name="layer")


def served(compressor: Compressor) -> Compressor:
    """Return the compressor that an error names: the wrapped compressor, if there is one."""
    return getattr(compressor, "compressor", compressor)


@by_framework
@by_case
def test_refused(case: Case, framework: Framework) -> None:
    """`init` refuses a tensor that a compressor cannot handle, before anything is sent.

    The error names the compressor, the tensor, the bad value and the allowed values.
    """
    takes_all = isinstance(served(case.compressor), AllElements)
    bad: list[tuple[tuple[int, ...], str, str]] = [
        ((40, 50), dtype, f"dtype of layer is '{dtype}', but must be one of float16, ")
        for dtype in ("int32", "int8", "uint8", "int64", "bool", "complex64", "complex128")
    ]
    if not takes_all:
        for shape in ((0,), (0, 7), (3, 0, 2)):
            words = f"shape of layer is {shape}, but must be one with at least one element"
            bad.append((shape, "float32", words))
        for shape in ((2**31,), (2**16, 2**15), (2**40, 3)):
            words = f"size of layer is {int(np.prod(shape))}, but must be below 2^31"
            bad.append((shape, "float32", words))
    for shape, dtype, words in bad:
        with pytest.raises(ValueError) as refusal:
            case.compressor.init(Spec(shape, dtype, framework.xp), INFO)
        assert str(refusal.value).startswith(f"{type(served(case.compressor)).__name__}: {words}")
    assert isinstance(case.compressor.init(Spec((40, 50), "float32", framework.xp), INFO), dict)


@by_framework
@by_case
def test_a_scalar_is_a_vector_of_one_element(case: Case, framework: Framework) -> None:
    check_conservation(case, framework, 2, (), steps=3)


@by_framework
@by_case
def test_double_precision(case: Case, framework: Framework) -> None:
    """The conservation law holds for float64 gradients, to the precision of fp32."""
    check_conservation(case, framework, 2, (24, 50), 3, "float64")


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH)))  # TensorFlow's are contiguous
@by_case
def test_scattered_memory(case: Case, framework: Framework) -> None:
    """A tensor whose memory is not contiguous gives the same mean as a contiguous copy of it."""
    whole, views = (Ranks(case.compressor, 2, framework) for _ in "ab")
    rng = np.random.default_rng(0)
    for number in range(3):
        sources = [rng.standard_normal((50, 48)).astype(np.float32) for _ in range(2)]
        tensors = [[framework.tensor(x) for x in sources] for _ in "ab"]
        scattered = [framework.xp.transpose(x)[::2] for x in tensors[0]]
        packed = [framework.tensor(x.T[::2].copy()) for x in sources]
        means = []
        for world, given in ((views, scattered), (whole, packed)):
            world.states = world.states or world.init(given[0])
            results = world.exchange(given, world.states)
            world.states, world.steps = [state for _, state in results], number + 1
            means.append(framework.array(results[1][0]))
        if case.bitwise:
            assert same_bits(*means)
        else:  # matrix products add in another order
            np.testing.assert_allclose(*means, atol=1e-4)


# --------------------------------------------------------------------- what reaches no compressor
def sparse(framework: Framework) -> Any:
    """Return a sparse gradient of the framework."""
    if framework is TORCH:
        import torch

        return torch.eye(40).to_sparse()
    import tensorflow as tf

    return tf.IndexedSlices(tf.ones((2, 40)), tf.constant([0, 1]), tf.constant([40, 40]))


@pytest.mark.parametrize("framework", parameters((TORCH, TENSORFLOW)))
def test_sparse_tensors_are_refused(framework: Framework) -> None:
    """Compressors refuse sparse gradients, which optimizers gather without compression."""
    with pytest.raises(ValueError, match=r"is .*(sparse_coo|IndexedSlices).*, but must be .*dense"):
        simulate(TopK(0.1), 2).step([{"w": sparse(framework)}] * 2)


@by_framework
def test_small_and_empty_tensors_travel_along(framework: Framework) -> None:
    """Empty tensors, scalars and small tensors are exchanged alone and beside a large tensor."""
    shapes = {"e": (0, 40), "s": (), "b": (7,), "w": (40, 50)}
    for case in FEW.values():
        for names in (["e"], ["s"], list(shapes)):
            if case.private and names == ["e"]:  # a release of nothing is refused
                continue
            given = [{k: framework.tensor(np.ones(shapes[k], np.float32)) for k in names}] * 2
            means = simulate(case.compressor, 2).step(given)
            for mean in means:
                assert mean is not None
                for name in names:
                    x = framework.array(mean[name])
                    assert x.shape == shapes[name] and np.isfinite(x).all()


def test_gradients_that_change_are_refused() -> None:
    """A step is refused if names, shapes or dtypes of gradients change, and is not counted.

    The world does not change in a refused step, so the next valid step succeeds.
    """
    world, x = simulate(TopK(0.1), 2), np.ones((40, 50), np.float32)
    world.step([{"w": x.copy()}] * 2)
    for bad, words in [
        ({"w": x[:20]}, r"World: gradient of w is 'float32 \(20, 50\)', but must be float32 \(40"),
        ({"w": x.astype(np.float16)}, "gradient of w is 'float16"),
        ({"v": x}, r"names of gradients is \['v'\], but must be those of rank 0, \['w'\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            world.step([{"w": x.copy()}, bad])
    with pytest.raises(ValueError, match="number of gradients is 1, but must be 2"):
        world.step([{"w": x}])
    assert world.step([{"w": x.copy()}] * 2)[0] is not None
    assert world.exchanges[0].steps == 2


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
def test_frozen_integers_do_not_matter() -> None:
    """A process without peers ignores frozen quantised weights among its parameters."""
    import torch

    pytest.importorskip("horovod.torch")
    from accordion_hvd.resolve import as_policy
    from accordion_hvd.torch.reducer import Reducer

    quantised = torch.nn.Parameter(torch.ones(40, 50, dtype=torch.int8), requires_grad=False)
    named = [("w", torch.nn.Parameter(torch.ones(40, 50))), ("q", quantised)]
    alone = SimpleNamespace(process_set_id=0, included=lambda: True, size=lambda: 1)
    reducer = Reducer(named, as_policy(TopK(0.1)), alone, lambda: [])
    assert reducer.idle
    assert [tensor.name for tensor in reducer.exchange.tensors] == ["w"]


def test_a_refusal_leaves_the_policy_free() -> None:
    """After a refusal, the same policy serves an exchange without the refused tensor."""
    policy, link = as_policy(TopK(0.1)), SimulatedCommunicator(Hub(1), 0, NUMPY.xp)
    good, bad = TensorInfo("w", (40, 50), "float32"), TensorInfo("i", (40, 50), "int32")
    with pytest.raises(ValueError, match="dtype of i is 'int32'"):
        Exchange(link, policy, [good, bad])
    assert Exchange(link, policy, [good]).levels() == {"w": "TopK(ratio=0.1)"}
