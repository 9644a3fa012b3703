"""The bytes that a compressor will send for a tensor, computed before training.

The compressor's exchange runs in NumPy, with normally distributed values. A `LocalCommunicator`
answers each request as if all ranks had sent this rank's payload, and counts the bytes.
"""

from __future__ import annotations

import numpy as np

from accordion_hvd.averaging.base import Averaging
from accordion_hvd.comm.local import LocalCommunicator
from accordion_hvd.comm.traffic import Traffic
from accordion_hvd.core.base import Compressor, Info
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
    step = -(-compressor.startup_steps // ranks) * ranks  # rank 0 leads, if leaders rotate
    spec, traffic = Spec(shape, dtype, xp), Traffic()
    period = compressor.period or 1
    for number in range(compressor.startup_steps, compressor.startup_steps + period):
        phase = compressor.variant(number) if compressor.phases else 0
        info = Info(step=step, size=ranks, name="price", phase=phase, shape=shape)
        grad = xp.cast(xp.asarray(normal(shape, "price")), dtype)
        with np.errstate(all="ignore"):
            exchange = compressor.exchange(grad, compressor.init(spec, info), info)
            LocalCommunicator(xp, ranks).run("price", exchange, traffic)
    return traffic.sent / period


def averaging_share(method: Averaging, ranks: int) -> float:
    """Return the mean bytes that a rank sends per step and byte of the model, over one period."""
    if ranks == 1:
        return 0.0
    period = next((step + 1 for step in range(LONGEST) if method.equal(step)), 1)
    local, traffic = LocalCommunicator(xp, ranks), Traffic()
    info = Info(size=ranks, name="price")
    model = xp.asarray(normal((SAMPLE,), "price"))
    state = method.start(model, info)
    for step in range(period):
        info = Info(step=step, size=ranks, name="price")
        model, state = local.run("price", method.exchange(model, state, info), traffic)
    return traffic.sent / period / (4 * SAMPLE)
