"""Tests of the wait-avoiding protocol under an adversary that delays any action."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from averages import problems, replay, tree

from accordion_hvd.averaging.groups import Groups
from accordion_hvd.engine import group_protocol as agents
from accordion_hvd.engine.group_protocol import Activation, GroupProtocol, GroupRound

SIZE = 3  # elements of a model


def update(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=SIZE)


class Rank:
    """One rank: a training thread and a progress thread that take one small action at a time."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.agent = GroupProtocol(rank, world.groups.size, world.groups, np.zeros(SIZE))
        self.model, self.step = np.zeros(SIZE), 0
        self.waiting: int | None = None
        self.results: dict[int, tuple[int, np.ndarray]] = {}
        self.round_: GroupRound | None = None
        self.seeded = False
        self.log: list[tuple[int, bool, int]] = []
        self.models: list[np.ndarray] = []

    def all_ranks(self, step: int) -> bool:
        return (step + 1) % self.world.period == 0

    def actions(self, asleep: bool) -> list[Callable[[], None]]:
        """Return the possible next actions; none of the training thread if it is `asleep`."""
        found: list[Callable[[], None]] = []
        if asleep:
            pass
        elif self.waiting is None and self.step < self.world.steps:
            found.append(self.train)
        elif self.waiting in self.results:
            found.append(self.collect)
        if self.round_ is None and self.agent.next_round() is not None:
            found.append(self.prepare)
        if self.round_ is not None and not self.seeded and not self.agent.missing(self.round_):
            found.append(self.seed)
        if self.seeded and len(self.world.pot(self)) == len(self.round_.members):  # type: ignore[union-attr]
            found.append(self.finish)
        return found

    def train(self) -> None:
        self.model = self.model + update(self.rank, self.step)
        self.waiting = self.step
        if self.all_ranks(self.step):
            self.agent.ask(self.step, self.model)
        else:
            self.world.post(self.agent.activate(self.step))
            self.agent.publish(self.step, self.model)
        self.step += 1

    def collect(self) -> None:
        assert self.waiting is not None
        label, total = self.results.pop(self.waiting)
        if self.all_ranks(self.waiting):
            self.model = total / self.world.groups.size
        else:
            members = len(self.world.groups.of(self.rank, self.waiting))
            self.model = self.model.copy()
            self.world.combine(total, self.model, members, label == self.waiting)
        self.models.append(self.model)
        self.waiting = None

    def prepare(self) -> None:
        self.round_ = self.agent.next_round()
        assert self.round_ is not None
        for member in self.round_.members:
            if member != self.rank:
                self.world.letters.append(
                    (member, (self.rank, self.round_.version, self.round_.all_ranks))
                )

    def seed(self) -> None:
        assert self.round_ is not None
        label, model = self.agent.seed(self.round_)
        self.log.append((self.round_.version, self.round_.all_ranks, label))
        self.world.pot(self)[self.rank] = model
        self.seeded = True

    def finish(self) -> None:
        round_, pot = self.round_, self.world.pot(self)
        assert round_ is not None
        total = tree([pot[member] for member in round_.members]).copy()
        self.results[round_.version] = self.log[-1][2], total
        self.world.done(self, round_, total / len(round_.members))
        self.round_, self.seeded = None, False


