"""Laws that every compressor obeys, in every framework and for any number of ranks.

A law is a function of a case, a framework and a number of ranks. It raises AssertionError if the
compressor breaks it. The negative controls in `test_compressors.py` show that each law can fail.

All laws are checked in NumPy. Where other frameworks give NumPy's bits (`Case.bitwise`), the laws
of `EQUALITY` are checked in them, and the others follow; elsewhere they have to obey all laws.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cases import FIRST, Case
from frameworks import (
    NUMPY,
    POISONED,
    TORCH,
    Framework,
    Ranks,
    exact_mean,
    local_size,
    normals,
    same_bits,
)

from accordion_hvd import Accordion, simulate
from accordion_hvd.optimizers.base import needs_weights
from accordion_hvd.simulation.one_process import World

Law = Callable[[Case, Framework, int], None]
Gradients = tuple[tuple[int, ...], str | None, list[float]]
SHAPE = (24, 50)  # large enough to be a bucket of its own
ODD_SHAPES = [
    (1, 7),
    (7, 1),
    (1, 1),
    (1,),
    (13,),
    (3, 4, 5),
    (8, 3, 3, 3),  # a convolution of PyTorch
    (3, 3, 3, 8),  # the same in Keras
    (1, 1, 16, 32),
    (70001,),  # a prime, above the size at which selection changes its algorithm
]
LAWS: list[Law] = []
APPLIES: dict[Law, Callable[[Case, Framework, int], bool]] = {}
"""Law -> whether it applies to a case, a framework and a number of ranks; by default, it does."""


def law(function: Law) -> Law:
    LAWS.append(function)
    return function


def law_if(applies: Callable[[Case, Framework, int], bool]) -> Callable[[Law], Law]:
    """Add a law that is checked only where `applies(case, framework, ranks)`."""

    def add(function: Law) -> Law:
        APPLIES[function] = applies
        return law(function)

    return add


EQUALITY: set[Law] = set()
"""The laws from which all others follow in a framework, because they hold in NumPy."""


def equality(function: Law) -> Law:
    """Add a law that compares a framework with NumPy."""
    EQUALITY.add(function)
    return law_if(lambda case, framework, ranks: framework is not NUMPY)(function)


def applies(law: Law, case: Case, framework: Framework, ranks: int) -> bool:
    """Return whether a law applies to a case in a framework, on a number of ranks."""
    if framework is not NUMPY and case.bitwise and law not in EQUALITY:
        return law in NOT_OF_NUMPY.get(framework, ())
    return law not in APPLIES or APPLIES[law](case, framework, ranks)


def has_state(case: Case) -> bool:
    """Return whether the case's compressor has a state."""
    return bool(Ranks(case.compressor, 2).init(np.zeros(SHAPE, np.float32))[0])


