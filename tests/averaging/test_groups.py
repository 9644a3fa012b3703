"""Tests of the groups of each step, and of the sum of a group's vectors."""

from __future__ import annotations

import numpy as np
import pytest
from averages import tree
from hypothesis import given, settings
from hypothesis import strategies as st

from accordion_hvd.averaging.groups import Groups, default_size, steps_needed
from accordion_hvd.engine import group_protocol

POWERS = [(2**d, 2**s) for d in range(1, 8) for s in range(1, d + 1)]


def reached(groups: Groups, start: int, steps: int) -> bool:
    """Return whether every model has reached every rank, `steps` steps after `start`.

    In this case, the product of the steps' mixing matrices has no zeros.
    """
    mixing = np.eye(groups.size)
    for step in range(start, start + steps):
        matrix = np.zeros((groups.size, groups.size))
        for group in groups.at(step):
            matrix[np.ix_(group, group)] = 1 / len(group)
        mixing = matrix @ mixing
    return bool((mixing > 0).all())


@pytest.mark.parametrize(("size", "each"), POWERS)
def test_powers_of_two_follow_the_paper(size: int, each: int) -> None:
    """Groups are those of the paper's masks, 2^((t s + r) mod d), even if s does not divide d."""
    groups, d, s = Groups(size, each), size.bit_length() - 1, each.bit_length() - 1
    for step in range(3 * d):
        masks = [1 << ((step * s + r) % d) for r in range(s)]
        for rank in range(size):
            theirs = {rank}
            for mask in masks:
                theirs |= {other ^ mask for other in theirs}
            assert groups.of(rank, step) == tuple(sorted(theirs))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 90), st.data())
def test_groups_are_a_partition_with_a_bound(size: int, data: st.DataObject) -> None:
    each = data.draw(st.integers(1, size))
    groups = Groups(size, each)
    assert max(groups.sizes) - min(groups.sizes) <= 1
    assert max(groups.sizes) <= max(each, 3 if each == 2 and size % 2 else 1)
    assert min(groups.sizes) > 1 or each == 1, "nobody is left alone"
    for step in range(2 * groups.cycle):
        found = groups.at(step)
        assert sorted(rank for group in found for rank in group) == list(range(size))
        assert sorted(map(len, found), reverse=True) == list(groups.sizes)
        assert all(groups.of(rank, step) == group for group in found for rank in group)
    assert set(groups.all()) == {group for t in range(groups.cycle) for group in groups.at(t)}
    if each == 1:
        assert groups.reach == (0 if size == 1 else None)
        return
    least = steps_needed(size, max(groups.sizes))
    most = steps_needed(size, min(groups.sizes)) + 2
    assert groups.reach is not None and least <= groups.reach <= most
    late = []
    for start in range(groups.cycle):
        assert reached(groups, start, groups.reach)
        late.append(not reached(groups, start, groups.reach - 1))
    assert any(late), "the bound is what is needed, not more"


@pytest.mark.parametrize(("size", "each"), [*POWERS, (1024, 32), (1024, 8)])
def test_powers_of_two_need_the_fewest_steps(size: int, each: int) -> None:
    assert Groups(size, each).reach == steps_needed(size, each)


def test_sizes_of_real_jobs() -> None:
    """With 1000 ranks or a prime number, `reach` is near its bound, and cycles are short."""
    for size, each in ((1000, 32), (127, 11), (3, 2), (7, 2), (997, 31)):
        groups = Groups(size, each)
        assert groups.reach is not None
        assert groups.reach <= steps_needed(size, min(groups.sizes)) + 2
        assert groups.cycle < 20, "each group is a process set"


def test_default_sizes_are_near_the_root() -> None:
    known = {1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 8: 4, 12: 4, 16: 4, 64: 8, 100: 10, 256: 16, 1024: 32}
    assert {size: default_size(size) for size in known} == known


@pytest.mark.parametrize(("size", "each"), [(4, 0), (4, 5), (0, 1), (4, 2.0), (4, True)])
def test_bad_sizes_are_refused(size: int, each: int) -> None:
    with pytest.raises(ValueError, match="Groups: (group_)?size is"):
        Groups(size, each)


def add_up(vectors: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Add up vectors with all members in lockstep; return each member's sum.

    Also return the number of elements that the first member has sent.
    """
    count, size = len(vectors), vectors[0].size
    results = [np.full(size, np.nan) for _ in vectors]
    generators = [
        group_protocol.total(vectors[i], results[i], np.empty(size + count), i, count)
        for i in range(count)
    ]
    sent = 0
    while True:
        rounds = [next(generator, None) for generator in generators]
        if rounds[0] is None:
            assert not any(rounds)
            return results, sent
        letters = {}
        for me, one in enumerate(rounds):
            assert one is not None
            letters |= {(me, peer): part.copy() for peer, part in one.send}
            sent += sum(part.size for _, part in one.send) if me == 0 else 0
        for me, one in enumerate(rounds):
            assert one is not None
            for peer, room in one.receive:
                room[:] = letters.pop((peer, me))
        assert not letters


@pytest.mark.parametrize("count", [*range(1, 13), 16, 21, 32])
@pytest.mark.parametrize("size", [1, 7, 400])
def test_sums_are_those_of_the_oracle(count: int, size: int) -> None:
    rng = np.random.default_rng(count)
    vectors = [rng.normal(size=size) for _ in range(count)]
    before = [vector.copy() for vector in vectors]
    results, sent = add_up(vectors)
    expected = tree(vectors)
    assert all((result == expected).all() for result in results), "bit for bit, all alike"
    assert all((a == b).all() for a, b in zip(vectors, before, strict=True)), "only read"
    np.testing.assert_allclose(expected, np.sum(vectors, 0), rtol=1e-12, atol=1e-12)
    if size == 400:
        assert abs(sent - 2 * (count - 1) / count * size) <= 2 * count


def test_groups_of_up_to_eight_exchange_directly() -> None:
    known = {1: (), 2: (2,), 8: (8,), 9: (3, 3), 12: (6, 2), 16: (8, 2), 17: (17,), 34: (2, 17)}
    assert {count: group_protocol.factors(count) for count in known} == known
    assert all(
        np.prod(group_protocol.factors(count), initial=1) == count for count in range(1, 200)
    )


def test_members_are_added_in_their_order() -> None:
    rng = np.random.default_rng(0)
    a, b, c, d = (rng.normal(size=50) for _ in range(4))
    assert (tree([a, b, c, d]) == ((a + b) + c) + d).all()
