"""A law that needs TensorFlow's graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import laws
from cases import Case
from frameworks import NUMPY, TENSORFLOW, Ranks, normals


@contextlib.contextmanager
def sums_in_order() -> Iterator[None]:
    """Keep TensorFlow from reordering sums.

    Simulated ranks share one graph, in which TensorFlow would merge a rank's own sums with the
    sum over ranks. In a job, a collective lies between them.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


@sums_in_order()
def same_in_a_graph(case: Case) -> None:
    """Results and residuals in a tf.function, with a tensor as step, equal those of NumPy.

    The function is traced once for each phase.
    """
    import tensorflow as tf

    ranks, traces = 4 if case.compressor.topology_aware else 2, []
    ours, oracle = Ranks(case.compressor, ranks, TENSORFLOW), Ranks(case.compressor, ranks, NUMPY)

    @tf.function(autograph=False)
    def exchange(tensors: Any, states: Any, step: Any, phase: int) -> Any:
        traces.append(1)
        return ours.exchange(tensors, states, step)

    state, phases = ours.init(tf.zeros(laws.SHAPE)), set()
    for number, gradients in enumerate(normals(laws.SHAPE, ranks, steps=6)):
        tensors = [tf.constant(g) for g in gradients]
        ours.steps, phase = number, case.compressor.variant(number)
        phases.add(phase)
        results = exchange(tensors, state, tf.constant(number, tf.int64), phase)
        state = [new for _, new in results]
        for (mean, _), wanted in zip(results, oracle.step(gradients), strict=True):
            laws.check_same(case, mean.numpy(), wanted)
    assert len(traces) == len(phases)
    for new, wanted in zip(state, oracle.states, strict=True):
        for key, x in wanted.items():
            if key == "error":
                laws.check_same(case, new[key].numpy(), x)