def check_conservation(
    case: Case,
    framework: Framework,
    ranks: int,
    shape: tuple[int, ...],
    steps: int,
    dtype: str | None = None,
    rounding: float = 2e-6,
) -> float:
    """Check that no part of the gradients is lost or added, and that all ranks' means are equal.

    - Without error feedback, the mean of each step is the exact mean, up to `case.loss`.
    - With error feedback, the sum of all means plus the mean of the ranks' residuals is the sum of
      the exact means. Each step may lose `case.loss`.
    - If the case `forgets` decoding errors, elements that were sent have no residual, and the sums
      above begin anew for them.
    - If the case has `momentum`, mean + new residual = old residual + velocity. The velocity is
      the momentum coefficient times its last value plus the (clipped) gradient, and the state holds
      it for all elements that were not sent.

    Returns:
        The slope of the means over the exact means (a regression line through the origin): 1 if
        all gradients arrive, 0 if no gradient does.
    """
    world, size = Ranks(case.compressor, ranks, framework), int(np.prod(shape))
    carried, lost, velocity, along, power = np.zeros(size), 0.0, np.zeros(size), 0.0, 0.0
    for step, gradients in enumerate(normals(shape, ranks, seed=len(shape), steps=steps)):
        if dtype:
            gradients = [framework.array(framework.tensor(g, dtype)) for g in gradients]
        before = world.mean_residual(size) if world.states else np.zeros(size)
        means = world.step(gradients, dtype)
        for mean in means:
            assert mean.shape == tuple(shape)
            assert np.isfinite(mean).all()
            assert same_bits(mean, means[0]), "ranks hold different means"
        wanted, sent = case.wanted(gradients, step).reshape(-1), means[0].reshape(-1)
        along, power = along + float(sent @ wanted), power + float(wanted @ wanted)
        carried += wanted - sent.astype(np.float64)
        largest = max(np.abs(g).max() for g in gradients)
        if not case.feedback:
            assert np.abs(carried).max() <= max(case.loss, rounding) * largest
            carried[:] = 0
        lost += case.loss * largest * (case.feedback and not case.forgets)
        if case.forgets:
            assert not world.mean_residual(size)[sent != 0].any()
            carried[sent != 0] = 0
        if case.momentum:
            used = exact_mean([clipped(case.compressor, g, ranks) for g in gradients])
            velocity = coefficient(case.compressor) * velocity + used.reshape(-1)
            off = before + velocity - sent - world.mean_residual(size)
            assert np.abs(off).max() <= rounding * 10 * largest * (step + 1)
            after = mean_momentum(world)
            assert np.abs((after - velocity)[sent == 0]).max(initial=0) <= rounding * 10 * largest
            velocity = after
    if case.momentum:
        return along / power
    error = np.abs(carried - world.mean_residual(size)).max()
    scale = max(1.0, np.abs(world.mean_residual(size)).max())
    assert error <= rounding * scale * steps + lost, f"{error} of the gradient is lost or made up"
    return along / power


def clipped(compressor: Any, gradient: np.ndarray, ranks: int) -> np.ndarray:
    """Return the gradient, scaled to a norm of at most clip / sqrt(ranks) if the method clips."""
    clip = getattr(compressor, "clip", None)
    norm = float(np.linalg.norm(gradient))
    return gradient if clip is None else gradient * min(1.0, clip / np.sqrt(ranks) / norm)


def coefficient(compressor: Any) -> float:
    """Return the momentum coefficient of a compressor, or of the compressor that it wraps."""
    own = getattr(compressor, "momentum", None)
    return coefficient(compressor.compressor) if own is None else own


def mean_momentum(world: Ranks) -> np.ndarray:
    """Return the mean of the ranks' momentum as a vector."""
    parts = [
        world.compressor.expand_residual(state["momentum"], world.spec, world.info(rank))
        for rank, state in enumerate(world.states)
    ]
    return np.mean([world.framework.array(x).astype(np.float64).reshape(-1) for x in parts], 0)


@law
def conservation(case: Case, framework: Framework, ranks: int) -> None:
    slope, (least, most) = check_conservation(case, framework, ranks, SHAPE, 12), case.slope
    assert least <= slope <= most, f"the slope of means over exact means is {slope}"


@law
def odd_shapes(case: Case, framework: Framework, ranks: int) -> None:
    for shape in ODD_SHAPES:
        check_conservation(case, framework, ranks, shape, steps=3)


@law
def half_gradients(case: Case, framework: Framework, ranks: int) -> None:
    """State is fp32 for 16-bit gradients too, so error feedback is exact up to fp32 rounding."""
    rounding = {"float16": 2 * 2**-11, "bfloat16": 2 * 2**-8}
    for dtype in ["float16"] if framework.backend == "numpy" else rounding:
        rest = 2e-6 if case.feedback else rounding[dtype]
        check_conservation(case, framework, ranks, SHAPE, 4, dtype, rest)


