"""Cost of compressors in TensorFlow's graphs, in which `fit` runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from accordion_hvd.core.base import Allgather, Allreduce, Compressor, Info, Request, State, Tensor
from accordion_hvd.ops.tensorflow import UntraceableError
from benchmarks.compressors.kernels import Bench, Cost


class GraphBench(Bench):
    """Measurement of compressors, each of whose exchanges is one graph.

    Answers to requests are computed outside of the graph, and the time for them does not count.
    Compressors that cannot be traced are measured eagerly.

    Args:
        side: number of rows and columns of the gradient.
        rounds: number of repetitions, of which the median counts.
    """

    def __init__(self, side: int, rounds: int) -> None:
        super().__init__("tensorflow", side, rounds)
        self._graphs: dict[int, Callable[..., Any]] = {}  # by phase
        self._requested, self._outside = 0.0, 0.0

    def measure(self, compressor: Compressor) -> Cost:
        """Return the costs of a compressor over consecutive steps."""
        self._graphs.clear()
        try:
            return super().measure(compressor)
        except UntraceableError:
            eager = Bench("tensorflow", len(self.values), self.rounds)
            return replace(eager.measure(compressor), eager=True)

    def _step(
        self, compressor: Compressor, gradient: Tensor, state: State, info: Info
    ) -> tuple[float, float, tuple[Tensor, State]]:
        """Return the seconds before and after the first requests, and the exchange's result."""
        if info.phase not in self._graphs:
            self._graphs[info.phase] = self._graph(compressor, info)
        number = tf.constant(info.step, tf.int64)
        self._outside, began = 0.0, time.perf_counter()
        result = self._graphs[info.phase](gradient, state, number)
        encode = self._requested - began
        return encode, time.perf_counter() - began - self._outside - encode, result

    def _graph(self, compressor: Compressor, info: Info) -> Callable[..., Any]:
        def exchange(gradient: Tensor, state: State, number: Tensor) -> Any:
            own = replace(info, step=number)
            return super(GraphBench, self)._step(compressor, gradient, state, own)[2]

        return tf.function(exchange, autograph=False)

    def _combined(self, request: Request, ranks: int) -> Any:
        parts = ranks if isinstance(request, Allgather) else 1
        factor = 1
        if isinstance(request, Allreduce) and request.op == "sum" and request.sender is None:
            factor = ranks
        answers = self._outside_of_graph(request.tensor, parts, factor)
        return tuple(answers) if isinstance(request, Allgather) else answers[0]

    def _received(self, sent: Tensor) -> Tensor:
        return self._outside_of_graph(sent, 1, 1)[0]

    def _outside_of_graph(self, tensor: Tensor, parts: int, factor: int) -> list[Tensor]:
        """Return copies of a tensor times `factor`, which the graph cannot merge."""
        first = self.round == 1

        def answer(x: np.ndarray) -> list[np.ndarray]:
            began = time.perf_counter()
            if first:
                self._requested = began
            copies = [x * x.dtype.type(factor) if factor > 1 else x.copy() for _ in range(parts)]
            self._outside += time.perf_counter() - began
            return copies

        answers = tf.numpy_function(answer, [tensor], [tensor.dtype] * parts)
        for copy in answers:
            copy.set_shape(tensor.shape)
        return answers
