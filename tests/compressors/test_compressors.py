"""Tests of all laws for all compressors and frameworks, and of compressors that break laws."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import laws
import numpy as np
import pytest
from cases import CASES, FIRST, REFUSED, Case, topk
from frameworks import (
    NUMPY,
    POISONED,
    TENSORFLOW,
    TORCH,
    Framework,
    Ranks,
    combined,
    exact_mean,
    installed,
    normals,
    parameters,
    same_bits,
)
from traced import same_in_a_graph

import accordion_hvd
from accordion_hvd import DGC, LGC, Allgather, Allreduce, Compressor, Dense, Info, TopK, TwoLevel
from accordion_hvd.engine.layout import Batch
from accordion_hvd.ops import namespace

# The algorithm is the same in all frameworks, so not each one needs every number of ranks.
WORLDS = combined({NUMPY: [1, 2, 4], POISONED: [2], TORCH: [1, 4], TENSORFLOW: [2]})

EACH = {(NUMPY, 1), (NUMPY, 4), (POISONED, 2), (TORCH, 4)}
"""Where `make test` checks the cases that are not the first ones, too."""

SELDOM = {LGC, TwoLevel}
"""Classes whose laws `make test` leaves out in TensorFlow: they take long, or repeat others."""

WRAPPERS = {accordion_hvd.ErrorFeedback, accordion_hvd.Gathered, accordion_hvd.Momentum}
"""Classes that call the operations of the compressor that they wrap, and hardly others."""


def rarely(law: laws.Law, case: Case, framework: Framework, ranks: int) -> bool:
    kind, elsewhere = type(case.compressor), (framework, ranks) not in EACH and case not in FIRST
    repeats = kind in WRAPPERS or (law not in laws.EQUALITY and kind in SELDOM)
    return elsewhere or (framework is TENSORFLOW and repeats)


rarely_in_graphs = pytest.mark.seldom(
    where=lambda case: case not in FIRST or type(case.compressor) in {LGC, *WRAPPERS}
)


@pytest.mark.seldom(where=rarely)
@pytest.mark.parametrize(
    ("law", "case", "framework", "ranks"),
    [
        pytest.param(
            law,
            case,
            *world.values,
            id=f"{law.__name__}-{case.name}-{world.id}",
            marks=world.marks,
        )
        for law in laws.LAWS
        for case in CASES
        for world in WORLDS
        if laws.applies(law, case, *world.values)
    ],
)
def test_law(law: laws.Law, case: Case, framework: Framework, ranks: int) -> None:
    law(case, framework, ranks)


def test_every_compressor_has_a_case() -> None:
    known = {getattr(accordion_hvd.compressors, name) for name in accordion_hvd.compressors.__all__}
    assert known | {accordion_hvd.TopAgg} == {type(case.compressor) for case in CASES}


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@rarely_in_graphs
@pytest.mark.parametrize("case", [c for c in CASES if not c.uneven], ids=lambda case: case.name)
def test_traced(case: Case) -> None:
    same_in_a_graph(case)


@pytest.mark.skipif(not installed(TENSORFLOW), reason="tensorflow not installed")
@rarely_in_graphs
@pytest.mark.parametrize("case", [c for c in CASES if c.uneven], ids=lambda case: case.name)
def test_called_from_a_graph(case: Case) -> None:
    """Untraceable compressors raise an error in a graph, and match NumPy within a py_function."""
    import tensorflow as tf

    from accordion_hvd.ops.tensorflow import UntraceableError

    ours, oracle = Ranks(case.compressor, 2, TENSORFLOW), Ranks(case.compressor, 2, NUMPY)
    state = ours.init(tf.zeros(laws.SHAPE))

    @tf.function(autograph=False)
    def traced(tensors: Any, states: Any) -> Any:
        return ours.exchange(tensors, states)

    @tf.function(autograph=False)
    def called(tensors: Any) -> Any:
        return tf.py_function(eagerly, tensors, tf.float32)

    def eagerly(*tensors: Any) -> Any:
        return ours.step([x.numpy() for x in tensors])[0]

    for gradients in normals(laws.SHAPE, 2, steps=4):
        tensors = [tf.constant(g) for g in gradients]
        with pytest.raises(UntraceableError):
            traced(tensors, state)
        laws.check_same(case, called(tensors).numpy(), oracle.step(gradients)[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_before_the_first_exchange_nothing_is_owed(case: Case) -> None:
    assert case.compressor.residual({}) is None


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_refused(kind: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: {name} is ") as refusal:
        kind(**{name: value})
    assert repr(value) in str(refusal.value)
    assert "must be" in str(refusal.value)


# ------------------------------------------------------------ negative controls: laws can be broken
class Stub(Compressor):
    """A compressor with the state that error feedback needs."""

    def init(self, spec: Any, info: Info) -> dict[str, Any]:
        return {"error": spec.zeros((spec.size,))}


class Unaveraged(Compressor):
    """A compressor that returns this rank's own gradient."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        yield Allreduce(grad)
        return grad, state