@law_if(lambda case, framework, ranks: ranks > 1)
def ranks_agree(case: Case, framework: Framework, ranks: int) -> None:
    world = Ranks(case.compressor, ranks, framework)
    for gradients in normals(SHAPE, ranks, steps=6):
        means = world.step([g * 10.0**r for r, g in enumerate(gradients)])
        assert all(same_bits(mean, means[0]) for mean in means)


@law_if(lambda case, framework, ranks: case.full is not None)
def full_level_is_exact(case: Case, framework: Framework, ranks: int) -> None:
    for shape in [SHAPE, (5,), (3, 3, 4, 6)]:
        world = Ranks(case.full, ranks, framework)
        for gradients in normals(shape, ranks, steps=3):
            mean = world.step(gradients)[0]
            np.testing.assert_allclose(mean, exact_mean(gradients), atol=2e-5)
            assert np.abs(world.mean_residual(mean.size)).max() < 2e-5


@equality
def frameworks_agree(case: Case, framework: Framework, ranks: int) -> None:
    """All frameworks compute NumPy's means and states, at each step, for gradients of any kind.

    NumPy has no bfloat16, for which PyTorch is the oracle.
    """
    if not case.bitwise:
        return steps_agree(case, framework, NUMPY, ranks, (SHAPE, None, [1.0] * 8))
    for row in GRADIENTS:
        oracle = TORCH if row[1] == "bfloat16" else NUMPY
        if oracle is not framework and not (oracle is TORCH and framework is POISONED):
            steps_agree(case, framework, oracle, ranks, row)
    if case.full is not None:
        full = replace(case, compressor=case.full)
        steps_agree(full, framework, NUMPY, ranks, (SHAPE, None, [1.0] * 3))


@np.errstate(over="ignore", invalid="ignore")  # large gradients become infinite in fp16
def steps_agree(
    case: Case, framework: Framework, oracle: Framework, ranks: int, row: Gradients
) -> None:
    """Check that a framework computes the oracle's means and states for a row of `GRADIENTS`."""
    shape, dtype, scales = row
    ours, theirs = (Ranks(case.compressor, ranks, where) for where in (framework, oracle))
    for scale, gradients in zip(scales, normals(shape, ranks, seed=3), strict=False):
        gradients = [g * np.float32(scale**rank) for rank, g in enumerate(gradients, 1)]
        found = zip(ours.step(gradients, dtype), theirs.step(gradients, dtype), strict=True)
        for mean, wanted in found:
            check_same(case, mean, wanted)
        for mine, others in zip(ours.states, theirs.states, strict=True):
            assert mine.keys() == others.keys()
            for key, x in mine.items() if case.bitwise else ():
                assert same_bits(framework.array(x), oracle.array(others[key])), key
    for residual, wanted in zip(ours.residuals(), theirs.residuals(), strict=True):
        if wanted is None:
            assert residual is None
        else:
            check_same(case, residual, wanted)


GRADIENTS: list[Gradients] = [
    (SHAPE, None, [1.0] * 4 + [0.0] * 2 + [10.0, 1e4, 1e-3]),  # states of several steps, zeros
    *[(shape, None, [1.0, 0.0, 3.0]) for shape in ODD_SHAPES],
    (SHAPE, "float16", [1.0, 0.0, 8.0, 1.0]),
    (SHAPE, "bfloat16", [1.0, 0.0, 8.0, 1.0]),
]
"""Shape, dtype, and for each step a scale, by whose powers the ranks' gradients are multiplied."""


