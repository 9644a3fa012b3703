"""The compressed optimizers for PyTorch, one for each update rule.

Constructors are only signatures: see `accordion_hvd.optimizers.base`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accordion_hvd import optimizers
from accordion_hvd.torch.optimizers import CompressedOptimizer, Options, Parameters

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10's typing lacks it

    from accordion_hvd.core.base import Compressor

__all__ = [
    "AMSGrad", "Adam", "Birder", "CDAMSGrad", "CDAdam", "Lamb", "OnebitAdam", "OnebitLamb",
    "SketchedAMSGrad", "ZeroOneAdam",
]  # fmt: skip


class AMSGrad(CompressedOptimizer, rule=optimizers.AMSGrad):
    """AMSGrad on the mean of the ranks' gradients."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
        **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


class Adam(CompressedOptimizer, rule=optimizers.Adam):
    """Adam on the mean of the ranks' gradients: dense stage and baseline of other optimizers."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
        **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


class Birder(CompressedOptimizer, rule=optimizers.Birder):
    """1-bit adaptive optimizer whose steps are random signs with an Adam-like direction as mean."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, *, beta: float = 0.95,
        within: str | None = None, feedback: bool = False, bits: float = 1,
        beta_b: float | None = None, weight_decay: float = 0.0, **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


class CDAdam(CompressedOptimizer, rule=optimizers.CDAdam):
    """CD-Adam: AMSGrad on an estimate of the mean gradient, updated by compressed differences."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
        compressor: Compressor | None = None, preconditioned: bool = False, bits: float = 1,
        replica_lr: float = 1, **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


CDAMSGrad = CDAdam


class Lamb(CompressedOptimizer, rule=optimizers.Lamb):
    """LAMB on the mean of the ranks' gradients: Adam's direction, rescaled for each tensor."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
        min_coeff: float = 0.01, max_coeff: float = 10.0, coeff_beta: float = 0.9,
        **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


class OnebitAdam(CompressedOptimizer, rule=optimizers.OnebitAdam):
    """1-bit Adam: Adam until the variance is stable, then momentum at one bit an element."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
        warmup_steps: int | str = "auto", scale: str = "l2", floor: float = 0.0,
        **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


class OnebitLamb(CompressedOptimizer, rule=optimizers.OnebitLamb):
    """1-bit LAMB: LAMB until the variance is stable, then momentum at one bit an element."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
        min_coeff: float = 0.01, max_coeff: float = 10.0, coeff_beta: float = 0.9,
        warmup_steps: int | str = "auto", scale: str = "l2", floor: float = 0.0,
        factor_min: float = 0.5, factor_max: float = 4.0, factor_threshold: float = 0.1,
        **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


class SketchedAMSGrad(CompressedOptimizer, rule=optimizers.SketchedAMSGrad):
    """AMSGrad that moves only the k elements with the largest steps, found by a count sketch."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8, weight_decay: float = 0.0, *, ratio: float = 0.0022, rows: int = 5,
        columns: float = 4.0, candidates: int = 4, bounded: bool = False,
        warmup_steps: int | str = 100, **options: Unpack[Options],
    ) -> None: ...  # fmt: skip


class ZeroOneAdam(CompressedOptimizer, rule=optimizers.ZeroOneAdam):
    """0/1 Adam: variance updates become rare, and later ranks take local steps between averages."""

    def __init__(
        self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, bias_correction: bool = True,
        var_freeze_step: int = 100_000, var_update_scaler: int = 16,
        local_step_scaler: int = 32_678, local_step_clipper: int = 16, scale: str = "l2",
        **options: Unpack[Options],
    ) -> None: ...  # fmt: skip
