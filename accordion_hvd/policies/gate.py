"""Compression only where it saves time: measured on this job's own link, model and machines.

Saving bytes and losing time is compression's usual failure: on a fast link, encoding costs more
than the bytes it spares. The gate lets the first steps of training run in turn as the policy wants
them and uncompressed (in 16 bits, and as they are), times them, and from then on lets the policy
have its levels only where that is faster: for all tensors, for some, or for none.
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
from accordion_hvd.policies.advice import Advice, Link, Option, TensorRow
from accordion_hvd.policies.evidence import StepTimes

WARM = 3  # steps before the first trial: caches fill, frameworks warm up
MARGIN = 1.03  # how much faster than dense a lossy option must be
CLOSE = 2.0  # options this near to the fastest are tried a second time: machines are noisy
HOPELESS = 2.0  # an option whose bytes take this many measured steps is not tried
CHANGED = 1.5  # factor by which a link or a step has changed enough to try everything again
WANTED, MIX = "wanted", "mixed"


@dataclass
class Cost:
    """The cost of a bucket's exchange in a step at the level that the policy wants.

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
    """The measurements of one pattern of wanted levels."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # option -> medians of turns
    skipped: dict[str, float] = field(default_factory=dict)  # option -> least seconds
    costs: dict[str, Cost] = field(default_factory=dict)
    mix: dict[str, int] = field(default_factory=dict)
    best: str = ""


class Gate:
    """Decides, at first and now and then, where compression pays.

    The gate tries configurations in turns of a few steps: the wanted levels, each fallback for all
    tensors, and then a mixture that keeps the compressor where the spared bytes cost more time than
    compressing. A lossy configuration is chosen only if it is 3 % faster than a less lossy one.
    Rank 0 measures and decides; all ranks follow at the same step. A method with phases (`LGC`) is
    judged by its last one: its first turn lasts until then (`Compressor.startup_steps`).

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
        self._option = ""  # under trial
        self._until = 0  # the step of the next decision
        self._pattern: tuple[tuple[str, int], ...] | None = None  # None: nothing decided yet
        self._known: dict[tuple[tuple[str, int], ...], _Trials] = {}
        self._clock = StepTimes(every)
        self._judged = _Trials()
        self._usual = math.nan  # seconds of a step when the verdict was given

    # ----------------------------------------------------------------------- what an exchange asks
    def level(self, name: str, wanted: int, own: int) -> int:
        """Return the level that serves bucket `name`: the policy's, or behind them a fallback's.

        Args:
            name: the bucket's.
            wanted: the policy's level.
            own: how many levels the policy has for it.
        """
        fallback = self.assignment.get(name, 0)
        return own + fallback - 1 if fallback else wanted

    def due(self, step: int, wanted: Mapping[str, int]) -> bool:
        """Return whether to decide before exchange number `step`; equal on all ranks."""
        if self._pattern is None:
            return bool(wanted) and step >= WARM
        return step >= self._until or tuple(wanted.items()) != self._pattern

    def probes(self, wanted: Mapping[str, int]) -> bool:
        """Return whether a decision begins with a measurement of the link; equal on all ranks."""
        return self._pattern is None or (
            not self._option and tuple(wanted.items()) == self._pattern
        )

    @property
    def decided(self) -> bool:
        """Return whether a verdict was given and no trial is running; equal on all ranks."""
        return self._pattern is not None and not self._option

    def restart(self) -> None:
        """Try everything anew from the next step on; to be called on all ranks together."""
        self._known.clear()
        self._pattern, self._option, self.link = None, "", None

    @property
    def fp16_reduction(self) -> bool:
        """Return whether a fallback sends nothing but fp16."""
        return any(fallback.fp16_reduction for fallback in self.fallbacks)

    @property
    def measuring(self) -> bool:
        """Return whether the costs of the present step are needed."""
        return self._option == WANTED

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
        startup_steps: int = 0,
    ) -> dict[str, Any]:
        """Choose the next configuration, for all ranks to `apply`.

        Args:
            step: number of the exchange that is about to begin.
            wanted: bucket -> the policy's level.
            names: bucket -> the wanted compressor.
            costs: bucket -> what it took in the trial that ends, if that was of the wanted option.
            link: as measured just now, if it was.
            startup_steps: steps that the wanted compressors still need before a fair measurement.
        """
        pattern = tuple(wanted.items())
        if link is not None and self._has_changed(link):
            self._known.clear()
        elif not self._option and self._pattern == pattern:
            return {"until": step + self.every, "keep": True}
        self.link = link or self.link
        if pattern != self._pattern:
            self._option = ""
        trials = self._trials(pattern)
        if self._option and not (self._option == WANTED and startup_steps):
            times = self._clock.times[-self.steps :]
            trials.seconds.setdefault(self._option, []).append(statistics.median(times))
            if self._option == WANTED:
                trials.costs = dict(costs)
        return self._next(step, trials, names, startup_steps)

    def apply(self, decision: Mapping[str, Any], wanted: Mapping[str, int]) -> bool:
        """Put a decision into force; whether levels may change."""
        self._until = decision["until"]
        self._clock.restart()
        if decision.get("keep"):
            return False
        self._pattern = tuple(wanted.items())
        self._option = decision["option"]
        self.assignment = dict(decision["assignment"])
        self.verdict = decision["verdict"] or self.verdict
        return True

    def _has_changed(self, link: Link) -> bool:
        if self.link is None:
            return True
        times = self._clock.times
        now = statistics.median(times) if times else self._usual
        ratios = [link.bandwidth / self.link.bandwidth]
        if not math.isnan(self._usual):
            ratios.append(now / self._usual)
        return any(not 1 / CHANGED < ratio < CHANGED for ratio in ratios)

    def _trials(self, pattern: tuple[tuple[str, int], ...]) -> _Trials:
        """Return the measurements of this pattern; fallbacks take the same time in all patterns."""
        if pattern not in self._known:
            fallbacks, fresh = [repr(fallback) for fallback in self.fallbacks], _Trials()
            for other in self._known.values():
                fresh.seconds |= {w: x for w, x in other.seconds.items() if w in fallbacks}
            self._known[pattern] = fresh
        return self._known[pattern]

    def _next(
        self, step: int, trials: _Trials, names: Mapping[str, str], startup_steps: int
    ) -> dict[str, Any]:
        option = self._untried(trials, names)
        if option is not None:
            assignment = self._assign(option, trials, names)
            until = step + self.steps + 2 + (startup_steps if option == WANTED else 0)
            return {"until": until, "option": option, "assignment": assignment, "verdict": ""}
        trials.best, self._judged = self._choose(trials), trials
        self._usual = min(trials.seconds.get(trials.best, [math.nan]))
        verdict = self._line(trials, names) if trials.seconds else ""
        assignment = self._assign(trials.best, trials, names)
        until = step + self.every
        return {"until": until, "option": "", "assignment": assignment, "verdict": verdict}

    def _untried(self, trials: _Trials, names: Mapping[str, str]) -> str | None:
        """Return the next configuration to try: each once, close ones twice, then a mixture."""
        options = [
            option for option in map(repr, self.fallbacks) if self._assign(option, trials, names)
        ]
        if not options:
            return None
        for option in (WANTED, *options):
            if option not in trials.seconds and option not in trials.skipped:
                least = self._least(option, trials)
                if option == WANTED or least < HOPELESS * min(trials.seconds[WANTED]):
                    return option
                trials.skipped[option] = least
        least = min(map(min, trials.seconds.values()))
        near = [option for option, turns in trials.seconds.items() if min(turns) < CLOSE * least]
        for option in near:
            if len(near) > 1 and len(trials.seconds[option]) < 2 and option != MIX:
                return option
        if MIX not in trials.seconds:
            trials.mix = self._mixture(trials, names)
            if trials.mix and trials.mix not in [self._assign(w, trials, names) for w in options]:
                return MIX
        return None

    def _least(self, option: str, trials: _Trials) -> float:
        """Seconds that a fallback's bytes take at least."""
        if option == WANTED or self.link is None:
            return 0.0
        dense = sum(cost.dense for cost in trials.costs.values())
        return _share(option) * dense / self.link.bandwidth

    def _mixture(self, trials: _Trials, names: Mapping[str, str]) -> dict[str, int]:
        """Buckets for which bytes cost less than what it takes to spare them -> their fallback."""
        fallback = min(
            (option for option in map(repr, self.fallbacks) if option in trials.seconds),
            key=lambda option: min(trials.seconds[option]),
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
        """Seconds that a byte costs in this job, overlap and all: from two options' times."""
        costs = trials.costs.values()
        spared = sum(_share(fallback) * cost.dense - cost.sent for cost in costs)
        worked = sum(cost.seconds for cost in costs)
        saved = min(trials.seconds[fallback]) - min(trials.seconds[WANTED])
        return max(0.0, saved + worked) / spared if spared > 0 else 0.0

    def _choose(self, trials: _Trials) -> str:
        order = [WANTED, MIX, *map(repr, self.fallbacks)]
        found = [option for option in order if option in trials.seconds]
        if not found:
            return WANTED
        least = min(min(trials.seconds[option]) for option in found)
        return next(w for w in reversed(found) if min(trials.seconds[w]) <= MARGIN * least)

    def _assign(self, option: str, trials: _Trials, names: Mapping[str, str]) -> dict[str, int]:
        if option == MIX:
            return trials.mix
        if option == WANTED:
            return {}
        options = [repr(fallback) for fallback in self.fallbacks]
        lossier = {name for name, wanted in names.items() if _loss(wanted) > _loss(option)}
        return dict.fromkeys(sorted(lossier), 1 + options.index(option))

    # ------------------------------------------------------------------------------ what users read
    def _line(self, trials: _Trials, names: Mapping[str, str]) -> str:
        served = self._assign(trials.best, trials, names)
        pays, all_ = len(names) - len(served), len(names)
        wanted = " and ".join(sorted(set(names.values())))
        rest = {repr(self.fallbacks[number - 1]) for number in served.values()}
        words = " or ".join("dense" if option == "Dense()" else option for option in sorted(rest))
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

    def _estimate(self, option: str, trials: _Trials) -> str:
        if option == trials.best:
            return ""
        if option in trials.seconds:
            return f"{1000 * min(trials.seconds[option]):.0f} -> "
        if option in trials.skipped:
            return f"over {1000 * trials.skipped[option]:.0f} -> "
        return ""

    def advice(self, names: Mapping[str, str]) -> Advice:
        """Return the evidence of the last verdict (rank 0; empty elsewhere)."""
        trials = self._judged
        options = [
            Option(option, min(turns), len(turns), option == trials.best)
            for option, turns in trials.seconds.items()
        ]
        options += [Option(option, least, 0, False) for option, least in trials.skipped.items()]
        measured = [w for w in map(repr, self.fallbacks) if w in trials.seconds]
        price = self._price(measured[-1], trials) if measured and trials.costs else 0.0
        served = {name: repr(self.fallbacks[i - 1]) for name, i in self.assignment.items() if i}
        tensors = []
        for name, cost in trials.costs.items():
            known = cost.seconds, cost.sent, cost.dense, price * (cost.dense - cost.sent)
            wanted = names.get(name, "")
            tensors.append(TensorRow(name, wanted, *known, served.get(name, wanted)))
        return Advice(self.verdict, self.link, options, tensors)

    def __repr__(self) -> str:
        """Return the constructor call."""
        if (self.steps, self.every, self.fallbacks) == (4, 1000, (FP16(), Dense())):
            return "'auto'"
        shown = f"steps={self.steps}, every={self.every}, fallbacks={list(self.fallbacks)}"
        return f"Gate({shown})"


def _loss(compressor: str) -> int:
    """Rank configurations by loss: a gate never exceeds the loss that the policy wants."""
    return {"Dense()": 0, "FP16()": 1, "BF16()": 1}.get(compressor, 2)


def _share(option: str) -> float:
    return 0.5 if _loss(option) else 1.0


def as_gate(owner: Any, gate: Any) -> Gate | None:
    """Return a gate for a policy, given None, "auto" or a `Gate`.

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
    """Measure the link, as a generator of collectives; return a `Link`.

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
