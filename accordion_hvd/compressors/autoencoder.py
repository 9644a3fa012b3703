"""LGC's autoencoder: 1-D convolutions, forward and backward, in whatever framework.

Strided convolutions are matrix products on the frames of a signal (`ops.frames`), transposed ones
add such products up again (`ops.overlap_add`, its adjoint); so the derivatives are the same few
products, and no framework's differentiation is asked for.

Signals are rows (signals, length * channels), channels within positions. Parameters are rows
(models, size): each model serves an equal share of the signals, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accordion_hvd.core.base import Tensor
from accordion_hvd.ops import namespace, random

SLOPE = 0.01
"""Of a leaky ReLU where its input is negative."""

TINY = 1e-30
"""What zeros are divided by."""


@dataclass(frozen=True)
class Layer:
    """A convolution without padding, or the transpose of one, with bias.

    Attributes:
        inputs: channels that come in.
        outputs: channels that go out.
        width: of the kernel.
        stride: between its places.
        transposed: whether a signal becomes longer instead of shorter.
        leaky: whether a leaky ReLU follows.
    """

    inputs: int
    outputs: int
    width: int = 3
    stride: int = 2
    transposed: bool = False
    leaky: bool = True

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the weights: a frame of the longer signal, a position of the shorter one."""
        if self.transposed:
            return self.width * self.outputs, self.inputs
        return self.width * self.inputs, self.outputs

    @property
    def size(self) -> int:
        """Number of parameters: weights, then biases."""
        rows, columns = self.matrix
        return rows * columns + self.outputs

    def draw(self, seed: str) -> np.ndarray:
        """Parameters to begin with: of He et al. (2015), so that a signal keeps its size."""
        taps = self.width / self.stride if self.transposed else self.width
        gain = 2.0 / (1.0 + SLOPE**2) if self.leaky else 1.0
        weights = random.normal((self.size - self.outputs,), seed)
        weights *= np.float32(np.sqrt(gain / (taps * self.inputs)))
        return np.concatenate([weights, np.zeros(self.outputs, np.float32)])

    def forward(self, parameters: Tensor, x: Tensor) -> Tensor:
        """Return the output: rows (signals, length * outputs)."""
        xp = namespace(x)
        weights, bias = self._weights(parameters), parameters[:, None, -self.outputs :]
        if self.transposed:
            y = self._grouped(x, self.inputs, parameters) @ xp.transpose(weights)
            y = xp.overlap_add(self._frames_of(y, x), self.stride * self.outputs)
        else:
            y = self._grouped(self._frames(x), self.matrix[0], parameters) @ weights
        y = self._grouped(y, self.outputs, parameters) + bias
        y = xp.reshape(y, (xp.shape(x)[0], -1))
        return xp.maximum(y, y * SLOPE) if self.leaky else y

    def backward(
        self, parameters: Tensor, x: Tensor, y: Tensor, slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Derivatives by `x` and by the parameters, from that by `y = forward(x)`."""
        xp = namespace(x)
        if self.leaky:
            slope = slope * (xp.cast(y > 0, "float32") * (1.0 - SLOPE) + SLOPE)
        models = xp.shape(parameters)[0]
        weights = self._weights(parameters)
        each = self._grouped(slope, self.outputs, parameters)
        if self.transposed:
            long = self._grouped(self._frames(slope), self.matrix[0], parameters)
            short = self._grouped(x, self.inputs, parameters)
            below = long @ weights
        else:
            long = self._grouped(self._frames(x), self.matrix[0], parameters)
            short = each
            below = each @ xp.transpose(weights)
            below = xp.overlap_add(self._frames_of(below, x), self.stride * self.inputs)
        ones = xp.full((models, 1, xp.shape(each)[1]), 1.0, "float32", xp.device(x))
        by_weights = xp.reshape(xp.transpose(long) @ short, (models, -1))
        by_bias = xp.reshape(ones @ each, (models, -1))
        return xp.reshape(below, xp.shape(x)), xp.concat([by_weights, by_bias], 1)

    def _weights(self, parameters: Tensor) -> Tensor:
        xp = namespace(parameters)
        weights = parameters[:, : self.size - self.outputs]
        return xp.reshape(weights, (xp.shape(parameters)[0], *self.matrix))

    def _frames(self, longer: Tensor) -> Tensor:
        """(signals, frames, width * channels) of the longer signal."""
        channels = self.outputs if self.transposed else self.inputs
        return namespace(longer).frames(longer, self.width * channels, self.stride * channels)

    def _frames_of(self, products: Tensor, x: Tensor) -> Tensor:
        """Products of all signals of a model, signal by signal."""
        xp = namespace(x)
        return xp.reshape(products, (xp.shape(x)[0], -1, self.matrix[0]))

    @staticmethod
    def _grouped(x: Tensor, width: int, parameters: Tensor) -> Tensor:
        """Return one matrix per model, with the rows of all its signals."""
        xp = namespace(x)
        return xp.reshape(x, (xp.shape(parameters)[0], -1, width))


def forward(layers: Sequence[Layer], parameters: Tensor, x: Tensor) -> list[Tensor]:
    """Return the signal before the first layer and after each one."""
    signals = [x]
    for layer, mine in zip(layers, _cut(layers, parameters), strict=True):
        signals.append(layer.forward(mine, signals[-1]))
    return signals


def backward(
    layers: Sequence[Layer], parameters: Tensor, signals: Sequence[Tensor], slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Derivatives by the first of `signals` and by all parameters, from that by the last."""
    parts = _cut(layers, parameters)
    found: list[Tensor] = []
    for i in reversed(range(len(layers))):
        slope, by_mine = layers[i].backward(parts[i], signals[i], signals[i + 1], slope)
        found.insert(0, by_mine)
    return slope, namespace(slope).concat(found, 1)


def _cut(layers: Sequence[Layer], parameters: Tensor) -> list[Tensor]:
    parts, start = [], 0
    for layer in layers:
        parts.append(parameters[:, start : start + layer.size])
        start += layer.size
    return parts


# ------------------------------------------------------------------------------ LGC's own networks
ENCODER = (Layer(1, 64), Layer(64, 128), Layer(128, 256), Layer(256, 64), Layer(64, 4, 1, 1))
"""Four layers halve the length; four channels leave: a code has a quarter of the values."""

_HIDDEN = [Layer(a, b, transposed=True) for a, b in itertools.pairwise((4, 32, 64, 128, 32))]
DECODER = (*_HIDDEN, Layer(32, 1, 1, 1, leaky=False))
"""The inverse; where there are innovations, they are one more channel of its last layer."""


def code_length(values: int) -> int:
    """Positions of a code: the fewest that decode to at least this number of values."""
    return max(1, -(-(values - 31) // 16) + 1)


def signals_of(parts: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Vectors of n values, divided by `scale`, as rows of what an encoder takes.

    They are completed to what the layers divide without rest, by repeating the last value.
    """
    xp = namespace(scale)
    (count,), device = xp.shape(parts[0]), xp.device(scale)
    length = 16 * code_length(count) + 15
    index = xp.minimum(xp.arange(length, device), xp.full((length,), count - 1, "int64", device))
    rows = xp.stack([xp.take(part, index) for part in parts])
    return rows / xp.maximum(scale, xp.full((1,), TINY, "float32", device))


@dataclass(frozen=True)
class Autoencoder:
    """One encoder, and one decoder or several; all parameters are one vector, in this order.

    Attributes:
        decoders: how many.
        innovates: whether decoders are told innovations beside the code.
    """

    decoders: int = 1
    innovates: bool = False

    @property
    def size(self) -> int:
        """Number of parameters."""
        return _size(ENCODER) + self.decoders * (_size(DECODER) + self.innovates)

    def draw(self, seed: str) -> np.ndarray:
        """Parameters to begin with: equal on all ranks."""
        parts = [layer.draw(f"{seed}.encoder.{i}") for i, layer in enumerate(ENCODER)]
        for number in range(self.decoders):
            parts += [layer.draw(f"{seed}.{number}.{i}") for i, layer in enumerate(DECODER)]
            parts += [np.zeros(1, np.float32)] * self.innovates
        return np.concatenate(parts)

    def encode(self, parameters: Tensor, x: Tensor) -> Tensor:
        """Codes (signals, 4 * length) of signals."""
        return forward(ENCODER, self._networks(parameters)[0], x)[-1]

    def decode(self, parameters: Tensor, codes: Tensor, news: Tensor | None) -> Tensor:
        """Signals of codes and, where there are such, innovations (signals like any other)."""
        decoders = self._networks(parameters)[1]
        return self._told(decoders, forward(DECODER, decoders, codes)[-1], news)

    def slopes(
        self,
        parameters: Tensor,
        x: Tensor,
        mix: Tensor,
        wanted: Tensor,
        news: Tensor | None = None,
        similarity: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the loss, and the reconstruction error.

        The loss is the sum over what is decoded of its mean squared error, and `similarity` times
        the sum over ordered pairs of codes of their mean squared difference.

        Args:
            parameters: all.
            x: signals.
            mix: the matrix that makes, of the signals' codes, those that are decoded.
            wanted: what they should decode to.
            news: innovations.
            similarity: how much alike codes should be.
        """
        xp = namespace(x)
        encoder, decoders = self._networks(parameters)
        coding = forward(ENCODER, encoder, x)
        decoding = forward(DECODER, decoders, mix @ coding[-1])
        off = self._told(decoders, decoding[-1], news) - wanted
        slope = off * (2.0 / xp.shape(off)[1])
        by_codes, by_decoders = backward(DECODER, decoders, decoding, slope)
        if news is not None:
            ones = xp.full((xp.shape(off)[1], 1), 1.0, "float32", xp.device(x))
            by_decoders = xp.concat([by_decoders, (slope * news) @ ones], 1)
        by_codes = xp.transpose(mix) @ by_codes
        if similarity:
            by_codes = by_codes + _apart(coding[-1]) * similarity
        _, by_encoder = backward(ENCODER, encoder, coding, by_codes)
        parts = [xp.reshape(part, (-1,)) for part in (by_encoder, by_decoders)]
        return xp.concat(parts), off

    def _told(self, decoders: Tensor, decoded: Tensor, news: Tensor | None) -> Tensor:
        return decoded if news is None else decoded + news * decoders[:, _size(DECODER) :]

    def _networks(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(1, size) of the encoder, (decoders, size) of the decoders."""
        xp, own = namespace(parameters), _size(ENCODER)
        encoder = xp.reshape(parameters[:own], (1, own))
        return encoder, xp.reshape(parameters[own:], (self.decoders, -1))


def _apart(codes: Tensor) -> Tensor:
    """Return the derivative of the summed mean squared differences of pairs of codes."""
    xp = namespace(codes)
    number, width = xp.shape(codes)
    ones = xp.full((number, number), 1.0, "float32", xp.device(codes))
    return (codes * float(number) - ones @ codes) * (4.0 / width)


def _size(layers: Sequence[Layer]) -> int:
    return sum(layer.size for layer in layers)
