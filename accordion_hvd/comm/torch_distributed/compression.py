"""Horovod's `Compression`, for jobs without Horovod."""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """No compression, the default."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    """Sends floating-point tensors in half precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """Compression objects, as arguments of `DistributedOptimizer` and `allreduce`."""

    none = NoneCompressor
    fp16 = FP16Compressor