@equality
def worlds_agree(case: Case, framework: Framework, ranks: int) -> None:
    """In all frameworks, steps of an exchange give NumPy's means, states and numbers of bytes.

    Each rank's fourth step is not finite. Levels that are equal change under Accordion, which sums
    up gradients.
    """
    compression: Any = case.compressor
    if not case.private and case.compressor.period == 1:
        signal = "local" if framework is TORCH else "reduced"
        compression = Accordion(compression, compression, window=2, interval=1, signal=signal)
    hosts = {"local_size": local_size(ranks)}
    worlds = [simulate(copy.deepcopy(compression), ranks, **hosts) for _ in "ab"]
    oracle = POISONED if framework.exact_undo else NUMPY
    for number, gradients in enumerate(several(ranks, 8)):
        if number == 3:
            gradients[ranks - 1]["w"].reshape(-1)[7] = np.nan
        for mine in gradients:
            mine["twin"] = mine["v"][::-1].copy()  # the two share a call of `exchange`
        ours, theirs = (
            step(world, where, gradients)
            for world, where in zip(worlds, (framework, oracle), strict=True)
        )
        for mine, wanted in zip(ours, theirs, strict=True):
            assert (mine is None) == (wanted is None)
            for name in mine or ():
                check_same(case, mine[name], wanted[name])
    for mine, wanted in zip(states(worlds[0], framework), states(worlds[1], oracle), strict=True):
        assert mine.keys() == wanted.keys()
        for key, x in mine.items() if case.bitwise else ():
            assert same_bits(x, wanted[key]), key
    unlike = {"seconds": 0} | ({} if case.bitwise else {"reports": 0})
    for mine, wanted in zip(worlds[0].exchanges, worlds[1].exchanges, strict=True):
        assert mine.stats() | unlike == wanted.stats() | unlike


def check_same(case: Case, ours: np.ndarray, oracle: np.ndarray) -> None:
    if case.bitwise:
        assert same_bits(ours, oracle)
    else:
        assert np.abs(ours - oracle).max() <= case.close * max(1.0, np.abs(oracle).max())


@law
def zeros_stay_zeros(case: Case, framework: Framework, ranks: int) -> None:
    world = Ranks(case.compressor, ranks, framework)
    nothing = [np.zeros(SHAPE, np.float32)] * ranks
    for step in range(3):
        for mean in world.step(nothing):
            assert (mean == case.wanted(nothing, step)).all()
        for state in world.states:
            assert all(np.isfinite(framework.array(x)).all() for x in state.values())
    gradients = next(normals(SHAPE, ranks))
    mean = world.step(gradients)[0]
    lost = case.wanted(gradients, 3).reshape(-1) - mean.reshape(-1) - world.mean_residual(mean.size)
    assert np.abs(lost).max() <= max(2e-6, case.loss) * 10, "after zeros, a gradient is lost"


@law
def deterministic(case: Case, framework: Framework, ranks: int) -> None:
    one, two = Ranks(case.compressor, ranks, framework), Ranks(case.compressor, ranks, framework)
    for gradients in normals(SHAPE, ranks, steps=5):
        for a, b in zip(one.step(gradients), two.step(gradients), strict=True):
            assert same_bits(a, b)


@law_if(lambda case, framework, ranks: case.unbiased and framework is NUMPY)
def unbiased(case: Case, framework: Framework, ranks: int, steps: int = 400) -> None:
    """The errors of many steps with one gradient cancel in the mean as independent errors do.

    This law is checked in NumPy only, because other frameworks give the same bits.
    """
    world, gradients = Ranks(case.compressor, ranks), next(normals(SHAPE, ranks))
    exact = exact_mean(gradients)
    wrong = np.array([world.step(gradients)[0] - exact for _ in range(steps)])
    assert 0.8 < steps * (wrong.mean(0) ** 2).sum() / (wrong**2).mean(0).sum() < 1.2
    for direction in (exact, np.ones(SHAPE)):
        along = (wrong * direction).sum((1, 2))
        assert abs(along.mean()) < 4 * along.std() / steps**0.5


