"""Averages of models over the engine's collectives, or over MPI without waiting for late ranks."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.averaging.wagma import WAGMA
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.communicator import Communicator
from accordion_hvd.comm.mpi import MPINeighbours
from accordion_hvd.core.base import Allreduce, Alltoall, ExchangeGenerator, Info, State, Tensor
from accordion_hvd.core.running import RequestGenerator, intercept
from accordion_hvd.engine.layout import TensorInfo, in_numbers
from accordion_hvd.engine.wait_avoiding import WaitAvoiding, why_not
from accordion_hvd.ops import namespace

logger = logging.getLogger(__name__)

HALF = ("float16", "bfloat16")


class ModelParameters(abc.ABC):
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


class Averages:
    """Averages of one model by the method's exchange generators, over the engine's collectives.

    All parameters of one dtype and device are one vector.

    Attributes:
        by_shares: whether alltoalls compute the means of groups, which the engine does not know.
        neighbourhood: what exchanges messages with neighbours over MPI; None: the engine does.
    """

    by_shares = False
    neighbourhood: MPINeighbours | None = None

    def __init__(self, method: Any, communicator: Communicator, traffic: Traffic) -> None:
        self.method, self.communicator, self.xp = method, communicator, communicator.xp
        self._name, self._traffic = "", traffic
        self._kinds: dict[tuple[str, Any], list[int]] = {}  # dtype and device -> positions
        self._states: list[State] = []  # of the method, by vector

    def begin(self, name: str, values: Sequence[Tensor], saved: Mapping[str, Any]) -> None:
        """Prepare for the first step with parameters `values`, equal on all ranks; collective.

        `saved` is the state to continue from, as from `ModelAverager.state`; {} for a new one.
        """
        self._name, self._kinds = name, {}
        for i, value in enumerate(values):
            dtype = self.xp.dtype(value)
            key = "float32" if dtype in HALF else dtype, self.xp.device(value)  # halves add in fp32
            self._kinds.setdefault(key, []).append(i)
        self._begin(self._joined(values), saved.get("steps", 0), saved)

    def average(self, model: ModelParameters, step: int, lr: float) -> bool:
        """Average the models after a step; return whether those of all ranks are equal now."""
        self._run_all(self.method.exchange, model, step, lr)
        return self.method.equal(step)

    def average_now(self, model: ModelParameters, step: int) -> None:
        self._run_all(self.method.synchronize, model, step, 0.0)

    def rest(self) -> None:
        """Stop until the next `begin`; collective."""

    def close(self, model: ModelParameters) -> None:
        """Release all resources after the last step; collective."""
        if self.neighbourhood is not None:
            self.neighbourhood.close()

    def version(self, steps: int) -> int:
        """Return the number of the next average, by which `WAGMA` chooses groups."""
        return steps

    def counts(self) -> dict[str, Any]:
        return {"sent": self._traffic.sent}

    def states(self) -> list[dict[str, np.ndarray]]:
        to_numpy = self.xp.to_numpy
        return [{k: to_numpy(x).copy() for k, x in state.items()} for state in self._states]

    def reports(self) -> list[dict[str, float]]:
        return [in_numbers(self.method.report(state)) for state in self._states]

    def _begin(self, models: list[Tensor], steps: int, saved: Mapping[str, Any]) -> None:
        self._states = [
            self.method.start(model, self._info(i, steps, 0.0)) for i, model in enumerate(models)
        ]
        rows = zip(models, self._states, saved.get("states", ()), strict=False)
        for model, state, old in rows:
            device = self.xp.device(model)
            state.update({k: self.xp.asarray(np.array(v), device) for k, v in old.items()})

    def _run_all(self, act: Any, model: ModelParameters, step: int, lr: float) -> None:
        values, results = model.read(), []
        for i, vector in enumerate(self._joined(values)):
            exchange = act(vector, self._states[i], self._info(i, step, lr))
            result, self._states[i] = self._run(f"{self._name}.{i}", exchange)
            results.append(result)
        model.write(self._spread(results, values))

    def _run(self, name: str, exchange: ExchangeGenerator) -> Any:
        if self.by_shares:
            exchange = by_shares(exchange, self.communicator.rank, self.communicator.size)
        if self.neighbourhood is not None:
            exchange = self.neighbourhood.serving(exchange, self._traffic)
        return self.communicator.run(name, exchange, self._traffic)

    def _info(self, number: int, step: int, lr: float) -> Info:
        rank, size = self.communicator.rank, self.communicator.size
        return Info(step=step, rank=rank, size=size, name=f"{self._name}.{number}", lr=lr)

    def _joined(self, values: Sequence[Tensor]) -> list[Tensor]:
        xp = self.xp
        return [
            xp.concat([xp.cast(xp.reshape(values[i], (-1,)), dtype) for i in members])
            for (dtype, _), members in self._kinds.items()
        ]

    def _spread(self, vectors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        xp, values = self.xp, list(like)
        for members, vector in zip(self._kinds.values(), vectors, strict=True):
            shapes = [xp.shape(like[i]) for i in members]
            parts = xp.split(vector, [int(np.prod(shape)) for shape in shapes])
            for i, shape, part in zip(members, shapes, parts, strict=True):
                values[i] = xp.cast(xp.reshape(part, shape), xp.dtype(like[i]))
        return values


class MPIAverages(Averages):
    """Averages of `WAGMA` over MPI that do not wait for late ranks.

    Attributes:
        engine: the `WaitAvoiding`; None before the first step, and at rest.
    """

    engine: Any = None
    _earlier: Mapping[str, int] = {"sent": 0, "late": 0, "on_time": 0, "lag": 0}  # before `engine`

    def _begin(self, models: list[Tensor], steps: int, saved: Mapping[str, Any]) -> None:
        self.rest()  # a state may have been loaded since the last step
        self.engine = WaitAvoiding(
            [self._hosted(model) for model in models],
            group_size=self.method.schedule(self.communicator.size).group_size,
            period=self.method.period,
            timeout=self.method.timeout,
            steps=steps,
            version=saved.get("version", steps),
        )

    def average(self, model: ModelParameters, step: int, lr: float) -> bool:
        return self._over_mpi(self.engine.average, model)

    def average_now(self, model: ModelParameters, step: int) -> None:
        self._over_mpi(self.engine.average_now, model)

    def close(self, model: ModelParameters) -> None:
        if self.engine is not None:
            self._over_mpi(self.engine.close, model)

    def rest(self) -> None:
        if self.engine is not None:
            self.engine.close()
        # Counts go on from here: the next `begin` makes an engine that counts from 0.
        self._earlier, self.engine = self.counts(), None

    def version(self, steps: int) -> int:
        return steps if self.engine is None else self.engine.version

    def counts(self) -> dict[str, Any]:
        counts, engine = dict(self._earlier), self.engine
        if engine is not None:
            counts["lag"] = max(counts["lag"], engine.lag)
            for key in ("sent", "late", "on_time"):
                counts[key] += getattr(engine, key)
        return counts

    def _over_mpi(self, act: Callable[[list[np.ndarray]], Any], model: ModelParameters) -> Any:
        xp, values = self.xp, model.read()
        hosted = [self._hosted(vector) for vector in self._joined(values)]
        try:
            return act(hosted)
        finally:  # if other ranks have ended, `hosted` is the last average
            devices = [xp.device(values[members[0]]) for members in self._kinds.values()]
            vectors = [xp.asarray(x, device) for x, device in zip(hosted, devices, strict=True)]
            model.write(self._spread(vectors, values))

    def _hosted(self, vector: Tensor) -> np.ndarray:
        return np.require(self.xp.to_numpy(vector), requirements="W")


# ----------------------------------------------------------------------------------------- set-up
def choose(
    method: Averaging, communicator: Communicator, traffic: Traffic, device: Any, of_all: bool
) -> Averages:
    """Return what averages on all ranks, and register all groups; collective.

    `of_all` says whether the communicator connects all ranks of the job. Raises the errors of
    `ModelAverager.set_up`.
    """

    # What one rank chose by itself, the others would wait for.
    def all_ranks(flag: bool) -> bool:
        unset = communicator.xp.asarray(np.array([not flag], np.float32), device)
        pending = communicator.launch("accordion.able", [Allreduce(unset, op="max")])
        return not communicator.xp.to_numpy(pending.result()[0])[0]

    groups = method.groups(communicator.size)
    if isinstance(method, WAGMA) and _avoids_waiting(method, communicator, of_all, all_ranks):
        return MPIAverages(method, communicator, traffic)
    result = Averages(method, communicator, traffic)
    if groups:
        # Equal on all ranks, so that `register` refuses on all of them or on none.
        communicator.extensible = all_ranks(communicator.extensible)
        try:
            communicator.register(groups)
        except ValueError:
            # Alltoalls among all ranks can replace groups, but compute means only.
            if not method.only_means:
                raise
            result.by_shares = True
    if method.neighbours_only and all_ranks(of_all and why_not(communicator.size) is None):
        result.neighbourhood = MPINeighbours(communicator.pause)
    return result


def _avoids_waiting(
    method: WAGMA, communicator: Communicator, of_all: bool, all_ranks: Callable[[bool], bool]
) -> bool:
    if method.wait_avoiding is False:
        return False
    reason = why_not(communicator.size)
    if not of_all:
        reason = "the process set does not contain all ranks"
    elif method.compressor is not None:
        reason = "the averages of groups are compressed"
    possible = all_ranks(reason is None)
    reason = reason or "another rank does not support it"
    if method.wait_avoiding is True and not possible:
        raise RuntimeError(f"{method!r}: wait-avoiding averaging is not possible: {reason}.")
    if communicator.rank == 0:
        text = f"averages wait for all members of a group, because {reason}"
        if possible:
            text = "wait-avoiding averages over MPI"
        logger.info("accordion_hvd: %r: %s", method, text)
    return possible


# ------------------------------------------------------------- groups that the engine does not know
# An engine such as Horovod must register a group before it runs collectives in it. If groups can be
# added after its start, all its small operations are slower. An alltoall among all ranks needs no
# group: the members send parts of their vectors to each other, and nothing to other ranks.


def by_shares(exchange: RequestGenerator, rank: int, size: int) -> RequestGenerator:
    """Run an exchange generator, computing means over groups by two alltoalls among all ranks.

    The alltoalls send as many bytes as a ring allreduce. All ranks must request means over groups
    at the same points, even a rank that is a group of one.

    Args:
        exchange: the generator; its requests for groups must be means.
    """

    def serve(asked: Any) -> RequestGenerator:
        if isinstance(asked, Allreduce) and asked.group is not None:
            return (yield from _mean(asked, rank, size))
        return (yield asked)

    return intercept(exchange, serve)


def _mean(asked: Allreduce, rank: int, size: int) -> RequestGenerator:
    group, tensor = asked.group or (), asked.tensor
    assert asked.op == "mean" and rank in group
    xp, shape = namespace(tensor), namespace(tensor).shape(tensor)
    flat = xp.reshape(tensor, (-1,))
    count = xp.shape(flat)[0]
    part = -(-count // len(group))
    # Each member averages one part of the vectors. Others get nothing, and take part.
    splits = [part if other in group else 0 for other in range(size)]
    received = yield Alltoall(xp.pad_last(flat, part * len(group)), splits=tuple(splits))
    parts = [received[member] for member in group]
    mean: Tensor = sum(parts[1:], parts[0]) / len(group)
    received = yield Alltoall(xp.concat([mean] * len(group)), splits=tuple(splits))
    means = xp.concat([received[member] for member in group])
    return xp.reshape(means[:count], shape)
