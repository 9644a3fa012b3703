"""Averaging of the ranks' models after each step: the part that all frameworks share."""

from __future__ import annotations

import abc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accordion_hvd.averaging.base import Averaging, Group
from accordion_hvd.averaging.wagma import WAGMA
from accordion_hvd.comm.agreement import require_agreement
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.mpi import Neighbourhood
from accordion_hvd.comm.shares import by_shares
from accordion_hvd.core.base import Allreduce, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.engine import checkpoint
from accordion_hvd.engine.guard import Guard
from accordion_hvd.engine.layout import TensorInfo
from accordion_hvd.engine.membership import Gather
from accordion_hvd.engine.wait_avoiding import WaitAvoiding, why_not
from accordion_hvd.policies.accordion import Alternation

logger = logging.getLogger(__name__)

_HALF = ("float16", "bfloat16")
_numbers: Counter[int] = Counter()  # averagers made so far, by process set; equal on its members


class Parameters(abc.ABC):
    """Access to a model's parameters or statistics in a framework.

    Attributes:
        device: device of numbers that accompany the parameters, as for `ops.asarray`.
    """

    device: Any = None

    @abc.abstractmethod
    def tensors(self) -> Sequence[TensorInfo]:
        """Return descriptions of the tensors in an order equal on all ranks; () while unknown."""

    @abc.abstractmethod
    def read(self) -> list[Tensor]:
        """Return the values, detached from any gradient computation; do not modify them."""

    @abc.abstractmethod
    def write(self, values: Sequence[Tensor]) -> None:
        """Assign values of the same shapes and dtypes."""


