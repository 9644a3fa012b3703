"""Compression only where it saves time, measured in this job.

Compression often saves bytes but loses time: on a fast link, encoding costs more than sending the
bytes that it saves. The gate runs the first steps of training in several configurations (with the
policy's levels, in 16 bits, and uncompressed) and measures their time. From then on, it uses the
policy's levels only where they are faster: for all tensors, for some, or for none.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion_hvd import check
from accordion_hvd.comm.agreement import share
from accordion_hvd.comm.fp16_reduction import choose_by
from accordion_hvd.compressors.dense import FP16, Dense
from accordion_hvd.core.base import Allreduce, Compressor
from accordion_hvd.core.codec import Codec
from accordion_hvd.core.observer import Observer
from accordion_hvd.policies.cost_model import bytes_sent
from accordion_hvd.policies.evidence import StepTimes

if TYPE_CHECKING:
    from accordion_hvd.engine.exchange import Exchange
    from accordion_hvd.engine.step import Step


WARM = 3  # steps before the first trial, in which caches fill and frameworks warm up
MARGIN = 1.03  # factor by which a lossy option must be faster than a less lossy one
CLOSE = 2.0  # options within this factor of the fastest are tried twice, since times are noisy
HOPELESS = 2.0  # an option whose bytes alone take this many steps of the wanted one is not tried
CHANGED = 1.5  # change of the bandwidth or the step time that starts all trials again
SMALL, ENOUGH = 8, 4  # the link is measured with 1 / 8 of a tensor if that takes 4 latencies
CHECK = 50  # steps between comparisons of the step time with that of the verdict
WANTED, MIX = "wanted", "mixed"


@dataclass
class Cost:
    """Cost of exchanging a bucket in one step, at the level that the policy wants.

    Attributes:
        seconds: seconds of encoding and decoding; 0 if they cannot be measured (in a graph).
        sent: bytes sent.
        dense: bytes that a ring allreduce of the bucket would send.
        fallbacks: lossy fallback -> bytes that it would send; not those of 16 or 32 bits.
        parts: bytes that `DoubleSqueeze` of the codec would send; infinite if it takes no such one.
    """

    seconds: float
    sent: float
    dense: float
    fallbacks: Mapping[str, float] = field(default_factory=dict)
    parts: float = math.inf

    def with_fallback(self, option: str) -> float:
        """Return the bytes that a fallback would send."""
        return self.fallbacks.get(option, self.dense * (0.5 if _loss(option) else 1.0))


class _Trials:
    """Measurements of the options under the levels that the policy wants.

    An option is `WANTED`, `MIX` or a fallback's repr.
    """

    def __init__(self, names: Mapping[str, str], fallbacks: Sequence[str]) -> None:
        self.names, self.fallbacks = names, fallbacks  # bucket -> wanted compressor; the fallbacks
        self.seconds: dict[str, list[float]] = {}  # option -> median of each trial
        self.skipped: dict[str, float] = {}  # option -> lower bound of seconds
        self.costs: dict[str, Cost] = {}
        self.best = ""
        ranks = {name: _rank(wanted, fallbacks) for name, wanted in names.items()}
        self.assigned: dict[str, dict[str, int]] = {WANTED: {}, MIX: {}}  # option -> assignment
        for fallback in fallbacks:
            lossier = (name for name in names if ranks[name] > _rank(fallback, fallbacks))
            number = 1 + fallbacks.index(fallback)
            self.assigned[fallback] = dict.fromkeys(sorted(lossier), number)

    def served(self, option: str) -> tuple[str, ...]:
        """Return the compressor that serves each bucket under an option."""
        served = {k: self.fallbacks[number - 1] for k, number in self.assigned[option].items()}
        return tuple({**self.names, **served}.values())

    def price(self, fallback: str) -> float:
        """Estimate the seconds per byte in this job, overlap included, from two options' times."""
        costs = self.costs.values()
        saved_bytes = sum(cost.with_fallback(fallback) - cost.sent for cost in costs)
        work = sum(cost.seconds for cost in costs)
        saved = min(self.seconds[fallback]) - min(self.seconds[WANTED])
        return max(0.0, saved + work) / saved_bytes if saved_bytes > 0 else 0.0