class World:
    """Ranks and the messages between them."""

    def __init__(self, size: int, each: int, period: int, steps: int, seed: int) -> None:
        self.groups, self.period, self.steps = Groups(size, each), period, steps
        self.random = random.Random(seed)
        self.letters: list[tuple[int, Any]] = []
        self._pots: dict[Any, dict[int, np.ndarray]] = {}
        self.combine: Any = agents.combine
        self.ranks = [Rank(rank, self) for rank in range(size)]
        self.sent = 0

    def done(self, rank: Rank, round_: GroupRound, average: np.ndarray) -> None:
        rank.agent.done(round_, average)

    def pot(self, rank: Rank) -> dict[int, np.ndarray]:
        assert rank.round_ is not None
        return self._pots.setdefault((rank.round_.version, rank.round_.members), {})

    def post(self, sends: list[Activation]) -> None:
        self.sent += len(sends)
        self.letters += [(send.to, send) for send in sends]

    def deliver(self, number: int) -> None:
        to, letter = self.letters.pop(number)
        if isinstance(letter, Activation):
            self.post(self.ranks[to].agent.hear(letter.version, letter.span))
        else:
            self.ranks[to].agent.arrived(*letter)

    def run(self) -> None:
        """Run with an adversary that stops some ranks or training threads for a while."""
        while True:
            frozen, asleep = self.some(0.3), self.some(0.5)
            for _ in range(self.random.randrange(1, 60)):
                if not self.act(frozen, asleep) and not self.act(set(), set()):
                    return

    def some(self, part: float) -> set[int]:
        return {rank for rank in range(self.groups.size) if self.random.random() < part}

    def act(self, frozen: set[int], asleep: set[int]) -> bool:
        moves = [a for r in self.ranks if r.rank not in frozen for a in r.actions(r.rank in asleep)]
        mail = [i for i, (to, _) in enumerate(self.letters) if to not in frozen]
        if not moves and not mail:
            return False
        if mail and (not moves or self.random.random() < 0.5):
            self.deliver(self.random.choice(mail))
        else:
            self.random.choice(moves)()
        return True


def wrong(world: World) -> int:
    """Return the models that differ from the oracle's in any bit."""
    logs = [rank.log for rank in world.ranks]
    due = replay(world.groups, logs, update, np.zeros(SIZE))
    pairs = [
        (mine, theirs)
        for rank in world.ranks
        for mine, theirs in zip(rank.models, due[rank.rank], strict=True)
    ]
    return sum(not (a == b).all() for a, b in pairs)


SETTINGS = [(8, 4, 10), (8, 2, 5), (4, 2, 7), (8, 8, 4), (6, 3, 6), (5, 2, 4), (7, 3, 8), (2, 2, 3)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "each", "period"), SETTINGS)
def test_any_order_of_events_gives_what_the_oracle_says(
    size: int, each: int, period: int, seed: int
) -> None:
    world = World(size, each, period, steps=5 * period, seed=seed)
    world.run()
    logs = [rank.log for rank in world.ranks]
    assert all(rank.step == world.steps and rank.waiting is None for rank in world.ranks), "stuck"
    assert not world.letters
    assert not problems(world.groups, period, logs)
    assert wrong(world) == 0
    for whole in range(period - 1, world.steps, period):
        assert all(
            (rank.models[whole] == world.ranks[0].models[whole]).all() for rank in world.ranks
        )
    lags = [version - label for log in logs for version, _, label in log]
    assert max(lags) > 0, "the adversary has made nobody late"


def test_the_adversary_reaches_the_largest_lag() -> None:
    lags = []
    for seed in range(6):
        world = World(4, 2, 4, steps=40, seed=seed)
        world.run()
        lags += [version - label for rank in world.ranks for version, _, label in rank.log]
    assert max(lags) == 3


def never_late(total: np.ndarray, fresh: np.ndarray, members: int, on_time: bool) -> None:
    agents.combine(total, fresh, members, True)


def only_fresh(total: np.ndarray, fresh: np.ndarray, members: int, on_time: bool) -> None:
    agents.combine(total, fresh, members + (not on_time) * (members - 1), on_time)


@pytest.mark.parametrize("planted", ["S for S + 1", "wrong divisor", "average not published"])
def test_the_oracle_notices_planted_errors(planted: str) -> None:
    world = World(8, 4, 5, steps=30, seed=1)
    if planted == "average not published":

        def done(rank: Rank, round_: GroupRound, average: np.ndarray) -> None:
            old = rank.agent.label, rank.agent.published
            rank.agent.done(round_, average)
            rank.agent.label, rank.agent.published = old

        world.done = done  # type: ignore[method-assign]
    else:
        world.combine = never_late if planted == "S for S + 1" else only_fresh
    world.run()
    logs = [rank.log for rank in world.ranks]
    assert wrong(world) > 0 or problems(world.groups, world.period, logs)


