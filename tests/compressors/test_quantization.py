"""Tests of quantisers: packed codes, random rounding, and the properties of each method."""

from __future__ import annotations

import functools
from typing import Any

import laws
import numpy as np
import pytest
from cases import Case, coded, majority_of, matrix
from frameworks import (
    NUMPY,
    TENSORFLOW,
    TORCH,
    Framework,
    Ranks,
    exact_mean,
    installed,
    normals,
    parameters,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from accordion_hvd import (
    QSGD,
    Accordion,
    Compressor,
    Dense,
    EFSignSGD,
    Int8,
    Natural,
    OneBit,
    SignSGD,
    TernGrad,
    simulate,
)
from accordion_hvd.compressors.signsgd import majority
from accordion_hvd.ops import quantization, random

RNG = np.random.default_rng(0)
SIZES = [1, 7, 8, 513, (1 << 16) + 3, 150_001]


# -------------------------------------------------------------------------------- codes and bytes
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 200), st.randoms(use_true_random=False))
def test_codes_survive_packing(bits: int, count: int, chance: Any) -> None:
    codes = np.array([chance.randrange(2**bits) for _ in range(count)], np.uint8)
    packed = quantization.pack_bits(codes, bits)
    assert packed.size == quantization.packed_length(count, bits)
    assert packed.size <= -(-count * bits // 8) + 2
    np.testing.assert_array_equal(quantization.unpack_bits(packed, bits, count), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_bit_by_bit(bits: int) -> None:
    """Codes are packed in sections of 8, 4, 2 and 1 bits, with their lowest bits first."""
    codes = RNG.integers(0, 2**bits, 41).astype(np.uint8)
    wanted, low = bytearray(), 0
    for width in (w for w in (8, 4, 2, 1) if bits & w):
        number = sum((int(c) >> low) % 2**width << i * width for i, c in enumerate(codes))
        wanted += number.to_bytes(-(-41 * width // 8), "little")
        low += width
    assert quantization.pack_bits(codes, bits).tobytes() == bytes(wanted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bucket", [1, 5, 512, 100_000, 10**7])
def test_grids_by_brute_force(size: int, bucket: int) -> None:
    """Norms, rounded values and sums match a computation by element in double precision."""
    x = RNG.standard_normal(size).astype(np.float32) ** 3
    x[::5] = 0
    of = np.arange(size) // bucket
    norms = quantization.bucket_norms(x, bucket, "max")
    wanted = np.zeros(norms.size, np.float32)
    np.maximum.at(wanted, of, np.abs(x))
    np.testing.assert_array_equal(norms, wanted)
    sums = np.bincount(of, np.abs(x.astype(np.float64)))
    np.testing.assert_allclose(quantization.bucket_norms(x, bucket, "l1"), sums, rtol=1e-5)
    squares = np.bincount(of, x.astype(np.float64) ** 2)
    np.testing.assert_allclose(quantization.bucket_norms(x, bucket, "l2"), squares**0.5, rtol=1e-6)
    for bits in (1, 2, 4, 8):
        middle = quantization.middle(bits)
        steps = norms / np.float32(middle)
        each = steps[of].astype(np.float64)
        for seed, most in ((None, 0.501), (random.key("a", bits), 1.001)):
            packed = quantization.quantize(x, steps, bucket, bits, seed)
            codes = quantization.unpack_bits(packed, bits, size)
            value = (codes.astype(float) - middle) * each
            assert (np.abs(value - x) <= most * each).all()
            out = np.empty(size, np.float32)
            parts, scales = [packed, packed[::-1].copy()], [steps, steps * np.float32(0.3)]
            quantization.sum_quantized(parts, scales, bucket, bits, middle, out)
            other = (
                (quantization.unpack_bits(parts[1], bits, size).astype(float) - middle) * each * 0.3
            )
            np.testing.assert_allclose(out, value + other, rtol=1e-5, atol=1e-5)
            if bits > 1:
                assert not value[x == 0].any(), "zero stays zero"


@pytest.mark.skipif(not installed(TORCH), reason="torch not installed")
@pytest.mark.parametrize("size", SIZES)
def test_any_device_gives_the_same_bytes(size: int) -> None:
    """PyTorch operations that GPUs use, run on the CPU, give the results of NumPy."""
    import torch

    from accordion_hvd.ops import quantization_torch as anywhere

    def pairs(*given: Any) -> Any:
        return given, [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in given]

    def same(name: str, *given: Any) -> np.ndarray:
        plain, moved = pairs(*given)
        wanted, found = getattr(quantization, name)(*plain), getattr(anywhere, name)(*moved)
        assert same_bits(found.numpy(), wanted), name
        return wanted

    x = RNG.standard_normal(size).astype(np.float32) ** 3
    x[::5] = 0
    for turn in (None, 0, 1):
        same("pack_signs", x, turn)
    same("pack_random_signs", np.tanh(x), 7)
    for bits in range(1, 9):
        codes = RNG.integers(0, 2**bits, size).astype(np.uint8)
        same("unpack_bits", same("pack_bits", codes, bits), bits, size)
        for bucket in (3, 512, 10**6):
            steps = same("bucket_norms", x, bucket, "max") / np.float32(quantization.middle(bits))
            for seed in (None, 7):
                packed = same("quantize", x, steps, bucket, bits, seed)
            out, rest = np.empty(size, np.float32), x.copy()
            grid = bucket, bits, quantization.middle(bits)
            (out, rest), (out2, rest2) = pairs(out, rest)
            out2, rest2 = out2.clone(), rest2.clone()
            quantization.sum_quantized([packed] * 2, [steps] * 2, *grid, out)
            quantization.subtract_quantized(rest, packed, steps, *grid)
            packed, steps = torch.from_numpy(packed), torch.from_numpy(steps)
            anywhere.sum_quantized([packed] * 2, [steps] * 2, *grid, out2)
            anywhere.subtract_quantized(rest2, packed, steps, *grid)
            assert same_bits(out2.numpy(), out) and same_bits(rest2.numpy(), rest)
    for names in (["w"], ["u", "v", "w"]):
        words = same("narrow", np.stack([x] * len(names)), names, 7)
        same("widen", words)
        alone = [quantization.narrow(x, [name], 7) for name in names]
        assert same_bits(words, np.stack(alone)), "the numbers of a tensor are its own"
    packed, out = same("pack_powers", x, 9), np.empty(size, np.float32)
    quantization.sum_powers([packed] * 3, 0.25, out)
    out2 = torch.empty(size)
    anywhere.sum_powers([torch.from_numpy(packed)] * 3, 0.25, out2)
    assert same_bits(out2.numpy(), out)
    cube = RNG.standard_normal((2, 40, 30)).astype(np.float32)
    bits = quantization.pack_signs(cube.reshape(-1), None)
    means = quantization.column_means(cube, bits)
    _, (tensor, packed, values) = pairs(cube, bits, means)
    np.testing.assert_allclose(anywhere.column_means(tensor, packed), means, atol=1e-5)
    rest = tensor.clone()
    anywhere.subtract_columns(rest, packed, values)
    quantization.subtract_columns(cube, bits, means)
    np.testing.assert_allclose(rest, cube, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_any_payload_can_be_decoded() -> None:
    """Random bytes decode without errors, and scales of NaN and inf make results non-finite."""
    size, bucket, out = 70_001, 100, np.empty(70_001, np.float32)
    scales = RNG.integers(0, 256, 4 * 701, np.uint8).view(np.float32)
    scales[:2] = np.nan, np.inf
    for bits in range(1, 9):
        packed = RNG.integers(0, 256, quantization.packed_length(size, bits), np.uint8)
        quantization.sum_quantized([packed], [scales], bucket, bits, 0.5 if bits == 1 else 3, out)
        assert not np.isfinite(out[0]) and not np.isfinite(out[: 2 * bucket]).all()
        quantization.subtract_quantized(np.zeros_like(out), packed, scales, bucket, bits, 0.5)
    packed = RNG.integers(0, 256, -(-size // 8) + size, np.uint8)
    quantization.sum_powers([packed], 1.0, out)


# --------------------------------------------------------------------------------- random numbers
def test_random_numbers_are_exactly_uniform() -> None:
    numbers = np.sort(quantization.table()[: quantization.TABLE])
    wanted = (np.arange(1 << 16) + 0.5) / (1 << 16)
    np.testing.assert_array_equal(numbers, np.repeat(wanted, 4).astype(np.float32))


def test_neighbours_and_ranks_round_independently() -> None:
    """Rounding errors of neighbouring elements are uncorrelated, and so are those of ranks.

    The mean of 4 ranks with equal gradients has a quarter of the squared error of one rank.
    """
    x = np.full((40, 30), 0.5, np.float32)
    x[::2] *= RNG.random((20, 30), np.float32)
    for method in (QSGD(2, bucket=64), TernGrad(None), Natural()):
        squares = []
        for ranks in (1, 4):
            world = Ranks(method, ranks)
            wrong = np.array([world.step([x] * ranks)[0] - x for _ in range(300)])
            squares.append((wrong**2).mean())
            random_only = wrong[:, wrong.std((0, 2)) > 0].reshape(300, -1)
            for lag in (1, 2, 32):
                product = (random_only[:, lag:] * random_only[:, :-lag]).mean()
                assert abs(product) < 0.02 * (random_only**2).mean()
        assert 3.5 < squares[0] / squares[1] < 4.5


# --------------------------------------------------------------------- what each method is about
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_sends_levels_of_the_norm(bits: int) -> None:
    """On one rank, QSGD sends one of the two enclosing multiples of norm / s, without bias."""
    levels, steps = 2 ** (bits - 1) - 1, 500
    world, (gradient,) = Ranks(QSGD(bits, bucket=100), 1), next(normals(laws.SHAPE, 1))
    norms = np.abs(gradient.reshape(-1, 100)).max(1)
    scaled = gradient.reshape(-1, 100) / norms[:, None] * levels
    ups = np.zeros(scaled.shape)
    for _ in range(steps):
        level = world.step([gradient])[0].reshape(-1, 100) / norms[:, None] * levels
        np.testing.assert_allclose(level, np.round(level), atol=1e-4)
        up = np.round(level) - np.floor(scaled - 1e-6)
        assert set(np.unique(up)) <= {0, 1}
        ups += up
    chance = scaled - np.floor(scaled - 1e-6)
    deviation = np.sqrt(np.maximum(chance * (1 - chance), 1e-4) / steps)
    assert (np.abs(ups / steps - chance) < 5.5 * deviation).all()


def test_terngrad_is_ternary_and_shares_its_scale() -> None:
    gradients = next(normals(laws.SHAPE, 3))
    gradients[1] *= 10
    largest = max(np.abs(g).max() for g in gradients)
    mean = Ranks(TernGrad(None), 3).step(gradients)[2]
    sums = mean * 3 / largest
    np.testing.assert_allclose(sums, np.round(sums), atol=1e-5)
    assert set(np.unique(np.round(sums))) <= set(range(-3, 4))
    (gradient,) = next(normals(laws.SHAPE, 1))
    gradient[3, 4] = 1000
    limit = 2.5 * np.sqrt((gradient.astype(np.float64) ** 2).mean())
    clipped = Ranks(TernGrad(), 1).step([gradient])[0]
    np.testing.assert_allclose(clipped[3, 4], limit, rtol=1e-5)


@pytest.mark.parametrize("ranks", [127, 128, 200])
def test_terngrad_sums_of_many_ranks(ranks: int) -> None:
    gradients = [np.float32([1, -1, 0, 1 if r % 2 else -1, 1 if r else -1]) for r in range(ranks)]
    for mean in Ranks(TernGrad(None), ranks).step(gradients):
        np.testing.assert_allclose(mean, exact_mean(gradients), atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 128])
def test_each_tensor_of_a_stack_has_its_own_ternary_scale(ranks: int) -> None:
    """Values of one magnitude are sent exactly, so the means are exact."""
    signs = np.where(np.arange(1024).reshape(2, 512) % 3, np.float32(1), np.float32(-1))
    gradients = [{"a": signs * (-1) ** r, "b": 100 * signs, "c": signs.T} for r in range(ranks)]
    world = simulate(TernGrad(None), ranks)
    means = world.step([{k: g.copy() for k, g in mine.items()} for mine in gradients], 0.1)
    for mean in means[0], means[-1]:
        assert not mean["a"].any()
        np.testing.assert_allclose(mean["b"], 100 * signs, rtol=1e-6)
    assert [batch.stacked for batch in world.exchanges[0].layout.batches] == ["alike", ""]


def test_natural_sends_powers_of_two() -> None:
    x = np.float32([0, -0.0, 1, -2, 1.5, -3, 1e-40, -1e-39, 3e38, 2**-126, 0.1])
    results = np.array([Ranks(Natural(), 1, name=f"{i}").step([x])[0] for i in range(2000)])
    mantissa = np.frexp(results[np.isfinite(results) & (results != 0)])[0]
    assert (np.abs(mantissa) == 0.5).all()
    assert not results[:, :2].any() and (results[:, 2:4] == x[2:4]).all()
    lower, upper = 2.0 ** np.floor(np.log2(0.1)), 2.0 ** np.ceil(np.log2(0.1))
    assert set(np.unique(results[:, -1])) == {np.float32(lower), np.float32(upper)}
    for i in (4, 5, 6, 7, 10):  # four deviations
        found = results[:, i].astype(np.float64)
        assert abs(found.mean() - np.float64(x[i])) < 4 * found.std() / 2000**0.5
    assert set(np.unique(results[:, 8])) == {np.float32(2.0**127), np.float32(np.inf)}


@pytest.mark.parametrize("method", [QSGD(), QSGD(1), QSGD(norm="l2"), Natural()], ids=repr)
def test_what_is_not_finite_shows(method: Compressor) -> None:
    """Methods without a flag for non-finite gradients return a mean that is not finite."""
    for bad in (np.nan, np.inf, -np.inf):
        for framework in (f for f in (NUMPY, TORCH, TENSORFLOW) if installed(f)):
            gradients = next(normals((300,), 2))
            gradients[1][17] = bad
            for mean in Ranks(method, 2, framework).step(gradients):
                assert not np.isfinite(mean[17])


def test_int8_waits_with_what_rounding_leaves() -> None:
    world, error = Ranks(Int8(block=50), 1), np.zeros(laws.SHAPE)
    for (gradient,) in normals(laws.SHAPE, 1, steps=6):
        total = (gradient + error).astype(np.float32)
        step = np.abs(total).max(1, keepdims=True) / 127
        mean = world.step([gradient])[0]
        np.testing.assert_allclose(mean, np.round(total / step) * step, atol=2e-6)
        error = total - mean
        assert (np.abs(error) <= 0.5001 * step).all()


@pytest.mark.parametrize("framework", parameters())
@pytest.mark.parametrize("ranks", range(1, 12))
def test_majority_by_counting(framework: Framework, ranks: int) -> None:
    xp = framework.xp
    votes = [RNG.integers(0, 256, 50).astype(np.uint8) for _ in range(ranks)]
    ups = np.sum([np.unpackbits(v, bitorder="little").astype(int) for v in votes], 0)
    for step in (0, 1, 2, 7):
        tie = (np.arange(400) + step) % 2 == 0
        wanted = np.packbits((2 * ups > ranks) | ((2 * ups == ranks) & tie), bitorder="little")
        found = majority(xp, [framework.tensor(v) for v in votes], step)
        np.testing.assert_array_equal(framework.array(found), wanted)


def test_signsgd_zeros_and_ties_cancel_in_two_steps() -> None:
    world = Ranks(SignSGD(), 2)
    x = np.zeros(37, np.float32)
    x[10:20] = RNG.standard_normal(10)
    opposite = [x, -x]
    total = sum(world.step(opposite)[0] for _ in range(2))
    assert not total.any()


def test_signsgd_outvotes_what_is_wrong() -> None:
    """Three ranks outvote two that send the reverse, however large their gradients are."""
    (good,) = next(normals(laws.SHAPE, 1))
    means = Ranks(SignSGD(), 5).step([good, good, good, -1e6 * good, -1e6 * good])
    assert all((mean == np.sign(good)).all() for mean in means)


def test_signum_sends_the_signs_of_its_momentum() -> None:
    world, momenta = Ranks(SignSGD(0.9), 3), [np.zeros(laws.SHAPE)] * 3
    for step, gradients in enumerate(normals(laws.SHAPE, 3, steps=6)):
        momenta = [0.9 * m + 0.1 * g for m, g in zip(momenta, gradients, strict=True)]
        np.testing.assert_array_equal(world.step(gradients)[1], majority_of(momenta, step))


@pytest.mark.parametrize("framework", parameters())
def test_signum_obeys_the_laws(framework: Framework) -> None:
    case = Case(SignSGD(0.9), lambda *_: [], discrete=True)
    for law in (laws.ranks_agree, laws.frameworks_agree, laws.deterministic):
        law(case, framework, 3)
    laws.state_keys_are_stable(case, framework, 2)
    laws.bad_steps_are_taken_back(case, framework, 2)
    laws.consumed_is_not_used_again(case, framework, 2)


@pytest.mark.parametrize("framework", parameters((NUMPY, TORCH, TENSORFLOW)))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_small_and_exempt_tensors_get_signs_too(momentum: float, framework: Framework) -> None:
    """SignSGD votes on small and exempt tensors too, so one learning rate fits all tensors.

    Each element costs one bit in each direction.
    """
    ranks, shapes = 3, {"w": (24, 50), "head": (40, 30), "b": (24,), "s": (3, 5)}
    world = simulate(SignSGD(momentum), ranks, skip=["head"])
    flat = sum(int(np.prod(shapes[name])) for name in ("head", "b", "s"))
    momenta = [{k: np.zeros(s) for k, s in shapes.items()} for _ in range(ranks)]
    for number in range(4):
        rng = np.random.default_rng(number)
        gradients = [
            {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
            for _ in range(ranks)
        ]
        momenta = [
            {k: momentum * m[k] + g[k] for k in shapes}
            for m, g in zip(momenta, gradients, strict=True)
        ]
        for mean in laws.step(world, framework, gradients):
            assert mean is not None
            for name in shapes:
                votes = [m[name] for m in momenta]
                np.testing.assert_array_equal(mean[name], majority_of(votes, number))
    sizes = [-(-coded((size,), 1) // ranks) for size in (24 * 50, flat)]
    for exchange in world.exchanges:
        flags = exchange.stats()["payload"] - 4 * sum((ranks + 1) * width for width in sizes)
        assert flags == 4 * 8 * len(exchange.layout.groups)


def test_efsignsgd_follows_the_paper() -> None:
    """EFSignSGD follows Algorithm 1, with the learning rate left out of the residual."""
    ranks = 3
    world, errors = Ranks(EFSignSGD(), ranks), [np.zeros(laws.SHAPE)] * ranks
    for gradients in normals(laws.SHAPE, ranks, steps=6):
        totals = [g + e for g, e in zip(gradients, errors, strict=True)]
        sent = [np.abs(p).mean() * np.sign(p) for p in totals]
        np.testing.assert_allclose(world.step(gradients)[1], np.mean(sent, 0), atol=1e-5)
        errors = [p - s for p, s in zip(totals, sent, strict=True)]


@pytest.mark.parametrize("shape", [laws.SHAPE, (7,), (5, 4, 3, 3), (1, 5), (2, 70_000)])
def test_onebit_follows_the_paper(shape: tuple[int, ...]) -> None:
    """Each column's two values are the means of its negative elements and of the others."""
    world, errors = Ranks(OneBit(), 2), [np.zeros(matrix(shape))] * 2
    for gradients in normals(shape, 2, steps=4):
        sent = []
        for rank, gradient in enumerate(gradients):
            total = gradient.reshape(matrix(shape)) + errors[rank]
            value = np.empty_like(total)
            for column in range(total.shape[1]) if total.shape[1] < 100 else (0, 69_999):
                x = total[:, column]
                for side in (x < 0, x >= 0):
                    value[side, column] = x[side].mean() if side.any() else 0
            if total.shape[1] > 100:
                value = np.where(total >= 0, *[mean_of(total, s) for s in (1, -1)])
            sent.append(value)
            errors[rank] = total - value
        mean = world.step(gradients)[0].reshape(matrix(shape))
        np.testing.assert_allclose(mean, np.mean(sent, 0), atol=1e-5)


def mean_of(x: np.ndarray, sign: int) -> np.ndarray:
    """Return the mean of each column's elements of one sign."""
    chosen = (x >= 0) == (sign > 0)
    return np.where(chosen, x, 0).sum(0) / np.maximum(chosen.sum(0), 1)


def test_small_tensors_keep_their_own_scale() -> None:
    """Small tensors that share a call have the same results as alone, each with its own scale."""
    shapes = {"a": (30, 40), "b": (30, 40), "c": (30, 40)}
    for method in (EFSignSGD(), OneBit()):
        together, alone = simulate(method, 2), {k: simulate(method, 2) for k in shapes}
        for step in range(3):
            rng = np.random.default_rng(step)
            gradients = [
                {k: (rng.standard_normal(s) * 10**i).astype(np.float32) for i, (k, s) in some}
                for some in [list(enumerate(shapes.items()))] * 2
            ]
            copies = [{k: g.copy() for k, g in mine.items()} for mine in gradients]
            means = together.step(gradients)[0]
            for k in shapes:
                single = alone[k].step([{k: mine[k]} for mine in copies])[0]
                assert means is not None and single is not None
                np.testing.assert_allclose(means[k], single[k], rtol=1e-5)


# ------------------------------------------------------------------------------------- it trains
LEARNERS: list[tuple[Compressor, float]] = [
    (QSGD(4), 0.5),
    (QSGD(2, bucket=64), 0.5),
    (QSGD(8), 0.5),
    (TernGrad(), 0.5),
    (Natural(), 0.5),
    (Int8(), 0.5),
    (SignSGD(), 0.01),
    (SignSGD(0.9), 0.01),
    (EFSignSGD(), 0.5),
    (OneBit(), 0.5),
]


@pytest.mark.parametrize(("method", "lr"), LEARNERS, ids=lambda x: repr(x))
def test_digits_are_learned(method: Compressor, lr: float) -> None:
    assert accuracy(method, lr) > accuracy(Dense(), 0.5) - 0.03


def test_levels_of_accordion() -> None:
    """Accordion trains with eight bits in critical regimes and one bit outside.

    Levels that return updates are refused beside levels that return gradients.
    """
    assert accuracy(Accordion(low=Int8(), high=EFSignSGD(), window=20), 0.5) > 0.9
    with pytest.raises(ValueError, match="output"):
        Accordion(low=Dense(), high=SignSGD())
    with pytest.raises(ValueError, match="exempt tensors"):
        Accordion(low=SignSGD(), high=SignSGD(0.9))


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 16).astype(np.float32), data.target[order]


@functools.cache
def accuracy(method: Any, lr: float, ranks: int = 4, steps: int = 200, batch: int = 32) -> float:
    """Return the accuracy on unseen digits of a network with one hidden layer after SGD steps."""
    x, y = digits()
    rng = np.random.default_rng(1)
    weights = {"a": rng.standard_normal((64, 64)) * 0.1, "b": rng.standard_normal((64, 10)) * 0.1}
    world = simulate(method, ranks)
    for step in range(steps):
        chosen = [rng.integers(0, 1400, batch) for _ in range(ranks)]
        means = world.step([slopes(weights, x[c], y[c]) for c in chosen], lr=lr)[0]
        assert means is not None
        fade = lr * min(1, 2 * (1 - step / steps))
        weights = {k: w - fade * means[k] for k, w in weights.items()}
    scores = np.maximum(x[1400:] @ weights["a"], 0) @ weights["b"]
    return float((scores.argmax(1) == y[1400:]).mean())


def slopes(weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    hidden = np.maximum(x @ weights["a"], 0)
    scores = hidden @ weights["b"]
    chance = np.exp(scores - scores.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    chance[np.arange(len(y)), y] -= 1
    back = chance / len(y)
    inner = (back @ weights["b"].T) * (hidden > 0)
    return {"a": (x.T @ inner).astype(np.float32), "b": (hidden.T @ back).astype(np.float32)}