class Gate:
    """Measures where compression saves time, and replaces the policy's levels elsewhere.

    The gate tries each configuration for a few steps: the wanted levels, each fallback for all
    tensors, and then a mixture that compresses only the buckets for which sending the saved bytes
    would take longer than compressing. The gate chooses a lossy configuration only if it is 3 %
    faster than a less lossy one. Rank 0 measures and decides; all ranks switch at the same step. A
    method with phases (`LGC`) is measured in its last phase: its first trial lasts until then
    (`Compressor.startup_steps`).

    On more than two ranks, codecs send less in parts (`DoubleSqueeze`). This is another algorithm,
    with a second rounding, so the verdict only mentions it. A gate that may choose it is that of
    `Fixed(DoubleSqueeze(QSGD(4)), gate=Gate(fallbacks=(QSGD(4), FP16(), Dense())))`.

    A policy may tell the gate what a step of a configuration is worth (`efficiency`); the gate then
    compares the progress per second instead of the steps per second.

    The gate measures the link again after `every` steps, and earlier if the time of a step has
    changed by half or more; it compares the time every 50 steps. It repeats all trials if the link
    or the time of a step has changed by half or more.

    Args:
        steps: number of timed steps in a trial, at least 2; one untimed step precedes them.
        every: optimizer steps between measurements of the link.
        fallbacks: different compressors that may replace the wanted one, from lossy to exact.

    Attributes:
        verdict: the line that rank 0 logged last.
        trial_steps: number of steps in trials so far, on rank 0.
        trial_seconds: duration of these steps and of the measurements of the link.
        efficiency: function that returns the progress of a step under an assignment (bucket -> 1 +
            index of the fallback that serves it) relative to an uncompressed one; called on rank 0.
    """

    def __init__(
        self, steps: int = 4, every: int = 1000, fallbacks: Sequence[Compressor] = (FP16(), Dense())
    ) -> None:
        check.integer(self, "steps", steps, least=2)
        check.integer(self, "every", every, least=1)
        self.steps, self.every, self.fallbacks = steps, every, tuple(fallbacks)
        self.verdict = ""
        self.trial_steps, self.trial_seconds = 0, 0.0
        self.efficiency: Callable[[Mapping[str, int]], float] = _equal
        self.link: Link | None = None
        self.assignment: dict[str, int] = {}  # bucket -> 1 + index of the fallback that serves it
        self._options = [repr(fallback) for fallback in self.fallbacks]
        if len({*self._options}) < len(self._options):
            check.refuse(self, "fallbacks", list(fallbacks), "different compressors")
        self._option = ""  # the option on trial
        self._until = 0  # the step of the next decision
        self._probes = True  # whether that decision starts with measuring the link
        self._measured = 0  # the step of the last measurement of the link or verdict; on rank 0
        self._pattern: tuple[tuple[str, int], ...] | None = None  # None before the first decision
        self._rejudges = False  # whether to choose again before the next step
        self._known: dict[tuple[tuple[str, int], ...], _Trials] = {}
        self._times: dict[tuple[str, ...], list[float]] = {}
        # compressor of each bucket -> median seconds of each trial; shared between patterns
        self._clock = StepTimes(every)
        self._judged = _Trials({}, self._options)
        self._usual = math.nan  # seconds per step in the first steps after the verdict

    # --------------------------------------------------------------------- queries of the exchange
    def level(self, name: str, wanted: int, own: int) -> int:
        """Return the level that serves a bucket; fallbacks follow the policy's `own` levels."""
        fallback = self.assignment.get(name, 0)
        return own + fallback - 1 if fallback else wanted

    def due(self, step: int, wanted: Mapping[str, int]) -> bool:
        """Return whether to decide before exchange number `step`; equal on all ranks."""
        if self._pattern is None:
            return bool(wanted) and step >= WARM
        changed = tuple(wanted.items()) != self._pattern
        return changed or step >= self._until or (self._rejudges and not self._option)

    def probes(self, wanted: Mapping[str, int]) -> bool:
        """Return whether a decision starts with measuring the link; equal on all ranks."""
        idle = not (self._option or self._rejudges) and tuple(wanted.items()) == self._pattern
        return self._pattern is None or (self._probes and idle)

    @property
    def decided(self) -> bool:
        """Return whether there is a verdict and no trial is running; equal on all ranks."""
        return self._pattern is not None and not self._option

    def rejudge(self) -> None:
        """Choose again before the next step, without new trials. Call it on all ranks.

        Policies call it when `efficiency` has changed.
        """
        self._rejudges = True

    def restart(self) -> None:
        """Start all trials again from the next step on. Call it on all ranks."""
        self._forget()
        self._pattern, self._option, self.link = None, "", None

    @property
    def measuring(self) -> bool:
        """Return whether the gate needs the costs of the current step."""
        return self._option == WANTED

    def tick(self, step: int) -> None:
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
        """Choose the next configuration on rank 0, for all ranks to `apply`.

        Args:
            step: number of the exchange that is about to begin.
            wanted: bucket -> the policy's level.
            names: bucket -> the wanted compressor.
            costs: bucket -> cost in the trial that ends, if it was a trial of the wanted levels.
            link: the link as measured just now; None if it was not measured.
            startup_steps: steps that the wanted compressors still need before a fair measurement.
        """
        pattern, times = tuple(wanted.items()), self._clock.times
        if link:
            self._measured = step
        if link and self._has_changed(link):
            self._forget()
        elif not self._option and self._pattern == pattern:
            if self._rejudges:
                return self._choose_again(step, self._trials(pattern, names), startup_steps)
            if math.isnan(self._usual) and times:
                self._usual = statistics.median(times)
            if not link and self._has_changed(link):
                return {"until": step, "probes": True, "keep": True}
            return self._wait(step) | {"keep": True}
        self.link = link or self.link
        if pattern != self._pattern:
            self._option = ""
        trials = self._trials(pattern, names)
        if self._option and not (self._option == WANTED and startup_steps):
            seconds = statistics.median(times[-self.steps :])
            shared = self._times.setdefault(trials.served(self._option), [])
            trials.seconds.setdefault(self._option, shared).append(seconds)
            self.trial_steps += self.steps + 2
            self.trial_seconds += (self.steps + 2) * seconds
            if self._option == WANTED:
                trials.costs = dict(costs)
        return self._next(step, trials, startup_steps)

    def apply(self, decision: Mapping[str, Any], wanted: Mapping[str, int]) -> bool:
        """Apply a decision of rank 0. Returns whether levels may have changed."""
        rejudged, self._rejudges = self._rejudges, False
        self._until, self._probes = decision["until"], decision.get("probes", True)
        self.verdict = decision.get("verdict") or self.verdict
        keep = decision.get("keep", False)
        if not (rejudged and keep):
            self._clock.restart()
        if not keep:
            self._pattern = tuple(wanted.items())
            self._option = decision["option"]
            self.assignment = dict(decision["assignment"])
        return not keep

    def _wait(self, step: int) -> dict[str, Any]:
        """Return the step of the next decision, and whether that measures the link."""
        remeasure = self._measured + self.every
        return {"until": min(step + CHECK, remeasure), "probes": step + CHECK >= remeasure}

    def _has_changed(self, link: Link | None) -> bool:
        """Return whether the link has changed, or the time of a step since the verdict."""
        if link and (self.link is None or _changed(link.bandwidth, self.link.bandwidth)):
            return True
        times = self._clock.times
        return bool(times) and _changed(statistics.median(times), self._usual)

    def _forget(self) -> None:
        self._known.clear()
        self._times = {}

    def _trials(self, pattern: tuple[tuple[str, int], ...], names: Mapping[str, str]) -> _Trials:
        """Return the measurements of this pattern; other patterns tell the times of fallbacks."""
        if pattern not in self._known:
            trials = self._known[pattern] = _Trials(names, self._options)
            known = {option: self._times.get(trials.served(option)) for option in self._options}
            trials.seconds = {option: times for option, times in known.items() if times}
        return self._known[pattern]

    def _choose_again(self, step: int, trials: _Trials, startup_steps: int) -> dict[str, Any]:
        """Return a decision by the measured times and the present efficiency."""
        found = self._next(step, trials, startup_steps)
        if not found["option"] and found["assignment"] == self.assignment:
            return found | {"until": self._until, "probes": self._probes, "keep": True}
        self._usual = math.nan
        return found

    def _next(self, step: int, trials: _Trials, startup_steps: int) -> dict[str, Any]:
        option = self._untried(trials)
        if option is not None:
            until = step + self.steps + 2 + (startup_steps if option == WANTED else 0)
            more = {"assignment": trials.assigned[option], "verdict": ""}
            return {"until": until, "option": option, **more}
        trials.best, self._judged = self._choose(trials), trials
        if not self._rejudges:
            self._usual, self._measured = math.nan, step
        verdict = self._verdict(trials) if trials.seconds else ""
        more = {"assignment": trials.assigned[trials.best], "verdict": verdict}
        return {"option": "", **more, **self._wait(step)}

    def _untried(self, trials: _Trials) -> str | None:
        """Return the next option to try: each option once, close ones twice, then a mixture."""
        options = [option for option in self._options if trials.assigned[option]]
        if not options:
            return None
        seconds = trials.seconds
        for option in (WANTED, *options):
            if option not in seconds and option not in trials.skipped:
                if option == WANTED:
                    return option
                sent = sum(cost.with_fallback(option) for cost in trials.costs.values())
                bound = 0.0 if self.link is None else sent / self.link.bandwidth
                if not self._is_hopeless(option, bound, trials):
                    return option
                trials.skipped[option] = bound
        least = min(map(min, seconds.values()))
        close = [option for option, times in seconds.items() if min(times) < CLOSE * least]
        for option in close:
            if len(close) > 1 and len(seconds[option]) < 2 and option != MIX:
                return option
        if MIX not in seconds:
            mix = trials.assigned[MIX] = self._mixture(trials)
            if mix and mix not in [trials.assigned[option] for option in options]:
                return MIX
        return None

    def _is_hopeless(self, option: str, bound: float, trials: _Trials) -> bool:
        """Return whether an option that takes at least `bound` seconds is far too slow."""
        wanted = min(trials.seconds[WANTED]) / self.efficiency({})
        return bound / self.efficiency(trials.assigned[option]) >= HOPELESS * wanted

    def _mixture(self, trials: _Trials) -> dict[str, int]:
        """Assign the fastest fallback to the buckets where compressing costs more than it saves."""
        measured = [option for option in self._options if option in trials.seconds]
        if not measured:
            return {}
        fallback = min(measured, key=lambda option: min(trials.seconds[option]))
        price, costs = trials.price(fallback), trials.costs
        step, progress = min(trials.seconds[WANTED]), self.efficiency({})

        def pays(name: str, number: int) -> bool:
            """Return whether a step with the fallback makes more progress per second."""
            longer = price * (costs[name].with_fallback(fallback) - costs[name].sent)
            gain = self.efficiency({name: number}) / progress - 1
            return longer - costs[name].seconds < step * gain

        assigned = trials.assigned[fallback]
        return {name: number for name, number in assigned.items() if pays(name, number)}

    def _choose(self, trials: _Trials) -> str:
        each = {
            option: min(trials.seconds[option]) / self.efficiency(trials.assigned[option])
            for option in (WANTED, MIX, *self._options)
            if option in trials.seconds
        }
        limit = MARGIN * min(each.values(), default=0.0)
        fast = [option for option, seconds in each.items() if seconds <= limit]
        return fast[-1] if fast else WANTED

    # ----------------------------------------------------------------------------- output for users
    def _verdict(self, trials: _Trials) -> str:
        assignment, total = trials.assigned[trials.best], len(trials.names)
        compressed = total - len(assignment)
        compressors = sorted(set(trials.names.values()))
        pay = f"{' and '.join(compressors)} {'pays' if len(compressors) == 1 else 'pay'}"
        fallbacks = {self._options[number - 1] for number in assignment.values()}
        text = " or ".join("dense" if name == "Dense()" else name for name in sorted(fallbacks))
        on = f"{compressed or 'none'} of {total}" if assignment else f"all {total}"
        others = f"; {'the rest' if compressed else 'all'} go {text}" if assignment else ""
        dense, before = repr(Dense()), ""
        if dense in trials.skipped:
            before = f"over {1000 * trials.skipped[dense]:.0f} -> "
        elif dense in trials.seconds and dense != trials.best:
            before = f"{1000 * min(trials.seconds[dense]):.0f} -> "
        chosen = 1000 * min(trials.seconds[trials.best])
        link = f"{self.link}; " if self.link else ""
        progress = self.efficiency(assignment)
        worth = f", of which {progress:.0%} count" if progress < 1 else ""
        duration = f"{before}{chosen:.0f} ms a step{worth}{self._in_parts(trials)}"
        return f"accordion_hvd: {link}{pay} on {on} tensors{others}: {duration}"

    def _in_parts(self, trials: _Trials) -> str:
        """Return what averages in parts would take, if that is less than any option takes."""
        costs = [cost for cost in trials.costs.values() if cost.parts < cost.sent]
        if not costs or self.link is None:
            return ""
        saved = self._price(trials) * sum(cost.sent - cost.parts for cost in costs)
        seconds = min(trials.seconds[WANTED]) - saved + self.link.latency  # of a second round
        if MARGIN * seconds > min(trials.seconds[trials.best]):
            return ""
        return f"; in parts (DoubleSqueeze), it might be {1000 * seconds:.0f}"

    def _price(self, trials: _Trials) -> float:
        """Return the seconds per byte, by the least lossy fallback that was measured."""
        measured = [option for option in self._options if option in trials.seconds]
        if measured and trials.costs:
            return trials.price(measured[-1])
        return 1 / self.link.bandwidth if self.link else 0.0

    def advice(self, names: Mapping[str, str]) -> Advice:
        """Return the last verdict and its measurements, which only rank 0 has."""
        trials = self._judged
        options = [
            Option(option, min(times), len(times), option == trials.best)
            for option, times in trials.seconds.items()
        ]
        options += [Option(option, bound, 0, False) for option, bound in trials.skipped.items()]
        price = self._price(trials)
        served = {name: self._options[i - 1] for name, i in self.assignment.items() if i}
        tensors = []
        for name, cost in trials.costs.items():
            figures = cost.seconds, cost.sent, cost.dense, price * (cost.dense - cost.sent)
            wanted = names.get(name, "")
            tensors.append(TensorRow(name, wanted, *figures, served.get(name, wanted)))
        return Advice(self.verdict, self.link, options, tensors)

    def __repr__(self) -> str:
        if (self.steps, self.every, self.fallbacks) == (4, 1000, (FP16(), Dense())):
            return "'auto'"
        shown = f"steps={self.steps}, every={self.every}, fallbacks={list(self.fallbacks)}"
        return f"Gate({shown})"


