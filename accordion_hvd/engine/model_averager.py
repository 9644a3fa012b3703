"""Averages the models of ranks after each step, whatever framework they are in."""

from __future__ import annotations

import abc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accordion_hvd.averaging.base import Averaging, Group
from accordion_hvd.averaging.wagma import WAGMA
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.neighbourhood import Neighbourhood
from accordion_hvd.comm.shares import by_shares
from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.buckets import TensorInfo
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.wait_avoiding import WaitAvoiding, why_not
from accordion_hvd.policies.alternation import Alternation

_HALF = ("float16", "bfloat16")
_numbers: Counter[int] = Counter()  # by process set: members count alike, others do not count


class Parameters(abc.ABC):
    """A model's parameters (or statistics), as a framework has them.

    Attributes:
        device: where numbers go that accompany them, as `ops.asarray` takes it.
    """

    device: Any = None

    @abc.abstractmethod
    def tensors(self) -> Sequence[TensorInfo]:
        """Return all of them, in an order that is equal on all ranks; () while none are known."""

    @abc.abstractmethod
    def read(self) -> list[Tensor]:
        """Their values, of which nothing is to be differentiated; not to be written into."""

    @abc.abstractmethod
    def write(self, values: Sequence[Tensor]) -> None:
        """Give them values of the same shapes and dtypes."""