@law
def state_keys_are_stable(case: Case, framework: Framework, ranks: int) -> None:
    """No step changes the keys, shapes and dtypes of the state that `init` returns.

    They are the same on all ranks, and all dtypes are fp32. The state has a residual if and only if
    the case claims error feedback.
    """
    xp, world = framework.xp, Ranks(case.compressor, ranks, framework)

    def forms() -> list[Any]:
        return [{k: (xp.shape(x), xp.dtype(x)) for k, x in s.items()} for s in world.states]

    gradients = next(normals(SHAPE, ranks))
    world.states = world.init(framework.tensor(gradients[0], "float16"))
    initial = forms()
    assert all(form == initial[0] for form in initial)
    assert all(dtype == "float32" for _, dtype in initial[0].values())
    for gradients in normals(SHAPE, ranks, steps=3):
        world.step(gradients)
        assert forms() == initial
    assert case.feedback == (case.compressor.residual(world.states[0]) is not None)


@law_if(lambda case, framework, ranks: framework is NUMPY and has_state(case))
def results_share_no_memory_with_states(case: Case, framework: Framework, ranks: int) -> None:
    """A result shares no memory with the state, so the optimizer may write into the result."""
    world = Ranks(case.compressor, ranks, framework)
    for gradients in normals(SHAPE, ranks, steps=3):
        tensors = [framework.tensor(g) for g in gradients]
        world.states = world.states or world.init(tensors[0])
        results = world.exchange(tensors, world.states)
        world.states, world.steps = [state for _, state in results], world.steps + 1
        for mean, state in results:
            assert not any(np.shares_memory(mean, x) for x in state.values())


@law_if(lambda case, framework, ranks: framework is NUMPY)
def consumed_is_not_used_again(case: Case, framework: Framework, ranks: int) -> None:
    """NumPy gives the same bits when consumed arguments are poisoned."""
    plain, poisoned = Ranks(case.compressor, ranks, NUMPY), Ranks(case.compressor, ranks, POISONED)
    for gradients in normals(SHAPE, ranks, steps=5):
        for a, b in zip(plain.step(gradients), poisoned.step(gradients), strict=True):
            assert same_bits(a, b)
    for a, b in zip(plain.residuals(), poisoned.residuals(), strict=True):
        assert (a is None and b is None) or same_bits(a, b)


MOVED = {
    "allreduce": lambda size, ranks: 2 * (ranks - 1) / ranks * size,
    "allgather": lambda size, ranks: (ranks - 1) * size,
    "alltoall": lambda size, ranks: (ranks - 1) / ranks * size,
    "broadcast": lambda size, ranks: (ranks - 1) / ranks * size,
}
"""The models of `comm.collectives`, stated once more: bytes sent, and received."""


def moved_in(case: Case, step: int, ranks: int) -> list[tuple[str, int, int]]:
    """Return the collectives of a step, as `Case.moves` does, and that of the non-finite flags."""
    moves = case.moves(SHAPE, 4, ranks, step)
    if case.guarded:
        moves.append(("allgather" if moves[0][0] == "allgather" else "allreduce", 8, ranks))
    return moves


# Uneven compressors have tests of their own that count bytes.
@law_if(lambda case, framework, ranks: not case.uneven)
def bytes_are_counted(case: Case, framework: Framework, ranks: int) -> None:
    steps = 3
    moves = [move for number in range(steps) for move in moved_in(case, number, ranks)]
    world = simulate(case.compressor, ranks, local_size=local_size(ranks))
    for gradients in normals(SHAPE, ranks, steps=steps):
        step(world, framework, [{"w": g} for g in gradients])
    payload = sum(size for _, size, _ in moves)
    moved = sum(MOVED[kind](size, members) for kind, size, members in moves)
    dense = 4 * int(np.prod(SHAPE)) * steps
    for exchange in world.exchanges:
        stats = exchange.stats()
        assert stats["steps"] == steps
        assert stats["dense"] == dense
        assert stats["payload"] == payload
        assert np.isclose(stats["dense_sent"], MOVED["allreduce"](dense, ranks))
        assert np.isclose(stats["sent"], moved) and np.isclose(stats["received"], moved)
        if ranks > 1:
            assert np.isclose(stats["ratio"], stats["dense_sent"] / stats["sent"])


