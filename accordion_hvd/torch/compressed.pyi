"""Signatures of the compressed optimizers; scripts/write_stubs.py writes them."""

from collections.abc import Iterable, Sequence

import torch

from accordion_hvd.comm.communicator import ProcessSet
from accordion_hvd.core.base import Compressor
from accordion_hvd.engine.guard import Mode
from accordion_hvd.policies import Policy
from accordion_hvd.torch.optimizers import CompressedOptimizer, Parameters

__all__ = [
    "AMSGrad",
    "Adam",
    "Birder",
    "CDAMSGrad",
    "CDAdam",
    "Lamb",
    "OnebitAdam",
    "OnebitLamb",
    "SketchedAMSGrad",
    "ZeroOneAdam",
]

NATIVE: dict[str, type[CompressedOptimizer]]

class AMSGrad(CompressedOptimizer):
    """AMSGrad on the mean of the ranks' gradients."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

class Adam(CompressedOptimizer):
    """Adam on the mean of the ranks' gradients: dense stage and baseline of the other optimizers."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

class Birder(CompressedOptimizer):
    """1-bit adaptive optimizer whose steps are random signs with an Adam-like direction as mean."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        *,
        beta: float = 0.95,
        within: str | None = None,
        feedback: bool = False,
        bits: float = 1,
        beta_b: float | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

class CDAdam(CompressedOptimizer):
    """CD-Adam: AMSGrad on an estimate of the mean gradient, updated by compressed differences."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        compressor: Compressor | None = None,
        preconditioned: bool = False,
        bits: float = 1,
        replica_lr: float = 1,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

CDAMSGrad = CDAdam

class Lamb(CompressedOptimizer):
    """LAMB on the mean of the ranks' gradients: Adam's direction, rescaled for each tensor."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

class OnebitAdam(CompressedOptimizer):
    """1-bit Adam: Adam until the variance is stable, then momentum at one bit an element."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        warmup_steps: int | str = "auto",
        scale: str = "l2",
        floor: float = 0.0,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

class OnebitLamb(CompressedOptimizer):
    """1-bit LAMB: LAMB until the variance is stable, then momentum at one bit an element."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        warmup_steps: int | str = "auto",
        scale: str = "l2",
        floor: float = 0.0,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

class SketchedAMSGrad(CompressedOptimizer):
    """AMSGrad that moves only the k elements with the largest steps, found by a count sketch."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        ratio: float = 0.0022,
        rows: int = 5,
        columns: float = 4.0,
        candidates: int = 4,
        bounded: bool = False,
        warmup_steps: int | str = 100,
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...

class ZeroOneAdam(CompressedOptimizer):
    """0/1 Adam: variance updates become rare, then ranks take local steps between synchronizations."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        scale: str = "l2",
        decoupled_weight_decay: bool | None = None,
        max_grad_norm: float | None = None,
        policy: Policy | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: ProcessSet | None = None,
        skip: Sequence[str] = (),
        guard: Mode | None = None,
        guard_every: int | None = None,
    ) -> None: ...