class Summed(Compressor):
    """A compressor that forgets to divide by the number of ranks."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        total = yield Allreduce(grad, op="sum")
        return total, state


@dataclass(frozen=True)
class Altered(TopK):
    """Top-k whose new state or mean is tampered with."""

    ratio: float = 0.1

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        mean, new = yield from super().exchange(grad, state, info)
        return self.alter(mean, new, info, namespace(grad))

    def alter(self, mean: Any, state: Any, info: Info, xp: Any) -> Any:
        return mean, state


class Forgetful(Altered):
    """Top-k that drops its residual."""

    def alter(self, mean: Any, state: Any, info: Info, xp: Any) -> Any:
        return mean, {"error": xp.zeros(xp.shape(state["error"]), "float32")}


class Selfish(Altered):
    """Top-k whose mean depends on the rank, by one bit."""

    def alter(self, mean: Any, state: Any, info: Info, xp: Any) -> Any:
        return mean * (1 + 1.2e-7 * info.rank), state


class Hoarder(Altered):
    """Top-k that adds a state key which `init` did not name."""

    def alter(self, mean: Any, state: Any, info: Info, xp: Any) -> Any:
        return mean, {**state, "count": xp.zeros((1,), "float32")}


class Narrow(Altered):
    """Top-k that keeps its residual in 16 bits."""

    def alter(self, mean: Any, state: Any, info: Info, xp: Any) -> Any:
        return mean, {"error": xp.cast(xp.cast(state["error"], "float16"), "float32")}


class Late(Stub):
    """A compressor that reads its residual after consuming it."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        xp = namespace(grad)
        total = xp.accumulate(state["error"], xp.reshape(grad, (-1,)))
        mean = yield Allreduce(xp.copy(total))
        error = total - state["error"]
        return xp.reshape(mean, xp.shape(grad)), {"error": error}


class Irreversible(Stub):
    """A compressor that changes its state without `ops`, before the first request."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        xp = namespace(grad)
        state["error"] += xp.reshape(grad, (-1,))
        mean = yield Allreduce(xp.copy(state["error"]))
        return xp.reshape(mean, xp.shape(grad)), {"error": state["error"] * 0.0}


class Chatty(Stub):
    """A compressor that sends more bytes than its case states, and divides zero by zero."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        xp = namespace(grad)
        scale = xp.norm(grad)
        with np.errstate(all="ignore"):
            mean, _ = yield Allreduce(grad / scale), Allgather(grad)
        return mean * scale, state


class Drifting(Stub):
    """A compressor whose mean depends on more than seed, step and gradient."""

    calls = [0]

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        self.calls[0] += 1
        mean = yield Allreduce(grad * (1 + 1e-6 * self.calls[0]))
        return mean, state


