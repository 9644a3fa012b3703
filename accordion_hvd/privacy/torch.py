"""Gradients of single examples, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import functional_call, grad, vmap

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gradients(
    model: torch.nn.Module,
    loss: Loss,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    chunk: int | None = None,
) -> dict[str, torch.Tensor]:
    """Each example's gradient of each parameter that needs one.

    Args:
        model: treats examples apart from each other.
        loss: of outputs and targets, as `torch.nn.functional.cross_entropy`; called with a batch
            of one.
        inputs: (examples, ...); none are allowed, too.
        targets: (examples, ...).
        chunk: examples that are computed together; None: all.

    Returns:
        Name of a parameter to (examples, its shape).

    Raises:
        ValueError: the model has batch normalisation, which mixes examples.
    """
    refuse_mixing(model)
    named = dict(model.named_parameters())
    wanted = {name: p.detach() for name, p in named.items() if p.requires_grad}
    rest = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    rest |= dict(model.named_buffers())
    if not len(inputs):
        return {name: p.new_zeros((0, *p.shape)) for name, p in wanted.items()}

    def of_one(
        parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        outputs = functional_call(model, {**rest, **parameters}, (x.unsqueeze(0),))
        return loss(outputs, y.unsqueeze(0))

    each = vmap(grad(of_one), (None, 0, 0), randomness="different", chunk_size=chunk)
    return each(wanted, inputs, targets)


def backward(
    model: torch.nn.Module,
    loss: Loss,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    chunk: int | None = None,
) -> None:
    """Put each example's gradients where a distributed optimizer with `TopAgg` finds them.

    That is `parameter.grad_sample`, as Opacus' `GradSampleModule` does. Instead of
    `loss.backward()`; the arguments are those of `gradients`.
    """
    found = gradients(model, loss, inputs, targets, chunk)
    for name, parameter in model.named_parameters():
        if name in found:
            parameter.grad_sample = found[name]  # type: ignore[attr-defined]


def refuse_mixing(model: torch.nn.Module) -> None:
    """Raise ValueError where one example changes what others give."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"privacy: module {name!r} is a {type(module).__name__}, which mixes the examples "
                "of a batch, so that none has a gradient of its own; use GroupNorm or LayerNorm."
            )