class ModelAverager(checkpoint.Keeper):
    """Averages the models of the ranks after each step.

    Args:
        method: how.
        parameters: what.
        communicator: among whom; with one rank nothing is ever averaged.
        guard: compares models when they should be equal.
        number: of the process set; 0 is that of all ranks.
        alternation: says when models are averaged and when gradients are; None: models always
            are.

    Attributes:
        steps: how many there have been.
        equal: whether all ranks' models are, since the last average.
        without_waiting: whether late ranks hold nobody up.
    """

    def __init__(
        self,
        method: Averaging,
        parameters: Parameters,
        communicator: Communicator,
        guard: Guard,
        number: int = 0,
        alternation: Alternation | None = None,
    ) -> None:
        self.method, self.parameters, self.guard = method, parameters, guard
        self.alternation = alternation
        self.communicator, self.xp = communicator, communicator.xp
        self.steps, self.equal = 0, True
        self.without_waiting = False
        self.single_rank = communicator.size == 1
        self._of_all = number == 0
        self._traffic, self._seconds = Traffic(), 0.0
        self._set = self._ready = self._by_shares = False
        self._neighbourhood: Neighbourhood | None = None
        self._agreed: Sequence[TensorInfo] = ()  # what all ranks have told each other
        self._kinds: list[tuple[str, list[int]]] = []  # dtypes, and whose they are
        self._states: list[State] = []
        self._engine: WaitAvoiding | None = None
        self._saved: dict[str, Any] | None = None  # to go on from
        self._name = f"accordion.averaging.{number}.{_numbers[number]}"
        _numbers[number] += 1

    # ------------------------------------------------------------------------------------- set-up
    def set_up(self) -> None:
        """Choose between groups that wait and averaging without waiting; register all groups.

        Raises:
            ValueError: the method does not suit this number of ranks, or groups cannot be added.
            RuntimeError: averaging without waiting was asked for and is not possible here; or the
                job is elastic; or ranks were set up differently.
        """
        if self.single_rank or self._set:
            return
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise RuntimeError(
                f"{self.method!r}: models are not averaged in elastic jobs, whose ranks change; "
                "start the job with a fixed number of ranks."
            )
        groups = self.method.groups(self.communicator.size)
        self._agree()
        self.without_waiting = isinstance(self.method, WAGMA) and self._choose(self.method)
        if not self.without_waiting and groups:
            self._register(groups)
        if self.method.neighbours_only and self._all(self._of_all and self._mpi_serves()):
            self._neighbourhood = Neighbourhood(self.communicator.pause)
        self._set = True

    def _mpi_serves(self) -> bool:
        return why_not(self.communicator.size) is None

    def _register(self, groups: Sequence[Group]) -> None:
        """Register groups with the engine where it has or takes them; else use `by_shares`."""
        self.communicator.extensible = self._all(self.communicator.extensible)
        try:
            self.communicator.register(groups)
        except ValueError:
            if not self.method.only_means:
                raise
            self._by_shares = True

    def _agree(self) -> None:
        rows = tuple(self.parameters.tensors())
        lines = [f"{row.name} {row.shape} {row.dtype}" for row in rows]
        text = "\n".join([f"averaging {self.method!r}", *lines])
        require_agreement(self.communicator, text, self.parameters.device)
        self._agreed = rows

    def _choose(self, method: WAGMA) -> bool:
        """Return whether to use wait-avoiding averages; equal on all ranks."""
        if method.wait_avoiding is False:
            return False
        reason = why_not(self.communicator.size)
        if not self._of_all:
            reason = "the process set is not all ranks"
        elif method.compressor is not None:
            reason = "what groups send is compressed"
        able = self._all(reason is None)
        reason = reason or "another rank cannot"
        if method.wait_avoiding is True and not able:
            raise RuntimeError(f"{method!r}: averaging without waiting is not possible: {reason}.")
        if self.communicator.rank == 0:
            words = "without waiting, over MPI" if able else f"in groups that wait, as {reason}"
            print(f"accordion_hvd: {method!r} averages {words}", file=sys.stderr, flush=True)
        return able

    def _all(self, flag: bool) -> bool:
        mine = self.xp.asarray(np.array([not flag], np.float32), self.parameters.device)
        anywhere = self.communicator.run("accordion.able", _largest(mine))
        return not self.xp.to_numpy(anywhere)[0]

    # ---------------------------------------------------------------------------------- each step
    def follow_mode(self) -> bool:
        """Before a step, where a policy says when models are averaged: act on its decisions.

        Returns:
            Whether they have been until now, so that optimizers' slots, which were each rank's
            own, are to be averaged once (`level`).
        """
        if self.alternation is None or not self.alternation.take_mode_change():
            return False
        self.rest()
        return not self.alternation.averaging_models

    def prepare(self, given: Parameters | None = None) -> None:
        """Before the first step, where ranks' models are equal, as broadcasts have made them.

        Args:
            given: what to read, if not the parameters themselves: in `average` and here what
                passes through a graph.
        """
        if self.single_rank or self._ready:
            return
        self.set_up()
        if len(self.parameters.tensors()) != len(self._agreed):
            self._agree()
        if self._engine is not None:
            self._engine.close()  # where a state was loaded since
        values = (given or self.parameters).read()
        self._compare(values, 1)
        self._sort(values)
        self._begin(self._vectors(values), self._saved or {})
        self._saved, self._ready, self.equal = None, True, True

    def _sort(self, values: Sequence[Tensor]) -> None:
        places: dict[tuple[str, Any], list[int]] = {}
        for i, value in enumerate(values):
            dtype = self.xp.dtype(value)
            key = "float32" if dtype in _HALF else dtype, self.xp.device(value)
            places.setdefault(key, []).append(i)
        self._kinds = [(dtype, members) for (dtype, _), members in places.items()]

    def _begin(self, models: list[Tensor], saved: dict[str, Any]) -> None:
        self.steps = saved.get("steps", 0)
        if isinstance(self.method, WAGMA) and self.without_waiting:
            self._engine = WaitAvoiding(
                [self._hosted(model) for model in models],
                group_size=self.method.schedule(self.communicator.size).group_size,
                period=self.method.period,
                steps=self.steps,
                version=saved.get("version", self.steps),
            )
            return
        self._states = [
            self.method.start(model, self._info(i, 0.0)) for i, model in enumerate(models)
        ]
        olds = zip(models, self._states, saved.get("states", ()), strict=False)
        for model, state, old in olds:
            device = self.xp.device(model)
            state.update({k: self.xp.asarray(np.array(v), device) for k, v in old.items()})

    def average(self, lr: float, given: Parameters | None = None) -> None:
        """Average after a step, which was taken at the learning rate `lr`."""
        if self.single_rank:
            return
        model, began = given or self.parameters, time.perf_counter()
        if self._engine is not None:
            self.equal = self._over_mpi(self._engine.average, model)
        else:
            self.equal = self.method.equal(self.steps)
            self._hold(self.method.exchange, lr, model)
        if self.alternation is not None and self.alternation.over and not self.method.synchronizes:
            self._hold(self.method.synchronize, 0.0, model)
            self.equal = True
        self._inform()
        self.steps += 1
        self._seconds += time.perf_counter() - began
        if self.equal and self.guard.due(self.steps):
            self._compare(model.read(), self.steps)

    def average_now(self, statistics: Parameters | None = None) -> None:
        """Make all models equal: their average. All ranks call it after the same step.

        Args:
            statistics: what is averaged besides; for averaging without waiting, too, this travels
                over Horovod.
        """
        if self.single_rank:
            return
        self.prepare()
        if self._engine is not None:
            self._over_mpi(self._engine.average_now, self.parameters)
        else:
            self._hold(self.method.synchronize, 0.0, self.parameters)
        self.equal = True
        self._inform()
        if statistics is not None:
            self.level(statistics)

    def _inform(self) -> None:
        if self.alternation is not None:
            self.alternation.equal = self.equal

    def level(self, tensors: Parameters) -> None:
        """Average these over the ranks, over Horovod; all ranks have the same ones."""
        values = tensors.read()
        if values and not self.single_rank:
            means = self.communicator.run(f"{self._name}.statistics", _means(self.xp, values))
            pairs = zip(means, values, strict=True)
            tensors.write([self.xp.cast(mean, self.xp.dtype(old)) for mean, old in pairs])

    def rest(self) -> None:
        """Models are equal, and others keep them so; the next `prepare` begins anew. Collective."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self.load({})

    def close(self) -> None:
        """Average all models and end; for averaging without waiting, ends its thread."""
        if self._engine is not None:
            self._over_mpi(self._engine.close, self.parameters)
        elif not (self.equal or self.single_rank):
            self.average_now()
        if self._neighbourhood is not None:
            self._neighbourhood.close()

    def _over_mpi(self, what: Callable[[list[np.ndarray]], Any], model: Parameters) -> Any:
        values = model.read()
        hosted = [self._hosted(vector) for vector in self._vectors(values)]
        try:
            return what(hosted)
        finally:  # where others have ended, it is their last average
            devices = [self.xp.device(values[members[0]]) for _, members in self._kinds]
            pairs = zip(hosted, devices, strict=True)
            vectors = [self.xp.asarray(vector, device) for vector, device in pairs]
            model.write(self._spread(vectors, values))

    def _hosted(self, vector: Tensor) -> np.ndarray:
        return np.require(self.xp.to_numpy(vector), requirements="W")

    def _hold(self, what: Any, lr: float, model: Parameters) -> None:
        """Conversations of all kinds of parameters, one after the other."""
        values, results = model.read(), []
        for i, vector in enumerate(self._vectors(values)):
            talk = what(vector, self._states[i], self._info(i, lr))
            result, self._states[i] = self._run(f"{self._name}.{i}", talk)
            results.append(result)
        model.write(self._spread(results, values))

    def _run(self, name: str, talk: ExchangeGenerator) -> Any:
        if self._by_shares:
            talk = by_shares(talk, self.communicator.rank, self.communicator.size)
        if self._neighbourhood is not None:
            talk = self._neighbourhood.serving(talk, self._traffic)
        return self.communicator.run(name, talk, self._traffic)

    def _info(self, number: int, lr: float) -> Info:
        rank, size = self.communicator.rank, self.communicator.size
        return Info(step=self.steps, rank=rank, size=size, name=f"{self._name}.{number}", lr=lr)

    def _vectors(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return one vector per kind with copies of all its values."""
        xp = self.xp
        return [
            xp.concat([xp.cast(xp.reshape(values[i], (-1,)), dtype) for i in members])
            for dtype, members in self._kinds
        ]

    def _spread(self, vectors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        xp, found = self.xp, list(like)
        for (_, members), vector in zip(self._kinds, vectors, strict=True):
            shapes = [xp.shape(like[i]) for i in members]
            parts = xp.split(vector, [int(np.prod(shape)) for shape in shapes])
            for i, shape, part in zip(members, shapes, parts, strict=True):
                found[i] = xp.cast(xp.reshape(part, shape), xp.dtype(like[i]))
        return found

    def _compare(self, values: Sequence[Tensor], step: int) -> None:
        if self.guard.mode != "off":
            names = [row.name for row in self._agreed]
            sums = self.xp.stack([self.xp.checksum(value) for value in values])
            self.guard.compare(self.communicator, step, names, sums)

    # ------------------------------------------------------------------------------------ figures
    def stats(self) -> dict[str, Any]:
        """Return this rank's counts since the beginning.

        steps; sent: bytes (for averaging without waiting, those of its exchanges); seconds: in
        averages, waiting included; late, on_time, lag: see `WaitAvoiding`; reports: what the
        method says of itself.
        """
        found: dict[str, Any] = {"steps": self.steps, "seconds": self._seconds}
        found |= {"sent": self._traffic.sent, "reports": self._reports()}
        if self._engine is not None:
            engine = self._engine
            found |= {"late": engine.late, "on_time": engine.on_time, "lag": engine.lag}
            found["sent"] = engine.sent
        return found

    def _reports(self) -> list[dict[str, float]]:
        reports = [self.method.report(state) for state in self._states]
        return [
            {key: float(self.xp.to_numpy(x).reshape(-1)[0]) for key, x in report.items()}
            for report in reports
        ]

    # -------------------------------------------------------------------------------- checkpoints
    @property
    def exchange(self) -> ModelAverager:
        """Return the object that `save_state` saves: itself."""
        return self

    def expect(self, names: Sequence[str]) -> None:
        """Nothing to expect: called before a restore."""

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints: steps, and the method's state.

        `save_state` does all this for all ranks. Where it is not used, save it on each rank, after
        `average_now`.
        """
        states = [
            {key: self.xp.to_numpy(value).copy() for key, value in state.items()}
            for state in self._states
        ]
        found = {"steps": self.steps, "version": self._version(), "states": states}
        return found | (self._saved or {})

    def _version(self) -> int:
        """Return the number of the next average, by which `WAGMA` chooses groups."""
        return self.steps if self._engine is None else self._engine.version

    def load(self, saved: dict[str, Any]) -> None:
        """Go on where `state` was taken, with the model of then; for the rank that it is of.

        It takes effect with the next step, before which ranks' models must be equal.
        """
        self._saved, self._ready = saved, False
        self.steps, self.equal = saved.get("steps", 0), True

    def describe(self) -> dict[str, Any]:
        """Return the values that are equal on all ranks."""
        rows = self.parameters.tensors()
        return {
            "averaging": repr(self.method),
            "steps": self.steps,
            "version": self._version(),
            "tensors": [row.name for row in rows],
            "shapes": [[row.dtype, *row.shape] for row in rows],
        }

    def export(self) -> dict[str, np.ndarray]:
        """Return this rank's states.

        Raises:
            ValueError: models are not equal now, so that no single one could be gone on with.
        """
        if not self.equal:
            raise ValueError(
                f"after step {self.steps} of {self.method!r} ranks' models are not equal; call "
                "optimizer.average_now() before"
            )
        return {
            f"{i}/{key}": value
            for i, state in enumerate(self.state()["states"])
            for key, value in state.items()
        }

    def restore(self, row: dict[str, Any], load: checkpoint.Loader, ranks: int) -> None:
        """Go on from what was saved; on other ranks with what all ranks had in common.

        Raises:
            ValueError: it does not fit.
        """
        self._check_fits(row)
        own = ranks == self.communicator.size
        arrays = load(self.communicator.rank if own else 0)
        states: dict[str, dict[str, np.ndarray]] = {}
        for name, value in arrays.items():
            number, _, key = name.partition("/")
            if own or key in self.method.shared:
                states.setdefault(number, {})[key] = value
        begun = {"steps": row["steps"], "version": row["version"]} if own else {}
        self.load({**begun, "states": [states[i] for i in sorted(states, key=int)]})
        if not own and self.communicator.rank == 0:
            self._tell(ranks, {name.partition("/")[2] for name in arrays})

    def _check_fits(self, row: dict[str, Any]) -> None:
        if row.get("averaging") != repr(self.method):
            was = row.get("averaging") or row.get("compression")
            raise ValueError(f"models are averaged by {self.method!r}, but {was} was saved")
        ours = self.describe()
        names = zip(ours["tensors"], row["tensors"], strict=False)
        same = len(ours["tensors"]) == len(row["tensors"])
        same &= all(checkpoint.same_name(one, other) for one, other in names)
        if not same or ours["shapes"] != row["shapes"]:
            raise ValueError(
                f"the model's parameters {ours['tensors']} {ours['shapes']} were "
                f"{row['tensors']} {row['shapes']} when saved"
            )

    def _tell(self, ranks: int, keys: set[str]) -> None:
        parts = ["periods and groups begin anew"]
        lost = sorted(keys - set(self.method.shared))
        parts += [f"so does what each rank had of its own ({', '.join(lost)})"] if lost else []
        kept = sorted(keys & set(self.method.shared))
        parts += [f"what all had in common ({', '.join(kept)}) is kept"] if kept else []
        text = f"saved on {ranks} ranks, goes on with {self.communicator.size}: "
        print(f"{self.method!r}: {text}{'; '.join(parts)}.", file=sys.stderr, flush=True)


def _largest(x: Tensor) -> ExchangeGenerator:
    return (yield Allreduce(x, op="max"))


def _means(xp: Any, parts: Sequence[Tensor]) -> ExchangeGenerator:
    wide = [xp.cast(x, "float32") if xp.dtype(x) in _HALF else xp.copy(x) for x in parts]
    return (yield tuple(Allreduce(part) for part in wide))
