"""Fuzz tests of payloads from other ranks: each is decoded or refused, and nothing else happens."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from cases import CASES
from frameworks import NUMPY, TENSORFLOW, TORCH, Framework, installed
from fuzzing import fuzz, seeds, spoiled
from hypothesis import strategies as st

from accordion_hvd import AdaComp, Info, Threshold
from accordion_hvd.check import PayloadError
from accordion_hvd.compressors import sparsifier
from accordion_hvd.core.codec import Codec, Wrapper, parse
from accordion_hvd.simulation import one_process

SHAPES = [(1,), (7,), (13, 5), (1000,), (3, 4, 5), (50,), (300,), (70001,)]
FRAMEWORKS = [f for f in (NUMPY, TORCH) if installed(f)]
LEAST = 2.0**-126  # TensorFlow takes smaller numbers for 0
SLOW = [f for f in (TENSORFLOW,) if installed(f)]


def _codec(compressor: Any) -> Any:
    return compressor.codec if isinstance(compressor, Wrapper) else compressor


CODECS = [x for x in {repr(y): y for y in (_codec(c.compressor) for c in CASES)}.values()
          if isinstance(x, Codec)]  # fmt: skip
SPARSE = [codec for codec in CODECS if isinstance(codec, sparsifier.SparseCodec)]


def info_of(shape: tuple[int, ...]) -> Info:
    return Info(name="w", shape=shape)


@functools.cache
def message_of(codec: Codec, shape: tuple[int, ...]) -> tuple[Codec, tuple[np.ndarray, ...]]:
    """Return the codec for a shape, and a message that it encodes."""
    codec = codec.specialize(info_of(shape))
    x = np.random.default_rng(0).standard_normal(codec.layout(shape)).astype(np.float32)
    return codec, codec.encode(x, info_of(shape))


def decoded(
    framework: Framework, codec: Codec, parts: list[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Return the tensor decoded from the payloads of rank 1, or None if they are refused."""
    xp, layout = framework.xp, codec.layout(shape)
    try:
        message = parse(codec, [xp.asarray(part) for part in parts], layout, 1)
    except (PayloadError, ValueError) as error:
        assert str(error)
        return None
    like = xp.zeros(layout, "float32")
    found = framework.array(codec.decode(message, like, info_of(shape)))
    assert found.shape == layout and found.dtype == np.float32
    return found


def check_chosen(codec: Codec, payload: np.ndarray, chosen: Any, shape: tuple[int, ...]) -> None:
    """An accepted payload holds indices in range, each once, and ascending but for chunks.

    A payload of Threshold also encodes to itself again.
    """
    index, values = (np.asarray(x) for x in chosen)
    size = math.prod(shape)
    if getattr(codec, "chunk", None):
        order = np.argsort(index)
        index, values = index[order], values[order]
    assert index.shape == values.shape and (np.diff(index) > 0).all()
    assert not index.size or (index[0] >= 0 and index[-1] < size)
    if isinstance(codec, Threshold):
        np.testing.assert_array_equal(sparsifier.encode(index, values, size), payload)


def try_sparse(codec: Codec, shape: tuple[int, ...], seed: int, frameworks: Any) -> None:
    codec, (sent,) = message_of(codec, shape)
    rng = np.random.default_rng(seed)
    if rng.integers(4) == 0:  # a payload of another method, or for another tensor
        other = message_of(SPARSE[rng.integers(len(SPARSE))], SHAPES[rng.integers(len(SHAPES))])
        (sent,) = other[1]
    payload = spoiled(sent, rng)
    results = [decoded(framework, codec, [payload], shape) for framework in frameworks]
    for result in results[1:]:
        assert (result is None) == (results[0] is None)
        if result is not None:
            np.testing.assert_allclose(result, results[0], rtol=0, atol=LEAST)
    if results[0] is not None:
        layout = codec.layout(shape)
        check_chosen(codec, payload, parse(codec, [payload], layout, 1)[0], layout)


@fuzz("payloads of positions and values", 0.35, codec=st.sampled_from(SPARSE),
      shape=st.sampled_from(SHAPES), seed=seeds)  # fmt: skip
def test_sparse_payloads(codec: Codec, shape: tuple[int, ...], seed: int) -> None:
    """Frameworks accept the same payloads of any length, and decode them to the same tensor."""
    try_sparse(codec, shape, seed, FRAMEWORKS)


@pytest.mark.skipif(not SLOW, reason="tensorflow not installed")
@fuzz("payloads of positions and values, in TensorFlow", 0.005, codec=st.sampled_from(SPARSE),
      shape=st.sampled_from(SHAPES[:-1]), seed=seeds)  # fmt: skip
