"""Compression only where it saves time: measured on this job's own link, model and machines.

Saving bytes and losing time is compression's usual failure: on a fast link, encoding costs more
than the bytes it spares. The gate lets the first steps of training run in turn as the policy wants
them and uncompressed (in 16 bits, and as they are), times them, and from then on lets the policy
have its way only where that is faster: for all tensors, for some, or for none.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accordion_hvd import check
from accordion_hvd.compressors.dense import Dense
from accordion_hvd.compressors.half import FP16
from accordion_hvd.core.base import Allreduce, Compressor
from accordion_hvd.policies.advice import Advice, Link, TensorRow, WayRow
from accordion_hvd.policies.evidence import StepTimes

WARM = 3  # steps before the first trial: caches fill, frameworks settle
MARGIN = 1.03  # how much faster than dense a lossy way must be
CLOSE = 2.0  # ways this near to the fastest are tried a second time: machines are noisy
HOPELESS = 2.0  # a way whose bytes alone take so many times a measured step is not tried
CHANGED = 1.5  # factor by which a link or a step has changed enough to try everything again
WANTED, MIX = "wanted", "mixed"


@dataclass
class Cost:
    """What a bucket's conversation takes in a step, as the policy wants it.

    Attributes:
        seconds: in encoding and decoding; 0 where nobody can tell (in a graph).
        sent: bytes.
        dense: bytes that a ring allreduce of it would send.
    """

    seconds: float
    sent: float
    dense: float


@dataclass
class _Trials:
    """What is known about one pattern of wanted levels."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # way -> a median for each turn
    skipped: dict[str, float] = field(default_factory=dict)  # way -> seconds it would take at least
    costs: dict[str, Cost] = field(default_factory=dict)
    mix: dict[str, int] = field(default_factory=dict)
    best: str = ""