STUBS = [
    (Unaveraged(), replace(CASES[0], guarded=True), {laws.conservation, laws.ranks_agree}),
    (Summed(), CASES[0], {laws.conservation, laws.odd_shapes}),
    (Forgetful(), topk(0.1), {laws.conservation, laws.odd_shapes, laws.zeros_stay_zeros}),
    (Selfish(), topk(0.1), {laws.conservation, laws.ranks_agree}),
    (Hoarder(), topk(0.1), {laws.state_keys_are_stable}),
    (Narrow(), topk(0.1), {laws.conservation, laws.half_gradients}),
    (Late(), topk(0.1), {laws.consumed_is_not_used_again}),
    (Irreversible(), topk(0.1), {laws.bad_steps_are_taken_back}),
    (Chatty(), topk(0.1), {laws.bytes_are_counted, laws.zeros_stay_zeros}),
    (Drifting(), topk(0.1), {laws.deterministic, laws.frameworks_agree}),
]


@pytest.mark.parametrize(("stub", "claims", "broken"), STUBS, ids=lambda x: type(x).__name__)
def test_stubs_break_laws(stub: Compressor, claims: Case, broken: set[laws.Law]) -> None:
    case = replace(claims, compressor=stub, full=None)
    for law in broken:
        with pytest.raises(AssertionError):
            law(case, NUMPY, 2)


def test_what_is_not_restored_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "_chosen", lambda self, old, new, absent: new)
    with pytest.raises(AssertionError):
        laws.absent_tensors_stay(topk(0.1), NUMPY, 2)


@dataclass(frozen=True)
class Silent(Compressor):
    """A compressor that sends zeros and adds nothing to its residual."""

    compressor: Compressor

    def init(self, spec: Any, info: Info) -> dict[str, Any]:
        return self.compressor.init(spec, info)

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        nothing = yield Allreduce(grad * 0)
        return nothing, state


@pytest.mark.parametrize("case", [c for c in CASES if c.slope[1] > 0], ids=lambda case: case.name)
def test_silence_breaks_conservation(case: Case) -> None:
    """The conservation law fails for a mean of zeros, however coarse the compressor is."""
    with pytest.raises(AssertionError):
        laws.conservation(replace(case, compressor=Silent(case.compressor)), NUMPY, 2)


class Undamped(DGC):
    """DGC that forgets the momentum of the elements that it has not sent."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        mean, new = yield from super().exchange(grad, state, info)
        return mean, {**new, "momentum": new["momentum"] * 0}


class Lossy(LGC):
    """LGC that drops the residual of the elements that it has not sent."""

    def exchange(self, grad: Any, state: Any, info: Info) -> Any:
        mean, new = yield from super().exchange(grad, state, info)
        return mean, {**new, "error": new["error"] * 0}


@pytest.mark.parametrize("kind", [Undamped, Lossy])
def test_what_is_not_sent_is_retained(kind: type) -> None:
    """The conservation law fails if DGC loses its momentum, or LGC its residual."""
    kinds = [c for c in CASES if type(c.compressor) is kind.__base__ and (c.momentum or c.forgets)]
    for case in (c for c in kinds if c.compressor != DGC(1.0)):  # which sends everything
        arguments = {f.name: getattr(case.compressor, f.name) for f in fields(case.compressor)}
        with pytest.raises(AssertionError):
            laws.conservation(replace(case, compressor=kind(**arguments)), NUMPY, 2)


def test_a_level_that_is_not_full_breaks_the_law() -> None:
    with pytest.raises(AssertionError):
        laws.full_level_is_exact(replace(topk(0.1), full=TopK(0.9)), NUMPY, 2)


OF_FLOATS = (
    "accumulate", "accumulate_scaled", "accumulate_largest", "sum_sparse", "sum_quantized",
    "sum_powers", "column_means", "subtract_columns", "take", "from_bytes",
)  # fmt: skip
"""Operations of compressors, whose results are floats that take part in sums."""


@functools.cache
def calls_it(case: Case, name: str) -> bool:
    """Return whether a case's compressor calls the operation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NUMPY.xp, name, None)
        try:
            Ranks(case.compressor, 2).step(next(normals(laws.SHAPE, 2)))
        except TypeError:
            return True
    return False