def test_weights_of_the_paper() -> None:
    """Weights are those of the paper for S = 4; member 3 is late, with an old and a fresh model."""
    a, b, c, z, f = (np.array([x]) for x in (1.0, 10.0, 100.0, 1000.0, 10000.0))
    total = a + b + c + z
    for fresh, on_time, due in ((a, True, 1111 / 4), (f, False, 11111 / 5)):
        mine = fresh.copy()
        agents.combine(total, mine, 4, on_time)
        assert mine[0] == due


def test_an_interrupt_leaves_no_half_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt at any line, each element of a late rank's model is the old or the new."""
    monkeypatch.setattr(agents, "BLOCK", 4)
    total, old = np.arange(10.0) * 3, np.arange(10.0) + 100
    new = (total + old) / 5
    seen: set[int] = set()
    for stop in range(1, 30):
        model, lines = old.copy(), iter(range(stop))

        def interrupt(frame: Any, event: str, _: Any, lines: Any = lines) -> Any:
            if event == "line" and next(lines, None) is None:
                raise KeyboardInterrupt
            return interrupt

        tracing = sys.gettrace()
        sys.settrace(interrupt)
        try:
            agents.combine(total.copy(), model, 4, False)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        assert ((model == old) | (model == new)).all()
        seen.add(int((model == new).sum()))
    assert seen == {0, 4, 8, 10}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 23, 64])
def test_activation_reaches_everybody(size: int) -> None:
    """An activation reaches all ranks, from any rank and with any order of messages."""
    groups, sent, versions = Groups(size, 1), 0, 0
    for seed in range(40):
        draw = random.Random(seed)
        ranks = [GroupProtocol(rank, size, groups, None) for rank in range(size)]
        letters: list[Activation] = []
        starts = [
            (draw.randrange(size), version)
            for version in range(draw.randrange(1, 5))
            for _ in range(draw.randrange(1, size + 1))
        ]
        last = max(version for _, version in starts)
        versions += last + 1
        while starts or letters:
            if starts and (not letters or draw.random() < 0.3):
                rank, version = starts.pop(draw.randrange(len(starts)))
                letters += ranks[rank].activate(version)
            else:
                one = letters.pop(draw.randrange(len(letters)))
                letters += ranks[one.to].hear(one.version, one.span)
                sent += 1
        assert all(rank.level == last for rank in ranks)
    assert sent <= versions * size * max(1, (size - 1).bit_length())


def test_one_activation_is_a_tree() -> None:
    """Each other rank receives one activation, after a logarithmic number of rounds."""
    for size in range(1, 40):
        ranks = [GroupProtocol(rank, size, Groups(size, 1), None) for rank in range(size)]
        letters, rounds, heard = ranks[0].activate(0), 0, 0
        while letters:
            heard, rounds = heard + len(letters), rounds + 1
            letters = list(
                itertools.chain(*(ranks[one.to].hear(one.version, one.span) for one in letters))
            )
        assert heard == size - 1 and rounds <= (size - 1).bit_length()


def test_an_average_of_all_gives_way_to_an_activated_version() -> None:
    """If a rank leaves while others train, they average the version that it requested."""
    one = GroupProtocol(0, 4, Groups(4, 2), "old")
    one.ask(0, "last")
    assert one.next_round() == GroupRound(0, True, (0, 1, 2, 3))
    one.hear(2, 1)
    round_ = one.next_round()
    assert round_ is not None and round_ == GroupRound(0, False, (0, 1))
    assert one.seed(round_) == (-1, "old")