class Gate:
    """Decides, at first and now and then, where compression pays.

    Ways are tried in turns of a few steps: as wanted, with each fallback for all tensors, and then
    a mixture that keeps the compressor where the bytes it spares cost more time than it takes. A
    lossy way is chosen only if it is 3 % faster than a less lossy one. Rank 0 measures and decides;
    all ranks follow at the same step. What has phases (`LGC`) is judged by its last one: its first
    turn lasts until then (`Compressor.settling`).

    Args:
        steps: that are timed in a turn, at least 2; one more comes before and is not.
        every: optimizer steps between looks at the link and the step time.
        fallbacks: what may serve instead of the wanted compressor, from lossy to exact.

    Attributes:
        verdict: the line that rank 0 has printed last.
    """

    def __init__(
        self,
        steps: int = 4,
        every: int = 1000,
        fallbacks: Sequence[Compressor] = (FP16(), Dense()),
    ) -> None:
        check.integer(self, "steps", steps, least=2)
        check.integer(self, "every", every, least=1)
        self.steps, self.every, self.fallbacks = steps, every, tuple(fallbacks)
        self.verdict = ""
        self.link: Link | None = None
        self.assignment: dict[str, int] = {}  # bucket -> 1 + number of the fallback that serves it
        self._way = ""  # under trial
        self._until = 0  # the step of the next decision
        self._pattern: tuple[tuple[str, int], ...] | None = None  # None: nothing decided yet
        self._known: dict[tuple[tuple[str, int], ...], _Trials] = {}
        self._clock = StepTimes(every)
        self._judged = _Trials()
        self._usual = math.nan  # seconds of a step when the verdict was given

    # ----------------------------------------------------------------------- what an exchange asks
    def level(self, name: str, wanted: int, own: int) -> int:
        """The level that serves bucket `name`: the policy's, or that of a fallback behind them.

        Args:
            name: the bucket's.
            wanted: the policy's level.
            own: how many levels the policy has for it.
        """
        fallback = self.assignment.get(name, 0)
        return own + fallback - 1 if fallback else wanted

    def due(self, step: int, wanted: Mapping[str, int]) -> bool:
        """Whether to decide before exchange number `step`; equal on all ranks."""
        if self._pattern is None:
            return bool(wanted) and step >= WARM
        return step >= self._until or tuple(wanted.items()) != self._pattern

    def probes(self, wanted: Mapping[str, int]) -> bool:
        """Whether a decision begins with a look at the link; equal on all ranks."""
        return self._pattern is None or (not self._way and tuple(wanted.items()) == self._pattern)

    @property
    def settled(self) -> bool:
        """Whether a verdict was given and nothing is under trial; equal on all ranks."""
        return self._pattern is not None and not self._way

    def restart(self) -> None:
        """Try everything anew from the next step on; to be called on all ranks together."""
        self._known.clear()
        self._pattern, self._way, self.link = None, "", None

    @property
    def halves(self) -> bool:
        """Whether a fallback sends nothing but fp16."""
        return any(fallback.halves for fallback in self.fallbacks)

    @property
    def measuring(self) -> bool:
        """Whether the present step's costs are wanted."""
        return self._way == WANTED

    def tick(self, step: int) -> None:
        """Exchange number `step` is about to begin."""
        self._clock.note(step)

    # ---------------------------------------------------------------------------- rank 0's decision
    def decide(
        self,
        step: int,
        wanted: Mapping[str, int],
        names: Mapping[str, str],
        costs: Mapping[str, Cost],
        link: Link | None,
        settling: int = 0,
    ) -> dict[str, Any]:
        """What comes next, for all ranks to `apply`.

        Args:
            step: number of the exchange that is about to begin.
            wanted: bucket -> the policy's level.
            names: bucket -> the wanted compressor.
            costs: bucket -> what it took in the trial that ends, if that was of the wanted way.
            link: as measured just now, if it was.
            settling: steps for which the wanted compressors must yet serve to be judged fairly.
        """
        pattern = tuple(wanted.items())
        if link is not None and self._has_changed(link):
            self._known.clear()
        elif not self._way and self._pattern == pattern:
            return {"until": step + self.every, "keep": True}
        self.link = link or self.link
        if pattern != self._pattern:
            self._way = ""
        trials = self._trials(pattern)
        if self._way and not (self._way == WANTED and settling):
            times = self._clock.times[-self.steps :]
            trials.seconds.setdefault(self._way, []).append(statistics.median(times))
            if self._way == WANTED:
                trials.costs = dict(costs)
        return self._next(step, trials, names, settling)

    def apply(self, decision: Mapping[str, Any], wanted: Mapping[str, int]) -> bool:
        """Put a decision into force; whether levels may change."""
        self._until = decision["until"]
        self._clock.restart()
        if decision.get("keep"):
            return False
        self._pattern = tuple(wanted.items())
        self._way = decision["way"]
        self.assignment = dict(decision["assignment"])
        self.verdict = decision["verdict"] or self.verdict
        return True

    def _has_changed(self, link: Link) -> bool:
        """Whether everything is to be tried again."""
        if self.link is None:
            return True
        times = self._clock.times
        now = statistics.median(times) if times else self._usual
        ratios = [link.bandwidth / self.link.bandwidth]
        if not math.isnan(self._usual):
            ratios.append(now / self._usual)
        return any(not 1 / CHANGED < ratio < CHANGED for ratio in ratios)

    def _trials(self, pattern: tuple[tuple[str, int], ...]) -> _Trials:
        """What is known of this pattern; fallbacks take the same time in all patterns."""
        if pattern not in self._known:
            fallbacks, fresh = [repr(fallback) for fallback in self.fallbacks], _Trials()
            for other in self._known.values():
                fresh.seconds |= {w: x for w, x in other.seconds.items() if w in fallbacks}
            self._known[pattern] = fresh
        return self._known[pattern]

    def _next(
        self, step: int, trials: _Trials, names: Mapping[str, str], settling: int
    ) -> dict[str, Any]:
        way = self._untried(trials, names)
        if way is not None:
            assignment = self._assign(way, trials, names)
            until = step + self.steps + 2 + (settling if way == WANTED else 0)
            return {"until": until, "way": way, "assignment": assignment, "verdict": ""}
        trials.best, self._judged = self._choose(trials), trials
        self._usual = min(trials.seconds.get(trials.best, [math.nan]))
        verdict = self._line(trials, names) if trials.seconds else ""
        assignment = self._assign(trials.best, trials, names)
        until = step + self.every
        return {"until": until, "way": "", "assignment": assignment, "verdict": verdict}

    def _untried(self, trials: _Trials, names: Mapping[str, str]) -> str | None:
        """The next way to try: each once, near ones twice, then perhaps a mixture."""
        ways = [way for way in map(repr, self.fallbacks) if self._assign(way, trials, names)]
        if not ways:
            return None
        for way in (WANTED, *ways):
            if way not in trials.seconds and way not in trials.skipped:
                least = self._least(way, trials)
                if way == WANTED or least < HOPELESS * min(trials.seconds[WANTED]):
                    return way
                trials.skipped[way] = least
        least = min(map(min, trials.seconds.values()))
        near = [way for way, turns in trials.seconds.items() if min(turns) < CLOSE * least]
        for way in near:
            if len(near) > 1 and len(trials.seconds[way]) < 2 and way != MIX:
                return way
        if MIX not in trials.seconds:
            trials.mix = self._mixture(trials, names)
            if trials.mix and trials.mix not in [self._assign(w, trials, names) for w in ways]:
                return MIX
        return None

    def _least(self, way: str, trials: _Trials) -> float:
        """Seconds that a fallback's bytes take at least."""
        if way == WANTED or self.link is None:
            return 0.0
        dense = sum(cost.dense for cost in trials.costs.values())
        return _share(way) * dense / self.link.bandwidth

    def _mixture(self, trials: _Trials, names: Mapping[str, str]) -> dict[str, int]:
        """Buckets for which bytes cost less than what it takes to spare them -> their fallback."""
        fallback = min(
            (way for way in map(repr, self.fallbacks) if way in trials.seconds),
            key=lambda way: min(trials.seconds[way]),
            default=None,
        )
        if fallback is None:
            return {}
        price, costs = self._price(fallback, trials), trials.costs
        return {
            name: number
            for name, number in self._assign(fallback, trials, names).items()
            if price * (_share(fallback) * costs[name].dense - costs[name].sent)
            < costs[name].seconds
        }

    def _price(self, fallback: str, trials: _Trials) -> float:
        """Seconds that a byte costs in this job, overlap and all: from two ways' times."""
        costs = trials.costs.values()
        spared = sum(_share(fallback) * cost.dense - cost.sent for cost in costs)
        worked = sum(cost.seconds for cost in costs)
        saved = min(trials.seconds[fallback]) - min(trials.seconds[WANTED])
        return max(0.0, saved + worked) / spared if spared > 0 else 0.0

    def _choose(self, trials: _Trials) -> str:
        """The fastest, unless a less lossy one is about as fast."""
        order = [WANTED, MIX, *map(repr, self.fallbacks)]
        found = [way for way in order if way in trials.seconds]
        if not found:
            return WANTED
        least = min(min(trials.seconds[way]) for way in found)
        return next(w for w in reversed(found) if min(trials.seconds[w]) <= MARGIN * least)

    def _assign(self, way: str, trials: _Trials, names: Mapping[str, str]) -> dict[str, int]:
        if way == MIX:
            return trials.mix
        if way == WANTED:
            return {}
        ways = [repr(fallback) for fallback in self.fallbacks]
        lossier = {name for name, wanted in names.items() if _loss(wanted) > _loss(way)}
        return dict.fromkeys(sorted(lossier), 1 + ways.index(way))

    # ------------------------------------------------------------------------------ what users read
    def _line(self, trials: _Trials, names: Mapping[str, str]) -> str:
        """The verdict in one line."""
        served = self._assign(trials.best, trials, names)
        pays, all_ = len(names) - len(served), len(names)
        wanted = " and ".join(sorted(set(names.values())))
        rest = {repr(self.fallbacks[number - 1]) for number in served.values()}
        words = " or ".join("dense" if way == "Dense()" else way for way in sorted(rest))
        if pays == all_:
            what = f"{wanted} pays on all {all_} tensors"
        elif pays:
            what = f"{wanted} pays on {pays} of {all_} tensors; the rest go {words}"
        else:
            what = f"{wanted} pays on none of {all_} tensors; all go {words}"
        dense = self._estimate(repr(Dense()), trials)
        chosen = 1000 * min(trials.seconds[trials.best])
        link = f"{self.link}; " if self.link else ""
        return f"accordion_hvd: {link}{what}: {dense}{chosen:.0f} ms a step"

    def _estimate(self, way: str, trials: _Trials) -> str:
        if way == trials.best:
            return ""
        if way in trials.seconds:
            return f"{1000 * min(trials.seconds[way]):.0f} -> "
        if way in trials.skipped:
            return f"over {1000 * trials.skipped[way]:.0f} -> "
        return ""

    def advice(self, names: Mapping[str, str]) -> Advice:
        """What led to the last verdict (rank 0; empty elsewhere)."""
        trials = self._judged
        ways = [
            WayRow(way, min(turns), len(turns), way == trials.best)
            for way, turns in trials.seconds.items()
        ]
        ways += [WayRow(way, least, 0, False) for way, least in trials.skipped.items()]
        measured = [w for w in map(repr, self.fallbacks) if w in trials.seconds]
        price = self._price(measured[-1], trials) if measured and trials.costs else 0.0
        served = {name: repr(self.fallbacks[i - 1]) for name, i in self.assignment.items() if i}
        tensors = []
        for name, cost in trials.costs.items():
            known = cost.seconds, cost.sent, cost.dense, price * (cost.dense - cost.sent)
            wanted = names.get(name, "")
            tensors.append(TensorRow(name, wanted, *known, served.get(name, wanted)))
        return Advice(self.verdict, self.link, ways, tensors)

    def __repr__(self) -> str:
        """As it is written."""
        if (self.steps, self.every, self.fallbacks) == (4, 1000, (FP16(), Dense())):
            return "'auto'"
        shown = f"steps={self.steps}, every={self.every}, fallbacks={list(self.fallbacks)}"
        return f"Gate({shown})"