LOSSY = 2


def _loss(compressor: str) -> int:
    return {"Dense()": 0, "FP16()": 1, "BF16()": 1}.get(compressor, LOSSY)


def _rank(compressor: str, fallbacks: Sequence[str]) -> float:
    """Rank compressors by their loss; a fallback never loses more than the wanted one."""
    ranks = {fallback: float(len(fallbacks) - i) for i, fallback in enumerate(fallbacks)}
    loss = _loss(compressor)
    if compressor in ranks or loss == LOSSY:
        return ranks.get(compressor, math.inf)
    alike = [rank for fallback, rank in ranks.items() if _loss(fallback) == loss]
    below = [rank for fallback, rank in ranks.items() if _loss(fallback) < loss]
    return max(alike) if alike else max(below, default=0.0) + 0.5


def _equal(assignment: Mapping[str, int]) -> float:
    return 1.0


def _changed(now: float, before: float) -> bool:
    """Return whether a number has changed by half or more; False if one is unknown."""
    return now / before >= CHANGED or before / now >= CHANGED


def as_gate(owner: Any, gate: Any) -> Gate | None:
    """Return the gate that None, "auto" or a `Gate` stands for.

    Raises:
        ValueError: if `gate` is none of these, or fallbacks cannot replace the owner's compressors.
    """
    if gate is None:
        return None
    if gate != "auto" and not isinstance(gate, Gate):
        check.refuse(owner, "gate", gate, "None, 'auto' or a Gate")
    if owner.output != "gradient":
        check.refuse(owner, "gate", gate, f"None where the compressor's output is {owner.output!r}")
    return Gate() if gate == "auto" else gate