def step(
    world: World, framework: Framework, gradients: Sequence[Mapping[str, Any]], lr: float = 0.1
) -> list[Any]:
    """Run one step of a simulated world on NumPy arrays; return each rank's result, or None.

    If the world's methods read weights, the step is also applied to the weights of `weights_of`.
    """
    weights = weights_of(world, gradients)
    with framework.running():
        tensors = [{k: made(framework.tensor, g) for k, g in mine.items()} for mine in gradients]
        told = [{k: framework.tensor(x) for k, x in mine.items()} for mine in weights]
        means = world.step(tensors, lr=lr, weights=told or None)
        found = [
            None if m is None else {k: made(framework.array, x) for k, x in m.items()}
            for m in means
        ]
    for exchange, mine, moves in zip(world.exchanges, weights, found, strict=bool(weights)):
        assigned = {
            member: entry.compressor.returns_weights
            for entry in exchange.bucket_states
            for member in entry.bucket.members
        }
        for i, name in enumerate(mine if moves else ()):
            move = moves[name] if moves else None
            if move is not None:
                kept = mine[name] - np.asarray(lr * move, move.dtype)
                mine[name] = move if assigned[i] else kept
    return found


def made(function: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else function(value)


def weights_of(world: World, gradients: Sequence[Mapping[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Return each rank's weights, equal before the first step; [] if no method reads weights."""
    policy = world._policies[0]
    levels = (*policy.levels("w"), policy.plain) if policy.output == "update" else ()
    if not any(needs_weights(level) for level in levels):
        return []
    kept = vars(world).setdefault("weights", [])
    if not kept:
        for mine in gradients:
            drawn = {k: np.random.default_rng(7).normal(size=g.shape) for k, g in mine.items()}
            kept.append({k: x.astype(mine[k].dtype) for k, x in drawn.items()})
    return kept


def states(world: World, framework: Framework) -> list[Any]:
    """Return each rank's state of all buckets, as arrays by (bucket, key)."""
    return [
        {
            (entry.bucket.name, key): framework.array(x)
            for entry in exchange.bucket_states
            for key, x in (entry.state or {}).items()
        }
        for exchange in world.exchanges
    ]


def several(ranks: int, steps: int, seed: int = 0) -> list[list[dict[str, np.ndarray]]]:
    """Return gradients by step and rank: two large tensors, and two small ones to be packed."""
    shapes = {"w": SHAPE, "b": (24,), "v": (40, 30), "s": (3, 5)}
    streams = {k: normals(s, ranks, seed + i) for i, (k, s) in enumerate(shapes.items())}
    together = (zip(*streams.values(), strict=True) for _ in itertools.count())
    return [
        [dict(zip(shapes, mine, strict=True)) for mine in zip(*next(iter(now)), strict=True)]
        for now in itertools.islice(together, steps)
    ]


@law
def bad_steps_are_taken_back(case: Case, framework: Framework, ranks: int) -> None:
    """After a non-finite gradient on one rank, all ranks return None and undo the step.

    The next steps equal those of a world without such gradients. Compressors without a flag have no
    state and return a non-finite mean instead; private ones return a finite mean.
    """
    good = several(ranks, 7)
    world, twin = (simulate(case.compressor, ranks, local_size=local_size(ranks)) for _ in "ab")
    for gradients in good[:3]:
        step(world, framework, gradients)
        step(twin, framework, gradients)
    for rank, name, value in [(ranks - 1, "w", np.nan), (0, "b", np.inf), (0, "v", -np.inf)]:
        before = states(world, framework)
        bad = several(ranks, 1, seed=9)[0]
        bad[rank][name].reshape(-1)[7] = value
        means = step(world, framework, bad)
        if case.private:
            assert all(np.isfinite(mean[name]).all() for mean in means)
            continue
        if not case.guarded:  # these have no state, and the mean shows the error
            assert all(not np.isfinite(mean[name]).all() for mean in means)
            assert not any(states(world, framework))
            continue
        assert means == [None] * ranks
        for mine, was in zip(states(world, framework), before, strict=True):
            assert mine.keys() == was.keys()
            for key, x in mine.items():
                if framework.exact_undo:
                    assert same_bits(x, was[key])
                else:
                    scale = np.maximum(np.abs(was[key]), 4.0)  # an ulp of the added values
                    assert (np.abs(x - was[key]) <= 2**-22 * scale).all()
    for exchange in twin.exchanges:  # the number of steps includes skipped steps
        exchange.steps += 3
        exchange.skipped += 3
    for gradients in good[3:]:
        ours, theirs = step(world, framework, gradients), step(twin, framework, gradients)
        for mine, wanted in zip(ours, theirs, strict=True):
            for name in wanted:
                if framework.exact_undo:
                    assert same_bits(mine[name], wanted[name])
                elif case.discrete:
                    assert np.mean(np.abs(mine[name] - wanted[name]) > 1e-5) < 0.01
                else:
                    np.testing.assert_allclose(mine[name], wanted[name], atol=max(1e-4, case.close))


@law_if(
    lambda case, framework, ranks: (
        case.guarded and not case.private and (framework is NUMPY or (case in FIRST and ranks > 1))
    )
)
def absent_tensors_stay(case: Case, framework: Framework, ranks: int) -> None:
    """A tensor without a gradient on all ranks keeps its state; on some ranks, it counts as zeros.

    The next gradients then find the residual as it was.
    """
    good = several(ranks, 4)
    world, twin = (simulate(case.compressor, ranks, local_size=local_size(ranks)) for _ in "ab")
    for gradients in good[:2]:
        step(world, framework, gradients)
        step(twin, framework, gradients)
    for name in ("v", "b") if ranks > 1 else ():
        absent = [dict(mine) for mine in good[2]]
        zeros = [dict(mine) for mine in good[2]]
        absent[-1][name], zeros[-1][name] = None, np.zeros_like(zeros[-1][name])
        ours, theirs = step(world, framework, absent), step(twin, framework, zeros)
        for mine, wanted in zip(ours, theirs, strict=True):
            assert all(same_bits(mine[key], wanted[key]) for key in wanted)
    for names in (["v"], ["w", "b"], ["w", "b", "v", "s"]):
        before = parts(world, framework)
        means = step(world, framework, [dict(x) | dict.fromkeys(names) for x in good[3]])
        assert all((mean[key] is None) == (key in names) for mean in means for key in mean)
        for mine, was in zip(parts(world, framework), before, strict=True):
            assert mine.keys() == was.keys()
            assert all(same_bits(mine[k], was[k]) for k in was if k[0] in names)
    assert all(np.isfinite(x).all() for x in step(world, framework, good[3])[0].values())


EQUALITY.add(absent_tensors_stay)  # which frameworks restore in their own ways


def parts(world: World, framework: Framework) -> list[dict[tuple[str, str], np.ndarray]]:
    """Return each rank's tensors of states by (tensor, key), cut where several share a bucket."""
    found: list[dict[tuple[str, str], np.ndarray]] = []
    for exchange in world.exchanges:
        found.append({})
        for entry in exchange.bucket_states:
            names = [exchange.tensors[member].name for member in entry.bucket.members]
            cuts = np.cumsum(entry.bucket.sizes)[:-1]
            for key, value in (entry.state or {}).items():
                array = framework.array(value)
                if len(names) == 1:
                    found[-1][names[0], key] = array
                elif array.size == entry.bucket.size:
                    rows = zip(names, np.split(np.ravel(array), cuts), strict=True)
                    found[-1] |= {(name, key): row.copy() for name, row in rows}
    return found


NOT_OF_NUMPY = {POISONED: {bad_steps_are_taken_back}, TORCH: {half_gradients}}
"""Laws that NumPy does not show: of an exact undo, and of bfloat16."""
