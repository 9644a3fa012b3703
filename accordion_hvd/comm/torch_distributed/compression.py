"""Horovod's `Compression`, for jobs without Horovod."""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """No compression, the default."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor and no context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class FP16Compressor:
    """Sends floating-point tensors in half precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in fp16, and its dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in the dtype `ctx`."""
        return tensor.to(ctx)


class Compression:
    """Compression objects, as arguments of `DistributedOptimizer` and `allreduce`."""

    none = NoneCompressor
    fp16 = FP16Compressor