def probe(tensor: Any, xp: Any, ranks: int) -> Any:
    """Measure the link and return a `Link`; a generator of collectives.

    On a slow link, an eighth of `tensor`, fp32 of some hundred kB, suffices; its memory may be
    overwritten.
    """

    def seconds(x: Any, count: int) -> Any:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            yield Allreduce(xp.copy(x))
            times.append(time.perf_counter() - began)
        return times

    latency = statistics.median((yield from seconds(tensor[:1], 6))[1:])
    for size in (xp.shape(tensor)[0] // SMALL, xp.shape(tensor)[0]):
        total = statistics.median((yield from seconds(tensor[:size], 3)))
        times = xp.asarray(np.array([total, latency], np.float32), xp.device(tensor))
        means = xp.to_numpy((yield Allreduce(times)))  # ranks must agree on the next size
        if means[0] > ENOUGH * means[1]:
            break
    sent = 2 * (ranks - 1) / ranks * 4 * size
    transfer = max(total - latency, total / 5)  # on a fast link, latency may seem to be all
    return Link(sent / transfer, latency)


# ---------------------------------------------------------------------------- the verdict in tables
@dataclass(frozen=True)
class Link:
    """Bandwidth and latency of the link, measured with this job's collectives.

    Attributes:
        bandwidth: bytes per second that a rank sends in a large allreduce.
        latency: duration of a small allreduce, in seconds.
    """

    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return f"link {8e-6 * self.bandwidth:.0f} Mbit/s, {1e3 * self.latency:.1f} ms"


@dataclass(frozen=True)
class Option:
    """A configuration for all tensors, and its measurements.

    Attributes:
        name: "wanted", "mixed" or a fallback.
        seconds: duration of a step; a lower bound from its bytes if the option was never tried.
        trials: number of trials.
        chosen: whether the gate has chosen this option.
    """

    name: str
    seconds: float
    trials: int
    chosen: bool


@dataclass(frozen=True)
class TensorRow:
    """The costs of one bucket.

    Attributes:
        name: name of the bucket.
        wanted: the policy's compressor.
        work: seconds per step of encoding and decoding; 0 if they cannot be measured (in a graph).
        sent: bytes sent per step.
        dense: bytes sent per step without compression.
        spares: seconds per step that compression saves in communication.
        served: the compressor that serves the bucket.
    """

    name: str
    wanted: str
    work: float
    sent: float
    dense: float
    spares: float
    served: str


@dataclass(frozen=True)
class Advice:
    """A gate's verdict and the measurements behind it; `str()` returns the tables.

    Attributes:
        verdict: the verdict in one line.
        link: the measured link; None before the first measurement.
        options: the measured configurations.
        tensors: the costs of each bucket.
    """

    verdict: str
    link: Link | None
    options: Sequence[Option]
    tensors: Sequence[TensorRow]

    def __str__(self) -> str:
        if not self.options:
            return self.verdict or "the gate has no measurements (yet); it measures on rank 0."
        options = [["configuration", "ms per step", "trials", ""]]
        for option in self.options:
            duration = f"{'' if option.trials else 'over '}{1e3 * option.seconds:.1f}"
            mark = "chosen" if option.chosen else ""
            options.append([option.name, duration, str(option.trials), mark])
        rows = [["tensor", "wanted", "work ms", "spares ms", "kB sent", "kB dense", "served by"]]
        for row in self.tensors:
            times = [f"{1e3 * seconds:.2f}" for seconds in (row.work, row.spares)]
            sizes = [f"{size / 1e3:.1f}" for size in (row.sent, row.dense)]
            rows.append([row.name, row.wanted, *times, *sizes, row.served])
        return "\n".join([self.verdict, "", *_table(options), "", *_table(rows)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                  for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


# --------------------------------------------------------------------------- the observer of a gate
logger = logging.getLogger(__name__)

PROBE = 1 << 18
"""Elements of the tensor that measures the link."""


class Gating(Observer):
    """Connects a gate to an exchange."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._totals: dict[str, list[float]] = {}  # bucket -> sums of seconds, bytes and steps
        self._bytes: dict[str, dict[str, float]] = {}  # bucket -> lossy fallback -> bytes
        self._weight = 1

    def due(self, exchange: Exchange) -> bool:
        """Return `Gate.due`. If the batch size has changed, old measurements are void: restart."""
        weight = exchange.policy.observers.weight
        if weight != self._weight:
            self._weight = weight
            self.gate.restart()
        self.gate.tick(exchange.steps)
        return self.gate.due(exchange.steps, wanted(exchange))

    def decide(self, exchange: Exchange) -> Generator[Any, Any, None]:
        """Measure the link if the gate needs it, let rank 0 decide, and apply the decision."""
        gate, communicator = self.gate, exchange.communicator
        levels, link = wanted(exchange), None
        if gate.probes(levels):
            vector = exchange.xp.zeros((PROBE,), "float32", exchange.device)
            began = time.perf_counter()
            link = yield from probe(vector, exchange.xp, communicator.size)
            gate.trial_seconds += time.perf_counter() - began
            if any(fallback.fp16_reduction for fallback in gate.fallbacks):
                yield from choose_by(link.bandwidth, communicator, exchange.device)
        decision = None
        if communicator.rank == 0:
            measured = names(exchange), self._costs(exchange), link, startup(exchange)
            decision = gate.decide(exchange.steps, levels, *measured)
        decision = yield from share(communicator, decision, exchange.device)
        if gate.apply(decision, levels) and decision["verdict"] and communicator.rank == 0:
            logger.info("%s", decision["verdict"])
        self._totals.clear()

    @property
    def measures(self) -> bool:  # type: ignore[override]
        return self.gate.measuring

    def closed(self, exchange: Exchange, step: Step) -> None:
        """Add the seconds and bytes of a step's calls to the totals, after the start-up steps."""
        if not step.measuring or startup(exchange):
            return
        for index, batch in enumerate(exchange.layout.batches):
            buckets = [entry.bucket for entry in batch.entries]
            size = max(sum(bucket.size for bucket in buckets), 1)
            seconds, sent = step.spent(index)
            for bucket in buckets:
                part, totals = bucket.size / size, self._totals.setdefault(bucket.name, [0.0] * 3)
                totals[0] += part * seconds
                totals[1] += part * sent
                totals[2] += 1

    def _costs(self, exchange: Exchange) -> dict[str, Cost]:
        """Return the mean cost per step of each bucket since the last decision."""
        ranks, costs = exchange.communicator.size, {}
        for bucket in (entry.bucket for entry in _compressed(exchange)):
            seconds, sent, steps = self._totals.get(bucket.name, [0.0, 0.0, 1.0])
            if bucket.name not in self._bytes:  # other fallbacks' bytes follow from the size
                self._bytes[bucket.name] = {
                    repr(fallback): bytes_sent(fallback, bucket.shape, bucket.dtype, ranks)
                    for fallback in self.gate.fallbacks
                    if _loss(repr(fallback)) == LOSSY
                }
            dense = 2 * (ranks - 1) / ranks * bucket.dense_bytes
            level = exchange.policy.levels(bucket.name)[exchange.policy.level(bucket.name)]
            parts = sent_in_parts(level, sent / steps, ranks)
            fallbacks = self._bytes[bucket.name]
            costs[bucket.name] = Cost(seconds / steps, sent / steps, dense, fallbacks, parts)
        return costs

    def advice(self, exchange: Exchange) -> Advice:
        return self.gate.advice(names(exchange))


def sent_in_parts(compressor: Compressor, sent: float, ranks: int) -> float:
    """Return about how many bytes `DoubleSqueeze` of a codec sends where the codec sends `sent`.

    The result is infinite for compressors that do not gather messages of a fixed size.
    """
    gathers = type(compressor).exchange is Codec.exchange
    if not gathers or compressor.uneven or compressor.summed:  # type: ignore[attr-defined]
        return math.inf
    return sent * 2 / ranks


def wanted(exchange: Exchange) -> dict[str, int]:
    """Return bucket -> the level that the policy wants."""
    buckets = (entry.bucket.name for entry in _compressed(exchange))
    return {name: exchange.policy.level(name) for name in buckets}


def names(exchange: Exchange) -> dict[str, str]:
    """Return bucket -> the compressor that the policy wants, as text."""
    levels = exchange.policy.levels
    return {name: repr(levels(name)[level]) for name, level in wanted(exchange).items()}


def startup(exchange: Exchange) -> int:
    """Return the start-up steps left for the wanted compressors; see `Compressor.startup_steps`."""
    levels, left = wanted(exchange), [0]
    for entry in _compressed(exchange):
        level = levels[entry.bucket.name]
        served = entry.served_by_level.get(level, 0)
        if entry.level == level:
            served = exchange.counted - entry.served_from
        left.append(entry.levels[level].startup_steps - served)
    return max(left)


def _compressed(exchange: Exchange) -> list[Any]:
    return [entry for entry in exchange.bucket_states if entry.bucket.compress]
