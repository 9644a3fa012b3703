"""Gradients of single examples in PyTorch."""

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
    """Return each example's gradient of each parameter that requires one.

    Args:
        model: model that processes examples independently.
        loss: function of outputs and targets, such as `torch.nn.functional.cross_entropy`; called
            with batches of one example.
        inputs: (examples, ...); may have 0 examples.
        targets: (examples, ...).
        chunk: number of examples that are computed together; None: all.

    Returns:
        A dict from parameter names to gradients, (examples, *shape of the parameter).

    Raises:
        ValueError: if the model has batch normalisation, which mixes examples.
    """
    refuse_mixing(model)
    named = dict(model.named_parameters())
    wanted = {name: p.detach() for name, p in named.items() if p.requires_grad}
    constants = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    constants |= dict(model.named_buffers())
    if not len(inputs):
        return {name: p.new_zeros((0, *p.shape)) for name, p in wanted.items()}

    def loss_of_one(
        parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        outputs = functional_call(model, {**constants, **parameters}, (x.unsqueeze(0),))
        return loss(outputs, y.unsqueeze(0))

    per_example = vmap(grad(loss_of_one), (None, 0, 0), randomness="different", chunk_size=chunk)
    return per_example(wanted, inputs, targets)


def backward(
    model: torch.nn.Module,
    loss: Loss,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    chunk: int | None = None,
) -> None:
    """Store each example's gradients in `parameter.grad_sample`, for an optimizer with `TopAgg`.

    Call this function instead of `loss.backward()`; Opacus' `GradSampleModule` uses the same
    attribute. The arguments are those of `gradients`.
    """
    samples = gradients(model, loss, inputs, targets, chunk)
    for name, parameter in model.named_parameters():
        if name in samples:
            parameter.grad_sample = samples[name]  # type: ignore[attr-defined]


def refuse_mixing(model: torch.nn.Module) -> None:
    """Raise ValueError if the model has modules that mix examples (batch normalisation)."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"privacy: module {name!r} is a {type(module).__name__}, which mixes the examples "
                "of a batch, so that no example has its own gradient; use GroupNorm or LayerNorm."
            )