def _loss(compressor: str) -> int:
    """How lossy a way is: a gate never makes it lossier than the policy wants."""
    return {"Dense()": 0, "FP16()": 1, "BF16()": 1}.get(compressor, 2)


def _share(way: str) -> float:
    """The part of the dense bytes that a fallback sends."""
    return 0.5 if _loss(way) else 1.0


def as_gate(owner: Any, gate: Any) -> Gate | None:
    """A gate for a policy from what users write: None, "auto" or a `Gate`.

    Raises:
        ValueError: it is none of these, or the policy's compressors cannot be left out.
    """
    if gate is None:
        return None
    if gate != "auto" and not isinstance(gate, Gate):
        check.refuse(owner, "gate", gate, "None, 'auto' or a Gate")
    if (owner.target, owner.output) != ("gradient", "gradient"):
        wanted = f"None where the compressor's output is {owner.output!r} of {owner.target}s"
        check.refuse(owner, "gate", gate, wanted)
    return Gate() if gate == "auto" else gate


def probe(tensor: Any, xp: Any, ranks: int) -> Any:
    """A conversation that measures the link; returns a `Link`.

    Args:
        tensor: fp32 vector, some hundred kB, whose memory may be used.
        xp: the operations that serve it.
        ranks: how many take part.
    """

    def seconds(x: Any, count: int) -> Any:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            yield Allreduce(xp.copy(x))
            times.append(time.perf_counter() - began)
        return times

    latency = statistics.median((yield from seconds(tensor[:1], 6))[1:])
    whole = statistics.median((yield from seconds(tensor, 3)))
    moved = 2 * (ranks - 1) / ranks * 4 * xp.shape(tensor)[0]
    busy = max(whole - latency, whole / 5)  # the two are hard to tell apart on a fast link
    return Link(moved / busy, latency)
