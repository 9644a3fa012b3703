"""The gain of PyTorch's optimizers; see `accordion_hvd.engine.gain`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from accordion_hvd.engine import gain


def gain_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """Return the gain for a parameter.

    Args:
        group: the parameter group.
        state: the optimizer's state of the parameter.
    """
    moments = state.get("exp_avg_sq")
    if moments is None:
        momentum = group.get("momentum")
        return gain.USUAL if momentum is None else gain.of_sgd(float(momentum))
    local: torch.Tensor = moments.to_local() if hasattr(moments, "to_local") else moments
    beta = group.get("betas", (0.0, 0.0))[1]  # optimizers of other packages may lack some entries
    return gain.of_adam(float(local.float().mean()), beta, float(state.get("step", math.inf)))