@pytest.mark.parametrize("framework", parameters((TORCH, TENSORFLOW)))
@pytest.mark.parametrize("name", OF_FLOATS)
def test_a_wrong_last_bit_breaks_the_law(
    name: str, framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frameworks do not agree if an operation's results are one ulp too large."""
    xp, right, calls = framework.xp, getattr(framework.xp, name), []

    def wrong(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return enlarged(xp, right(*arguments, **options))

    monkeypatch.setattr(xp, name, wrong)
    for case in (c for c in CASES if c.bitwise and calls_it(c, name)):
        try:
            laws.steps_agree(case, framework, NUMPY, 2, laws.GRADIENTS[0])
        except AssertionError:
            assert calls
            return
    pytest.fail(f"{len(calls)} wrong results of {name} were not noticed", pytrace=False)


def enlarged(xp: Any, x: Any) -> Any:
    """Return tensors of floats with their largest elements one ulp larger."""
    if isinstance(x, (tuple, list)):
        return type(x)(enlarged(xp, one) for one in x)
    if not str(xp.dtype(x)).startswith("float"):
        return x
    array = np.array(xp.to_numpy(x))
    most = np.abs(array).reshape(-1).argmax() if array.size else None
    if most is not None:
        array.reshape(-1)[most] = np.nextafter(array.reshape(-1)[most], np.inf, dtype=array.dtype)
    return xp.asarray(array)


def test_nothing_is_lost_in_the_driver_itself() -> None:
    """Without compression, `Ranks` returns NumPy's mean of the gradients on every rank."""
    for gradients in normals((5, 3), 4, steps=3):
        means = Ranks(Dense(), 4).step(gradients)
        np.testing.assert_allclose(means[0], exact_mean(gradients), atol=1e-6)
        assert all(same_bits(mean, means[0]) for mean in means)


def noisy(mean: Any, state: Any, count: int) -> Any:
    """Return the mean plus an offset that is different in each call, and the same state."""
    return mean + 1000.0 * count, state


def aliasing(mean: Any, state: Any, count: int) -> Any:
    return next(iter(state.values())), state


def growing(mean: Any, state: Any, count: int) -> Any:
    return mean, {**state, f"key {count}": np.zeros(1, np.float32)}


def talkative(mean: Any, state: Any, count: int) -> Any:
    return mean, state


SPOILERS = {
    laws.results_share_no_memory_with_states: aliasing,
    laws.state_keys_are_stable: growing,
    laws.bytes_are_counted: talkative,
}
"""What breaks a law, of any compressor; `noisy` breaks the others."""


def spoiled(compressor: Compressor, spoil: Any) -> Compressor:
    """Return the compressor with results that `spoil` changes; if `talkative`, it sends more."""
    kind, calls = type(compressor), [0]

    def exchange(self: Any, grad: Any, state: Any, info: Info) -> Any:
        if spoil is talkative:
            yield Allreduce(grad + 0.0)
        mean, new = yield from kind.exchange(self, grad, state, info)
        calls[0] += 1
        return spoil(mean, new, calls[0])

    made = object.__new__(type(kind.__name__, (kind,), {"exchange": exchange}))
    vars(made).update(vars(compressor))
    return made


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_a_law_can_fail_for_every_case(law: laws.Law) -> None:
    """Each law fails for spoiled versions of all compressors that it applies to.

    A law that holds for a spoiled compressor would say nothing about the compressor.
    """
    framework, spoil = POISONED if law in laws.EQUALITY else NUMPY, SPOILERS.get(law, noisy)
    cases = [c for c in CASES if laws.applies(law, c, framework, 2)]
    few = {"steps": 20} if law is laws.unbiased else {}
    assert cases
    for case in cases:
        full = case.full and spoiled(case.full, spoil)
        with pytest.raises(AssertionError):
            broken = replace(case, compressor=spoiled(case.compressor, spoil), full=full)
            law(broken, framework, 2, **few)
            pytest.fail(f"{law.__name__} holds for a spoiled {case.name}", pytrace=False)
