"""The steps of a job that averages models: those of the method's own exchange generators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.recording import RecordingCommunicator
from accordion_hvd.comm.traffic import Traffic, size_of
from accordion_hvd.core.base import Info, Neighbours, Request
from accordion_hvd.core.running import Running
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops.random import normal
from accordion_hvd.simulation.compute_times import Throughput
from accordion_hvd.simulation.members import Everyone, members_of_requests
from accordion_hvd.simulation.programs import Collective, FusionGroup, Program, Round

SAMPLE = 4096
"""Elements of the sample model."""


class AveragingPrograms:
    """The programs of a job that averages models, step by step.

    The generators of all ranks run on a small sample model; its bytes are scaled up to `size`. Each
    group waits for all of its members.
    """

    def __init__(self, method: Averaging, size: float, ranks: int, encoding: Throughput) -> None:
        method.groups(ranks)  # refuses numbers of ranks that the method does not support
        self._method, self._size, self._encoding = method, size, encoding
        self._recorder = RecordingCommunicator(xp, ranks)
        self._model = xp.asarray(normal((SAMPLE,), "model"))
        self._infos = [Info(rank=rank, size=ranks, name="model") for rank in range(ranks)]
        self._states = [method.start(self._model, info) for info in self._infos]
        self._known: dict[Any, Program] = {}

    def __iter__(self) -> Iterator[Program]:
        ranks = range(1 if self._method.neighbours_only else len(self._infos))
        for step in itertools.count():
            running = [self._start(rank, step) for rank in ranks]
            first = tuple(map(size_of, (x.tensor for x in running[0].requests)))
            key = first, tuple(tuple(map(_description, x.requests)) for x in running)
            if key not in self._known:
                others = range(len(running), len(self._infos))
                running += [self._start(rank, step) for rank in others]
                self._known[key] = self._program(running)
            for exchange in running:
                exchange.close()
            yield self._known[key]

    def _start(self, rank: int, step: int) -> Running:
        """Return the generator of a rank in a step, at its first request."""
        info, model = replace(self._infos[rank], step=step), xp.copy(self._model)
        return Running(self._method.exchange(model, self._states[rank], info))

    def _program(self, running: list[Running]) -> Program:
        """Run the generators of all ranks to their ends, and return their requests."""
        rounds: list[Round] = []
        traffic, seconds = Traffic(), []
        factor = self._size / size_of(self._model)
        while not all(exchange.done for exchange in running):
            asked = {rank: x.requests for rank, x in enumerate(running) if not x.done}
            rounds.append(self._round(asked, traffic))
            answers = 0.0
            for rank, requests in asked.items():
                running[rank].answer([self._recorder.answer(request) for request in requests])
                answers = max(answers, sum(map(self._recorder.received, requests)))
            seconds.append(self._seconds(factor * answers))
        encode = self._seconds(0.0) if rounds else 0.0
        group = FusionGroup(1.0, encode, tuple(rounds), tuple(seconds))
        members = rounds[-1][-1].members if rounds and rounds[-1] else Everyone()
        levels = {"model": repr(self._method)}
        return Program((), (group,) if rounds else (), encode, 1, traffic, levels, members)

    def _round(self, asked: dict[int, tuple[Request, ...]], traffic: Traffic) -> Round:
        """Return the operations of one round, and add the bytes of rank 0 to `traffic`."""
        factor, found = self._size / size_of(self._model), []
        for number in range(max(map(len, asked.values()))):
            requests = {rank: own[number] for rank, own in asked.items() if number < len(own)}
            members = members_of_requests(requests, len(self._infos))
            first = next(iter(requests.values()))
            for operation in self._recorder.operations([first]):
                scaled = replace(operation, size=operation.size * factor)
                found.append(Collective(scaled, members))
        counted = self._recorder.traffic(asked.get(0, ()))
        traffic.add(Traffic(*(factor * x for x in vars(counted).values())))
        return tuple(found)

    def _seconds(self, answers: float) -> float:
        compressor = getattr(self._method, "compressor", None)
        if compressor is None:
            return 0.0
        return self._encoding.seconds(compressor, self._size, answers)


def _description(request: Request) -> tuple[Any, ...]:
    """Return the kind and the ranks of a request."""
    own = (request.to, request.of) if isinstance(request, Neighbours) else ()
    return type(request), request.group, *own
