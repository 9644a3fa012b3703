"""The bytes that a compressor will send for a tensor, computed before training.

Its conversation is held in NumPy, with normally distributed values, among ranks that all answer
what this one says; the packing counts the bytes.
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
"""Steps after which a method has no period; elements of a model that stands for all."""


def bytes_sent(compressor: Compressor, shape: tuple[int, ...], dtype: str, ranks: int) -> float:
    """Return the bytes that a rank sends for a tensor in a step, after the start-up steps.

    What depends on the values is that of normally distributed ones, and no two ranks are taken to
    share a machine.
    """
    if ranks == 1:
        return 0.0
    dtype = "float16" if dtype == "bfloat16" else dtype  # NumPy has none
    phase = compressor.variant(compressor.startup_steps) if compressor.phases else 0
    info = Info(step=compressor.startup_steps, size=ranks, name="price", phase=phase)
    spec, traffic = Spec(shape, dtype, xp), Traffic()
    grad = xp.cast(xp.asarray(normal(shape, "price")), dtype)
    with np.errstate(all="ignore"):
        exchange = compressor.exchange(grad, compressor.init(spec, info), info)
        LocalCommunicator(xp, ranks).run("price", exchange, traffic)
    return traffic.sent


def averaging_share(method: Averaging, ranks: int) -> float:
    """Bytes that a rank sends in a step for each byte of a model, on average over a period."""
    if ranks == 1:
        return 0.0
    period = next((step + 1 for step in range(LONGEST) if method.equal(step)), 1)
    alike, traffic = LocalCommunicator(xp, ranks), Traffic()
    info = Info(size=ranks, name="price")
    model = xp.asarray(normal((SAMPLE,), "price"))
    state = method.start(model, info)
    for step in range(period):
        told = Info(step=step, size=ranks, name="price")
        model, state = alike.run("price", method.exchange(model, state, told), traffic)
    return traffic.sent / period / (4 * SAMPLE)
