"""Shapes of the parameters of usual models, in the order of their layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from accordion_hvd import check

Shape = tuple[int, ...]
Model = dict[str, Shape]


def resnet50() -> Model:
    """Return the shapes of ResNet-50 for ImageNet: 25.6 million parameters."""
    model: Model = dict(_convolution("stem", 3, 64, 7))
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"stage{stage}.block{block}"
            model |= dict(_convolution(f"{name}.a", channels, width, 1))
            model |= dict(_convolution(f"{name}.b", width, width, 3))
            model |= dict(_convolution(f"{name}.c", width, 4 * width, 1))
            if block == 0:
                model |= dict(_convolution(f"{name}.shortcut", channels, 4 * width, 1))
            channels = 4 * width
    return model | {"head.weight": (1000, channels), "head.bias": (1000,)}


def _convolution(name: str, inputs: int, outputs: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs, width, width)
    yield f"{name}.norm.weight", (outputs,)
    yield f"{name}.norm.bias", (outputs,)


def gpt2() -> Model:
    """Return the shapes of GPT-2 small: 124 million parameters."""
    width, model = 768, dict[str, Shape](tokens=(50257, 768), positions=(1024, 768))
    for layer in range(12):
        for part, inputs, outputs in (
            ("attention.input", width, 3 * width),
            ("attention.output", width, width),
            ("mlp.input", width, 4 * width),
            ("mlp.output", 4 * width, width),
        ):
            model[f"layer{layer}.{part}.weight"] = (outputs, inputs)
            model[f"layer{layer}.{part}.bias"] = (outputs,)
        for norm in ("norm1", "norm2"):
            model |= {f"layer{layer}.{norm}.{kind}": (width,) for kind in ("weight", "bias")}
    return model | {"norm.weight": (width,), "norm.bias": (width,)}


MODELS = {"resnet50": resnet50, "gpt2": gpt2}


def model_of(name: str) -> Model:
    """Return the shapes of a model.

    Args:
        name: a key of `MODELS`, or the path of a JSON file with shapes by name.

    Raises:
        ValueError: if it is neither.
    """
    if name in MODELS:
        return MODELS[name]()
    try:
        shapes = json.loads(Path(name).read_text())
        return {str(key): tuple(map(int, shape)) for key, shape in shapes.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        allowed = f"one of {', '.join(MODELS)}, or a JSON file of shapes by name"
        check.refuse("settings", "model", name, allowed)
        raise
