"""The gain of PyTorch's optimizers; see `accordion_hvd.engine.gain`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from accordion_hvd.engine import gain

MOMENTS = "exp_avg_sq", "square_avg", "sum"
"""Names of second moments in the states of Adam, RMSprop and Adagrad."""


def gain_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    momentum = group.get("momentum")
    moments = next((state[name] for name in MOMENTS if name in state), None)
    if moments is None or "acc_delta" in state:  # Adadelta has no learning rate in this sense
        if momentum is None:
            return gain.USUAL
        return gain.of_sgd(float(momentum)) * (1 - (group.get("dampening", 0) if momentum else 0))
    local: torch.Tensor = moments.to_local() if hasattr(moments, "to_local") else moments
    beta = group.get("betas", (0.0, 0.0))[1]  # optimizers of other packages may lack some entries
    steps = float(state.get("step", math.inf))
    return gain.of_sgd(momentum or 0.0) * gain.of_adam(float(local.float().mean()), beta, steps)