def test_sparse_payloads_in_tensorflow(codec: Codec, shape: tuple[int, ...], seed: int) -> None:
    try_sparse(codec, shape, seed, [NUMPY, *SLOW])


@fuzz("uneven payloads of random bytes", 0.15, codec=st.sampled_from([Threshold(1.0), AdaComp(50),
      AdaComp(500)]), shape=st.sampled_from(SHAPES), payload=st.binary(max_size=60))  # fmt: skip
def test_random_bytes(codec: Codec, shape: tuple[int, ...], payload: bytes) -> None:
    """Frameworks accept the same short payloads of random bytes."""
    data = np.frombuffer(payload, np.uint8)
    results = [decoded(framework, codec, [data], shape) for framework in FRAMEWORKS]
    assert len({result is None for result in results}) == 1


@fuzz("payloads of all elements", 0.1, codec=st.sampled_from(CODECS),
      shape=st.sampled_from(SHAPES), seed=seeds)  # fmt: skip
def test_payloads_of_all_elements(codec: Codec, shape: tuple[int, ...], seed: int) -> None:
    """Frameworks decode payloads of the right length, with spoiled bytes, to the same tensor.

    Other lengths need no test, because the exchange compares the lengths.
    """
    codec, message = message_of(codec, shape)
    rng, parts = np.random.default_rng(seed), []
    for part in message:
        data = spoiled(np.ascontiguousarray(part).reshape(-1).view(np.uint8), rng, resize=False)
        parts.append(data.view(part.dtype).reshape(part.shape))
    with np.errstate(all="ignore"):
        results = [decoded(framework, codec, parts, shape) for framework in FRAMEWORKS]
        for result in results[1:]:
            assert (result is None) == (results[0] is None)
            if result is not None:
                np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=LEAST)


# ------------------------------------------------------------------------------ whole exchanges
class Spoiling(one_process.SimulatedCommunicator):
    """A communicator that spoils one tensor before the other ranks receive it."""

    rng = np.random.default_rng(0)
    left = 0  # tensors before the spoiled one

    def _spoiled(self, x: Any, resize: bool = False) -> Any:
        xp, kind = self.xp, type(self)
        kind.left -= 1
        if kind.left != 0:
            return x
        data = spoiled(xp.to_numpy(xp.to_bytes(x)), kind.rng, resize and xp.dtype(x) == "uint8")
        shape = (-1,) if resize else xp.shape(x)
        return xp.from_bytes(xp.asarray(data), xp.dtype(x), shape)

    def allreduce(self, name: str, tensors: Any, op: str, group: Any) -> Any:
        return super().allreduce(name, [self._spoiled(x) for x in tensors], op, group)

    def allgather(self, name: str, tensor: Any, group: Any, lengths: Any = None) -> Any:
        return super().allgather(name, self._spoiled(tensor, resize=True), group, lengths)

    def broadcast(self, name: str, tensor: Any, root: int, group: Any) -> Any:
        return super().broadcast(name, self._spoiled(tensor, resize=True), root, group)

    def alltoall(self, name: str, tensor: Any, group: Any, splits: Any = None) -> Any:
        return super().alltoall(name, self._spoiled(tensor), group, splits)


@fuzz("exchanges with a spoiled message", 0.01, case=st.sampled_from(CASES),
      framework=st.sampled_from(FRAMEWORKS), ranks=st.integers(2, 4),
      shape=st.sampled_from(SHAPES[:-1]), left=st.integers(1, 60), seed=seeds)  # fmt: skip
def test_exchanges(
    case: Any, framework: Framework, ranks: int, shape: tuple[int, ...], left: int, seed: int
) -> None:
    """An exchange with one spoiled message returns means of the right shape, or is refused."""
    plain, Spoiling.left = one_process.SimulatedCommunicator, left
    Spoiling.rng = rng = np.random.default_rng(seed)
    one_process.SimulatedCommunicator = Spoiling
    shapes = {"w": shape, "b": (5, 40)}
    try:
        local_size = 2 if ranks == 4 and "TwoLevel" in case.name else 1
        world = one_process.simulate(case.compressor, ranks, local_size=local_size)
        for _ in range(3):
            given = [{k: rng.standard_normal(s) for k, s in shapes.items()} for _ in range(ranks)]
            tensors = [{k: framework.tensor(x.astype(np.float32)) for k, x in row.items()}
                       for row in given]  # fmt: skip
            with np.errstate(all="ignore"):
                for means in world.step(tensors):
                    for key, mean in (means or {}).items():
                        assert framework.array(mean).shape == shapes[key]
    except PayloadError as error:
        assert "payload" in str(error)
    except RuntimeError as error:
        assert "ranks disagree about the tensors to exchange" in str(error)
    finally:
        one_process.SimulatedCommunicator = plain