class ModelAverager(checkpoint.Keeper):
    """Averages the models of the ranks after each step.

    Args:
        communicator: communicator of the ranks that average; a single rank averages nothing.
        guard: guard that compares models when they should be equal.
        number: number of the process set; 0 for all ranks.
        alternation: policy that switches between averaging of models and of gradients; None:
            models are always averaged.

    Attributes:
        steps: number of steps since the start of training or the last `rest`; the method's groups
            depend on it.
        total_steps: number of steps that this process has averaged.
        equal: whether the models of all ranks are equal since the last average.
        without_waiting: whether averaging is wait-avoiding.
        single_rank: whether there is only one rank.
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
        self.total_steps = 0
        self.without_waiting = False
        self.single_rank = communicator.size == 1
        self._of_all = number == 0
        self._traffic, self._seconds = Traffic(), 0.0
        self._earlier: dict[str, int] = {}  # counts of the phases before the last `rest`
        self._is_set_up = self._ready = self._by_shares = False
        self._neighbourhood: Neighbourhood | None = None
        self._agreed: Sequence[TensorInfo] = ()  # tensors on which all ranks have agreed
        self._kinds: list[tuple[str, list[int]]] = []  # dtype and positions of its parameters
        self._states: list[State] = []
        self._engine: WaitAvoiding | None = None
        self._saved: dict[str, Any] | None = None  # state to continue from
        self._committed: dict[str, Any] = {}  # state of the last commit
        self._apart = False  # whether models differed before the last change of ranks
        self._name = f"accordion.averaging.{number}.{_numbers[number]}"
        _numbers[number] += 1

    def connect(self) -> Communicator:
        """Return a new communicator of the present ranks, for elastic jobs.

        Raises:
            NotImplementedError: if the adapter of the framework does not support elastic jobs.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- set-up
    def set_up_early(self) -> None:
        """Set up before the first step, except in elastic jobs, which ranks join at any time.

        Raises the errors of `set_up`.
        """
        if os.environ.get("HOROVOD_ELASTIC") != "1":
            self.set_up()

    def set_up(self) -> None:
        """Choose between wait-avoiding averages and averages that wait; register all groups.

        Raises:
            ValueError: if the method does not support this number of ranks, or if groups cannot be
                registered.
            RuntimeError: if wait-avoiding averaging was requested but is not possible, or if the
                set-ups of the ranks differ.
        """
        if self.single_rank or self._is_set_up:
            return
        groups = self.method.groups(self.communicator.size)
        self._agree()
        self.without_waiting = isinstance(self.method, WAGMA) and self._choose(self.method)
        if not self.without_waiting and groups:
            self._register(groups)
        if self.method.neighbours_only and self._all(self._of_all and self._mpi_serves()):
            self._neighbourhood = Neighbourhood(self.communicator.pause)
        self._is_set_up = True

    def _mpi_serves(self) -> bool:
        return why_not(self.communicator.size) is None

    def _register(self, groups: Sequence[Group]) -> None:
        """Register groups as process sets if the engine supports them; else use `by_shares`."""
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
        """Return whether averages are wait-avoiding; equal on all ranks."""
        if method.wait_avoiding is False:
            return False
        reason = why_not(self.communicator.size)
        if not self._of_all:
            reason = "the process set does not contain all ranks"
        elif method.compressor is not None:
            reason = "the averages of groups are compressed"
        possible = self._all(reason is None)
        reason = reason or "another rank does not support it"
        if method.wait_avoiding is True and not possible:
            raise RuntimeError(f"{method!r}: wait-avoiding averaging is not possible: {reason}.")
        if self.communicator.rank == 0:
            text = f"averages wait for all members of a group, because {reason}"
            if possible:
                text = "wait-avoiding averages over MPI"
            logger.info("accordion_hvd: %r: %s", method, text)
        return possible

    def _all(self, flag: bool) -> bool:
        unset = self.xp.asarray(np.array([not flag], np.float32), self.parameters.device)
        anywhere = self.communicator.run("accordion.able", _largest(unset))
        return not self.xp.to_numpy(anywhere)[0]

    # ---------------------------------------------------------------------------------- each step
    def follow_mode(self) -> bool:
        """Apply the policy's last switch between averaging of models and of gradients.

        Call it before each step.

        Returns:
            Whether model averaging has just ended. The caller must then average the optimizer's
            slots once (`level`), because they differ between ranks.
        """
        if self.alternation is None or not self.alternation.take_mode_change():
            return False
        self.rest()
        return not self.alternation.averaging_models

    def prepare(self, given: Parameters | None = None) -> None:
        """Set up averaging before the first step; the models of all ranks must be equal.

        Args:
            given: tensors to read in place of `parameters`: those that pass through a graph.
        """
        if self.single_rank or self._ready:
            return
        self.set_up()
        if len(self.parameters.tensors()) != len(self._agreed):
            self._agree()
        if self._engine is not None:
            self._engine.close()  # a state was loaded since it was made
        values = (given or self.parameters).read()
        self._compare(values, 1, ())
        self._group_by_dtype(values)
        self._begin(self._vectors(values), self._saved or {})
        self._saved, self._ready, self.equal = None, True, True

    def _group_by_dtype(self, values: Sequence[Tensor]) -> None:
        positions: dict[tuple[str, Any], list[int]] = {}
        for i, value in enumerate(values):
            dtype = self.xp.dtype(value)
            key = "float32" if dtype in _HALF else dtype, self.xp.device(value)
            positions.setdefault(key, []).append(i)
        self._kinds = [(dtype, members) for (dtype, _), members in positions.items()]

    def _begin(self, models: list[Tensor], saved: dict[str, Any]) -> None:
        self.steps = saved.get("steps", 0)
        if isinstance(self.method, WAGMA) and self.without_waiting:
            self._engine = WaitAvoiding(
                [self._hosted(model) for model in models],
                group_size=self.method.schedule(self.communicator.size).group_size,
                period=self.method.period,
                timeout=self.method.timeout,
                steps=self.steps,
                version=saved.get("version", self.steps),
            )
            return
        self._states = [
            self.method.start(model, self._info(i, 0.0)) for i, model in enumerate(models)
        ]
        rows = zip(models, self._states, saved.get("states", ()), strict=False)
        for model, state, old in rows:
            device = self.xp.device(model)
            state.update({k: self.xp.asarray(np.array(v), device) for k, v in old.items()})

    def average(
        self, lr: float, given: Parameters | None = None, rates: Sequence[float] = ()
    ) -> None:
        """Average the models after an optimizer step.

        Args:
            given: tensors to average in place of `parameters`, as in `prepare`.
            rates: all learning rates of the optimizer, which the guard compares.
        """
        if self.single_rank:
            return
        model, began = given or self.parameters, time.perf_counter()
        if self._engine is not None:
            self.equal = self._over_mpi(self._engine.average, model)
        else:
            self.equal = self.method.equal(self.steps)
            self._run_all(self.method.exchange, lr, model)
        if self.alternation is not None and self.alternation.over and not self.method.synchronizes:
            self._run_all(self.method.synchronize, 0.0, model)
            self.equal = True
        self._inform()
        self.steps, self.total_steps = self.steps + 1, self.total_steps + 1
        self._seconds += time.perf_counter() - began
        if self.equal and self.guard.next_after(self.steps - 1) == self.steps:
            self._compare(model.read(), self.steps, rates or [lr])

    def average_now(self, statistics: Parameters | None = None) -> None:
        """Replace the models of all ranks by their average; all ranks call it after the same step.

        Args:
            statistics: tensors to average besides the parameters. They are averaged over Horovod,
                also if averaging is wait-avoiding.
        """
        if self.single_rank:
            return
        self.prepare()
        if self._engine is not None:
            self._over_mpi(self._engine.average_now, self.parameters)
        else:
            self._run_all(self.method.synchronize, 0.0, self.parameters)
        self.equal = True
        self._inform()
        if statistics is not None:
            self.level(statistics)

    def _inform(self) -> None:
        if self.alternation is not None:
            self.alternation.equal = self.equal

    def level(self, tensors: Parameters) -> None:
        """Average `tensors` over the ranks with Horovod; all ranks must pass the same tensors."""
        values = tensors.read()
        if values and not self.single_rank:
            means = self.communicator.run(f"{self._name}.statistics", _means(self.xp, values))
            pairs = zip(means, values, strict=True)
            tensors.write([self.xp.cast(mean, self.xp.dtype(old)) for mean, old in pairs])

    def rest(self) -> None:
        """Stop averaging while models are equal, until the next `prepare`; collective.

        Averaging of gradients then preserves the equality of the models.
        """
        if self._engine is not None:
            self._engine.close()
        self._earlier = self._counts()
        self._engine = None
        self.load({})

    def close(self) -> None:
        """Average the models a last time and release all resources; ends the progress thread."""
        if self._engine is not None:
            self._over_mpi(self._engine.close, self.parameters)
        elif not (self.equal or self.single_rank):
            self.average_now()
        if self._neighbourhood is not None:
            self._neighbourhood.close()

    def _over_mpi(self, operation: Callable[[list[np.ndarray]], Any], model: Parameters) -> Any:
        values = model.read()
        hosted = [self._hosted(vector) for vector in self._vectors(values)]
        try:
            return operation(hosted)
        finally:  # if other ranks have ended, `hosted` is the last average
            devices = [self.xp.device(values[members[0]]) for _, members in self._kinds]
            pairs = zip(hosted, devices, strict=True)
            vectors = [self.xp.asarray(vector, device) for vector, device in pairs]
            model.write(self._spread(vectors, values))

    def _hosted(self, vector: Tensor) -> np.ndarray:
        return np.require(self.xp.to_numpy(vector), requirements="W")

    def _run_all(self, method: Any, lr: float, model: Parameters) -> None:
        """Run the exchange generators of all kinds of parameters, one after the other."""
        values, results = model.read(), []
        for i, vector in enumerate(self._vectors(values)):
            exchange = method(vector, self._states[i], self._info(i, lr))
            result, self._states[i] = self._run(f"{self._name}.{i}", exchange)
            results.append(result)
        model.write(self._spread(results, values))

    def _run(self, name: str, exchange: ExchangeGenerator) -> Any:
        if self._by_shares:
            exchange = by_shares(exchange, self.communicator.rank, self.communicator.size)
        if self._neighbourhood is not None:
            exchange = self._neighbourhood.serving(exchange, self._traffic)
        return self.communicator.run(name, exchange, self._traffic)

    def _info(self, number: int, lr: float) -> Info:
        rank, size = self.communicator.rank, self.communicator.size
        return Info(step=self.steps, rank=rank, size=size, name=f"{self._name}.{number}", lr=lr)

    def _vectors(self, values: Sequence[Tensor]) -> list[Tensor]:
        xp = self.xp
        return [
            xp.concat([xp.cast(xp.reshape(values[i], (-1,)), dtype) for i in members])
            for dtype, members in self._kinds
        ]

    def _spread(self, vectors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        xp, values = self.xp, list(like)
        for (_, members), vector in zip(self._kinds, vectors, strict=True):
            shapes = [xp.shape(like[i]) for i in members]
            parts = xp.split(vector, [int(np.prod(shape)) for shape in shapes])
            for i, shape, part in zip(members, shapes, parts, strict=True):
                values[i] = xp.cast(xp.reshape(part, shape), xp.dtype(like[i]))
        return values

    def _compare(self, values: Sequence[Tensor], step: int, rates: Sequence[float]) -> None:
        if self.guard.mode != "off":
            names = ["learning rates", *(row.name for row in self._agreed)]
            lr = self.xp.asarray(np.array([*rates, 0.0], np.float32), self.parameters.device)
            sums = self.xp.stack([self.xp.checksum(value) for value in (lr, *values)])
            self.guard.compare(self.communicator, step, names, sums)

    # -------------------------------------------------------------------------------- elastic jobs
    def commit(self) -> None:
        self._committed = {**self.state(), "apart": not self.equal}

    def committed_norm(self) -> float:
        """Return 0: local progress of models is lost with a rank that dies, but no residual."""
        return 0.0

    def roll_back(self) -> None:
        saved = dict(self._committed)
        self._apart = saved.pop("apart", False)
        self.load(saved)
        self.equal = not self._apart

    def hand_over(self, gather: Gather) -> None:
        """Average the models, so that the progress of ranks that leave is kept; collective."""
        if not self.equal:
            self.average_now()

    def ranks_changed(self) -> None:
        self._apart = not self.equal
        self.load(self._shared_state())
        self.communicator = self.connect()
        self.single_rank = self.communicator.size == 1
        self._is_set_up = self._by_shares = False
        self._neighbourhood = None

    def prepare_regroup(self, gather: Gather, leader: int) -> None:
        """Set the models to the average over the ranks with models of the present step; collective.

        Ranks that join then receive this average from the leader.
        """
        rows = gather((self.steps, self._apart))
        present = [steps == rows[leader][0] for steps, _ in rows]
        if self.single_rank or not any(apart for _, apart in rows):
            return
        values = self.parameters.read()
        if not present[self.communicator.rank]:
            values = [value * 0 for value in values]
        means = self.communicator.run(f"{self._name}.regroup", _means(self.xp, values))
        factor = len(present) / sum(present)
        pairs = zip(means, values, strict=True)
        self.parameters.write(
            [self.xp.cast(mean * factor, self.xp.dtype(old)) for mean, old in pairs]
        )

    def regroup(self, gather: Gather, leader: int) -> None:
        leads = self.communicator.rank == leader
        self._name, saved = gather((self._name, self._shared_state()) if leads else None)[leader]
        self._apart = False
        self.load(saved)

    def _shared_state(self) -> dict[str, Any]:
        state = self.state()
        shared = [{k: v for k, v in row.items() if k in self.method.shared}
                  for row in state["states"]]  # fmt: skip
        return {**state, "states": shared} if self.steps else {}

    # --------------------------------------------------------------------------------- statistics
    def stats(self) -> dict[str, Any]:
        """Return this rank's counts since the start of this process.

        Returns:
            A dict with these keys:

            - "steps": number of steps.
            - "sent": bytes that this rank has sent (if averaging is wait-avoiding, over MPI).
            - "seconds": seconds spent in averages, waiting included.
            - "reports": reports of the method, one per kind of parameters (`Averaging.report`).
            - "on_time", "late": numbers of averages that contained this rank's newest model, or an
              older one; "lag": the largest age of an older one, in versions. Only if averaging is
              wait-avoiding.
        """
        counts = {"sent": self._traffic.sent, **self._counts()}
        return counts | {"seconds": self._seconds, "reports": self._reports()}

    def _counts(self) -> dict[str, int]:
        """Return the counts of all phases; those of wait-avoiding averages if there were any."""
        engine, earlier = self._engine, self._earlier
        counts = earlier | {"steps": self.total_steps}
        if engine is not None:
            now = {"late": engine.late, "on_time": engine.on_time, "sent": engine.sent}
            counts |= {key: earlier.get(key, 0) + value for key, value in now.items()}
            counts["lag"] = max(earlier.get("lag", 0), engine.lag)
        return counts

    def _reports(self) -> list[dict[str, float]]:
        reports = [self.method.report(state) for state in self._states]
        return [
            {key: float(self.xp.to_numpy(x).reshape(-1)[0]) for key, x in report.items()}
            for report in reports
        ]

    # -------------------------------------------------------------------------------- checkpoints
    @property
    def exchange(self) -> ModelAverager:
        """Return this object, which `save_state` saves."""
        return self

    def expect(self, names: Sequence[str]) -> None:
        """Do nothing; `load_state` calls this method before a restore."""

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints: the number of steps and the method's state.

        `save_state` saves it for all ranks. Without `save_state`, call `average_now` and save this
        state on each rank.
        """
        states = [
            {key: self.xp.to_numpy(value).copy() for key, value in state.items()}
            for state in self._states
        ]
        state = {"steps": self.steps, "version": self._version(), "states": states}
        return state | (self._saved or {})

    def _version(self) -> int:
        """Return the number of the next average, by which `WAGMA` chooses groups."""
        return self.steps if self._engine is None else self._engine.version

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a result of `state` of the same rank, together with the model saved then.

        The state takes effect at the next step, before which the models of all ranks must be equal.
        """
        self._saved, self._ready = saved, False
        self.steps, self.equal = saved.get("steps", 0), True

    def describe(self) -> dict[str, Any]:
        rows = self.parameters.tensors()
        return {
            "averaging": repr(self.method),
            "steps": self.steps,
            "version": self._version(),
            "tensors": [row.name for row in rows],
            "shapes": [[row.dtype, *row.shape] for row in rows],
        }

    def export(self) -> dict[str, np.ndarray]:
        """Return this rank's states; ValueError if models differ, so that none could be saved."""
        if not self.equal:
            raise ValueError(
                f"after step {self.steps} of {self.method!r} the models of the ranks differ; call "
                "optimizer.average_now() before"
            )
        return {
            f"{i}/{key}": value
            for i, state in enumerate(self.state()["states"])
            for key, value in state.items()
        }

    def restore(self, row: dict[str, Any], load: checkpoint.Loader, ranks: int) -> None:
        """Restore a saved state; on another number of ranks, only the parts equal on all ranks."""
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
            self._report_changed_ranks(ranks, {name.partition("/")[2] for name in arrays})

    def _check_fits(self, row: dict[str, Any]) -> None:
        if row.get("averaging") != repr(self.method):
            saved = row.get("averaging") or row.get("compression")
            raise ValueError(f"models are averaged by {self.method!r}, but {saved} was saved")
        ours = self.describe()
        names = zip(ours["tensors"], row["tensors"], strict=False)
        same = len(ours["tensors"]) == len(row["tensors"])
        same &= all(checkpoint.same_name(name, other) for name, other in names)
        if not same or ours["shapes"] != row["shapes"]:
            raise ValueError(
                f"the model's parameters {ours['tensors']} {ours['shapes']} were "
                f"{row['tensors']} {row['shapes']} when saved"
            )

    def _report_changed_ranks(self, ranks: int, keys: set[str]) -> None:
        parts = ["periods and groups start again"]
        lost = sorted(keys - set(self.method.shared))
        parts += [f"per-rank state ({', '.join(lost)}) is discarded"] if lost else []
        restored = sorted(keys & set(self.method.shared))
        parts += [f"shared state ({', '.join(restored)}) is restored"] if restored else []
        text = f"saved on {ranks} ranks, continues on {self.communicator.size}: "
        logger.info("%r: %s%s.", self.method, text, "; ".join(parts))


def _largest(x: Tensor) -> ExchangeGenerator:
    return (yield Allreduce(x, op="max"))


def _means(xp: Any, parts: Sequence[Tensor]) -> ExchangeGenerator:
    wide = [xp.cast(x, "float32") if xp.dtype(x) in _HALF else xp.copy(x) for x in parts]
    return (yield tuple(Allreduce(part) for part in wide))
