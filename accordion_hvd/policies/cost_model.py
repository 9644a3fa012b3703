"""The bytes that a compressor will send for a tensor, computed before training.

The compressor's exchange runs in NumPy, with normally distributed values. Each request is answered
as if all ranks had sent this rank's payload, and its bytes are counted.
"""

from __future__ import annotations

import numpy as np

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.collectives import Traffic
from accordion_hvd.comm.recording import RecordingCommunicator, record
from accordion_hvd.core.base import Compressor, ExchangeGenerator, Hosts, Info
from accordion_hvd.ops import numpy as xp
from accordion_hvd.ops.random import normal
from accordion_hvd.ops.spec import Spec

LONGEST, SAMPLE = 10_000, 4096
"""Steps without an average over all ranks after which a method counts as one without a period;
elements of the sample model."""


def bytes_sent(compressor: Compressor, shape: tuple[int, ...], dtype: str, ranks: int) -> float:
    """Return the bytes that a rank sends for a tensor per step, after the start-up steps.

    If phases repeat, the result is the mean over a period. The gradient has normally distributed
    values, and each rank counts as a host of its own.
    """
    if ranks == 1:
        return 0.0
    dtype = "float16" if dtype == "bfloat16" else dtype  # NumPy has no bfloat16
    traffic, period = Traffic(), compressor.period or 1
    for number in range(compressor.startup_steps, compressor.startup_steps + period):
        phase = compressor.variant(number) if compressor.period != 1 else 0

        def exchange(size: int, hosts: Hosts, phase: int = phase) -> ExchangeGenerator:
            step = -(-compressor.startup_steps // size) * size  # rank 0 leads, if leaders rotate
            info = Info(step=step, size=size, name="price", phase=phase, shape=shape)
            grad = xp.cast(xp.asarray(normal(shape, "price")), dtype)
            return compressor.exchange(grad, compressor.init(Spec(shape, dtype, xp), info), info)

        with np.errstate(all="ignore"):
            rounds = record(exchange, xp, ranks)
        for requests in rounds:
            traffic.add(RecordingCommunicator(xp, ranks).traffic(requests))
    return traffic.sent / period


def averaging_share(method: Averaging, ranks: int) -> float:
    """Return the mean bytes that a rank sends per step and byte of the model, over one period."""
    if ranks == 1:
        return 0.0
    period = next((step + 1 for step in range(LONGEST) if method.equal(step)), 1)
    local, traffic = RecordingCommunicator(xp, ranks), Traffic()
    info = Info(size=ranks, name="price")
    model = xp.asarray(normal((SAMPLE,), "price"))
    state = method.start(model, info)
    for step in range(period):
        info = Info(step=step, size=ranks, name="price")
        model, state = local.run("price", method.exchange(model, state, info), traffic)
    return traffic.sent / period / (4 * SAMPLE)
